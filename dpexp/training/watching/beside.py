"""What stands beside a batch in what a loop makes of it: factors, places of a crop, masks, public rows, weights of a teacher.

It has to be the same for all physical batches of a step. With one example more, others move into the next physical batch, at each
border one; where a number is drawn for a whole batch, or follows each of them, these get another one, and the sum moves by up to
2C for each, and not by C alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dpexp.clipping.independence.comparison import same_buffer
from dpexp.clipping.operations.others import BROADCASTING
from dpexp.training.watching.entering import Entering
from dpexp.training.watching.guards import few_numbers
from dpexp.training.watching.lines import WHOLE, Line, name_of
from dpexp.training.watching.trace import Trace

# of larger tensors, as of a network beside the model, a few numbers are compared
SMALL = 1 << 12
# whole numbers may be places of rows, if they are not one for all
COMPARED = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool}
# what they return is what they are given, or goes by an index, row by row
PLACING = {"clone", "contiguous", "detach", "to", "float", "__setitem__", "index_put", "index_put_", "where"}
# so many equal rows are one draw, repeated for all of them; coins of 8 examples are equal now and then
MANY, COINS = 8, 16


@dataclass(frozen=True, eq=False)
class Constant:
    """A tensor that is no batch's.

    Attributes:
        shape: its own; of one row where they are repeated.
        some: of its numbers.
        sure: whether no size of it says that it might have rows of each example.
        repeated: whether it has a row for each of many examples, and all are equal.
    """

    shape: torch.Size
    some: Tensor | None
    sure: bool
    repeated: bool = False

    @classmethod
    def of(cls, tensor: Tensor, examples: int) -> Constant:
        if tensor.layout != torch.strided or tensor.is_nested:
            return cls(torch.Size(), None, False)
        repeated = _repeated(tensor, examples)
        for axis, stride in enumerate(tensor.stride()):
            if tensor.shape[axis] > 1 and (stride == 0 or (axis == 0 and repeated)):
                # one for all rows, expanded to as many as there are
                tensor = tensor.narrow(axis, 0, 1)
        some = tensor.detach() if tensor.numel() <= SMALL else few_numbers(tensor)
        if tensor.dtype not in COMPARED and not repeated:
            return cls(tensor.shape, None, False)
        rows = examples in tensor.shape or (tensor.dim() > 0 and len(tensor) % examples == 0)
        return cls(tensor.shape, None if some is None else some.clone(), not rows or repeated, repeated)

    def differs(self, other: Constant, resized: bool, as_long: bool) -> bool:
        """Whether it is another one beside another batch.

        Args:
            other: what stood there.
            resized: whether the batch has another size, which rows would have gone with.
            as_long: whether tensors are as long there, as whole numbers may be lengths.
        """
        a, b = self.some, other.some
        if a is None or b is None or self.shape != other.shape:
            return False
        if not (resized or self.sure) or (self.repeated and _whole(a) and _whole(b) and not as_long):
            return False
        return not same_buffer(a, b)


def _repeated(tensor: Tensor, examples: int) -> bool:
    """Whether all rows are equal, and so many that no examples have drawn them, each by itself."""
    if tensor.dim() == 0 or tensor.numel() == 0 or len(tensor) % examples:
        return False
    if tensor.dtype not in COMPARED.union(WHOLE):
        return False
    if tensor.stride(0) == 0:
        return len(tensor) > 1
    if examples < MANY:
        return False
    first = tensor[:1]
    coins = _whole(first) and bool((first.float().abs() <= 1).all())
    return examples >= (COINS if coins else MANY) and bool((tensor == first).all())


def _whole(tensor: Tensor) -> bool:
    """Whether there are whole numbers alone."""
    return not tensor.is_floating_point() or bool((tensor == tensor.round()).all())


class Together(NamedTuple):
    """A call that all rows of a batch went through.

    Attributes:
        name: of the function.
        given: all numbers that it was given, in words.
        real, whole: those of them that have a fraction, and the others in arithmetic.
        beside: tensors.
    """

    name: str
    given: list[str]
    real: list[str]
    whole: list[str]
    beside: list[Constant]

    @classmethod
    def of(
        cls, name: str, given: Any, beside: Iterable[Tensor], examples: int, whole: bool = True
    ) -> Together:
        """Take it from what a function was given; ``whole``: whether whole numbers are arithmetic."""
        # numpy's own number is a float, and True an int
        numbers = [
            leaf for leaf in tree_leaves(given) if isinstance(leaf, float | slice) or type(leaf) is int
        ]
        return cls(
            name,
            [*map(repr, numbers)],
            [repr(number) for number in numbers if isinstance(number, float)],
            [repr(number) for number in numbers if whole and type(number) is int],
            [Constant.of(tensor, examples) for tensor in beside],
        )

    def unlike(self, other: Together, resized: bool, as_long: bool) -> bool:
        """Whether a call was given something else beside another batch: see `Constant.differs`."""
        constants = zip(self.beside, other.beside, strict=False)
        changed = any(here.differs(there, resized, as_long) for here, there in constants)
        return changed or self.real != other.real or (as_long and self.whole != other.whole)


def _names(calls: Iterable[Together]) -> list[str]:
    return [call.name for call in calls]


def _along(line: Line) -> bool:
    """Whether a part of all rows is written to, and not a part of the rows."""
    if name_of(line.func) != "__setitem__":
        return False
    key = line.given[0][1]
    first = key[0] if isinstance(key, tuple) and key else key
    return first is Ellipsis or first == slice(None)


@dataclass(frozen=True, eq=False)
class Beside:
    """What stood beside one batch.

    Attributes:
        examples: how many it has.
        sure: whether no row is as long as that.
        shapes: of its tensors.
        calls: that all of its rows went through, on their way to the losses.
        placing: those that place rows, by what was repeated for all of them.
        entering: calls of the model, and what stood in its modules.
        few: whether numbers were drawn, but fewer than there are examples.
    """

    examples: int
    sure: bool
    shapes: list[torch.Size]
    calls: list[Together]
    placing: list[Together]
    entering: list[tuple[Together, Entering]]
    few: bool

    @classmethod
    def of(cls, trace: Trace, losses: Tensor, moved: set[str]) -> Beside:
        """Take it from a trace, whose tape still holds all.

        Args:
            trace: of the batch.
            losses: of it.
            moved: settings that the model's own forward has changed beside any batch; those of this one are added.
        """
        tape, count = trace.tape, trace.examples
        entered = [number for call in trace.calls for number in call]
        calls, placing = [], []
        for i in sorted(tape.behind([*entered, tape.numbers.get(losses, 0)])):
            line = tape.lines[i]
            name = name_of(line.func)
            if not line.together:
                continue
            held = [tape.held[number] for number in line.slots if number in tape.beside]
            call = Together.of(name, line.given, held, count, whole=name.strip("_") in BROADCASTING)
            if name not in PLACING or _along(line):
                calls.append(call)
            elif any(constant.repeated for constant in call.beside):
                placing.append(call)
        entering = [
            (Together.of("the model", call.numbers, call.beside, count), call) for call in trace.entering
        ]
        for met in trace.entering:
            moved |= met.moved
            met.moved = moved
        rowed = [t for t in trace.known.rowed if t.dim()]
        sure = not trace.known.listed and not any(count in t.shape[1:] for t in rowed)
        drawn = trace.drawn + trace.chance.count(count)
        return cls(count, sure, trace.shapes, calls, placing, entering, drawn in range(1, count))

    def unlike(self, other: Beside) -> str:
        """Say in words what stood beside this batch, and not beside another one of the same step; "" if nothing is seen."""
        resized, alike = self.examples != other.examples, self.shapes == other.shapes
        if not (resized or (self.sure and other.sure)):
            # a row may have been taken for the batch
            return ""
        # whole numbers may be lengths, also of what the loop has made of texts
        shapes = [[call.shapes for _, call in beside.entering] for beside in (self, other)]
        as_long = alike and shapes[0] == shapes[1]
        pairs: list[tuple[Together, Together]] = []
        for (given, here), (given_there, there) in zip(self.entering, other.entering, strict=False):
            if name := here.unlike(there, as_long):
                return f"{name} of the model"
            pairs.append((given, given_there))
        for mine, theirs in ((self.calls, other.calls), (self.placing, other.placing)):
            if _names(mine) == _names(theirs):
                pairs += zip(mine, theirs, strict=True)
        if unlike := next((a for a, b in pairs if a.unlike(b, resized, as_long)), None):
            return f"what {unlike.name} is given beside it"
        names, others = _names(self.calls), _names(other.calls)
        if names != others and sorted(names) == sorted(others):
            return "the order of what is done with all of its examples together"
        # what each example draws for itself may decide what is done with all of them; noise may be what a coin has decided
        decided = alike and (self.few or other.few)
        if decided and [call[:2] for call in self.calls] != [call[:2] for call in other.calls]:
            return "what is done with all of its examples together"
        return ""
