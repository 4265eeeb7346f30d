"""What a loop asked torch to do between a batch and its losses, as a list that can be gone through again with other examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from dpexp.clipping.independence.chance import Chance, WithoutChance
from dpexp.clipping.independence.comparison import ROUNDING, ROUNDING_16

# factor of floating-point numbers in rows that stand in the place of others
SCALE = 3.0


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


@dataclass
class Tape:
    """The calls that lead from one batch to its losses.

    Attributes:
        lines: in their order.
        held: tensors that no line makes, by number.
        written: of them, those that a line writes to: copies of what they were.
        places: of them, those with the rows of the batch: which dimension that is, and how many rows each example has there.
    """

    examples: int
    lines: list[Line] = field(default_factory=list)
    held: dict[int, Tensor] = field(default_factory=dict)
    written: set[int] = field(default_factory=set)
    places: dict[int, tuple[int, int]] = field(default_factory=dict)

    def clear(self) -> None:
        """Let go of all tensors."""
        self.held.clear()
        self.lines.clear()

    def compare(self, number: int, losses: Tensor) -> tuple[bool, bool]:
        """Compute the losses again, with one half of the examples in the place of the others, then with the other half.

        Args:
            number: of the losses.
            losses: `[b]`, as the loop computed them.

        Returns:
            whether any of them depends on another example than its own, and whether any depends on examples at all.

        Raises:
            ValueError: computed again, with nothing replaced, they are others.
        """
        # neighbours and mirror images should not stay together
        order = torch.randperm(self.examples, generator=torch.Generator().manual_seed(20221201)).tolist()
        cut = (self.examples + 1) // 2
        whole, by_chance = self._again(number)
        changed = []
        for kept in (order[:cut], order[cut:]):
            try:
                other, _ = self._again(number, kept, SCALE)
            except Exception:
                # a target that must be between 0 and 1
                other, _ = self._again(number, kept, 1.0)
            changed.append(self._unlike(whole, other))
        mixed = bool((changed[0] & changed[1]).any())
        if mixed and not by_chance and bool(self._unlike(whole, losses).any()):
            raise ValueError("computed again they are others")
        return mixed, bool((changed[0] | changed[1]).any())

    def _again(self, number: int, kept: Sequence[int] = (), scale: float = 1.0) -> tuple[Tensor, bool]:
        """The losses, with the examples ``kept`` in the place of all others; and whether chance has a part in them."""
        there = {n: held.clone() if n in self.written else held for n, held in self.held.items()}
        if kept:
            there |= {
                n: self._replaced(self.held[n], *place, kept, scale) for n, place in self.places.items()
            }
        last = {slot.number: i for i, line in enumerate(self.lines) for slot in _slots(line)}
        cuda = [t.device for t in there.values() if t.is_cuda][:1]
        with torch.random.fork_rng(cuda), torch.no_grad(), WithoutChance(Chance()) as chance:
            for i, line in enumerate(self.lines):
                args, kwargs = tree_map_only(Slot, lambda slot: there[slot.number], line.given)
                kind, dtype = line.autocast or ("cpu", torch.bfloat16)
                with torch.autocast(
                    kind, dtype=dtype, enabled=line.autocast is not None, cache_enabled=False
                ):
                    result = line.func(*args, **kwargs)
                made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
                there.update(zip(line.made, made, strict=True))
                for slot in _slots(line):
                    if last[slot.number] == i and slot.number != number:
                        there.pop(slot.number, None)
        return there[number], chance.met

    def _replaced(self, tensor: Tensor, axis: int, times: int, kept: Sequence[int], scale: float) -> Tensor:
        """Rows of the examples ``kept`` in the place of all others."""
        others = islice(cycle(kept), self.examples)
        chosen = [i if i in kept else next(others) for i in range(self.examples)]
        rows = torch.tensor([i * times + m for i in chosen for m in range(times)], device=tensor.device)
        taken = tensor.index_select(axis, rows)
        if tensor.is_floating_point() and not bool(((tensor == 0) | (tensor == 1)).all()):
            factor = torch.where(rows == torch.arange(len(rows), device=tensor.device), 1.0, scale)
            taken = taken * factor.to(tensor).view([-1 if d == axis else 1 for d in range(tensor.dim())])
        return taken

    def _unlike(self, a: Tensor, b: Tensor) -> Tensor:
        """``[b]``: which losses are not equal, up to rounding."""
        low = any(t.is_floating_point() and t.itemsize < 4 for t in self.held.values())
        a, b = a.double(), b.double()
        size = a.abs().nan_to_num(posinf=0.0)
        allowed = (ROUNDING_16 if low else ROUNDING) * torch.maximum(size, 1e-3 * size.max())
        return ~((a - b).abs().le(allowed) | (a == b) | (a.isnan() & b.isnan()))


def _slots(line: Line) -> list[Slot]:
    return [leaf for leaf in tree_leaves(line.given) if isinstance(leaf, Slot)]
