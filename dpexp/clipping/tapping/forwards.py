"""A forward pass: what entered it, and what is noted of it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import FrameType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dpexp.clipping.refusals import STRIDED
from dpexp.clipping.tapping.dataflow import NONE, Sizes
from dpexp.clipping.tapping.uses import Use
from dpexp.errors import UserError

# Roles that an operation on followed values may have, as the forward passes that were watched have decided.
#
# followed by a digit for every other tensor: 1 for one of the batch, 2 for a constant whose rows look like those of the batch
USE = "use"
# a function of parameters; copies of a value, one for each row of the batch, are a use all the same
DERIVE = "derive"
# a function of parameters, also where its result looks like one row for each example
SHARED = "shared"
# now one, now the other, in places that have the same name
NATIVE = "native"
# left to ordinary autograd
PLAIN = "plain"
# beside them: of what an operation on picked rows gives
PICKED = "picked"


@dataclass(eq=False)
class ForwardPass:
    """One forward through the model. Taps and uses belong to it, not to the clipper: several may be alive at once.

    Attributes:
        shapes: what may be the batch, see `Entered`.
        batch: the index of what probably is.
        uses: in the order of the forward.
        roles: what was decided of each operation on a parameter, where this pass was watched.
        consumed: whether a backward pass has arrived here.
        earlier: whether it is of an earlier batch.
        begun, ended: how many nodes autograd had made before and after it.
        returned: the `node_key` of each output that was computed from rows of examples, where this pass was watched.
        picked: the sizes of the dimensions along which it picked, of what has a gradient, where this pass was watched.
    """

    shapes: tuple[torch.Size, ...] = ()
    batch: int = 0
    uses: list[Use] = field(default_factory=list)
    roles: dict[str, str] = field(default_factory=dict)
    ordinals: dict[str, int] = field(default_factory=dict)
    consumed: bool = False
    earlier: bool = False
    begun: int = 0
    ended: int = 0
    returned: set[tuple[int, int]] = field(default_factory=set)
    picked: Sizes = NONE

    @property
    def rows(self) -> int | None:
        """Rows of the batch, as far as the shapes tell."""
        return self.shapes[self.batch][0] if self.shapes else None

    def may_have(self, rows: int) -> bool:
        """Tell whether a batch of so many rows may have entered here, and not several of each example, or nodes of graphs."""
        return not self.shapes or any(rows in shape for shape in self.shapes)

    def has_in_front(self, rows: int) -> bool:
        """Tell whether something of so many rows has entered, and not only by chance of so many features."""
        return not self.shapes or any(shape[0] == rows for shape in self.shapes)

    def mistook(self, rows: int) -> bool:
        """Tell whether the batch, of so many rows, is another input than was taken for it."""
        # where there is none, it is the second dimension of an input
        return bool(self.shapes) and self.rows != rows and self.has_in_front(rows)

    def is_ragged(self, first: int, rows: int) -> bool:
        """Tell whether ``first`` rows may have entered end to end: texts of any length, or graphs."""
        return any(
            shape[0] > rows and first % shape[0] == 0 and first // shape[0] % rows for shape in self.shapes
        )


class Entered(NamedTuple):
    """What entered a forward pass, and where the size of the batch may stand.

    Attributes:
        tensors: among its arguments.
        shapes: the lengths of lists of tensors, then the first two dimensions of every tensor that has any; one of these numbers
            is the size of the batch.
        first: the index of the first tensor among the shapes.
    """

    tensors: list[Tensor]
    shapes: tuple[torch.Size, ...]
    first: int

    @property
    def rows(self) -> int:
        """How many rows enter, as far as shapes tell before the losses are there; 0 where they do not."""
        return self.shapes[self.first][0] if self.first < len(self.shapes) else 0


def entered(value: Any) -> Entered:
    """Look at the arguments of a forward pass.

    Raises:
        UserError: nested tensors of the strided layout.
    """
    tensors = tensors_in(value)
    if any(tensor.is_nested and tensor.layout == torch.strided for tensor in tensors):
        raise UserError(STRIDED)
    lists = [leaf for leaf in tree_leaves(value, is_leaf=is_tensors) if is_tensors(leaf)]
    shapes = [tensor.shape[:2] for tensor in tensors if tensor.dim()]
    lengths = [torch.Size([len(items)]) for items in lists]
    return Entered(tensors, (*lengths, *shapes), len(lists) if shapes else 0)


def tensors_in(value: Any, depth: int = 2) -> list[Tensor]:
    """The tensors among the arguments of a forward pass, also inside mappings, dataclasses and objects like a batch of graphs.

    Args:
        value: anything.
        depth: how many objects deep to look.
    """
    found = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif isinstance(leaf, Mapping):
            found += tensors_in(dict(leaf), depth)
        elif depth:
            found += tensors_in(list(attributes_of(leaf).values()), depth - 1)
    return found


def attributes_of(value: Any) -> dict[str, Any]:
    """Return what an object holds, a dataclass or one of another class; nothing of numbers, functions and modules."""
    if isinstance(
        value, str | int | float | Tensor | nn.Module | type | FunctionType | MethodType | ModuleType
    ):
        return {}
    slots = [vars(cls).get("__slots__", ()) for cls in type(value).__mro__]
    names = [name for given in slots for name in ((given,) if isinstance(given, str) else given)]
    return {name: getattr(value, name) for name in names if hasattr(value, name)} | dict(
        getattr(value, "__dict__", {})
    )


def is_tensors(value: Any) -> bool:
    """Tell whether a value is a list of tensors."""
    return isinstance(value, list) and bool(value) and all(isinstance(item, Tensor) for item in value)


def inside_reentrant_checkpoint() -> bool:
    """Whether the caller runs in the gradient-free first forward of reentrant activation checkpointing."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "forward" and frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            return True
        frame = frame.f_back
    return False
