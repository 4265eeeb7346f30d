"""Gradients that are there already: biases, the scales of norm layers, bare parameters."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Self

import torch
from torch import Tensor

from dpexp.clipping.cost import Cost
from dpexp.clipping.gradients import numerics, rounding
from dpexp.clipping.gradients.base import Doubt, PerExampleGradient

# bytes of a batch's gradients that cost less to copy than to ask about one by one
SMALL = 1 << 20


class Dense(PerExampleGradient):
    """Instantiated per-example gradients.

    Args:
        grad: ``[B, *shape]``, any floating dtype.
        magnitudes: ``[B]``, squared (see `rounding`), where a second back-propagation will not add up these very rows but
            their parts one after the other.
        squares: ``[B]``, bounds of the squared norms of these very rows, where they are known.
    """

    held = ("grad", "_of_parts", "_squares")

    def __init__(self, grad: Tensor, magnitudes: Tensor | None = None, squares: Tensor | None = None):
        super().__init__(grad.shape[1:], grad.shape[0], grad.dtype, grad.device)
        self.grad, self._of_parts, self._squares = numerics.detached(grad), magnitudes, squares

    @property
    def joins(self) -> bool:
        """Whether it may lie beside others in `Joined`: it is small, and the rows that are measured are those that are summed."""
        return self._of_parts is None and self.grad.nbytes <= SMALL

    def to(self, device: torch.device) -> Self:
        """A copy in the memory of another device."""
        return self._replace(grad=self.grad.to(device, copy=True), device=device)

    def methods(self) -> tuple[str, ...]:
        return ("instantiate",)

    def cost(self, method: str) -> Cost:
        return Cost(2 * self.grad.numel(), self.grad.numel())

    def workspace(self, method: str) -> int:
        return 0

    def signature(self) -> tuple[Hashable, ...]:
        return ("dense", tuple(self.grad.shape), self.grad.dtype, str(self.device))

    def sq_norms(self, method: str, doubts: list[Doubt] | None = None) -> Tensor:
        norms = numerics.squared_norms(self.grad) if self._squares is None else self._squares
        if self._of_parts is None:
            return norms
        return rounding.of_instantiated_norms(norms, self._of_parts, 1, rounding.ORDINARY)

    def _magnitudes(self) -> Tensor | None:
        return self._of_parts

    def _gradients(self, start: int, stop: int, method: str, out: Tensor | None) -> Tensor:
        return self.grad[start:stop].to(self.dtype)

    def _chunks(self, method: str) -> Iterator[tuple[Tensor, slice]]:
        yield self.grad.to(self.dtype).contiguous(), slice(0, self.num_examples)

    def _weighted_sum(self, factors: Tensor, out: Tensor | None) -> Tensor:
        return numerics.add_to(out, numerics.combine(self.grad.to(self.dtype).contiguous(), factors))


class Joined(Dense):
    """Instantiated per-example gradients of several parameters side by side: one norm and one product for all of them.

    A large model has hundreds of biases and scales, and to ask for the norm of one costs as much as to ask for all.

    Args:
        parts: by name of the parameter, several; all of the same examples.
    """

    def __init__(self, parts: dict[str, Dense]):
        rows = [part.grad.to(part.dtype) for part in parts.values()]
        super().__init__(torch.cat([x.flatten(1) if x.dim() > 1 else x.unsqueeze(1) for x in rows], 1))
        self.shapes = {name: part.shape for name, part in parts.items()}

    def weighted_sums(self, factors: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Give ``sum_i factors[i] * g_i`` of each parameter."""
        sizes = [shape.numel() for shape in self.shapes.values()]
        sums = torch.ops.aten.split_with_sizes_copy(self.weighted_sum(factors), sizes)
        for (name, shape), each in zip(self.shapes.items(), sums, strict=True):
            yield name, each if len(shape) == 1 else each.view(shape)
