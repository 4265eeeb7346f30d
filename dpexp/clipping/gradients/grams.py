"""The ghost norm: norms of ``sum_t g_t a_tᵀ`` from two T x T Gram matrices (Bu et al., equation 2)."""

from __future__ import annotations

import torch
from torch import Tensor

from dpexp.clipping.gradients import numerics
from dpexp.clipping.gradients.memory import Scratch

# Positions from which computing three quarters of a symmetric matrix beats computing all of it, and rows of a block where there
# are more than two: smaller ones save little more, and multiply more slowly.
HALVES_FROM, BLOCK = 64, 128


def gram_norms(a: Tensor, g: Tensor, scratch: Scratch) -> tuple[Tensor, Tensor]:
    """``<a aᵀ, g gᵀ>`` for every element of a batch, and the same of absolute values (see `rounding`).

    The matrices are symmetric: from `HALVES_FROM` positions on, rows are computed in blocks, from the diagonal on. Neither matrix
    is ever whole where that would go over the cap of ``scratch``.

    Args:
        a: ``[N, T, d]``, any strides.
        g: ``[N, T, p]``, of the same dtype.
        scratch: for its cap.

    Returns:
        both ``[N]``, float32 or float64.
    """
    examples, positions = a.shape[:2]
    size = numerics.wide(a.dtype).itemsize
    blocks = 1 if positions < HALVES_FROM else max(2, positions // BLOCK)
    while 2 * -(-positions // blocks) * positions * size > scratch.cap_bytes and blocks < positions:
        blocks *= 2
    height = max(1, -(-positions // blocks))
    step = scratch.chunk(2 * height * positions * size, a.device)
    if step >= examples:
        return _block_norms(a, g, height)
    parts = [_block_norms(x, y, height) for x, y in zip(a.split(step), g.split(step), strict=True)]
    norms, magnitudes = zip(*parts, strict=True)
    return torch.cat(norms), torch.cat(magnitudes)


def _block_norms(a: Tensor, g: Tensor, height: int) -> tuple[Tensor, Tensor]:
    positions = a.shape[1]
    total = torch.zeros(a.shape[0], dtype=numerics.wide(a.dtype), device=a.device)
    magnitude = torch.zeros_like(total)
    for start in range(0, positions, height):
        rows = slice(start, start + height)
        both = numerics.product(a[:, rows], a[:, start:].mT).mul_(
            numerics.product(g[:, rows], g[:, start:].mT)
        )
        # what stands right of the block on the diagonal stands for what is below it, too
        for sums in (total, magnitude):
            if sums is magnitude:
                both.abs_()
            sums.add_(both[:, :, :height].sum((1, 2)))
            if start + height < positions:
                sums.add_(both[:, :, height:].sum((1, 2)), alpha=2)
    # rounding may leave a tiny negative number where gradients cancel
    return total.clamp_(min=0), magnitude
