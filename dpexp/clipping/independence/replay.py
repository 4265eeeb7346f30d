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
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from typing import Any, ParamSpec, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, saved_tensors_hooks

from dpexp.clipping.distributed import reducers_in, silent
from dpexp.clipping.given import modules_of
from dpexp.clipping.gradients.numerics import all_full_precision, has_generator
from dpexp.clipping.independence.arguments import Inputs, changed, copied, leaves
from dpexp.clipping.independence.chance import Chance, Draw, WithoutChance
from dpexp.clipping.independence.comparison import Places, held_in, same_buffer
from dpexp.clipping.independence.state import State
from dpexp.clipping.sharding import held_as_it_is, is_shard
from dpexp.clipping.tapping.forwards import tensors_in
from dpexp.clipping.tapping.roots import NodeKey, Roots, node_key

P = ParamSpec("P")
T = TypeVar("T")

# the keyword under which what entered an earlier forward stands beside what enters this one
EARLIER = "_dpexp_earlier"
# about how large the outputs of a layer are that had weights of zero, beside its inputs
GATE = 0.1
# kinds of plain values that a forward asks whether they are there
SWITCHES = {bool, int, float, type(None)}


class Replay:
    """One forward of a model as it was entered; `run` repeats it.

    Args:
        model: the module whose forward is about to run.
        args, kwargs: what enters it; tensors are copied.
        mode: of the model, as far as it is known.

    Attributes:
        kind: what tells it from other forwards without their numbers.
    """

    def __init__(self, model: nn.Module, args: tuple, kwargs: dict, mode: int = 0):
        self.model = model
        self.inputs: Inputs = changed((args, kwargs), copied)
        self.kind: Hashable = mode, shapes_of(self.inputs)
        self._state, self._entered = State(model), fingerprints(model)
        # what sets the model back, inside `around`
        self._set_back: Callable[[], None] | None = None
        self._written: dict[str, tuple[Tensor, Tensor]] | None = None
        # trainable parameters that are zero throughout; no biases: they hide nothing, and would drown what there is to see in a
        # model of small weights
        self._closed = {
            n
            for n, p in model.named_parameters()
            if p.requires_grad and n in self._entered and "bias" not in n.rpartition(".")[2]
            and not bool(self._entered[n].any())
        }  # fmt: skip
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
        # whether to compute in 64 bits
        self.wide = False
        # whether the graph of a replay is kept, for a model that asks for gradients on its way
        self.keeps = False
        self.chance = Chance()
        # a forward without gradients that came before it, and may have left something for it
        self.earlier: Earlier | None = None
        # whether it drew what may decide its way; and whether by place in the batch, as from generators of Python or numpy
        self.drew = self.by_chance = False
        # of the last run: its draws, and where the generators of Python and numpy stood behind it, and whether they had moved
        self.draws: list[Draw] = []
        self.stood: Hashable = ()
        self.drawn_by_others = False
        # shapes of batches of which nothing else decided what the model did, and whether that was wrong
        self._settled: set[Hashable] = set()
        self._shapes: Hashable = ()
        self._drawn = False
        # whether Python read numbers in it, and may have decided by them
        self.asked = False
        kinds = {"cpu", self._device.type}
        # whole only inside their own forwards, which end in another way where gradients are asked for
        self._sharded = any(is_shard(p) for p in model.parameters())
        # by kind of device, the 16 bits in which the forward ran
        self.autocast = {k: torch.get_autocast_dtype(k) for k in kinds if torch.is_autocast_enabled(k)}

    def with_earlier(self) -> Replay | None:
        """Return what repeats the earlier forward, then this one, with the same examples in both; None where there was none."""
        if self.earlier is None:
            return None
        both, (args, kwargs) = copy(self), self.inputs
        both.inputs = args, kwargs | {EARLIER: self.earlier.inputs}
        return both

    @contextmanager
    def around(self) -> Iterator[None]:
        """Inside, `begun` sets back what a replay needs, and nothing else; afterwards all is as if nothing had happened."""
        if self._set_back is not None:
            yield
            return
        python, numpy = random.getstate(), np.random.get_state()
        earlier = self.earlier if EARLIER in self.inputs[1] else None
        with ExitStack() as inside:
            inside.callback(random.setstate, python)
            inside.callback(np.random.set_state, numpy)
            there = [self._device.index] if has_generator(self._device) else []
            inside.enter_context(torch.random.fork_rng(there, device_type=self._device.type))
            # the rounding of products hides what a replay looks for, or looks like it
            inside.enter_context(all_full_precision())
            if "torch._dynamo" in sys.modules:
                # a few forwards are not worth a compilation each
                inside.enter_context(torch.compiler.set_stance("force_eager"))
            state = self._state if earlier is None else earlier.state
            self._set_back = inside.enter_context(state.installed())
            inside.callback(setattr, self, "_set_back", None)
            yield

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Inside, the model is as it was before the forward; afterwards, outside of `around`, as if nothing had happened."""
        with ExitStack() as inside:
            inside.enter_context(self.around())
            inside.callback(self._restore, self.written())
            cast(Any, self._set_back)()
            # other ranks may not look now
            inside.enter_context(silent(reducers_in(self.model)))
            inside.enter_context(self._opened())
            if self.wide:
                inside.enter_context(_widened(self.model))
            if self._sharded:
                inside.enter_context(held_as_it_is(self.model))
            if not self.keeps:
                inside.enter_context(saved_tensors_hooks(_nothing, _nothing))
            for kind in {"cpu", self._device.type}:
                dtype = self.autocast.get(kind)
                on = self.narrow and dtype is not None
                if on or torch.is_autocast_enabled(kind):
                    inside.enter_context(torch.autocast(kind, dtype=dtype, enabled=on, cache_enabled=False))
            yield

    def written(self) -> dict[str, Tensor]:
        """Return the parameters that the forward writes to, by name: held to a norm, or following others like a teacher."""
        if self._written is None:
            now = fingerprints(self.model)
            found = {
                n: p
                for n, p in self.model.named_parameters()
                if n in now and not same_buffer(self._entered.get(n, now[n]), now[n], 0, 0)
            }
            self._written = {name: (p.data, p.data.clone()) for name, p in found.items()}
        params = dict(self.model.named_parameters()) if self._written else {}
        return {name: params[name] for name in self._written}

    @contextmanager
    def _opened(self) -> Iterator[None]:
        """Inside, trainable parameters that are zero throughout have small values: a gate (ReZero, LoRA, a new head) is open."""
        if not self._closed:
            yield
            return
        closed = [
            p
            for name, p in self.model.named_parameters()
            if name in self._closed and name not in self.written()
        ]
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
        found = roots.made_of(self.ends.values())
        return {n: found[end] for n, end in self.ends.items() if end in found}

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
        """The model's output for ``inputs``, inside `begun`; it may be called several times there.

        Raises:
            Drawn: see `without_chance`.
        """
        seed = self.chance.seed or 0
        if self._device.type == "cpu":
            # torch's own function notes who called it, a millisecond for each kind of device that is not in use
            torch.default_generator.manual_seed(seed)
        else:
            torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        args, kwargs = changed(inputs, _doubled if self.wide else copied)
        earlier = kwargs.pop(EARLIER, None)
        self._shapes = self.narrow, *shapes_of(inputs)
        with self.without_chance() as chance:
            if earlier is not None and self.earlier is not None:
                self.earlier.state.switch()
                with torch.no_grad():
                    self.model(*earlier[0], **earlier[1])
                self._state.switch()
            result = self.model(*args, **kwargs)
        # where nobody has drawn, the next numbers are the first ones
        self.stood = random.random(), np.random.random_sample()
        self.drawn_by_others = moved = self.stood != _first(seed)
        self.draws = [] if chance is None else chance.draws
        self.drew |= moved
        self.by_chance |= moved
        if chance is not None:
            self.drew |= chance.drew
            self.asked |= chance.asked
            self.by_chance |= chance.drew and self.chance.seed is not None
            if chance.settled:
                self._settled.add(self._shapes)
        return result

    @contextmanager
    def without_chance(self) -> Iterator[WithoutChance | None]:
        """Inside, on the way there or back, chance gives constants.

        To see to that costs as much as a small operation, for each of them. None where it is left out: a batch of the same shapes
        has drawn nothing, and shapes alone decided what the model did.

        Raises:
            Drawn: something was drawn there nevertheless. From then on it is not left out.
        """
        # on a GPU, an index out of range has to be found before it is used
        if self._drawn or self._shapes not in self._settled or self._device.type != "cpu":
            with WithoutChance(self.chance) as chance:
                yield chance
            return
        before = torch.default_generator.get_state()
        yield None
        if not torch.equal(before, torch.default_generator.get_state()):
            self._drawn = True
            raise Drawn


class Drawn(Exception):
    """A replay has drawn numbers where none were expected: it is to be begun again."""


def again(replay: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return what a replay gives, after a second begin if need be."""
    try:
        return replay(*args, **kwargs)
    except Drawn:
        return replay(*args, **kwargs)


class Earlier:
    """A forward without gradients, of so many rows, as it was entered."""

    def __init__(self, model: nn.Module, args: tuple, kwargs: dict, rows: int):
        self.inputs: Inputs = changed((args, kwargs), copied)
        self.state, self.rows = State(model), rows


def switches(model: nn.Module, args: tuple, kwargs: dict) -> Iterator[Hashable]:
    """Yield what a forward may branch by, of modules and arguments: words, and of other plain values whether they are zero.

    A number that rises with every step is another switch once.
    """
    owners: list[dict[Any, Any]] = [*map(vars, modules_of(model)), dict(enumerate(args)), kwargs]
    for owner in owners:
        for name, value in owner.items():
            kind = type(value)
            if kind is str:
                yield name, value
            elif kind in SWITCHES:
                yield name, bool(value)


def shapes_of(inputs: Inputs) -> tuple[Hashable, ...]:
    """Return what enters a forward without the numbers of tensors: their shapes, and other arguments."""
    plain = bool | int | float | str
    return tuple(
        (name, part.shape if isinstance(part, Tensor) else part if isinstance(part, plain) else type(part))
        for name, part in leaves(inputs)
    )


def fingerprints(model: nn.Module) -> dict[str, Tensor]:
    """Return three numbers for each parameter, without a copy of it: whoever writes to one, again and again, changes them.

    Of shards there are none: whole in a forward and cut behind it, they are no signs of writing.
    """
    return {
        name: torch.stack(
            [n for t in map(_countable, held_in(p.detach())) if t.numel() for n in (t.sum(), *t.aminmax())]
        )
        for name, p in model.named_parameters()
        if p.is_floating_point() and p.numel() and not is_shard(p)
    }


def _countable(tensor: Tensor) -> Tensor:
    """As it is, or, of a float of 8 bits, its bytes: of the former there is no sum."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


@contextmanager
def _widened(model: nn.Module) -> Iterator[None]:
    """Inside, a model computes in 64 bits, as far as it does not name others itself."""
    tables: list[dict[str, Any]] = [
        table for module in model.modules() for table in (module._parameters, module._buffers)
    ]
    before = [
        (table, name, t)
        for table in tables
        for name, t in table.items()
        if t is not None and t.is_floating_point()
    ]
    # not in place: pending graphs know these tensors; and what is tied stays one
    wide: dict[Tensor, Tensor] = {t: _doubled("", t) for _, _, t in before}
    wide |= {t: nn.Parameter(w, t.requires_grad) for t, w in wide.items() if isinstance(t, nn.Parameter)}
    default = torch.get_default_dtype()
    try:
        for table, name, t in before:
            table[name] = wide[t]
        torch.set_default_dtype(torch.float64)
        yield
    finally:
        torch.set_default_dtype(default)
        for table, name, t in before:
            table[name] = t


def _doubled(name: str, value: Any) -> Any:
    """Return a copy of a tensor, floating-point numbers in 64 bits; anything else as it is."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().double()
    return copied(name, value)


def _nothing(value: Any) -> Any:
    """Of a replay nothing is kept for a backward pass."""


@functools.cache
def _first(seed: int) -> tuple[float, float]:
    """The first numbers of Python's generator and of numpy's."""
    return random.Random(seed).random(), np.random.RandomState(seed).random_sample()
