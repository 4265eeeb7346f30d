"""What stands beside a batch in what a loop makes of it: factors, places of a crop, masks, public rows, weights of a teacher.

It has to be the same for all physical batches of a step. With one example more, others move into the next physical batch, at each
border one; where a number is drawn for a whole batch, or follows each of them, these get another one, and the sum moves by up to
2C for each, and not by C alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dpexp.clipping.independence.comparison import same_buffer
from dpexp.clipping.operations.others import BROADCASTING
from dpexp.training.watching.guards import few_numbers
from dpexp.training.watching.lines import Line, name_of
from dpexp.training.watching.trace import Trace

# of larger tensors, as of a network beside the model, a few numbers are compared
SMALL = 1 << 12
# whole numbers may be places of rows
COMPARED = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool}
# what they return is what they are given, or goes by an index, row by row
PLACING = {"clone", "contiguous", "detach", "to", "float", "__setitem__", "index_put", "index_put_", "where"}


@dataclass(frozen=True, eq=False)
class Constant:
    """A tensor that is no batch's; ``sure``: no size of it says that it might have rows of each example."""

    shape: torch.Size
    some: Tensor | None
    sure: bool

    @classmethod
    def of(cls, tensor: Tensor, examples: int) -> Constant:
        if tensor.layout != torch.strided or tensor.is_nested:
            return cls(torch.Size(), None, False)
        for axis, stride in enumerate(tensor.stride()):
            if stride == 0 and tensor.shape[axis] > 1:
                # one for all rows, expanded to as many as there are
                tensor = tensor.narrow(axis, 0, 1)
        some = tensor.detach() if tensor.numel() <= SMALL else few_numbers(tensor)
        rows = examples in tensor.shape or (tensor.dim() > 0 and len(tensor) % examples == 0)
        return cls(tensor.shape, None if some is None else some.clone(), not rows)

    def differs(self, other: Constant, resized: bool) -> bool:
        """Whether it is another one beside another batch; ``resized``: of another size, which rows would have gone with."""
        a, b = self.some, other.some
        if a is None or b is None or self.shape != other.shape or not (resized or self.sure):
            return False
        return not same_buffer(a, b)


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
        few: whether numbers were drawn, but fewer than there are examples.
    """

    examples: int
    sure: bool
    shapes: list[torch.Size]
    calls: list[Together]
    few: bool

    @classmethod
    def of(cls, trace: Trace, losses: Tensor) -> Beside:
        """Take it from a trace, whose tape still holds all."""
        tape, count = trace.tape, trace.examples
        entered = [number for call in trace.calls for number in call]
        calls = []
        for i in sorted(tape.behind([*entered, tape.numbers.get(losses, 0)])):
            line = tape.lines[i]
            name = name_of(line.func)
            if not line.together or (name in PLACING and not _along(line)):
                continue
            # numpy's own number is a float, and True an int
            leaves = tree_leaves(line.given)
            given = [leaf for leaf in leaves if isinstance(leaf, float | slice) or type(leaf) is int]
            real = [repr(number) for number in given if isinstance(number, float)]
            whole = [
                repr(number) for number in given if type(number) is int and name.strip("_") in BROADCASTING
            ]
            held = [tape.held[number] for number in line.slots if number in tape.beside]
            beside = [Constant.of(t, count) for t in held if t.dtype in COMPARED]
            calls.append(Together(name, [*map(repr, given)], real, whole, beside))
        rowed = [t for t in trace.known.rowed if t.dim()]
        sure = not trace.known.listed and not any(count in t.shape[1:] for t in rowed)
        drawn = trace.drawn + trace.chance.count(count)
        return cls(count, sure, trace.shapes, calls, drawn in range(1, count))

    def unlike(self, other: Beside) -> str:
        """Say in words what stood beside this batch, and not beside another one of the same step; "" if nothing is seen."""
        resized, alike = self.examples != other.examples, self.shapes == other.shapes
        if not (resized or (self.sure and other.sure)):
            # a row may have been taken for the batch
            return ""
        if [call.name for call in self.calls] == [call.name for call in other.calls]:
            for a, b in zip(self.calls, other.calls, strict=True):
                constants = zip(a.beside, b.beside, strict=False)
                changed = any(here.differs(there, resized) for here, there in constants)
                # whole numbers may be sizes of the batch
                if changed or a.real != b.real or (alike and a.whole != b.whole):
                    return f"what {a.name} is given beside it"
        # what each example draws for itself may decide what is done with all of them; noise may be what a coin has decided
        decided = alike and (self.few or other.few)
        if decided and [call[:2] for call in self.calls] != [call[:2] for call in other.calls]:
            return "what is done with all of its examples together"
        return ""
