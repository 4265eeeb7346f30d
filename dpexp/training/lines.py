"""One call of a torch function, as a `Trace` writes it down, and what such calls have in common."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dpexp.clipping.dataflow import in_place
from dpexp.clipping.following import Followed
from dpexp.clipping.independence.comparison import rows_apart

# relative difference of numbers that are one, inverted or not
SAME = 1e-9
# what they return tells the shape of their first argument, and none of its values
SHAPES = {
    "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like",
    "new_zeros", "new_ones", "new_empty", "new_full", "new_tensor",
}  # fmt: skip
# and these return no tensor
READING_SHAPES = {
    "__len__",
    "__get__",
    "dim",
    "size",
    "numel",
    "stride",
    "is_floating_point",
    "get_device",
    "__hash__",
}
# what they return holds values of their first argument alone, and may be that argument itself
LIKE = {"to", "type_as", "expand_as", "view_as", "reshape_as"}
# what rows belong to is told, and those of each are added up
ADDING = {"index_add", "scatter_add", "scatter_reduce", "index_reduce"}
# the last one: a parameter, as it is read within a module of an attached model
PLAIN = (Tensor, nn.Parameter, Followed)


@dataclass(frozen=True)
class Place:
    """Where the rows of each example are in a tensor.

    Attributes:
        axis: the dimension that is the batch.
        times: how many rows each example has there.
        strided: whether they are as far apart as there are examples, and not adjacent.
    """

    axis: int
    times: int
    strided: bool = False

    def rows(self, tensor: Tensor, examples: int) -> Tensor:
        """Return ``[examples, …]``, what each example has."""
        return rows_apart(tensor, self.axis, examples, self.strided).reshape(examples, -1)


@dataclass(frozen=True)
class Slot:
    """The place of a tensor among the arguments of a function."""

    number: int


@dataclass
class Line:
    """One call of a torch function; ``given``: arguments, with slots; ``made``: numbers of the tensors that it returned."""

    func: Any
    given: Any
    made: list[int]
    autocast: tuple[str, torch.dtype] | None
    # whether autograd looks on
    differentiated: bool = True
    # whether a number that was made of the whole batch is among the arguments
    counted: bool = False
    # whether it takes as many rows as there are examples, and some of them twice
    repeats: bool = False

    @property
    def writes(self) -> bool:
        """Whether it has written to its first argument."""
        return in_place(self.func, self.given[1])


@dataclass(frozen=True)
class Number:
    """A number among the arguments of a function; ``error``: of its format; ``by_row``: whether it may be one of each row."""

    value: float
    error: float = 0.0
    by_row: bool = False

    def is_near(self, other: float) -> bool:
        """Whether it is another one, or its inverse."""
        error = max(self.error, SAME)
        return math.isclose(self.value, other, rel_tol=error) or math.isclose(
            self.value * other, 1, rel_tol=error
        )


def slots_of(line: Line) -> list[Slot]:
    """The slots among the arguments of a call."""
    return [leaf for leaf in tree_leaves(line.given) if isinstance(leaf, Slot)]


def name_of(func: Any) -> str:
    """The name of a function, without its module."""
    return getattr(func, "__name__", str(func))


def values_of(func: Any, given: list[Tensor]) -> list[Tensor]:
    """The arguments of a function whose values are in what it returns."""
    name = name_of(func)
    return given[1:] if name in SHAPES else given[:1] if name in LIKE else given


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written to, where that is counted."""
    return 0 if tensor.is_inference() else tensor._version


def address_of(tensor: Tensor) -> int:
    """Where a tensor begins; 0 where it has no place of its own."""
    return tensor.data_ptr() if type(tensor) in PLAIN and storage_of(tensor) else 0


def storage_of(tensor: Tensor) -> int:
    """Where the numbers of a tensor lie; 0 where it has no place of its own."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0


def is_order(tensor: Tensor) -> bool:
    """Whether it may say which row goes where."""
    if tensor.dim() != 1 or tensor.is_floating_point() or tensor.dtype == torch.bool:
        return False
    return bool((tensor.sort().values == torch.arange(len(tensor), device=tensor.device)).all())
