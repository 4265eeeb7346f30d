"""Memory that a loop writes values of its batch to, and that nothing in its trace has made: a buffer for inputs, say.

Whatever lies there, by whatever name (a slice, a view, ``t.data``, ``t.detach()``), is written down as a part of one flat tensor:
so what is done again writes and reads as the loop did. What an earlier batch has left there goes as soon as it is written over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from dpexp.errors import UntoldError
from dpexp.training.watching.lines import ByMemory, Call, Part, tensors_of

# what was there before is not in what they write
FILLING = {
    "copy_", "zero_", "fill_", "normal_", "uniform_", "bernoulli_", "random_", "exponential_", "log_normal_", "cauchy_",
    "geometric_", "_foreach_copy_", "_foreach_zero_",
}  # fmt: skip


class Piece(NamedTuple):
    """A part of memory, or what an index takes of it.

    Attributes:
        part: where.
        index: tensors among it are kept as they were.
        take: called with a mask of that part, and with the index: writes to the mask where a call has written over what was
            there, or returns what it has read.
    """

    part: Part
    index: Any
    take: Callable[[Tensor, Any], Any]


def _set(index: Any, values: Any) -> Any:
    return index, lambda there, index: there.__setitem__(index, False)


def _put(indices: Any, values: Any, accumulate: bool = False) -> Any:
    return indices, lambda there, index: None if accumulate else there.__setitem__(tuple(index), False)


def _at(dim: int, index: Tensor, source: Any = None, value: Any = None) -> Any:
    return index, lambda there, index: there.index_fill_(dim, index, False)


def _scattered(dim: int, index: Tensor, src: Any = None, value: Any = None) -> Any:
    return index, lambda there, index: there.scatter_(dim, index, False)


def _masked(mask: Tensor, source: Any = None, value: Any = None) -> Any:
    return mask, lambda there, mask: there.masked_fill_(mask, False)


ALL: tuple[Any, Any] = (), lambda there, index: there.zero_()


def _selected(dim: int, index: Tensor) -> Any:
    return index, lambda there, index: there.index_select(dim, index)


def _got(index: Any) -> Any:
    return index, lambda there, index: there[index]


# what is written over where an index says so; anything that is added to what is there is given more than these take
FILLING_SOME: dict[str, Callable[..., Any]] = {
    "__setitem__": _set,
    "index_put_": _put,
    "index_copy_": _at,
    "index_fill_": _at,
    "scatter_": _scattered,
    "masked_fill_": _masked,
    "masked_scatter_": _masked,
}
READING_SOME: dict[str, Callable[..., Any]] = {"__getitem__": _got, "index_select": _selected}


class Memory:
    """Flat tensors, and which tensors are parts of them.

    Attributes:
        parts: number of a tensor -> where it lies.
        lengths: number of a flat tensor -> how long it is.
        old: numbers of flat tensors in which an earlier batch has left something.
    """

    def __init__(self) -> None:
        self.parts: dict[int, Part] = {}
        self.lengths: dict[int, int] = {}
        self.old: set[int] = set()
        # of what was added, the number of the flat tensor, and its kind
        self._wholes = ByMemory()

    def add(self, tensor: Tensor, number: int, old: bool) -> Tensor:
        """Return a copy of all the memory that a tensor lies in, ``[n]``; ``old``: whether earlier batches are in it."""
        self._wholes.setdefault(tensor, (number, tensor.dtype))
        with torch._C.DisableTorchFunction():
            flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            flat = flat.set_(tensor.untyped_storage()).clone()
        self.lengths[number] = len(flat)
        if old:
            self.old.add(number)
        return flat

    def holds(self, tensor: Any) -> bool:
        """Whether a tensor lies in memory that was added."""
        return self._wholes.get(tensor) is not None

    def has_moved(self, tensor: Tensor, number: int) -> bool:
        """Whether the tensor with a number is another part of its memory by now."""
        return number in self.parts and self.holds(tensor) and self.parts[number] != self.part_of(tensor)

    def part_of(self, tensor: Tensor) -> Part:
        """Where a tensor lies in memory that was added.

        Raises:
            UntoldError: it reads the memory as numbers of another type.
        """
        whole, dtype = self._wholes.get(tensor)
        if dtype != tensor.dtype:
            raise UntoldError(f"memory that the loop writes to is read as {dtype} and as {tensor.dtype}")
        # it may have grown
        length = tensor.untyped_storage().nbytes() // tensor.itemsize
        self.lengths[whole] = max(self.lengths[whole], length)
        return Part(whole, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def filled_by(self, call: Call, public: Callable[[Tensor], bool]) -> list[Piece]:
        """Where a call leaves nothing of what was there before; ``public``: of an index."""
        if call.name in FILLING:
            return self.filled_as_out(call.written)
        return self._pieces(FILLING_SOME.get(call.name), call, call.written, public)

    def read_by(self, call: Call, public: Callable[[Tensor], bool]) -> list[Piece]:
        """What a call reads of its first argument, where it does not read all."""
        return self._pieces(READING_SOME.get(call.name), call, call.args[:1], public)

    def _pieces(
        self,
        index_of: Callable[..., Any] | None,
        call: Call,
        tensors: Iterable[Tensor],
        public: Callable[[Tensor], bool],
    ) -> list[Piece]:
        parts = [self.part_of(t) for t in tensors if self.holds(t)]
        if not parts or index_of is None:
            return []
        try:
            index, take = index_of(*call.args[1:], **call.kwargs)
        except TypeError:
            return []
        if not all(map(public, tensors_of(index))):
            return []
        index = tree_map_only(Tensor, lambda t: t.detach().to("cpu", copy=True), index)
        return [Piece(part, index, take) for part in parts]

    def filled_as_out(self, made: list[Tensor]) -> list[Piece]:
        """Where a call that was told where to write has left nothing of what was there."""
        return [Piece(self.part_of(t), *ALL) for t in made if self.holds(t)]

    def copy_of(self, number: int, tensor: Tensor, used: Iterable[int]) -> Tensor:
        """Return a copy of what is held; of flat memory, from the first to the last of its parts that are used."""
        parts = [self.parts[n] for n in used if n in self.parts and self.parts[n].whole == number]
        if not parts:
            return tensor.clone()
        first, last = min(part.offset for part in parts), max(part.end for part in parts)
        copy = torch.empty_like(tensor)
        copy[first:last] = tensor[first:last]
        return copy

    def of(self, numbers: Iterable[int]) -> set[int]:
        """These numbers, and those of the flat tensors that they are parts of."""
        found = set(numbers)
        return found | {self.parts[number].whole for number in found & self.parts.keys()}


class Remains:
    """Where in memory values of earlier batches are, while a trace is gone through; see `Memory`."""

    def __init__(self, memory: Memory) -> None:
        self._parts, self._lengths = memory.parts, memory.lengths
        self._old = {whole: torch.ones(memory.lengths[whole], dtype=torch.bool) for whole in memory.old}

    def among(self, numbers: Iterable[int]) -> bool:
        """Whether one of these tensors holds some."""
        return any(bool(there.any()) for there in self._places(self._of(numbers)))

    def add(self, numbers: Iterable[int]) -> None:
        """Values of earlier batches were written to these tensors."""
        parts = self._of(numbers)
        for part in parts:
            if part.whole not in self._old:
                self._old[part.whole] = torch.zeros(self._lengths[part.whole], dtype=torch.bool)
        for there in self._places(parts):
            there.fill_(True)

    def remove(self, filled: Iterable[Piece]) -> None:
        """Other values were written over what was there."""
        for part, index, take in filled:
            for there in self._places([part]):
                take(there, index)

    def misses(self, read: Sequence[Piece]) -> bool:
        """Whether what was read of a part has none."""
        return bool(read) and not any(
            bool(take(there, index).any()) for part, index, take in read for there in self._places([part])
        )

    def _of(self, numbers: Iterable[int]) -> list[Part]:
        return [self._parts[number] for number in numbers if number in self._parts]

    def _places(self, parts: Iterable[Part]) -> Iterator[Tensor]:
        for part in parts:
            if part.whole in self._old:
                yield self._old[part.whole].as_strided(part.size, part.stride, part.offset)
