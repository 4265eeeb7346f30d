"""Clipping of whole microbatches: the mean gradient of some examples, computed as without privacy, is clipped as one vector.

Dupuy et al. 2022 give each microbatch to a GPU of its own; Monir et al., section 4.1. No per-example gradient is needed.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dpexp.clipping.attach import Report
from dpexp.clipping.plain import PlainClipper
from dpexp.clipping.rules import RULES


class MicrobatchClipper(PlainClipper):
    """What `Clipper` is for single examples: `backward` takes the losses of one microbatch, and adds its clipped mean gradient.

    Which microbatch an example is in must not depend on which others were drawn (`dpexp.training.batching.microbatches`).
    One example more or less then changes one of the clipped vectors, from one of norm C at most to another: the sum moves
    by up to 2C. It is not C, as is often assumed, for the rest of the microbatch is not the same after clipping.

    Args:
        model: its trainable parameters are clipped together.
        size: the expected number of examples in a microbatch; the mean is over it, not over the drawn number.
        clip_norm: C.
        rule: how a norm becomes a factor.
    """

    reach = 2.0

    def __init__(self, model: nn.Module, size: float, clip_norm: float = 1.0, rule: str = "abadi"):
        super().__init__(model, "flat", clip_norm, rule)
        self.size = size

    def backward(
        self, losses: Tensor, clip_scale: Tensor | None = None, *, loss_scale: float = 1.0
    ) -> Report:
        """Add the clipped mean gradient of one microbatch to ``p.grad``; a NaN or infinity in it makes it zero.

        Args:
            losses: ``[b]``, of all its examples.
            clip_scale: refused; there are no single examples here.
            loss_scale: undone before the norm is taken.
        """
        self.refuse_scales(clip_scale)
        total = torch.zeros((), dtype=torch.float64, device=losses.device)
        gradients: list[Tensor] = [torch.zeros_like(p) for p in self.params]
        if len(losses):
            found = torch.autograd.grad(
                losses.sum() * (loss_scale / self.size), self.params, allow_unused=True
            )
            gradients = [g if g is not None else z for g, z in zip(found, gradients, strict=True)]
            if loss_scale != 1.0:
                gradients = [g / loss_scale for g in gradients]
            total = sum((g.double().square().sum() for g in gradients), total)
        finite = bool(total.isfinite())
        factor = RULES[self.rule](total, float(self.thresholds)) if finite else torch.zeros(())
        for p, g in zip(self.params, gradients, strict=True):
            added = g * factor.to(g.dtype) if finite else torch.zeros_like(p)
            p.grad = added if p.grad is None else p.grad.add_(added)
        norms = total.sqrt().view(1, 1)[:, : min(1, len(losses))].detach()
        return Report(norms, (norms > self.thresholds[:, None]).sum(1))

    def finish(self, stds: dict[int, float]) -> None:
        """A sum over microbatches was divided by the number of examples: make it a mean of microbatches."""
        for p in self.params:
            if p.grad is not None:
                p.grad.mul_(self.size)
