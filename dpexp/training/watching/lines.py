"""One call of a torch function, as a `Trace` writes it down, and what such calls have in common."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from torch.utils.weak import WeakIdKeyDictionary

from dpexp.clipping.tapping.dataflow import BLANK, KINDS, in_place
from dpexp.clipping.tapping.following import Followed

WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
# relative difference of numbers that are one, inverted or not
SAME = 1e-9
# what they return tells the shape of their first argument, and none of its values
SHAPES = BLANK | {"randint_like", "new_tensor"}
# and these return no tensor
READING_SHAPES = {
    "__len__", "__get__", "dim", "size", "numel", "stride", "is_floating_point", "get_device", "__hash__",
}  # fmt: skip
# norms that keep means of what goes through them
RUNNING = {"batch_norm", "instance_norm"}
# what rows belong to is told, and those of each are added up
ADDING = {"index_add", "scatter_add", "scatter_reduce", "index_reduce"}
# what they return is no tensor, and may become one that nobody knows
LEAVING = {"numpy", "__array__", "__dlpack__", "untyped_storage", "storage", "tolist"}
# and these make tensors of what is none
COMING = {"tensor", "as_tensor", "asarray"}
# what they return was drawn, or scaled by what was
DRAWING = {
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal", "normal_", "uniform_", "random_",
    "bernoulli", "bernoulli_", "multinomial", "binomial", "poisson", "exponential_", "geometric_", "log_normal_", "cauchy_",
    "_standard_gamma", "_sample_dirichlet", "dropout", "dropout_", "feature_dropout", "alpha_dropout", "feature_alpha_dropout",
}  # fmt: skip
# given[0].data = given[1]
SETTING = Tensor.data.__set__  # type: ignore[attr-defined]
DIFFERENTIATING = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)
# the last one: a parameter, as it is read within a module of an attached model
PLAIN = (Tensor, nn.Parameter, Followed)


class ByMemory:
    """What is known of pieces of memory, by any tensor that lies there; nothing of one that has no place of its own."""

    def __init__(self) -> None:
        # as long as a storage is referred to here, no other one takes its number
        self._known: dict[int, tuple[StorageWeakRef, Any]] = {}

    def get(self, tensor: Any) -> Any:
        """Return what is known; None if that is nothing."""
        if not self._known or not address_of(tensor):
            return None
        return self._known.get(tensor.untyped_storage()._cdata, (None, None))[1]

    def setdefault(self, tensor: Tensor, value: Any) -> Any:
        """Return what is known, ``value`` from now on if that was nothing."""
        if not address_of(tensor):
            return value
        storage = StorageWeakRef(tensor.untyped_storage())
        return self._known.setdefault(storage.cdata, (storage, value))[1]

    def join(self, other: ByMemory) -> None:
        """Add what another one knows, and let go of memory that is gone."""
        known = self._known | other._known
        self._known = {place: held for place, held in known.items() if not held[0].expired()}


class Marks(WeakIdKeyDictionary):
    """Tensors, and all that lies where one of them was written to: ``t.data`` and ``t.detach()`` are other tensors than ``t``."""

    def __init__(self) -> None:
        super().__init__()
        self._written = ByMemory()

    def mark_written(self, tensor: Tensor) -> None:
        """Add a tensor, and what shares its memory."""
        self[tensor] = None
        self._written.setdefault(tensor, True)

    def join(self, other: Marks) -> None:
        """Add all of others, and let go of memory that is gone."""
        self.update(other)
        self._written.join(other._written)

    def shares_memory(self, tensor: Any) -> bool:
        """Whether a tensor lies where another one was written to."""
        return self._written.get(tensor) is not None and not super().__contains__(tensor)

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


class Call:
    """A call of a torch function, which `make` makes.

    Attributes:
        name: of the function.
        given: the tensors among its arguments.
    """

    def __init__(self, func: Any, args: Any, kwargs: Any):
        self.func, self.args, self.kwargs = func, args, kwargs
        self.name, self.given = name_of(func), tensors_of((args, kwargs))

    def make(self) -> Any:
        return self.func(*self.args, **self.kwargs)

    @cached_property
    def values(self) -> list[Tensor]:
        """The arguments whose values are in what it returns."""
        return self.given[1:] if self.name in SHAPES else self.given[:1] if self.func in KINDS else self.given

    @cached_property
    def written(self) -> list[Tensor]:
        """What it writes to, as far as its name and its keywords tell: its first argument may be a list."""
        first = (tensors_of(self.args[:1]) or self.given[:1]) if in_place(self.func, self.kwargs) else []
        return first + tensors_of(self.kwargs.get("out"))

    @cached_property
    def running(self) -> list[Tensor]:
        """The running statistics that a norm beside the model writes, though no version of a tensor says so: means over the
        batch."""
        asked = [self.kwargs[name] for name in ("training", "use_input_stats") if name in self.kwargs]
        if self.name not in RUNNING or not (asked or [*self.args[5:6], False])[0]:
            return []
        return [t for t in self.given[1:] if type(t) is Tensor]

    @property
    def changed(self) -> list[Any]:
        """What it has written to, once it is made, and what that is a part of."""
        written = self.given[:1] if self.func == SETTING else self.written
        return [*written, *(tensor._base for tensor in written), *self.running]


@dataclass(frozen=True)
class Slot:
    """The place of a tensor among the arguments of a function."""

    number: int


@dataclass
class Line:
    """What is kept of a call; ``given``: arguments, with slots; ``made``: numbers of the tensors that it returned."""

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
    # whether rows of all examples went in together, and came out
    together: bool = False
    # the example that all of the batch that it is given is of
    own: int | None = None

    @cached_property
    def _flat(self) -> tuple[list[Any], TreeSpec]:
        return tree_flatten(self.given)

    @cached_property
    def slots(self) -> list[int]:
        """The numbers of the tensors among its arguments."""
        return [leaf.number for leaf in self._flat[0] if isinstance(leaf, Slot)]

    def with_tensors(self, there: Mapping[int, Tensor]) -> Any:
        """Its arguments, with tensors in their slots."""
        leaves, spec = self._flat
        return tree_unflatten(
            [there[leaf.number] if isinstance(leaf, Slot) else leaf for leaf in leaves], spec
        )

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


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors among arguments, or results, in lists and dictionaries too."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written to, where that is counted."""
    return 0 if tensor.is_inference() else tensor._version


def address_of(tensor: Any) -> int:
    """Where a tensor begins; 0 where it has no place of its own, or is none."""
    return tensor.data_ptr() if type(tensor) in PLAIN and storage_of(tensor) else 0


def storage_of(tensor: Tensor) -> int:
    """Where the numbers of a tensor lie, of a sharded one its part here; 0 where it has no place of its own."""
    tensor = getattr(tensor, "_local_tensor", tensor)
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0
