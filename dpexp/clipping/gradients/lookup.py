"""Weights that are looked up by row: embeddings, by index and never by one-hot vectors."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from dpexp.clipping.cost import Cost
from dpexp.clipping.gradients import numerics
from dpexp.clipping.gradients.base import PerExampleGradient
from dpexp.clipping.gradients.grams import ROWS, norms_by_key

# gradients of one index that float32 may add one after the other: of equal numbers all errors have one direction, and 4096 of
# them are off by 5e-5
LONGEST_RUN = 64
CHUNK = 1 << 12


class Lookup(PerExampleGradient):
    """An embedding's per-example gradients: row v is the sum of the output gradients where the index is v.

    Norms never need a V x d tensor per example. "ghost" multiplies the Gram matrix of the output gradients
    with the matrix that says which positions have the same index (Li et al., appendix F): ``2 B T² d`` flops.
    "segments" sorts the indices of each example and adds up the gradients of equal ones: ``B T d`` additions,
    and as many floats.

    Args:
        ids: ``[B, T]``, integers.
        g: ``[B, T, d]``, the gradient of the output.
        num_rows: V.
        padding_idx: a row that never gets a gradient, or None.
    """

    held = ("ids", "g")
    without_gradients = frozenset({"ghost", "segments"})

    def __init__(self, ids: Tensor, g: Tensor, num_rows: int, padding_idx: int | None = None):
        super().__init__((num_rows, g.shape[2]), g.shape[0], g.dtype, g.device)
        self.ids, self.g, self.padding_idx = ids, g.detach(), padding_idx

    def methods(self) -> tuple[str, ...]:
        return ("ghost", "segments")

    def resolve(self, method: str) -> str:
        return super().resolve("segments" if method in ("instantiate", "loop") else method)

    def cost(self, method: str) -> Cost:
        B, T, d = self.g.shape
        if method == "ghost":
            return Cost(2 * B * T * T * d, 2 * B * T * T)
        return Cost(2 * B * T * d, B * T * d)

    def workspace(self, method: str) -> int:
        _, T, d = self.g.shape
        return self.dtype.itemsize * (2 * T * min(T, ROWS) if method == "ghost" else 4 * T * d)

    def signature(self) -> tuple[Hashable, ...]:
        return ("lookup", tuple(self.g.shape), self.g.dtype, str(self.device))

    def skipped(self, ids: Tensor) -> Tensor | None:
        """Where the padding row was looked up, of the shape of ``ids``; None where there is no padding row."""
        return None if self.padding_idx is None else ids == self.padding_idx

    def _terms(self) -> int:
        return self.g.shape[1]

    def _magnitudes(self) -> Tensor:
        return self._norms("segments")[1]

    def _row_norms(self, method: str) -> Tensor:
        return self._norms("segments")[0]

    def _norms(self, method: str) -> tuple[Tensor, Tensor]:
        found = self._gram_norms if method == "ghost" else self._segment_norms
        return self._in_chunks(found, self.workspace(method))

    def _gram_norms(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        ids = self.ids[start:stop]
        return norms_by_key(ids, self.g[start:stop], skipped=self.skipped(ids))

    def _segment_norms(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        ids, g = self.ids[start:stop], self.g[start:stop]
        B, T, d = g.shape
        dtype = numerics.wide(g.dtype)
        g = g.to(torch.float64 if T > LONGEST_RUN else dtype)
        if (skipped := self.skipped(ids)) is not None:
            g = g.masked_fill(skipped.unsqueeze(2), 0)
        ordered, positions = ids.sort(1)
        starts = torch.ones_like(ordered)
        starts[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
        segments = torch.empty_like(ids).scatter_(1, positions, starts.cumsum(1).to(ids.dtype) - 1)
        segments = segments + T * torch.arange(B, device=ids.device, dtype=ids.dtype).unsqueeze(1)
        sums = torch.zeros(B * T, d, dtype=g.dtype, device=g.device)
        sums.index_add_(0, segments.flatten(), g.reshape(B * T, d))
        lengths = torch.zeros(B * T, dtype=g.dtype, device=g.device)
        lengths.index_add_(0, segments.flatten(), torch.linalg.vector_norm(g, dim=2).flatten())
        both = (sums.view(B, T, d), lengths.view(B, T, 1))
        squares, magnitudes = (numerics.squared_norms(each).to(dtype) for each in both)
        return squares, magnitudes

    def _scaled(self, factors: Tensor | None) -> Tensor:
        """Output gradients times the factor of their example, zero at the padding row; ``[B * T, d]``."""
        g, skipped = self.g.to(self.dtype), self.skipped(self.ids)
        if factors is not None:
            g = g * factors.to(self.dtype).view(-1, 1, 1)
        if skipped is not None:
            g = g.masked_fill(skipped.unsqueeze(2), 0)
        return g.reshape(-1, self.shape[1])

    def _gradients(self, start: int, stop: int, method: str, out: Tensor | None) -> Tensor:
        rows = self._zeros(stop - start, *self.shape) if out is None else out.zero_()
        return self.add_gradients(rows, start)

    def add_gradients(self, rows: Tensor, start: int) -> Tensor:
        """Add those of the examples from ``start`` on to ``rows``, ``[b, *shape]``, in place."""
        some = slice(start, start + len(rows))
        part, (count, d) = self._replace(ids=self.ids[some], g=self.g[some]), self.shape
        ids = part.ids.long() + count * torch.arange(len(rows), device=self.device).unsqueeze(1)
        add_rows(rows.view(-1, d), ids.flatten(), part._scaled(None).to(rows.dtype), ids.shape[1])
        return rows

    def _weighted_sum(self, factors: Tensor, out: Tensor | None) -> Tensor:
        scaled = self._scaled(factors)
        table = self._zeros(*self.shape) if out is None else out
        return add_rows(table, self.ids.flatten(), scaled.to(table.dtype), self.ids.shape[1])

    def joined(self, other: Lookup) -> Lookup:
        """Both as one: the gradients of two calls of a module."""
        return self._replace(ids=torch.cat([self.ids, other.ids], 1), g=torch.cat([self.g, other.g], 1))


def add_rows(table: Tensor, ids: Tensor, rows: Tensor, terms: int) -> Tensor:
    """Add rows to those of a table that are named, in place; where there are many of an example, those of one index first.

    Args:
        table: ``[V, d]``.
        ids: ``[R]``.
        rows: ``[R, d]``, of the dtype of the table.
        terms: how many rows an example has.
    """
    if terms > LONGEST_RUN and table.dtype == torch.float32:
        ids, places = ids.unique(return_inverse=True)
        sums = torch.zeros(len(ids), rows.shape[1], dtype=torch.float64, device=table.device)
        for some, of_these in zip(rows.split(CHUNK), places.split(CHUNK), strict=True):
            sums.index_add_(0, of_these, some.double())
        rows = sums.to(table.dtype)
    return table.index_add_(0, ids, rows)
