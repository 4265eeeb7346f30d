"""Memory that a loop writes values of its batch to, and that nothing in its trace has made: a buffer for inputs, say.

Whatever lies there, by whatever name (a slice, a view, ``t.data``, ``t.detach()``), is written down as a part of one flat tensor:
so what is done again writes and reads as the loop did. What an earlier batch has left there goes as soon as it is written over.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from dpexp.clipping.tapping.dataflow import in_place
from dpexp.errors import UntoldError
from dpexp.training.watching.lines import PLAIN, Part, address_of, name_of

# what was there before is not in what they write
FILLING = {
    "copy_", "zero_", "fill_", "normal_", "uniform_", "bernoulli_", "random_", "exponential_", "log_normal_", "cauchy_",
    "geometric_",
}  # fmt: skip


class Memory:
    """Flat tensors, and which tensors are parts of them.

    Attributes:
        parts: number of a tensor -> where it lies.
        old: number of a flat tensor in which an earlier batch has left something -> how long it is.
    """

    def __init__(self) -> None:
        self.parts: dict[int, Part] = {}
        self.old: dict[int, int] = {}
        # storage -> what keeps its number from another one, the flat tensor's own number, and its kind
        self._wholes: dict[int, tuple[StorageWeakRef, int, torch.dtype]] = {}

    def add(self, tensor: Tensor, number: int, old: bool) -> Tensor:
        """Return a copy of all the memory that a tensor lies in, ``[n]``; ``old``: whether earlier batches are in it."""
        storage = StorageWeakRef(tensor.untyped_storage())
        self._wholes[storage.cdata] = storage, number, tensor.dtype
        with torch._C.DisableTorchFunction():
            flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            flat = flat.set_(tensor.untyped_storage()).clone()
        if old:
            self.old[number] = len(flat)
        return flat

    def holds(self, tensor: Any) -> bool:
        """Whether a tensor lies in memory that was added."""
        known = self._wholes and type(tensor) in PLAIN and address_of(tensor)
        return bool(known) and tensor.untyped_storage()._cdata in self._wholes

    def part_of(self, tensor: Tensor) -> Part:
        """Where a tensor lies in memory that was added.

        Raises:
            UntoldError: it reads the memory as numbers of another type.
        """
        _, whole, dtype = self._wholes[tensor.untyped_storage()._cdata]
        if dtype != tensor.dtype:
            raise UntoldError(f"memory that the loop writes to is read as {dtype} and as {tensor.dtype}")
        return Part(whole, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def filled_by(self, func: Any, args: Any, written: list[Tensor], out: bool) -> list[Part]:
        """Where a call leaves nothing of what was there before; ``out``: whether it was told where to write."""
        if name_of(func) == "__setitem__":
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if not all(map(_is_plain, index)):
                return []
            with torch._C.DisableTorchFunction():
                written = [args[0][args[1]]]
        elif name_of(func) not in FILLING and not out:
            return []
        return [self.part_of(t) for t in written if self.holds(t)]

    def of(self, numbers: Iterable[int]) -> set[int]:
        """These numbers, and those of the flat tensors that they are parts of."""
        found = set(numbers)
        return found | {self.parts[number].whole for number in found & self.parts.keys()}


class Remains:
    """Where in memory values of earlier batches are, while a trace is gone through; see `Memory`."""

    def __init__(self, memory: Memory) -> None:
        self._parts = memory.parts
        self._old = {whole: torch.ones(size, dtype=torch.bool) for whole, size in memory.old.items()}

    def among(self, numbers: Iterable[int]) -> bool:
        """Whether one of these tensors holds some."""
        return any(bool(there.any()) for there in self._places(self._of(numbers)))

    def add(self, numbers: Iterable[int]) -> None:
        """Values of earlier batches were written to these tensors."""
        for there in self._places(self._of(numbers)):
            there.fill_(True)

    def remove(self, filled: Iterable[Part]) -> None:
        """Other values were written over all that was there."""
        for there in self._places(filled):
            there.fill_(False)

    def _of(self, numbers: Iterable[int]) -> list[Part]:
        return [self._parts[number] for number in numbers if number in self._parts]

    def _places(self, parts: Iterable[Part]) -> Iterator[Tensor]:
        for part in parts:
            if part.whole in self._old:
                yield self._old[part.whole].as_strided(part.size, part.stride, part.offset)


def written_by(func: Any, kwargs: Any, given: list[Tensor]) -> list[Tensor]:
    """What a function writes to, as far as its name and its keywords tell."""
    first = given[:1] if in_place(func, kwargs) else []
    return first + [leaf for leaf in tree_leaves((kwargs or {}).get("out")) if isinstance(leaf, Tensor)]


def _is_plain(part: Any) -> bool:
    """Whether a part of an index takes what lies side by side, and not what numbers in a tensor say."""
    if isinstance(part, slice):
        return all(bound is None or type(bound) is int for bound in (part.start, part.stop, part.step))
    return part is None or part is Ellipsis or type(part) is int
