"""Inputs that hold the rows of all examples end to end, as of texts of any length or graphs, beside a tensor that says whose."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

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

    def __init__(self, sizes: Tensor, told: Any = None, within: Tensor | None = None):
        self.sizes, self.told, self.within = sizes.cpu(), told, within
        self.starts, self.total = self.sizes.cumsum(0) - self.sizes, int(sizes.sum())

    def cuts(self, part: Any) -> bool:
        """Whether the rows of a tensor may lie so."""
        if not isinstance(part, Tensor) or part.is_nested or not part.dim() or part is self.told:
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


class Stacked(Ends):
    """``told``, ``[K, B]``, holds where the bags of one table after the other begin."""

    def __init__(self, tables: Sequence[Ends], told: Tensor):
        super().__init__(tables[0].sizes, told)
        self.tables = tables

    def cuts(self, part: Any) -> bool:
        return part is self.told

    def told_of(self, places: Sequence[int]) -> Tensor:
        return torch.stack([table.told_of(places) for table in self.tables])


class Bundle(Ends):
    """``told`` holds the examples themselves, and its own functions take it apart and put others together, see `bundled`."""

    def __init__(self, told: Any):
        self.examples: list[Any]
        if isinstance(told, PackedSequence):
            self.examples = unpack_sequence(told)
        else:
            self.examples = list(told.unbind() if isinstance(told, Tensor) else told.to_data_list())
        # where the nodes of each graph lie; the steps of packed sequences lie in turn
        sizes = [getattr(example, "num_nodes", 1) for example in self.examples]
        super().__init__(torch.tensor(sizes, device="cpu"), told)

    def together(self, chosen: list[Any]) -> Any:
        """What holds these examples as ``told`` does its own."""
        told: Any = self.told
        if isinstance(told, PackedSequence):
            falls = all(len(a) >= len(b) for a, b in pairwise(chosen))
            return pack_sequence(chosen, enforce_sorted=told.sorted_indices is None and falls)
        if isinstance(told, Tensor):
            return torch.nested.nested_tensor(chosen, layout=told.layout)
        # of which of its parts a batch of graphs says whose rows they are
        asked = [key.removesuffix("_batch") for key in list(told.keys()) if key.endswith("_batch")]
        return type(told).from_data_list(chosen, follow_batch=asked)


def bundled(value: Any) -> int:
    """How many examples something holds that can be taken apart into them: packed sequences, a nested tensor with a jagged
    dimension, a batch of graphs as PyTorch Geometric makes it; 0 for anything else.
    """
    if isinstance(value, PackedSequence):
        return int(value.batch_sizes[0])
    if isinstance(value, Tensor):
        return value.size(0) if value.is_nested and value.layout == torch.jagged else 0
    apart = hasattr(value, "to_data_list") and hasattr(type(value), "from_data_list")
    return int(getattr(value, "num_graphs", 0)) if apart else 0


def ends_of(parts: Sequence[tuple[str, Any]], count: int, bags: bool = False) -> list[Ends]:
    """Find the tensors that say where the rows of ``count`` examples lie, by name and by their numbers.

    Args:
        parts: of the inputs, by name.
        count: B.
        bags: whether bags of ids are looked for first, whatever else their offsets may be taken for: zeros alone (of one bag, or
            of empty ones) or lengths.
    """
    named = [
        (name.lower(), part)
        for name, part in parts
        if isinstance(part, Tensor) and not part.is_nested and part.dim() and (bags or len(part))
    ]
    found: list[Ends] = [Bundle(part) for _, part in parts if bundled(part) == count]
    if bags:
        begins = _begins(named, count)
        named = [own for own in named if not any(own[1] is part for _, part in begins)]
        for _, part in begins:
            found += _bags(part, named, count, found)
        named = [own for own in named if len(own[1])]
    for name, part in named:
        if (
            part.dim() == 1
            and _is_whole(part)
            and (ends := _told(name, part, named, count, found)) is not None
        ):
            found.append(ends)
    nodes = [ends for ends in found if isinstance(ends, Named)] or found
    edges = [e for ends in nodes[:1] for _, part in named if (e := _edges(part, ends)) is not None]
    return found + edges


def _begins(named: Sequence[tuple[str, Tensor]], count: int) -> list[tuple[str, Tensor]]:
    """What may be offsets, ``[B]``, ``[B + 1]`` or such of several tables: of a list, or of names that differ in digits, all or
    none; and where some are called so, no others."""

    def rises(part: Tensor) -> bool:
        shaped = part.dim() < 3 and part.shape[-1] in (count, count + 1) and part.numel()
        return bool(
            shaped and _is_whole(part) and (part[..., 0] == 0).all() and (part.diff(dim=-1) >= 0).all()
        )

    def without_digits(name: str) -> str:
        return name.strip("_0123456789")

    others = {without_digits(name) for name, part in named if not rises(part)} - {""}
    found = [(name, part) for name, part in named if without_digits(name) not in others and rises(part)]
    return [own for own in found if any(word in own[0] for word in POINTERS)] or found


def _bags(part: Tensor, named: Sequence[tuple[str, Tensor]], count: int, found: list[Ends]) -> list[Ends]:
    """Where the bags lie in the ids of each table, which come in the order of their offsets; nothing where one has no ids."""
    tables: list[Ends] = []
    taken = {id(ends.within) for ends in found}
    for row in part if part.dim() == 2 else [part]:
        last = int(row[-1])
        for _, ids in named:
            fits = len(ids) == last if len(row) > count else len(ids) >= last
            if ids.dim() == 1 and _is_whole(ids) and id(ids) not in taken and fits:
                ends = torch.cat([row[:count].cpu(), torch.tensor([len(ids)], device="cpu")])
                tables.append(Ends(ends.long().diff(), row, ids))
                taken.add(id(ids))
                break
        else:
            return []
    return [*tables, Stacked(tables, part)] if part.dim() == 2 else tables


def _told(
    name: str, part: Tensor, named: Sequence[tuple[str, Tensor]], count: int, found: list[Ends]
) -> Ends | None:
    numbers = part.long()
    totals = {len(other) for _, other in named}
    if int(numbers.min()) < 0:
        return None
    if len(part) == count != int(numbers.sum()) in totals:
        return Ends(numbers)
    if bool((numbers.diff() < 0).any()):
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
        ids = other.dim() == 1 and _is_whole(other) and len(other) != count
        if (
            other is not part
            and id(other) not in taken
            and len(other) >= int(numbers[-1]) > 0
            and (ids or called)
        ):
            return Ends(torch.cat([numbers, numbers.new_tensor([len(other)])]).diff(), part, other)
    return None


def _edges(part: Tensor, nodes: Ends) -> Edges | None:
    if part.dim() != 2 or len(part) != 2 or not _is_whole(part) or not part.numel():
        return None
    numbers = part.long().cpu().contiguous()
    if int(numbers.min()) < 0 or int(numbers.max()) >= nodes.total:
        return None
    source, target = torch.bucketize(numbers, nodes.starts + nodes.sizes, right=True)
    apart = torch.equal(source, target) and not bool((source.diff() < 0).any())
    return Edges(nodes, source, part) if apart else None


def _is_whole(part: Tensor) -> bool:
    return not part.is_floating_point() and not part.is_complex() and part.dtype != torch.bool
