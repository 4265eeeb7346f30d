"""Cross-entropy over a large vocabulary that holds the logits once, and their gradient once.

The library's own keeps the logits, their log-softmax of the same size, and makes the gradient beside them; under bf16 there is a
float32 copy of the logits besides. With 50,000 words these are the largest tensors of a step. Here one number per position is
kept, the logarithm of the sum of exponentials, and everything else is done a few rows at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK = 1 << 22  # numbers that are looked at in float32 at a time


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ignored: int) -> Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        counted = targets != ignored
        losses = logits.new_empty(targets.shape, dtype=wide)
        sums = torch.empty_like(losses)
        for rows in _blocks(logits):
            part = logits[rows].to(wide)
            sums[rows] = part.logsumexp(1)
            picked = part.gather(1, targets[rows].clamp(min=0)[:, None]).squeeze(1)
            losses[rows] = torch.where(counted[rows], sums[rows] - picked, 0.0)
        ctx.save_for_backward(logits, targets, sums, counted)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, weights: Tensor) -> tuple[Tensor, None, None]:
        logits, targets, sums, counted = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        for rows in _blocks(logits):
            part = (logits[rows].to(sums.dtype) - sums[rows, None]).exp_()
            part.scatter_add_(1, targets[rows].clamp(min=0)[:, None], -torch.ones_like(part[:, :1]))
            part *= weights[rows, None]
            gradient[rows] = part.masked_fill_(~counted[rows, None], 0.0).to(gradient.dtype)
        return gradient, None, None


def cross_entropy(logits: Tensor, targets: Tensor, ignored: int = -100) -> Tensor:
    """The negative log-likelihood of each target; exactly 0, with a gradient of exactly 0, where it is `ignored`.

    Args:
        logits: `[N, V]`, any floating dtype.
        targets: `[N]` int64, below V or `ignored`.

    Returns:
        `[N]`, float32 or better.
    """
    result: Tensor = _CrossEntropy.apply(logits, targets, ignored)
    return result


def _blocks(logits: Tensor) -> list[slice]:
    height = max(1, BLOCK // max(1, logits.shape[1]))
    return [slice(start, start + height) for start in range(0, logits.shape[0], height)]
