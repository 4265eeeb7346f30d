"""Weights that are applied by a matrix product: ``g_i = sum_t g_it a_itᵀ``."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from dpexp.clipping import cost
from dpexp.clipping.cost import Cost
from dpexp.clipping.gradients import numerics
from dpexp.clipping.gradients.base import PerExampleGradient
from dpexp.clipping.gradients.grams import gram_norms


class Outer(PerExampleGradient):
    """A sum over positions of outer products, as every linear layer has it.

    "ghost" multiplies two Gram matrices, "instantiate" forms the gradients, "loop" one at a time; on a GPU, "fused_ghost" and
    "fused_outer" find the same norms without a tensor for what is squared (`dpexp.clipping.kernels`).

    A layer whose weight is stored as ``[inputs, outputs]`` (transformers' ``Conv1D``) passes the two
    arguments swapped.

    Args:
        a: ``[B, T, d]``, the layer's input.
        g: ``[B, T, p]``, the gradient of its output.
        shape: of the parameter, where it is not ``[p, d]`` but has as many numbers in the same order (1x1
            convolutions).
    """

    def __init__(self, a: Tensor, g: Tensor, shape: Sequence[int] | None = None):
        a, g = numerics.align(a, g)
        super().__init__(shape or (g.shape[2], a.shape[2]), a.shape[0], a.dtype, a.device)
        # one per use of the parameter; joined on first need, so that many uses are joined once
        self._a, self._g = [a], [g]

    @property
    def parts(self) -> tuple[Tensor, Tensor]:
        """Inputs ``[B, T, d]`` and output gradients ``[B, T, p]`` of all calls, side by side along T."""
        if len(self._a) > 1:
            a, g = numerics.align(torch.cat(self._a, 1), torch.cat(self._g, 1))
            self._a, self._g = [a], [g]
        return self._a[0], self._g[0]

    held = ("_a", "_g")
    without_gradients = frozenset({"ghost", "fused_ghost", "fused_outer"})

    def methods(self) -> tuple[str, ...]:
        fused = ("fused_ghost", "fused_outer") if _fused_norms(self.device, self._a[0].dtype) else ()
        return ("ghost", "instantiate", "loop", *fused)

    def cost(self, method: str) -> Cost:
        B, T, p, d = self._sizes()
        if method in ("ghost", "fused_ghost"):
            return cost.ghost_norm(B, T, p, d)
        whole = cost.instantiation(B, T, p, d)
        return whole if method == "instantiate" else Cost(whole.flops, p * d)

    def workspace(self, method: str) -> int:
        _, T, p, d = self._sizes()
        if method.startswith("fused"):
            return 0
        return self.dtype.itemsize * (2 * T * T if method == "ghost" else p * d)

    def signature(self) -> tuple[Hashable, ...]:
        return ("outer", *self._sizes(), self._a[0].dtype, str(self.device))

    def _sizes(self) -> tuple[int, int, int, int]:
        positions = sum(a.shape[1] for a in self._a)
        return self.num_examples, positions, self._g[0].shape[2], self._a[0].shape[2]

    def _terms(self) -> int:
        return self._sizes()[1]

    def _magnitudes(self) -> Tensor | None:
        if self._terms() == 1:
            return None
        a, g = self.parts
        return numerics.squared_norms(a.flatten(1)).mul_(numerics.squared_norms(g.flatten(1)))

    def _magnitude(self, example: int) -> Tensor:
        a, g = (part[example : example + 1] for part in self.parts)
        return gram_norms(a, g, self.scratch)[1][0]

    def _norms(self, method: str) -> tuple[Tensor, Tensor | None]:
        a, g = self.parts
        if method.startswith("fused"):
            from dpexp.clipping.kernels import norms

            return norms.ghost_norms(a, g) if method == "fused_ghost" else (norms.outer_norms(a, g), None)
        if a.shape[1] == 1:
            return numerics.squared_norms(a).mul_(numerics.squared_norms(g)), None
        return gram_norms(a, g, self.scratch)

    def _gradients(self, start: int, stop: int, method: str, out: Tensor | None) -> Tensor:
        a, g = (x[start:stop] for x in self.parts)
        if stop - start == 1:
            matrix = None if out is None else out.view(g.shape[2], a.shape[2])
            return numerics.product(g[0].t(), a[0], matrix).view(1, *self.shape)
        batch = None if out is None else out.view(stop - start, g.shape[2], a.shape[2])
        return numerics.product(g.mT, a, batch).view(stop - start, *self.shape)

    def _weighted_sum(self, factors: Tensor, out: Tensor | None) -> Tensor:
        a, g = numerics.scale_smaller(*self.parts, factors)
        left, right = g.flatten(0, 1).t(), a.flatten(0, 1)
        if out is not None and out.dtype == self.dtype and out.is_contiguous():
            numerics.product_into(out.view(g.shape[2], a.shape[2]), left, right, beta=1)
            return out
        total = torch.empty((g.shape[2], a.shape[2]), dtype=self.dtype, device=self.device)
        numerics.product_into(total, left, right, beta=0)
        return numerics.add_to(out, total.view(self.shape))

    def transposed(self) -> Outer:
        """The gradients of the transposed parameter."""
        return self._replace(_a=self._g, _g=self._a, shape=torch.Size(reversed(self.shape)))

    def joined(self, other: Outer) -> Outer:
        """Both as one: the gradients of two calls of a module."""
        return self._replace(_a=self._a + other._a, _g=self._g + other._g)


def _fused_norms(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the Triton kernels can be used: a GPU, Triton, and kernels that computed right on it."""
    if device.type != "cuda" or dtype == torch.float64:
        return False
    try:
        from dpexp.clipping.kernels import norms
    except ImportError:
        return False
    return norms.trusted(device, dtype)
