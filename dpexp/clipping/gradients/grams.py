"""The ghost norm: norms of ``sum_t g_t a_tᵀ`` from two T x T Gram matrices (Bu et al., equation 2)."""

from __future__ import annotations

import torch
from torch import Tensor

from dpexp.clipping.gradients import numerics
from dpexp.clipping.gradients.scratch import Scratch

HALVES_FROM = (
    128  # positions from which computing three quarters of a symmetric matrix beats computing all of it
)


def gram_norms(a: Tensor, g: Tensor, scratch: Scratch) -> tuple[Tensor, Tensor]:
    """``<a aᵀ, g gᵀ>`` for every element of a batch, and the same of absolute values (see `rounding`).

    The matrices are symmetric: from `HALVES_FROM` positions on, only the blocks on and above the diagonal are
    computed. Neither matrix is ever whole where that would go over the cap of ``scratch``.

    Args:
        a: ``[N, T, d]``, any strides.
        g: ``[N, T, p]``, of the same dtype.
        scratch: for its cap.

    Returns:
        both ``[N]``, float32 or float64.
    """
    examples, positions = a.shape[:2]
    size = numerics.wide(a.dtype).itemsize
    blocks = 1 if positions < HALVES_FROM else 2
    while 2 * (-(-positions // blocks)) ** 2 * size > scratch.cap_bytes and blocks < positions:
        blocks *= 2
    height = max(1, -(-positions // blocks))
    step = scratch.chunk(2 * height * height * size, a.device)
    if step >= examples:
        return _block_norms(a, g, height)
    parts = [_block_norms(x, y, height) for x, y in zip(a.split(step), g.split(step), strict=True)]
    norms, magnitudes = zip(*parts, strict=True)
    return torch.cat(norms), torch.cat(magnitudes)


def _block_norms(a: Tensor, g: Tensor, height: int) -> tuple[Tensor, Tensor]:
    rows, columns = a.split(height, 1), g.split(height, 1)
    total = torch.zeros(a.shape[0], dtype=numerics.wide(a.dtype), device=a.device)
    magnitude = torch.zeros_like(total)
    for i in range(len(rows)):
        for j in range(i, len(rows)):
            both = numerics.product(rows[i], rows[j].mT).mul_(numerics.product(columns[i], columns[j].mT))
            total.add_(both.sum((1, 2)), alpha=1 if i == j else 2)
            magnitude.add_(both.abs_().sum((1, 2)), alpha=1 if i == j else 2)
    # rounding may leave a tiny negative number where gradients cancel
    return total.clamp_(min=0), magnitude
