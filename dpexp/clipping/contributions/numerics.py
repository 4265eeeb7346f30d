"""Small numerical pieces that every contribution shares: dtypes, squared norms, products, scaling.

Norms decide the guarantee, so they are accumulated in float32 at least, whatever the model computes in.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LONGEST_RUN = 1 << 12  # numbers that a float32 norm may add one after the other, see `squared_norms`


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which norms and sums are accumulated: float64 for float64, float32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def align(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Bring both to the lower of their dtypes: under autocast an activation and its gradient may differ.

    Two different 16-bit formats have no lower one in common and meet in float32.
    """
    a, b = a.detach(), b.detach()  # inputs of a layer have a graph of their own, which is no concern of ours
    if a.dtype == b.dtype:
        return a, b
    low = a.dtype if a.dtype.itemsize < b.dtype.itemsize else b.dtype
    if a.dtype.itemsize == b.dtype.itemsize:
        low = torch.float32
    return a.to(low), b.to(low)


def squared_norms(x: Tensor) -> Tensor:
    """``[B, ...]`` -> ``[B]``: squared Euclidean norms, accumulated in at least float32.

    Two stages: on a CPU ``vector_norm`` adds one number after the other, which loses 0.4% of the squared norm
    of a vector of 38 million float32 (a language-model head), always downwards. Short runs whose squares are
    summed pairwise do not.
    """
    dtype = wide(x.dtype)
    if x.dim() == 1:
        return x.to(dtype).square()
    x = x.flatten(2) if x.dim() > 2 else x
    length = x.shape[-1]
    if length > LONGEST_RUN:
        pieces = next(
            (k for k in range(2, length // 64) if length % k == 0 and length // k <= LONGEST_RUN), 0
        )
        if not pieces:
            return x.to(dtype).square().flatten(1).sum(1)
        x = x.unflatten(-1, (pieces, length // pieces))
    runs = torch.linalg.vector_norm(x, dim=-1, dtype=dtype).square_()
    return runs if runs.dim() == 1 else runs.flatten(1).sum(1)


def product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """``a @ b`` of matrices or batches of matrices of one dtype, with a result in at least float32.

    A GPU multiplies 16-bit numbers exactly and adds them up in float32, so there the result is as good as
    that of float32 inputs. A CPU would round the result to 16 bits; the inputs are widened first. ``out`` is
    a place where the result may be written; the returned tensor is the result.
    """
    batched = a.dim() == 3
    dtype = wide(a.dtype)
    if a.dtype != dtype:
        if a.is_cuda:
            return torch.bmm(a, b, out_dtype=dtype) if batched else torch.mm(a, b, out_dtype=dtype)
        a, b = a.to(dtype), b.to(dtype)
    if out is None:
        return torch.bmm(a, b) if batched else torch.mm(a, b)
    return torch.bmm(a, b, out=out) if batched else torch.mm(a, b, out=out)


def scale(x: Tensor, factors: Tensor) -> Tensor:
    """Multiply example i of ``x`` (``[B, ...]``) by ``factors[i]``, rounding once to the dtype of ``x``."""
    factors = factors.to(wide(x.dtype)).view(-1, *[1] * (x.dim() - 1))
    return x * factors if x.dtype == factors.dtype else (x * factors).to(x.dtype)


def normalise(factors: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Split factors into numbers of at most 1 and one common multiplier where float16 could overflow."""
    if dtype != torch.float16 or factors.numel() == 0:
        return factors, None
    peak = factors.amax().clamp_min(torch.finfo(factors.dtype).tiny)
    return factors / peak, peak


def by_example(x: Tensor, num_examples: int, features: int) -> Tensor:
    """``[R, ..., *features]`` -> ``[B, T, *features]``: the rows and positions of an example side by side.

    Args:
        x: R = B * m rows, those of one example adjacent.
        num_examples: B; may be 0.
        features: how many trailing dimensions are features and stay.
    """
    kept = x.shape[x.dim() - features :]
    rows = x.shape[0] // num_examples if num_examples else 1
    positions = rows * math.prod(x.shape[1 : x.dim() - features])
    return x.reshape(num_examples, positions, *kept)


def combine(rows: Tensor, factors: Tensor | None) -> Tensor:
    """``sum_i factors[i] * rows[i]``, the plain sum without factors; ``rows`` is contiguous, ``[B, *shape]``."""
    if factors is None:
        return rows.sum(0)
    matrix = rows.view(rows.shape[0], math.prod(rows.shape[1:]))
    return torch.mv(matrix.t(), factors.to(rows.dtype)).view(rows.shape[1:])


def add_to(out: Tensor | None, value: Tensor) -> Tensor:
    """``out += value`` in place, or ``value`` itself where there is nothing to add to."""
    return value if out is None else out.add_(value)


def zero_examples(x: Tensor, keep: Tensor) -> Tensor:
    """A copy of ``x`` (``[B, ...]``) whose examples with ``keep[i] == False`` are zero, also where they were NaN."""
    return x.masked_fill(~keep.view(-1, *[1] * (x.dim() - 1)), 0)


def all_finite(x: Tensor) -> bool:
    """Whether nothing is NaN or Inf, at the price of one sum; may say no to finite numbers whose sum overflows."""
    return math.isfinite(x.sum().item())


def static(x: Tensor) -> bool:
    """Whether branching on values is free: no graph is being traced and no device has to be waited for."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()
