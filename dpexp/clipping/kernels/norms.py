"""Per-example norms of ``sum_t g_t a_tᵀ`` in Triton, without a tensor for what is squared.

* `ghost_norms` multiplies a tile of either Gram matrix in registers; the T x T matrices never exist (Bu et al., equation 2).
* `outer_norms` squares the per-example gradient tile by tile; the ``[B, p, d]`` tensor never exists.

Every program writes the sum of its tile, and torch adds these up in a fixed order, whatever the scheduling. float32 is
multiplied as float32. 16-bit inputs, which TF32 holds exactly, are multiplied as TF32 and added in float32.

Examples and tiles lie along one axis of the grid, the only one that may be longer than 65535: a head of 128256 tokens has more
tiles. Places are counted in 64 bits: one example's output gradient may have more than 2^31 numbers.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

# positions, outputs or inputs that one program covers
TILE = 64
# how much of the inner dimension is multiplied at once
DEPTH = 32


@triton.jit
def _gram_tile(
    x, stride_t, stride_f, rows, columns, T, features,
    tile: tl.constexpr, depth: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """``x[rows] @ x[columns]ᵀ`` of one example, ``[tile, tile]`` in float32."""
    total = tl.zeros((tile, tile), dtype=tl.float32)
    for start in range(0, features, depth):
        f = (start + tl.arange(0, depth)).to(tl.int64)
        left = tl.load(
            x + rows[:, None] * stride_t + f[None, :] * stride_f,
            mask=(rows[:, None] < T) & (f[None, :] < features),
            other=0.0,
        )
        right = tl.load(
            x + columns[None, :] * stride_t + f[:, None] * stride_f,
            mask=(columns[None, :] < T) & (f[:, None] < features),
            other=0.0,
        )
        total = tl.dot(left.to(tl.float32), right.to(tl.float32), total, input_precision=precision)
    return total


@triton.jit
def _ghost(
    a, g, out, magnitudes, a_b, a_t, a_f, g_b, g_t, g_f, T, d, p, tiles,
    tile: tl.constexpr, depth: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """Tile (i, j) of both Gram matrices, multiplied and summed, with signs and without; symmetric, so j < i is left out."""
    number = tl.program_id(0)
    b = (number // (tiles * tiles)).to(tl.int64)
    i = number // tiles % tiles
    j = number % tiles
    total = 0.0
    magnitude = 0.0
    if j >= i:
        rows = (i * tile + tl.arange(0, tile)).to(tl.int64)
        columns = (j * tile + tl.arange(0, tile)).to(tl.int64)
        inputs = _gram_tile(a + b * a_b, a_t, a_f, rows, columns, T, d, tile, depth, precision)
        outputs = _gram_tile(g + b * g_b, g_t, g_f, rows, columns, T, p, tile, depth, precision)
        times = tl.where(i == j, 1.0, 2.0)
        total = tl.sum(inputs * outputs) * times
        magnitude = tl.sum(tl.abs(inputs * outputs)) * times
    tl.store(out + number, total)
    tl.store(magnitudes + number, magnitude)


@triton.jit
def _outer(
    a, g, out, a_b, a_t, a_f, g_b, g_t, g_f, T, d, p, across, tiles,
    tile: tl.constexpr, depth: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """Tile (i, j) of ``sum_t g_t a_tᵀ``, squared and summed; ``across`` tiles cover the inputs."""
    number = tl.program_id(0)
    b = (number // tiles).to(tl.int64)
    rows = ((number % tiles // across) * tile + tl.arange(0, tile)).to(tl.int64)
    columns = ((number % tiles % across) * tile + tl.arange(0, tile)).to(tl.int64)
    total = tl.zeros((tile, tile), dtype=tl.float32)
    for start in range(0, T, depth):
        t = (start + tl.arange(0, depth)).to(tl.int64)
        left = tl.load(
            g + b * g_b + t[None, :] * g_t + rows[:, None] * g_f,
            mask=(t[None, :] < T) & (rows[:, None] < p),
            other=0.0,
        )
        right = tl.load(
            a + b * a_b + t[:, None] * a_t + columns[None, :] * a_f,
            mask=(t[:, None] < T) & (columns[None, :] < d),
            other=0.0,
        )
        total = tl.dot(left.to(tl.float32), right.to(tl.float32), total, input_precision=precision)
    tl.store(out + number, tl.sum(total * total))


def ghost_norms(a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """``<a aᵀ, g gᵀ>`` for every example, and the same of absolute values (see `dpexp.clipping.gradients.rounding`).

    Args:
        a: ``[B, T, d]``, any strides, float32 or 16 bits.
        g: ``[B, T, p]``, of the same dtype.

    Returns:
        both ``[B]``, float32.
    """
    (B, T, d), p = a.shape, g.shape[2]
    tiles = triton.cdiv(T, TILE)
    sums, magnitudes = torch.empty(2, B, tiles * tiles, dtype=torch.float32, device=a.device)
    # Triton launches on the current device
    with torch.cuda.device_of(a):
        _ghost[(B * tiles * tiles,)](
            a, g, sums, magnitudes, *a.stride(), *g.stride(), T, d, p, tiles, TILE, DEPTH, _precision(a)
        )
    return sums.sum(1).clamp_(min=0), magnitudes.sum(1)


def outer_norms(a: Tensor, g: Tensor) -> Tensor:
    """``||sum_t g_t a_tᵀ||²`` for every example, ``[B]``, float32; arguments as in `ghost_norms`."""
    (B, T, d), p = a.shape, g.shape[2]
    across = triton.cdiv(d, TILE)
    tiles = across * triton.cdiv(p, TILE)
    sums = torch.empty(B, tiles, dtype=torch.float32, device=a.device)
    with torch.cuda.device_of(a):
        _outer[(B * tiles,)](
            a, g, sums, *a.stride(), *g.stride(), T, d, p, across, tiles, TILE, DEPTH, _precision(a)
        )
    return sums.sum(1)


def _precision(a: Tensor) -> str:
    return "ieee" if a.dtype == torch.float32 else "tf32"


@cache
def trusted(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether both kernels, compiled for this device, agree with float64 on a small problem; asked once per process."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(3, 70, 45, generator=generator).to(device, dtype)
    g = torch.randn(3, 70, 130, generator=generator).to(device, dtype)
    products = (a.double() @ a.double().mT) * (g.double() @ g.double().mT)
    squares, magnitudes = products.sum((1, 2)), products.abs().sum((1, 2))
    try:
        pairs = zip((*ghost_norms(a, g), outer_norms(a, g)), (squares, magnitudes, squares), strict=True)
    except Exception:
        # a compiler that does not know the device, or none at all
        return False
    return all(torch.allclose(found.double(), expected, rtol=1e-4, atol=0.0) for found, expected in pairs)
