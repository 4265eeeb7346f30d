"""Where examples stand in what a collate function has made of them, and which are lost when others are changed.

They stand in a dimension, or in a list, to which each of them adds as much as any other. Elsewhere (nodes of graphs and tokens of
texts end to end, a sparse matrix) nothing says whose a row is, but no row goes by two examples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dpexp.clipping.tapping.forwards import attributes_of, tensors_in

# largest difference of numbers that are taken to be equal, relative to the largest of them
ROUNDING = 1e-4


@dataclass
class Part:
    """A tensor of a batch; ``axes``: its dimensions that may be the examples."""

    tensor: Tensor
    axes: list[int]

    def equals(self, other: Part) -> bool:
        """Whether it is the same, up to rounding."""
        a, b = self.tensor, other.tensor
        return a.shape == b.shape and torch.allclose(a.double(), b.double(), ROUNDING, equal_nan=True)

    def lost(self, other: Part, count: int) -> list[frozenset[int]]:
        """Which of so many examples are not found again, in whatever order; as often as it may be read."""
        a, b = self.tensor, other.tensor
        if not self.axes or a.shape != b.shape or not a.numel() or self.equals(other):
            return [frozenset()]
        pairs = [[t.movedim(axis, 0).reshape(count, -1) for t in (a, b)] for axis in self.axes]
        if _begins(a) and _begins(b):
            # where texts begin that lie end to end: how long each is goes by itself
            pairs.append([t.diff(append=t[-1:])[:, None] for t in (a, b)])
        return [frozenset(_unlike(*pair).nonzero()[:, 0].tolist()) for pair in pairs]

    def is_in(self, whole: Part, count: int, more: int) -> bool:
        """Whether the rows of so many examples are among those of more examples, which may be padded further, on any side."""
        a, b = self.tensor, whole.tensor
        axes = [axis for axis in self.axes if axis in whole.axes and a.numel() and a.dim() == b.dim()]
        return not axes or any(_is_in(a.movedim(axis, 0), b.movedim(axis, 0), count, more) for axis in axes)

    def shared(self, one: Part, other: Part) -> bool:
        """Whether some of it changes with one half of the examples and with the other half too, though no dimension is theirs."""
        a = self.tensor.detach().double()
        if self.axes or not a.numel() or not a.shape == one.tensor.shape == other.tensor.shape:
            return False
        allowed = ROUNDING * torch.maximum(a.abs(), 1e-3 * a.nan_to_num(0.0, 0.0, 0.0).abs().max())
        changed = [((a - t.tensor.detach().double()).abs() > allowed) for t in (one, other)]
        # it may be one example's as a whole, as of a list of pictures, or row by row along one of its dimensions
        views = [[t.reshape(1, -1) for t in changed]]
        views += [[t.movedim(axis, 0).reshape(t.shape[axis], -1) for t in changed] for axis in range(a.dim())]
        return all(bool((here.any(1) & there.any(1)).any()) for here, there in views)


@dataclass
class Parts:
    """Takes batches of so many examples apart.

    Attributes:
        count: how many examples there are.
        without: batches of the same examples without one of them each, or without so many rows of one unit.
        rows_per_unit: how many.
    """

    count: int
    without: Sequence[Any] = ()
    rows_per_unit: int = 1

    def of(self, batch: Any) -> list[Part]:
        """The tensors of a batch; a list with an entry for each example is one with a row for each."""
        return list(self._within(batch, self.without))

    def lose(self, batch: Sequence[Part], other: Sequence[Part], most: int) -> bool:
        """Whether more examples than so many are not found again: row by row, in all tensors together."""
        found = {frozenset[int]()}
        for a, b in zip(batch, other, strict=True):
            found = {rows | lost for rows in found for lost in a.lost(b, self.count)}
            found = {rows for rows in found if len(rows) <= most}
        return not found

    def _within(self, value: Any, without: Sequence[Any], depth: int = 2) -> Iterator[Part]:
        if isinstance(value, Tensor) and value.layout == torch.strided and not value.is_nested:
            yield Part(value, [axis for axis in range(value.dim()) if self._counts(axis, value, without)])
        elif self._is_list(value, without):
            rows = [_flat(item) for item in value]
            yield Part(pad_sequence(rows, batch_first=True), [0])
        else:
            depth -= not isinstance(value, Mapping | list | tuple | Tensor)
            for key, child in _children(value).items() if depth >= 0 else ():
                yield from self._within(child, [_children(other).get(key) for other in without], depth)

    def _counts(self, axis: int, value: Tensor, without: Sequence[Any]) -> bool:
        """Whether each example adds as much to a dimension as any other."""
        each, rest = divmod(value.shape[axis], self.count)
        fewer = each * (self.count - self.rows_per_unit)
        shapes = [other.shape if isinstance(other, Tensor) else () for other in without]
        return (
            rest == 0
            and (each == 1 or (axis == 0 and each > 1))
            and all(shape[axis : axis + 1] == (fewer,) for shape in shapes)
        )

    def _is_list(self, value: Any, without: Sequence[Any]) -> bool:
        fewer = self.count - self.rows_per_unit
        return (
            isinstance(value, list | tuple)
            and len(value) == self.count
            and len(without) > 0
            and all(isinstance(other, list | tuple) and len(other) == fewer for other in without)
            and bool(tensors_in(value))
        )


def by_name(value: Any) -> Any:
    """What a mapping, or an object that is like one, holds by name; any other value as it is."""
    if hasattr(type(value), "items"):
        # a tensorclass has names, and is indexed by numbers alone
        return dict(value.items())
    return dict(value) if hasattr(value, "keys") else value


def _children(value: Any) -> dict[Any, Any]:
    """What a container holds, an object of any class, or a tensor that is not one block of memory."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Tensor):
        if value.is_nested:
            value = value.unbind()
        elif value.layout == torch.sparse_coo:
            value = (value._indices(), value._values())
        else:
            return {}
    return dict(enumerate(value)) if isinstance(value, list | tuple) else attributes_of(value)


def _flat(item: Any) -> Tensor:
    """The tensors of one example, with their sizes, in a row."""
    parts = [
        p
        for t in tensors_in(item)
        if t.layout == torch.strided
        for p in (torch.tensor(t.shape), t.detach().cpu())
    ]
    return torch.cat([part.double().flatten() for part in parts]) if parts else torch.zeros(0).double()


def _begins(a: Tensor) -> bool:
    """Whether these may be the places where each of several texts begins."""
    return a.dim() == 1 and not a.is_floating_point() and int(a[0]) == 0 and bool((a.diff() >= 0).all())


def _is_in(a: Tensor, b: Tensor, count: int, more: int) -> bool:
    longer = [n - m for m, n in zip(a.shape[1:], b.shape[1:], strict=True)]
    if min(longer, default=0) < 0:
        return False
    missing = set(range(count))
    for starts in product(*({0, added // 2, (added + 1) // 2, added} for added in longer)):
        part = b
        for axis, start in enumerate(starts, 1):
            part = part.narrow(axis, start, a.shape[axis])
        missing &= set(_unlike(a.reshape(count, -1), part.reshape(more, -1)).nonzero()[:, 0].tolist())
        if not missing:
            return True
    return False


def _unlike(a: Tensor, b: Tensor) -> Tensor:
    """Which rows of ``a`` are none of those of ``b``."""
    a, b = a.detach().double(), b.detach().double()
    allowed = ROUNDING * torch.maximum(a.abs(), 1e-3 * a.abs().amax(0))
    rows = zip(a, allowed, strict=True)
    return torch.tensor([bool(((row - b).abs() > limit).any(1).all()) for row, limit in rows])
