"""Where the rows of each example are in a tensor of a person's own loop: the one rule by which `trace` and `redone` find them.

A dimension may be the batch where it is as long as there are examples, or as all the rows that these may have. Where several are,
what the collate function has told decides; else nothing does, and another batch, or what has entered the model, has to tell.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, cycle, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from dpexp.clipping.independence.batches import rows_of
from dpexp.clipping.independence.comparison import rows_apart


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

    def replaced(self, tensor: Tensor, chosen: Sequence[int], scale: float) -> Tensor:
        """Put the rows of ``chosen`` examples in the places of all; ``scale``: factor of floating-point numbers where that are
        another's."""
        examples = len(chosen)
        own = replace(self, axis=0).rows(torch.arange(examples * self.times), examples)
        rows = torch.empty_like(own.flatten())
        rows[own.flatten()] = own[list(chosen)].flatten()
        return rows_of(tensor, self.axis, rows, rows != torch.arange(len(rows)), scale)


@dataclass(frozen=True)
class EndToEnd:
    """Where the rows of each example are in a tensor that holds those of all end to end.

    Attributes:
        sizes: how many each has.
    """

    sizes: tuple[int, ...]

    def replaced(self, tensor: Tensor, chosen: Sequence[int], scale: float) -> Tensor:
        """As `Place.replaced`; each example keeps its size, and gets the rows of the other over and over, if that has any."""
        parts = torch.arange(len(tensor)).split(self.sizes)
        others = (parts[other if self.sizes[other] else i] for i, other in enumerate(chosen))
        rows = [
            torch.tensor(list(islice(cycle(other.tolist()), len(part))), dtype=torch.long)
            for part, other in zip(parts, others, strict=True)
        ]
        changes = torch.tensor([i != other for i, other in enumerate(chosen)])
        return rows_of(tensor, 0, torch.cat(rows), changes.repeat_interleave(torch.tensor(self.sizes)), scale)

    def told_by(self, tensor: Tensor) -> bool:
        """Whether a tensor says how many rows each example has, or where these begin or end."""
        if tensor.dim() != 1 or len(tensor) != len(self.sizes) or tensor.is_floating_point():
            return False
        ends = tuple(accumulate(self.sizes))
        return tuple(tensor.tolist()) in (self.sizes, ends, (0, *ends[:-1]))


class Places:
    """The places that sizes allow in the tensors of one batch.

    Args:
        examples: how many it has.
        rows_per_example: rows that it may have of each.
        axes, ends: see `layout.Layout`.
    """

    def __init__(
        self, examples: int, rows_per_example: int, axes: WeakIdKeyDictionary, ends: WeakIdKeyDictionary
    ):
        self.examples, self._times, self.axes = examples, {1, rows_per_example}, axes
        self.ends = WeakIdKeyDictionary()
        # as many rows of each as they may have are a dimension
        self.ends.update({t: place for t, place in ends.items() if t not in axes or not self.fits(t)})
        # where the examples stand in all that has several dimensions, as far as is known
        self._usual = {axis for tensor, axis in axes.items() if tensor.dim() > 1}

    def fits(self, tensor: Tensor) -> list[Place]:
        """Dimensions that may be the batch, with the rows that each example would have there."""
        if tensor in self.ends:
            return []
        return [
            Place(axis, times)
            for axis, size in enumerate(tensor.shape)
            for times in self._times
            if size == self.examples * times and self.axes.get(tensor, axis) == axis
        ]

    def likely(self, tensor: Tensor, returned: bool) -> tuple[list[Place] | list[EndToEnd], bool]:
        """Find where the rows are, and whether that is sure: in front, or where the collate function has told.

        Args:
            tensor: of the batch, or what the model has ``returned``, which may have several rows of each example.
        """
        if tensor in self.ends and not returned:
            return [self.ends[tensor]], True
        if any(ends.told_by(tensor) for ends in self.ends.values()):
            # these rows go where they are, whatever they are
            return [], True
        fits = self.fits(tensor)
        usual = [place for place in fits if self._usual == {place.axis}]
        front = any(place.axis == 0 for place in fits)
        several = not front and returned and tensor.dim() > 0 and len(tensor) % self.examples == 0
        sure = tensor.dim() == 0 or tensor in self.axes or bool(usual) or front or several
        # as many layers as examples, in front of them
        return usual if len(usual) == 1 else fits, sure and not (returned and len(fits) > 1)

    def possible(self, tensor: Tensor) -> list[Place]:
        """As `fits`, with several views of each example; none where there are rows that no size tells apart."""
        # pictures may have as many lines as the batch has examples: these alone are apart in one of the places
        found, several = self.fits(tensor), len(tensor) // self.examples if tensor.dim() else 0
        if several and len(tensor) % self.examples == 0 and not any(place.axis == 0 for place in found):
            # one behind the other, or all of one kind and then all of the next
            found += [Place(0, several), Place(0, several, strided=True)]
        return found


def in_turn(kept: Sequence[int], examples: int) -> list[int]:
    """Who stands in the place of each example: itself, or those that are kept, one after the other."""
    others = islice(cycle(kept), examples)
    return [i if i in kept else next(others) for i in range(examples)]


def neighbours(order: Sequence[int], side: int, wide: bool) -> list[int]:
    """Who stands in the place of each example: itself, or the next one in an order, which stays; every second is kept, or two and
    two."""
    kept = [i for i in range(len(order)) if ((i + 1) // 2 if wide else i) % 2 == side]
    nearest = [min(kept, key=lambda k: abs(k - i)) for i in range(len(order))]
    return [order[nearest[list(order).index(example)]] for example in range(len(order))]


def rows_changed(tensor: Tensor, told: Sequence[Tensor], scale: float) -> Tensor:
    """Put rows of a tensor in the place of those that are told to change: all of them where it has other rows than all that tell.

    Args:
        tensor: what the model has returned.
        told: which rows of what it was given have changed, ``[n]``.
        scale: factor of floating-point numbers in rows that change.
    """
    tensor = tensor if tensor.dim() else tensor[None]
    changed = [rows for rows in told if len(rows) == len(tensor)]
    everywhere = torch.full((len(tensor),), any(bool(rows.any()) for rows in told))
    where = torch.stack(changed).any(0) if changed else everywhere
    stay = (~where).nonzero().flatten().tolist()
    rows = torch.arange(len(tensor))
    if stay:
        rows[where] = torch.tensor(list(islice(cycle(stay), int(where.sum()))), dtype=torch.long)
    return rows_of(tensor, 0, rows, where, scale)


def is_order(tensor: Tensor) -> bool:
    """Whether it may say which row goes where."""
    if tensor.dim() != 1 or tensor.is_floating_point() or tensor.dtype == torch.bool:
        return False
    return bool((tensor.sort().values == torch.arange(len(tensor), device=tensor.device)).all())


def entries(
    batch: Any, examples: int, times: Collection[int], placed: Collection[Tensor]
) -> Iterator[tuple[Tensor, int]]:
    """Yield the tensors of lists with an entry for each example, as long as it likes, and whose they are.

    Inputs and targets are two tensors, too: of as many rows as two examples have, one or several `times` each, or with rows of
    all examples, ``placed``.
    """
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if not isinstance(batch, list | tuple):
        return
    tensors = [part for part in batch if isinstance(part, Tensor)]
    rows = [(examples * number,) for number in times]
    one_each = len(tensors) == len(batch) == examples and not any(t in placed for t in tensors)
    if one_each and any(t.shape[:1] not in rows for t in tensors):
        yield from zip(tensors, range(examples), strict=True)
    else:
        for part in batch:
            yield from entries(part, examples, times, placed)
