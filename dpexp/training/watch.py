"""Whether the losses of a loop of one's own depend on their own example alone, seen while the loop computes them.

The clipper proves that of the model, and of all that shows in gradients. What a loop mixes behind the model shows in none:
targets ``[b]`` against outputs ``[b, 1]``, classes weighted by their counts in the batch, other examples as negatives without a
gradient. So what happens between a batch and its losses is written down, function by function, and computed again (`tape.py`):
with one half of the examples in the place of the others, then with the other half. A loss of one example alone is the same in one
of the two.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode, _push_mode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from dpexp.clipping.dataflow import FEW, in_place, tensors_in
from dpexp.clipping.following import Followed
from dpexp.clipping.layouts import due
from dpexp.clipping.operations.others import BROADCASTING
from dpexp.errors import UserError
from dpexp.training.tape import Line, Slot, Tape

log = logging.getLogger(__name__)

# physical batches that are watched until one has told something
PATIENCE = 16
# functions that are written down for one batch
LONGEST = 5000
# bytes that are held for it
LARGEST = 1 << 28
# from here on what the loop does is not written down: it goes by numbers of Python
ESCAPES = {"tolist"}
# the last one: a parameter, as it is read within a module of an attached model
PLAIN = (Tensor, nn.Parameter, Followed)

MIXED = (
    "the loop mixes examples: the loss of one changes when the others of its batch are replaced{where}, whether a gradient shows "
    "it or not. This voids any guarantee. Compute each loss from its own example alone: outputs and targets of one shape; no "
    "count, mean or maximum over the batch; no other examples, detached or not"
)
SIZED = (
    "{name} scales losses by the number of examples in their batch ({first}, then {second}): each weighs by how many others "
    "were drawn. Leave it out: the step divides by the expected size of the batch"
)
NOTE = "losses were not looked at for values that mix examples (%s): engine.look_at_losses(losses, batch) asks for them again"


class LossWatch:
    """Watches physical batches of a loop: the first until one has told something; the 16th, the 64th and so on.

    Args:
        model: whose own forward is not looked into: the clipper does that.
        rows_per_example: rows that a batch may have of each example.
    """

    def __init__(self, model: nn.Module, rows_per_example: int = 1):
        self.model, self.rows_per_example = model, rows_per_example
        self._batches = self._tried = 0
        self._sizes: dict[int, set[tuple[int, str]]] = {}
        self._trace: Trace | None = None

    def begin(self, batch: Any, examples: int) -> None:
        """Watch what is done with a batch from here on, if it is time to."""
        self.end()
        self._batches += 1
        self._trace = None
        if examples > 1 and (self._tried < PATIENCE or due(self._batches)):
            self._trace = Trace(self.model, batch, examples, self.rows_per_example)
            self._trace.begin()

    def end(self) -> None:
        """Watch no longer."""
        if self._trace is not None:
            self._trace.end()

    def check(self, losses: Tensor) -> None:
        """Look at what was watched.

        Raises:
            UserError: what an example loses depends on the others.
        """
        trace, self._trace = self._trace, None
        if trace is None:
            return
        told = trace.check(losses)
        for examples, scaled in self._sizes.items():
            if examples != trace.examples and (both := scaled & trace.scaled):
                raise UserError(SIZED.format(name=min(both)[1], first=examples, second=trace.examples))
        if told:
            self._sizes[trace.examples] = trace.scaled
        # a factor that equals the size of the batch may be a constant: the next size tells
        sure = told and (len(self._sizes) > 1 or not trace.scaled)
        self._tried = PATIENCE if sure else self._tried + 1
        if self._tried == PATIENCE and not told:
            log.warning(NOTE, trace.failure or "nothing in them goes by the rows of the batch")


class Trace(TorchFunctionMode):
    """What is done with one batch.

    Attributes:
        scaled: where a number that equals the number of examples stood in arithmetic.
        failure: why nothing can be said, in words.
    """

    def __init__(self, model: nn.Module, batch: Any, examples: int, rows_per_example: int):
        super().__init__()
        self.model, self.examples, self._times = model, examples, {1, rows_per_example}
        self.scaled: set[tuple[int, str]] = set()
        self.failure = ""
        self._numbers = WeakIdKeyDictionary()
        # tensors that have the rows of the batch and were made by nothing that is written down
        self._rowed = WeakIdKeyDictionary()
        self._tape = Tape(examples)
        self._count = self._inside = self._bytes = 0
        self._table = ""
        self._open = ExitStack()
        self._have_rows(tensors_in(batch))

    # -- watching -----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Watch from here on."""
        if "torch._dynamo" in sys.modules:
            # no compiled code of the loop is to carry what watches it
            self._open.enter_context(torch.compiler.set_stance("force_eager"))
        self._open.callback(register_module_forward_pre_hook(self._enter).remove)
        self._open.callback(register_module_forward_hook(self._leave, always_call=True).remove)
        _push_mode(self)
        self._open.callback(self._remove)

    def end(self) -> None:
        """Watch no longer."""
        self._open.close()

    def _remove(self) -> None:
        """Leave the stack of modes, wherever in it this one stands: the loop may have entered others and not left them yet."""
        above = []
        while (mode := _get_current_function_mode()) is not None:
            _pop_mode()
            if mode is self:
                break
            above.append(mode)
        for mode in reversed(above):
            _push_mode(mode)

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._inside += module is self.model

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if module is self.model:
            self._have_rows(tensors_in(output, depth=1))
            self._inside -= 1

    def _have_rows(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if type(tensor) in PLAIN and tensor not in self._numbers:
                self._rowed[tensor] = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._inside or self.failure:
            return func(*args, **kwargs)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not any(t in self._numbers or t in self._rowed for t in given):
            return func(*args, **kwargs)
        # differentiated by the loop itself, or of somebody's own kind: what comes out has the rows, too
        opaque = func is torch.autograd.grad or any(type(t) not in PLAIN for t in given)
        before = [_version(t) for t in given]
        # what is written to is noted as it was
        line = None if opaque or not in_place(func) else self._tried(self._noted, func, args, kwargs, given)
        result = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if opaque:
            self._have_rows(made)
        elif line is not None:
            self._tried(self._add, line, made)
        elif any(_version(t) != v for t, v in zip(given, before, strict=True)) or _name(func) in ESCAPES:
            self._stop(f"{_name(func)} writes to what it is given, or makes numbers of Python of it")
        elif made and not self.failure:
            self._tried(lambda: self._add(self._noted(func, args, kwargs, given), made))
        return result

    def _tried(self, action: Callable[..., Line | None], *arguments: Any) -> Line | None:
        """What goes wrong here is no concern of the loop."""
        try:
            return action(*arguments)
        except Exception as error:
            self._stop(str(error))
            return None

    def _noted(self, func: Any, args: Any, kwargs: Any, given: list[Tensor]) -> Line:
        """A call and what it is given."""
        name = _name(func)
        slots = tree_map_only(Tensor, lambda t: Slot(self._number(t)), (args, kwargs))
        if in_place(func):
            for number, held in self._tape.held.items():
                if _storage(held) == _storage(given[0]):
                    self._tape.held[number] = held.clone()
                    self._tape.written.add(number)
        kind = given[0].device.type
        on = torch.is_autocast_enabled(kind)
        if name.strip("_") in BROADCASTING and given[0].is_floating_point():
            numbers = [n for n in tree_leaves((args, kwargs)) if type(n) in (int, float)]
            sizes = [self.examples * times for times in self._times]
            if any(n in (size, 1 / size) for n in numbers for size in sizes):
                self.scaled.add((len(self._tape.lines), name))
        return Line(func, slots, [], (kind, torch.get_autocast_dtype(kind)) if on else None)

    def _add(self, line: Line, made: list[Tensor]) -> None:
        """A call that was made, and what it returned."""
        for tensor in made:
            if tensor not in self._numbers:
                self._numbers[tensor] = self._count = self._count + 1
            line.made.append(self._numbers[tensor])
            if not self._table and sum(size == self.examples for size in tensor.shape) > 1:
                self._table = f" ({_name(line.func)} makes a table {list(tensor.shape)})"
        self._tape.lines.append(line)
        if len(self._tape.lines) > LONGEST:
            raise ValueError(f"the loop calls more than {LONGEST} functions")

    def _number(self, tensor: Tensor) -> int:
        """The number of a tensor; what was made elsewhere is held."""
        if tensor not in self._numbers:
            self._numbers[tensor] = self._count = self._count + 1
            with torch._C.DisableTorchFunctionSubclass():
                self._tape.held[self._count] = tensor.detach()
            if tensor in self._rowed:
                self._bytes += tensor.nbytes
                self._place(self._count, tensor)
        return self._numbers[tensor]

    def _place(self, number: int, tensor: Tensor) -> None:
        """Find the dimension that is the batch, and how many rows each example has there."""
        fits = [
            (axis, times)
            for axis, size in enumerate(tensor.shape)
            for times in self._times
            if size == self.examples * times
        ]
        if len(fits) > 1:
            raise ValueError(
                f"{list(tensor.shape)} may have its {self.examples} examples in several dimensions"
            )
        if self._bytes > LARGEST:
            raise ValueError(f"they are computed from more than {LARGEST >> 20} MiB")
        if fits and not _is_order(tensor):
            self._tape.places[number] = fits[0]
        elif fits and self.examples < FEW:
            # in an order, rows that are replaced still go where they went; of few examples, labels may look like one
            raise ValueError(f"{tensor.tolist()} may be labels or an order")

    def _stop(self, why: str) -> None:
        self.failure = self.failure or why
        self._tape.clear()

    # -- looking ------------------------------------------------------------------------------------------------------

    def check(self, losses: Tensor) -> bool:
        """Compute the losses again; return whether that told anything.

        Raises:
            UserError: what an example loses depends on the others.
        """
        if losses in self._rowed:
            return True
        number = self._numbers.get(losses)
        if number is None:
            self.failure = self.failure or "they are made by something else than torch's functions"
        if self.failure or number is None:
            return False
        try:
            mixed, told = self._tape.compare(number, losses.detach())
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
            return False
        finally:
            self._tape.clear()
        if mixed:
            raise UserError(MIXED.format(where=self._table))
        return told


def _name(func: Any) -> str:
    return getattr(func, "__name__", str(func))


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_order(tensor: Tensor) -> bool:
    """Whether it may say which row goes where."""
    if tensor.dim() != 1 or tensor.is_floating_point() or tensor.dtype == torch.bool:
        return False
    return bool((tensor.sort().values == torch.arange(len(tensor), device=tensor.device)).all())
