"""Gradients of a parameter that the layer transforms before it uses it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from dpexp.clipping.cost import Cost
from dpexp.clipping.gradients import numerics
from dpexp.clipping.gradients.base import PerExampleGradient


class Pulled(PerExampleGradient):
    """Per-example gradients of what was used, pulled back through a transformation that all examples share.

    Because it is the same linear map for all, the weighted sum needs only one pull-back; norms need one per
    example. A map that rounds to 16 bits is not linear: the error of a sum is one of all examples, and would let each move it by
    more than its threshold. Then every example is pulled back alone, as for its norm, and added in 32 bits.

    Args:
        inner: gradients of the transformed parameter.
        pull: ``[b, *inner.shape]`` -> ``[b, *shape]``, the transposed Jacobian of the transformation.
        shape: of the parameter.
        rounds: whether ``pull`` computes in 16 bits.
    """

    held = ("inner",)

    def __init__(
        self,
        inner: PerExampleGradient,
        pull: Callable[[Tensor], Tensor],
        shape: Sequence[int],
        rounds: bool = False,
    ):
        super().__init__(shape, inner.num_examples, inner.dtype, inner.device)
        self.inner, self.pull, self.rounds = inner, pull, rounds
        self.looped, self.without_gradients = inner.looped, frozenset()

    def methods(self) -> tuple[str, ...]:
        # the norms of a lookup need no gradients, but what is pulled back does
        return tuple(m for m in self.inner.methods() if self.inner.instantiates(m)) or ("instantiate",)

    def resolve(self, method: str) -> str:
        method = "instantiate" if method == "ghost" else method
        inner = self.inner.resolve(method)
        return inner if inner in self.methods() else super().resolve(method)

    def cost(self, method: str) -> Cost:
        return self.inner.cost(method)

    def workspace(self, method: str) -> int:
        return 3 * max(self.inner.workspace(method), self.inner.shape.numel() * self.dtype.itemsize)

    def signature(self) -> tuple[Hashable, ...]:
        return ("pulled", tuple(self.shape), *self.inner.signature())

    def _gradients(self, start: int, stop: int, method: str, out: Tensor | None) -> Tensor:
        return self.pull(self.inner._gradients(start, stop, method, None).to(self.dtype))

    def _terms(self) -> int:
        return self.inner._terms()

    def _magnitudes(self) -> Tensor:
        """Of the inner gradients, times how much the map may lengthen the rounding errors of their sum.

        Those have no direction of their own, so it is asked of a random one; twice that is allowed for.
        """
        generator = torch.Generator().manual_seed(0)
        probe = torch.randn((1, *self.inner.shape), generator=generator, dtype=self.dtype, device="cpu")
        longer = 2 * self.pull(probe.to(self.device)).norm() / probe.norm()
        return self.inner.magnitudes() * longer.square()

    def _magnitudes_of_rows(self) -> None:
        # they cost another pull-back in every step
        return None

    def _weighted_sum(self, factors: Tensor, out: Tensor | None) -> Tensor:
        if self.rounds:
            total = None
            for rows, examples in self._chunks(self.resolve("instantiate")):
                total = numerics.accumulate(rows, factors[examples], total)
            assert total is not None
            return numerics.add_to(out, total)
        total = self.pull(self.inner.weighted_sum(factors).to(self.dtype).unsqueeze(0))
        return numerics.add_to(out, total.view(self.shape))
