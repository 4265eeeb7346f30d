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
    positions = a.shape[1]
    size = numerics.wide(a.dtype).itemsize
    blocks = 1 if positions < HALVES_FROM else max(2, positions // BLOCK)
    while 2 * -(-positions // blocks) * positions * size > scratch.cap_bytes and blocks < positions:
        blocks *= 2
    height = max(1, -(-positions // blocks))
    step = scratch.chunk(2 * height * positions * size, a.device)
    parts = [_block_norms(x, y, height) for x, y in zip(a.split(step), g.split(step), strict=True)]
    norms, magnitudes = zip(*parts, strict=True)
    return torch.cat(norms), torch.cat(magnitudes)


def _block_norms(a: Tensor, g: Tensor, height: int) -> tuple[Tensor, Tensor]:
    positions = a.shape[1]
    norms, magnitudes = torch.zeros(2, a.shape[0], dtype=numerics.wide(a.dtype), device=a.device)
    for start in range(0, positions, height):
        # the rows of a block, and what stands right of its diagonal
        both, other = (numerics.product(x[:, start : start + height], x[:, start:].mT) for x in (a, g))
        both.mul_(other)
        norms += _unfolded(both)
        magnitudes += _unfolded(both.abs_())
    # rounding may leave a tiny negative number where gradients cancel
    return norms.clamp_(min=0), magnitudes


def _unfolded(block: Tensor) -> Tensor:
    """Sum some rows of a symmetric matrix from the diagonal on; what stands right of it stands for what is below it, too."""
    height, width = block.shape[1:]
    if height >= width:
        return block.sum((1, 2))
    return block[:, :, :height].sum((1, 2)).add_(block[:, :, height:].sum((1, 2)), alpha=2)
