"""Clipping of whole microbatches: the mean gradient of some examples, computed as without privacy, is clipped as one vector.

Dupuy et al. 2022 give each microbatch to a GPU of its own; Monir et al., section 4.1. No per-example gradient is needed.
"""

from __future__ import annotations

from torch import Tensor, nn

from dpexp.clipping.distributed import Sums
from dpexp.clipping.methods.watched import WatchedClipper


class MicrobatchClipper(WatchedClipper):
    """What `Clipper` is for single examples: `backward` takes the losses of one microbatch, and adds its clipped mean gradient.

    Which microbatch an example is in must not depend on which others were drawn (`dpexp.training.batching.microbatches`).
    One example more or less then changes one of the clipped vectors, from one of norm C at most to another: the sum moves
    by up to 2C. It is not C, as is often assumed, for the rest of the microbatch is not the same after clipping.

    Nothing of a microbatch may stay in the model: `WatchedClipper` looks for that.

    Args:
        model: its trainable parameters are clipped together.
        size: the expected number of examples in a microbatch; the mean is over it, not over the drawn number.
        clip_norm: C.
        rule: how a norm becomes a factor.
    """

    reach, whole = 2.0, True

    def __init__(self, model: nn.Module, size: float, clip_norm: float = 1.0, rule: str = "abadi"):
        super().__init__(model, "flat", clip_norm, rule)
        self.size = size

    def clipped(self, losses: Tensor, loss_scale: float) -> tuple[Tensor, Sums]:
        """Return the norm ``[1, 1]`` of the mean gradient of one microbatch, and what is left of that gradient.

        A NaN or infinity in it makes it zero.
        """
        mean = losses.sum() * (loss_scale / self.size)
        gradients = self._gradients(mean)
        if loss_scale != 1.0:
            gradients = {name: g / loss_scale for name, g in gradients.items()}
        return self._shortened(gradients)

    def finish(self, stds: dict[int, float]) -> None:
        """A sum over microbatches was divided by the number of examples: make it a mean of microbatches."""
        for p in self.params.values():
            if p.grad is not None:
                p.grad.mul_(self.size)
