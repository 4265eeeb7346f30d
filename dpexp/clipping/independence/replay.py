"""Running a model's forward again, without a trace and without chance.

A replay starts from what the forward started from: inputs, buffers, plain attributes, autocast, gradients asked for. Whatever it
writes goes to copies, so that tensors which a pending graph has saved stay as they are. Random draws give constants that do not
depend on the batch. And gates are opened: examples must not meet behind trainable weights that are still zero, either.
"""

from __future__ import annotations

import functools
import math
import random
import sys
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import copy
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, saved_tensors_hooks

from dpexp.clipping.distributed import reducers_in, silent
from dpexp.clipping.gradients.numerics import all_full_precision
from dpexp.clipping.independence.arguments import Inputs, changed, copied, leaves
from dpexp.clipping.independence.chance import Chance, WithoutChance
from dpexp.clipping.independence.comparison import Places
from dpexp.clipping.sharding import is_shard
from dpexp.clipping.tapping.dataflow import attributes_of, tensors_in
from dpexp.clipping.tapping.roots import NodeKey, Roots, node_key

# every module has these; children and buffers are treated by name, and parameters are never copied
COMMON = frozenset(nn.Module().__dict__) - {"training"}
# a forward may add hooks to these tables when it first runs, and a mark that it has, as those of transformers do
HOOKS = tuple(
    key for key, value in nn.Module().__dict__.items() if isinstance(value, dict) and "hooks" in key
)
# what is put together anew for each replay, and not copied as other values are
TABLES = {*HOOKS, "_modules"}
NO_STATE = (type, FunctionType, MethodType, ModuleType, torch.Generator)
# values that nobody can write to
ATOMS = (bool, int, float, str, type(None))
# the keyword under which what entered an earlier forward stands beside what enters this one
EARLIER = "_dpexp_earlier"
# about how large the outputs of a layer are that had weights of zero, beside its inputs
GATE = 0.1


class Replay:
    """One forward of a model as it was entered; `run` repeats it.

    Args:
        model: the module whose forward is about to run.
        args, kwargs: what enters it; tensors are copied.

    Attributes:
        kind: see `kind_of`.
    """

    def __init__(self, model: nn.Module, args: tuple, kwargs: dict):
        self.model = model
        self.inputs: Inputs = changed((args, kwargs), copied)
        self.kind = kind_of(model, self.inputs)
        self._state, self._entered = State(model), fingerprints(model)
        self._written: dict[str, tuple[Tensor, Tensor]] | None = None
        # trainable parameters that are zero throughout
        self._closed = {
            n
            for n, p in model.named_parameters()
            if p.requires_grad and n in self._entered and not bool(self._entered[n].any())
        }
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        # by output, its end in the graph, which must not be held; and where the gradients say that the rows of an example are
        self.ends: dict[int, NodeKey] = {}
        self.places: dict[int, Places] = {}
        # of a forward beside others: how many rows it has, where the gradients say that each is of one example alone
        self.own: int | None = None
        # the outputs that the losses use, and whether they use something else of what this forward computed
        self.used: set[int] = set()
        self.used_else = False
        # numbers of autograd's nodes that this forward makes
        self._nodes = torch._C._autograd._get_sequence_nr(), 0
        # whether to compute in 16 bits where the forward did
        self.narrow = False
        # whether the graph of a replay is kept, for a model that asks for gradients on its way
        self.keeps = False
        # what is around a way back, in which checkpointed parts are computed again
        self.silence: Callable[[], AbstractContextManager[None]] = nullcontext
        self.chance = Chance()
        # a forward without gradients that came before it, and may have left something for it
        self.earlier: Earlier | None = None
        # whether it drew what may decide its way; and whether by place in the batch, as from generators of Python or numpy
        self.drew = self.by_chance = False
        # whether Python read numbers in it, and may have decided by them
        self.asked = False
        kinds = {"cpu", self._device.type}
        # whole only inside their own forwards, which end in another way where gradients are asked for
        self._sharded = any(is_shard(p) for p in model.parameters())
        self._autocast = [(k, torch.get_autocast_dtype(k)) for k in kinds if torch.is_autocast_enabled(k)]

    @property
    def in_autocast(self) -> bool:
        """Whether the forward ran in 16 bits."""
        return bool(self._autocast)

    def with_earlier(self) -> Replay | None:
        """Return what repeats the earlier forward, then this one, with the same examples in both; None where there was none."""
        if self.earlier is None:
            return None
        both, (args, kwargs) = copy(self), self.inputs
        both.inputs = args, kwargs | {EARLIER: self.earlier.inputs}
        return both

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Inside, the model is as it was before the forward; afterwards as if nothing had happened."""
        indices = [self._device.index] if self._device.type == "cuda" else []
        python, numpy = random.getstate(), np.random.get_state()
        with ExitStack() as inside:
            inside.callback(random.setstate, python)
            inside.callback(np.random.set_state, numpy)
            inside.enter_context(torch.random.fork_rng(indices))
            # the rounding of products hides what a replay looks for, or looks like it
            inside.enter_context(all_full_precision())
            earlier = self.earlier if EARLIER in self.inputs[1] else None
            inside.enter_context((self._state if earlier is None else earlier.state).installed())
            inside.callback(self._restore, self.written())
            inside.enter_context(self._opened())
            if self._sharded:
                inside.enter_context(torch.no_grad())
            if not self.keeps:
                inside.enter_context(saved_tensors_hooks(_nothing, _nothing))
            if "torch._dynamo" in sys.modules:
                # a few forwards are not worth a compilation each
                inside.enter_context(torch.compiler.set_stance("force_eager"))
            for kind in {"cpu", self._device.type}:
                dtype = dict(self._autocast).get(kind)
                on = self.narrow and dtype is not None
                inside.enter_context(torch.autocast(kind, dtype=dtype, enabled=on, cache_enabled=False))
            yield

    def written(self) -> dict[str, Tensor]:
        """Return the parameters that the forward writes to, by name: held to a norm, or following others like a teacher."""
        if self._written is None:
            now = fingerprints(self.model)
            found = {
                n: p
                for n, p in self.model.named_parameters()
                if n in now and unlike(now[n], self._entered.get(n, now[n]))
            }
            self._written = {name: (p.data, p.data.clone()) for name, p in found.items()}
        params = dict(self.model.named_parameters()) if self._written else {}
        return {name: params[name] for name in self._written}

    @contextmanager
    def _opened(self) -> Iterator[None]:
        """Inside, trainable parameters that are zero throughout have small values: a gate (ReZero, LoRA, a new head) is open.

        No biases: they hide nothing, and would drown what there is to see in a model of small weights.
        """
        closed = [
            p
            for name, p in self.model.named_parameters()
            if name in self._closed and "bias" not in name.rpartition(".")[2] and name not in self.written()
        ]  # fmt: skip
        values = [p.data for p in closed]
        generator = torch.Generator().manual_seed(len(closed))
        try:
            for p in closed:
                size = GATE / math.sqrt(p[0].numel() if p.dim() > 1 else 1)
                p.data = (torch.randn(p.shape, generator=generator, device="cpu") * size).to(p)
            yield
        finally:
            for p, value in zip(closed, values, strict=True):
                p.data = value

    def _restore(self, params: dict[str, Tensor]) -> None:
        for name, (held, value) in (self._written or {}).items():
            params[name].data = held.copy_(value)

    def left(self, output: Any) -> None:
        """The forward has ended with this output, of which nothing is held."""
        self._nodes = self._nodes[0], torch._C._autograd._get_sequence_nr()
        self.ends = {
            leaf: node_key(tensor.grad_fn, tensor.output_nr)
            for leaf, tensor in enumerate(tensors_in(output))
            if tensor.grad_fn is not None
        }

    def returned(self, roots: Roots) -> dict[int, GradientEdge]:
        """Return the outputs, by number, from which the roots were computed."""
        nodes = {node._sequence_nr(): node for node in roots.graph()}
        return {n: GradientEdge(nodes[end], at) for n, (end, at) in self.ends.items() if end in nodes}

    def find_used(self, roots: Roots) -> None:
        """Go from the losses back to this forward, and note what of it they use."""
        leaves: dict[NodeKey, int] = {end: leaf for leaf, end in self.ends.items()}
        waiting, seen = roots.edges(), set()
        while waiting:
            node, place = waiting.pop()
            key = node_key(node, place)
            if key in leaves:
                self.used.add(leaves[key])
            elif self._nodes[0] <= key[0] < self._nodes[1]:
                self.used_else = True
            elif node not in seen:
                seen.add(node)
                waiting += [edge for edge in node.next_functions if edge[0] is not None]

    def run(self, inputs: Inputs) -> Any:
        """The model's output for ``inputs``, inside `begun`; it may be called several times there."""
        seed = self.chance.seed or 0
        if self._device.type == "cpu":
            # torch's own function notes who called it, a millisecond for each kind of device that is not in use
            torch.default_generator.manual_seed(seed)
        else:
            torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        before = random.getstate(), _place_of_numpy()
        args, kwargs = changed(inputs, copied)
        # other ranks may not look now
        earlier = kwargs.pop(EARLIER, None)
        with silent(reducers_in(self.model)), WithoutChance(self.chance) as chance:
            if earlier is not None and self.earlier is not None:
                self.earlier.state.switch()
                with torch.no_grad():
                    self.model(*earlier[0], **earlier[1])
                self._state.switch()
            result = self.model(*args, **kwargs)
        moved = before != (random.getstate(), _place_of_numpy())
        self.drew |= moved or chance.drew
        self.asked |= chance.asked
        self.by_chance |= moved or (chance.drew and self.chance.seed is not None)
        return result


class Earlier:
    """A forward without gradients, of so many rows, as it was entered."""

    def __init__(self, model: nn.Module, args: tuple, kwargs: dict, rows: int):
        self.inputs: Inputs = changed((args, kwargs), copied)
        self.state, self.rows = State(model), rows


def kind_of(model: nn.Module, inputs: Inputs) -> Hashable:
    """Return what tells two forwards apart without their numbers: shapes, other arguments, switches of modules."""
    plain = bool | int | float | str
    found = [
        (name, part.shape if isinstance(part, Tensor) else part if isinstance(part, plain) else type(part))
        for name, part in leaves(inputs)
    ]
    switches = (v for module in model.modules() for v in vars(module).values() if isinstance(v, bool | str))
    return (*found, *switches)


def fingerprints(model: nn.Module) -> dict[str, Tensor]:
    """Return three numbers for each parameter, without a copy of it: whoever writes to one, again and again, changes them.

    Of shards there are none: whole in a forward and cut behind it, they are no signs of writing.
    """
    return {
        name: torch.stack([p.detach().sum(), *p.detach().aminmax()])
        for name, p in model.named_parameters()
        if p.is_floating_point() and p.numel() and not is_shard(p)
    }


def _nothing(value: Any) -> Any:
    """Of a replay nothing is kept for a backward pass."""


def unlike(now: Tensor, before: Tensor) -> bool:
    return not torch.allclose(now, before, rtol=0, atol=0, equal_nan=True)


def _place_of_numpy() -> int:
    state: Any = np.random.get_state()
    return int(state[2])


class State:
    """Copies of all that a forward of a model may write to: buffers, attributes, the tables of children and of hooks."""

    def __init__(self, model: nn.Module):
        self._copy = _Copier()
        # modules that stand in a plain list, and are no children, come up on the way
        waiting = list(model.modules())
        # apart from what is copied again each time: what nobody can write to
        self._fixed: dict[nn.Module, dict[str, Any]] = {}
        self._saved: dict[nn.Module, dict[str, Any]] = {}
        while waiting:
            module = waiting.pop()
            # what a scripted module has lies in C++, and not among its attributes
            if module not in self._saved and not isinstance(module, torch.jit.ScriptModule):
                everything = self._copy.everything(module)
                self._fixed[module] = {k: v for k, v in everything.items() if type(v) in ATOMS}
                self._saved[module] = {k: v for k, v in everything.items() if k not in self._fixed[module]}
                waiting += self._copy.modules()

    def switch(self) -> None:
        """Set the modes that modules had: training, names, flags."""
        for module, saved in self._saved.items():
            every = self._fixed[module] | saved
            module.__dict__.update({k: v for k, v in every.items() if isinstance(v, bool | str)})

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Inside, the model has this state, and what it writes is lost."""
        fresh = _Copier()
        before = [(module, dict(module.__dict__)) for module in self._saved]
        try:
            for module, saved in self._saved.items():
                kept = {k: v for k, v in module.__dict__.items() if _is_common(k)}
                own = {key: fresh(value) for key, value in saved.items() if key not in TABLES}
                tables = {"_modules": dict(saved["_modules"])}
                # neither those that the forward added by itself and adds again, nor those that were there for it alone
                tables |= {key: _in_both(saved[key], module.__dict__[key]) for key in HOOKS}
                module.__dict__.clear()
                module.__dict__.update(kept | self._fixed[module] | own | tables)
            yield
        finally:
            for module, values in before:
                module.__dict__.clear()
                module.__dict__.update(values)


def _in_both(saved: dict[int, Any], now: dict[int, Any]) -> dict[int, Any]:
    return type(saved)([(handle, hook) for handle, hook in saved.items() if handle in now] if saved else ())


class _Copier:
    """Copies values and keeps who shares what with whom."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, Any]] = {}
        self._modules: list[nn.Module] = []

    def modules(self) -> list[nn.Module]:
        """Return the modules that have come up since the last call."""
        found, self._modules = self._modules, []
        return found

    def everything(self, module: nn.Module) -> dict[str, Any]:
        own = {key: self(value) for key, value in module.__dict__.items() if not _is_common(key)}
        hooks = {key: copy(module.__dict__[key]) for key in HOOKS}
        return own | hooks | {"_buffers": self(module._buffers), "_modules": dict(module._modules)}

    def __call__(self, value: Any, depth: int = 0) -> Any:
        if type(value) in ATOMS:
            return value
        if id(value) in self._known:
            return self._known[id(value)][0]
        result = self._copied(value, depth)
        self._known[id(value)] = (result, value)
        return result

    def _copied(self, value: Any, depth: int) -> Any:
        # what stands for a module, like the weak proxy by which a trainer knows its model, is none
        if issubclass(type(value), nn.Module):
            self._modules.append(value)
        if isinstance(value, nn.Module | nn.Parameter):
            return value
        if isinstance(value, Tensor):
            return value.detach().clone()
        if isinstance(value, np.ndarray):
            return value.copy()
        if isinstance(value, dict):
            result = copy(value)
            for key in value:
                result[key] = self(value[key], depth)
            return result
        if isinstance(value, deque):
            return deque((self(v, depth) for v in value), value.maxlen)
        if type(value) in (list, tuple, set):
            return type(value)(self(v, depth) for v in value)
        own_way = "__reduce_ex__" in {name for c in type(value).__mro__[:-1] for name in vars(c)}
        held = attributes_of(value)
        if depth > 1 or own_way or isinstance(value, NO_STATE) or not (held or hasattr(value, "__dict__")):
            return value
        try:
            # an object of the user's, like a record of running statistics; what lies deeper is not the model's state
            result = value.__new__(type(value))
            for key, part in held.items() if result is not value else ():
                object.__setattr__(result, key, self(part, depth + 1))
            return result
        except (TypeError, AttributeError):
            return value


@functools.cache
def _is_common(key: str) -> bool:
    return (key in COMMON and key not in ("_buffers", "_modules")) or key.startswith("_dpexp")
