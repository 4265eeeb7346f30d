"""The ghost norm: norms of ``sum_t g_t a_tᵀ`` from two T x T Gram matrices (Bu et al., equation 2)."""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from dpexp.clipping.gradients import numerics
from dpexp.clipping.gradients.memory import Scratch

# Positions from which computing three quarters of a symmetric matrix beats computing all of it, and rows of a block where there
# are more than two: smaller ones save little more, and multiply more slowly.
HALVES_FROM, BLOCK = 64, 128
# rows of a masked Gram matrix that are there at once: of a text of 16384 tokens the whole would be 1 GiB
ROWS = 512


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
    found, positions = [], a.shape[1]
    for start in range(0, max(1, positions), height):
        # the rows of a block, and what stands right of its diagonal
        parts = [
            (x[:, start : start + height], x[:, start:]) if height < positions else (x, x) for x in (a, g)
        ]
        both, other = (numerics.product(rows, right.mT) for rows, right in parts)
        both.mul_(other)
        found.append((_unfolded(both), _unfolded(both.abs_())))
    norms, magnitudes = found[0]
    for more, and_more in found[1:]:
        norms, magnitudes = norms + more, magnitudes + and_more
    # rounding may leave a tiny negative number where gradients cancel
    return norms.clamp_(min=0), magnitudes


def _unfolded(block: Tensor) -> Tensor:
    """Sum some rows of a symmetric matrix from the diagonal on; what stands right of it stands for what is below it, too."""
    height, width = block.shape[1:]
    if height >= width:
        return block.sum((1, 2))
    return block[:, :, :height].sum((1, 2)).add_(block[:, :, height:].sum((1, 2)), alpha=2)


def norms_by_key(keys: Tensor, *sides: Tensor, skipped: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The same of gradients of many rows or matrices, each of which is a sum over the positions of one key alone.

    Args:
        keys: ``[B, T]``, integers.
        sides: ``[B, T, …]``, what is multiplied at a position: outputs' gradients, and inputs where there are any.
        skipped: ``[B, T]``, bool: positions that have no part in a gradient.
    """
    squares, magnitudes = torch.zeros(2, len(keys), dtype=numerics.wide(sides[0].dtype), device=keys.device)
    for start in range(0, keys.shape[1], ROWS):
        some = slice(start, start + ROWS)
        products = reduce(Tensor.mul_, (numerics.product(side[:, some], side.mT) for side in sides))
        other = keys[:, some].unsqueeze(2) != keys.unsqueeze(1)
        if skipped is not None:
            other |= skipped[:, some].unsqueeze(2)
        products.masked_fill_(other, 0)
        squares += products.sum((1, 2))
        magnitudes += products.abs_().sum((1, 2))
    return squares.clamp_(min=0), magnitudes
