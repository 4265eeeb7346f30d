"""Stacked weights, of which each row of the batch meets one, as those of experts."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import torch
from torch import Tensor

from dpexp.clipping import cost
from dpexp.clipping.cost import Cost
from dpexp.clipping.gradients import numerics
from dpexp.clipping.gradients.base import PerExampleGradient
from dpexp.clipping.gradients.grams import ROWS, norms_by_key


class Grouped(PerExampleGradient):
    """``g_i[e] = sum_t g_it a_itᵀ`` over the positions t that met matrix e.

    "ghost" leaves out the products of positions that met different matrices: ``2 B T² (p + d)`` flops, whatever the number of
    matrices; "instantiate" forms the gradients of all of them: ``2 B T p d``.

    Args:
        a: ``[B, T, d]``, inputs.
        g: ``[B, T, p]``, the gradients of the outputs.
        which: ``[B, T]``, integers: the matrix that each position met.
        count: E.
    """

    held = ("a", "g", "which")

    def __init__(self, a: Tensor, g: Tensor, which: Tensor, count: int):
        a, g = numerics.align(a, g)
        super().__init__((count, g.shape[2], a.shape[2]), a.shape[0], a.dtype, a.device)
        self.a, self.g, self.which = a, g, which

    def methods(self) -> tuple[str, ...]:
        return ("ghost", "instantiate", "loop")

    def cost(self, method: str) -> Cost:
        (B, T), (E, p, d) = self.which.shape, self.shape
        if method == "ghost":
            return cost.ghost_norm(B, T, p, d)
        return Cost(cost.instantiation(B, T, p, d).flops, B * E * p * d)

    def workspace(self, method: str) -> int:
        T = self.which.shape[1]
        return self.dtype.itemsize * (3 * T * min(T, ROWS) if method == "ghost" else self.shape.numel())

    def signature(self) -> tuple[Hashable, ...]:
        return ("grouped", *self.which.shape, *self.shape, self.a.dtype, str(self.device))

    def _terms(self) -> int:
        return self.which.shape[1]

    def _magnitudes(self) -> Tensor:
        return numerics.squared_norms(self.a.flatten(1)).mul_(numerics.squared_norms(self.g.flatten(1)))

    def _magnitude(self, example: int) -> Tensor:
        return self._gram_norms(example, example + 1)[1][0]

    def _norms(self, method: str) -> tuple[Tensor, Tensor]:
        return self._in_chunks(self._gram_norms, self.workspace("ghost"))

    def _gram_norms(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        return norms_by_key(self.which[start:stop], self.a[start:stop], self.g[start:stop])

    def _gradients(self, start: int, stop: int, method: str, out: Tensor | None) -> Tensor:
        a, g, which = self.a[start:stop], self.g[start:stop], self.which[start:stop]
        rows = self._zeros(stop - start, *self.shape) if out is None else out.zero_()
        for i in range(stop - start):
            for e, own in _by_matrix(which[i]):
                rows[i, e] = numerics.product(g[i, own].t(), a[i, own])
        return rows

    def _weighted_sum(self, factors: Tensor, out: Tensor | None) -> Tensor:
        g = numerics.scale(self.g, factors).flatten(0, 1)
        a, which = self.a.flatten(0, 1).to(g.dtype), self.which.flatten()
        total = self._zeros(*self.shape) if out is None else out
        for e, own in _by_matrix(which):
            total[e] += numerics.product(g[own].t(), a[own]).to(total.dtype)
        return total

    def transposed(self) -> Grouped:
        """The gradients of the transposed matrices."""
        return Grouped(self.g, self.a, self.which, self.shape[0])

    def joined(self, other: Grouped) -> Grouped:
        """Both as one: the gradients of two uses of the parameter."""
        parts = ((self.a, other.a), (self.g, other.g), (self.which, other.which))
        a, g, which = (torch.cat(part, 1) for part in parts)
        return Grouped(a, g, which, self.shape[0])


def _by_matrix(which: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield each matrix that any position met, with those positions; ``which``: ``[T]``."""
    order, counts = which.argsort(stable=True), torch.bincount(which).tolist()
    for e, own in enumerate(order.split(counts)):
        if len(own):
            yield e, own
