"""Inputs that hold the rows of all examples end to end, as of texts of any length or graphs, beside a vector that says whose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# in place of a dimension: the rows of all examples end to end, and the vector that says where those of each begin
END_TO_END, POINTER = -1, -2
# in the names of such vectors, and of vectors of lengths
POINTERS, LENGTHS = ("offset", "ptr", "cu_"), ("len",)


@dataclass
class Ends:
    """Where the rows of each example lie in tensors that hold those of all examples end to end.

    Attributes:
        pointer: the vector of beginnings, which begins anew in another batch; None where lengths tell.
        starts, sizes: of each example.
    """

    pointer: Tensor | None
    starts: Tensor
    sizes: Tensor

    @staticmethod
    def of(parts: Sequence[tuple[str, Any]], count: int) -> Ends | None:
        """Find the vector among the inputs, by name and by its numbers; None where there is none."""
        totals = {len(part) for _, part in parts if isinstance(part, Tensor) and part.dim()}
        for name, part in parts:
            if not isinstance(part, Tensor) or part.dim() != 1 or part.is_floating_point() or not len(part):
                continue
            told, numbers = name.lower(), part.long()
            if any(word in told for word in LENGTHS) and len(part) == count != int(numbers.sum()) in totals:
                return Ends(None, numbers.cumsum(0) - numbers, numbers)
            if (
                not any(word in told for word in POINTERS)
                or int(numbers[0]) != 0
                or bool((numbers.diff() < 0).any())
            ):
                continue
            if len(part) == count + 1 and int(numbers[-1]) in totals:
                return Ends(part, numbers[:-1], numbers.diff())
            others = (len(p) for _, p in parts if isinstance(p, Tensor) and p.dim() and p is not part)
            total = next((length for length in others if length >= int(numbers[-1])), None)
            if len(part) == count and total is not None:
                return Ends(part, numbers, torch.cat([numbers[1:], numbers.new_tensor([total])]) - numbers)
        return None

    @property
    def total(self) -> int:
        """How many rows there are."""
        return int(self.sizes.sum())

    def rows(self, places: Sequence[int]) -> Tensor:
        """The rows of the examples at some places."""
        return torch.cat([torch.arange(int(self.sizes[i])) + self.starts[i].cpu() for i in places])

    def pointer_of(self, places: Sequence[int]) -> Tensor:
        """The vector of beginnings for these examples."""
        assert self.pointer is not None
        ends = self.sizes[list(places)].cumsum(0)
        found = (
            torch.cat([ends.new_zeros(1), ends])
            if len(self.pointer) > len(self.sizes)
            else ends - self.sizes[list(places)]
        )
        return found.to(self.pointer)
