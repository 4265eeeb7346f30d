"""One call of a torch function, as a `Trace` writes it down, and what such calls have in common."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from dpexp.clipping.tapping.following import Followed

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
# norms that keep means of what goes through them
RUNNING = {"batch_norm", "instance_norm"}
# what they return holds values of their first argument alone, and may be that argument itself
LIKE = {"to", "type_as", "expand_as", "view_as", "reshape_as"}
# what rows belong to is told, and those of each are added up
ADDING = {"index_add", "scatter_add", "scatter_reduce", "index_reduce"}
# from here on what the loop does is not written down: it goes by numbers of Python
ESCAPES = {"tolist"}
# what they return is no tensor, and may become one that nobody knows
LEAVING = {"numpy", "__array__", "__dlpack__", "untyped_storage", "storage"}
# and these make tensors of what is none
COMING = {"tensor", "as_tensor", "asarray"}
# given[0].data = given[1]
SETTING = Tensor.data.__set__  # type: ignore[attr-defined]
DIFFERENTIATING = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)
# the last one: a parameter, as it is read within a module of an attached model
PLAIN = (Tensor, nn.Parameter, Followed)


class Marks(WeakIdKeyDictionary):
    """Tensors, and all that lies where one of them was written to: ``t.data`` and ``t.detach()`` are other tensors than ``t``."""

    def __init__(self) -> None:
        super().__init__()
        # known for as long as it is referred to here: no other storage takes its number
        self._storages: dict[int, StorageWeakRef] = {}

    def mark_written(self, tensor: Tensor) -> None:
        """Add a tensor, and what shares its memory."""
        self[tensor] = None
        if address_of(tensor):
            storage = StorageWeakRef(tensor.untyped_storage())
            self._storages[storage.cdata] = storage

    def join(self, other: Marks) -> None:
        """Add all of others, and let go of memory that is gone."""
        self.update(other)
        storages = {**self._storages, **other._storages}
        self._storages = {place: storage for place, storage in storages.items() if not storage.expired()}

    def shares_memory(self, tensor: Any) -> bool:
        """Whether a tensor lies where another one was written to."""
        if not self._storages or not isinstance(tensor, Tensor) or not address_of(tensor):
            return False
        return tensor.untyped_storage()._cdata in self._storages and not super().__contains__(tensor)

    def __contains__(self, tensor: Any) -> bool:
        return super().__contains__(tensor) or self.shares_memory(tensor)


class Part(NamedTuple):
    """Where a tensor lies in a flat one; ``whole``: the number of that."""

    whole: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def end(self) -> int:
        """Where it is over."""
        far = sum((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True))
        return self.offset + far + 1 if all(self.size) else self.offset


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
    # numbers of what it has written to, and of what that is a part of
    targets: Set[int] = frozenset()
    # running statistics, which it writes and does not use
    kept: Set[int] = frozenset()
    # see `memory.Piece`: memory that it has written over, and what it has read of its first argument
    filled: Sequence[Any] = ()
    read: Sequence[Any] = ()

    @cached_property
    def slots(self) -> list[int]:
        """The numbers of the tensors among its arguments."""
        return [leaf.number for leaf in tree_leaves(self.given) if isinstance(leaf, Slot)]

    @cached_property
    def uses(self) -> list[int]:
        """The numbers of those that decide what it returns."""
        return [number for number in self.slots if number not in self.kept]

    @property
    def written(self) -> list[int]:
        """The numbers of what it has returned or written to."""
        return [*self.made, *self.kept, *self.targets]


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


def name_of(func: Any) -> str:
    """The name of a function, without its module."""
    return getattr(func, "__name__", str(func))


def values_of(func: Any, given: list[Tensor]) -> list[Tensor]:
    """The arguments of a function whose values are in what it returns."""
    name = name_of(func)
    return given[1:] if name in SHAPES else given[:1] if name in LIKE else given


def running(func: Any, args: Any, kwargs: Any, given: list[Tensor]) -> list[Tensor]:
    """The running statistics that a norm beside the model writes, though no version of a tensor says so: means over the batch."""
    if name_of(func) not in RUNNING:
        return []
    asked = [kwargs[name] for name in ("training", "use_input_stats") if name in kwargs]
    if not (asked or [*args[5:6], False])[0]:
        return []
    return [t for t in given[1:] if type(t) is Tensor]


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written to, where that is counted."""
    return 0 if tensor.is_inference() else tensor._version


def address_of(tensor: Tensor) -> int:
    """Where a tensor begins; 0 where it has no place of its own."""
    return tensor.data_ptr() if type(tensor) in PLAIN and storage_of(tensor) else 0


def storage_of(tensor: Tensor) -> int:
    """Where the numbers of a tensor lie, of a sharded one its part here; 0 where it has no place of its own."""
    tensor = getattr(tensor, "_local_tensor", tensor)
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0
