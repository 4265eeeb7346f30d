"""Inputs that hold the rows of all examples end to end, as of texts of any length or graphs, beside a tensor that says whose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# in the names of vectors that say where the rows of each example begin
POINTERS = ("offset", "ptr", "cu_")


class Ends:
    """Where the rows of each example lie in tensors that hold those of all examples end to end.

    Args:
        sizes: how many rows each example has, ``[B]``.
        told: what says it, where that is another thing in another batch; None where lengths do, rows like others.
        within: the tensor of which it is said, where there may be others as long.

    Attributes:
        starts: where those of each example begin, ``[B]``.
        total: how many rows there are.
    """

    def __init__(self, sizes: Tensor, told: Tensor | None = None, within: Tensor | None = None):
        self.sizes, self.told, self.within = sizes.cpu(), told, within
        self.starts, self.total = self.sizes.cumsum(0) - self.sizes, int(sizes.sum())

    def cuts(self, part: Any) -> bool:
        """Whether the rows of a tensor may lie so."""
        if not isinstance(part, Tensor) or not part.dim() or part is self.told:
            return part is self.told is not None
        return len(part) == self.total

    def rows(self, places: Sequence[int]) -> Tensor:
        """The rows of the examples at some places."""
        return torch.cat([self.starts[i] + torch.arange(int(self.sizes[i]), device="cpu") for i in places])

    def told_of(self, places: Sequence[int]) -> Tensor:
        """What says it of these examples: where each begins, as `torch.nn.EmbeddingBag` has it."""
        assert self.told is not None
        found = Ends(self.sizes[list(places)])
        # the end of the last one too, or not
        ends = torch.cat([found.starts, torch.tensor([found.total], device="cpu")])
        return ends[: len(places) + len(self.told) - len(self.sizes)].to(self.told)


class Named(Ends):
    """``told`` names the example of each row, as a batch of graphs does of its nodes."""

    def told_of(self, places: Sequence[int]) -> Tensor:
        assert self.told is not None
        return (
            torch.arange(len(places), device="cpu").repeat_interleave(self.sizes[list(places)]).to(self.told)
        )


class Edges(Ends):
    """``told``, ``[2, E]``, holds the numbers of two rows of ``nodes`` for each edge of a graph."""

    def __init__(self, nodes: Ends, owners: Tensor, told: Tensor):
        super().__init__(torch.bincount(owners, minlength=len(nodes.sizes)), told)
        self.nodes = nodes

    def told_of(self, places: Sequence[int]) -> Tensor:
        assert self.told is not None
        here = list(places)
        moved = Ends(self.nodes.sizes[here]).starts - self.nodes.starts[here]
        edges = self.told[:, self.rows(places).to(self.told.device)]
        return edges + moved.repeat_interleave(self.sizes[here]).to(edges)


def ends_of(parts: Sequence[tuple[str, Any]], count: int, zeros: bool = False) -> list[Ends]:
    """Find the tensors that say where the rows of ``count`` examples lie, by name and by their numbers.

    Args:
        parts: of the inputs, by name.
        count: B.
        zeros: whether the model has bags of ids: their offsets may be zeros alone (of one bag, or of empty ones), or look like
            lengths, and ids may be as many as examples.
    """
    named = [
        (name.lower(), part)
        for name, part in parts
        if isinstance(part, Tensor) and part.dim() and (zeros or len(part))
    ]
    found: list[Ends] = []
    for name, part in named:
        if (
            part.dim() == 1
            and len(part)
            and _is_whole(part)
            and (ends := _told(name, part, named, count, found, zeros)) is not None
        ):
            found.append(ends)
    nodes = [ends for ends in found if isinstance(ends, Named)] or found
    edges = [e for ends in nodes[:1] for _, part in named if (e := _edges(part, ends)) is not None]
    return found + edges


def _told(
    name: str,
    part: Tensor,
    named: Sequence[tuple[str, Tensor]],
    count: int,
    found: list[Ends],
    zeros: bool,
) -> Ends | None:
    numbers = part.long()
    totals = {len(other) for _, other in named}
    if int(numbers.min()) < 0:
        return None
    rises = not bool((numbers.diff() < 0).any())
    # offsets may add up to a number of ids by chance
    offsets = zeros and rises and int(numbers[0]) == 0
    if len(part) == count != int(numbers.sum()) in totals and not offsets:
        return Ends(numbers)
    if not rises:
        return None
    if len(part) > count > int(numbers[-1]) > 0:
        return Named(torch.bincount(numbers, minlength=count), part)
    if int(numbers[0]) != 0 or len(part) not in (count, count + 1):
        return None
    if len(part) > count:
        return Ends(numbers.diff(), part) if int(numbers[-1]) in totals else None
    # ids of several tables come in the order of their offsets
    called, taken = any(word in name for word in POINTERS), {id(ends.within) for ends in found}
    for _, other in named:
        ids = other.dim() == 1 and _is_whole(other) and (zeros or len(other) != count)
        told = other is part or any(other is ends.told for ends in found)
        if (
            not told
            and id(other) not in taken
            and len(other) >= int(numbers[-1])
            and (zeros or int(numbers[-1]) > 0)
            and (ids or called)
        ):
            return Ends(torch.cat([numbers, numbers.new_tensor([len(other)])]).diff(), part, other)
    return None


def _edges(part: Tensor, nodes: Ends) -> Edges | None:
    if part.dim() != 2 or len(part) != 2 or not _is_whole(part) or not part.numel():
        return None
    numbers = part.long().cpu()
    if int(numbers.min()) < 0 or int(numbers.max()) >= nodes.total:
        return None
    source, target = torch.bucketize(numbers, nodes.starts + nodes.sizes, right=True)
    apart = torch.equal(source, target) and not bool((source.diff() < 0).any())
    return Edges(nodes, source, part) if apart else None


def _is_whole(part: Tensor) -> bool:
    return not part.is_floating_point() and not part.is_complex() and part.dtype != torch.bool
