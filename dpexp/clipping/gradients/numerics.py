"""Small numerical pieces that all per-example gradients share: dtypes, squared norms, products, scaling.

Norms and weighted sums decide the guarantee: both are computed in float32 at least, whatever the model computes in.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpexp.torch_versions import float32_settings

# numbers that float32 may add one after the other, see `squared_norms` and `product_into`
LONGEST_RUN = 1 << 9
# outputs below which a CPU's matrix product adds up a whole run in one register
NARROW = 8
_REDUCED = ("tf32", "bf16")
_PRECISION = float32_settings()


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which norms and sums are accumulated: float64 for float64, float32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def detached(x: Tensor) -> Tensor:
    """Return ``x`` without the graph that made it: inputs of a layer have one, which is no concern of ours."""
    return x.detach() if x.requires_grad else x


def align(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Bring both to the lower of their dtypes: under autocast an activation and its gradient may differ.

    Two different 16-bit formats have no lower one in common and meet in float32.
    """
    a, b = detached(a), detached(b)
    if a.dtype == b.dtype:
        return a, b
    low = a.dtype if a.dtype.itemsize < b.dtype.itemsize else b.dtype
    if a.dtype.itemsize == b.dtype.itemsize:
        low = torch.float32
    return a.to(low), b.to(low)


def squared_norms(x: Tensor) -> Tensor:
    """``[B, ...]`` -> ``[B]``: squared Euclidean norms, accumulated in at least float32.

    Two stages: on a CPU ``vector_norm`` adds one number after the other, which loses 0.4% of the squared norm
    of a vector of 38 million float32 (a language-model head), always downwards, and up to 7e-6 of one of 4096. Runs of
    `LONGEST_RUN`, whose squares are summed pairwise, lose at most 1.2e-6, which is 6e-7 of the norm.
    """
    dtype = wide(x.dtype)
    if x.dim() == 1:
        return x.to(dtype).square()
    x = x.flatten(2) if x.dim() > 2 else x
    length = x.shape[-1]
    if length > LONGEST_RUN:
        fewest = -(-length // LONGEST_RUN)
        pieces = next((k for k in range(fewest, 4 * fewest) if length % k == 0), 0)
        if not pieces:
            tail = length % LONGEST_RUN
            return squared_norms(x[..., :-tail]) + squared_norms(x[..., -tail:])
        x = x.unflatten(-1, (pieces, length // pieces))
    runs = torch.linalg.vector_norm(x, dim=-1, dtype=dtype).square_()
    return runs if runs.dim() == 1 else runs.flatten(1).sum(1)


def unit(dtype: torch.dtype) -> float:
    """The unit roundoff of the dtype that norms and sums are computed in: 2^-24 or 2^-53."""
    return torch.finfo(wide(dtype)).eps / 2


def full_precision(operation: str, device: torch.device) -> AbstractContextManager[None]:
    """Inside, float32 is multiplied as float32: no TF32, no bfloat16, whatever the model itself may use.

    A norm that is off by 2^-11 makes a clipped gradient that is too large by as much.

    Args:
        operation: "matmul" or "conv".
    """
    settings = _PRECISION.get((operation, device.type), ())
    reduced = [(s, precision) for s in settings if (precision := s.fp32_precision) in _REDUCED]
    # asked around every product
    return _unreduced(reduced) if reduced else nullcontext()


@contextmanager
def all_full_precision() -> Iterator[None]:
    """As `full_precision`, of all operations on all devices."""
    with ExitStack() as inside:
        for operation, device in _PRECISION:
            inside.enter_context(full_precision(operation, torch.device(device)))
        yield


@contextmanager
def in_full(device: torch.device) -> Iterator[None]:
    """Inside, nothing is differentiated and autocast is off: 16 bits belong to the model's forward alone.

    A sum of examples in 16 bits would be rounded by what all of them add, and one example could move it by more than C.
    """
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


@contextmanager
def _unreduced(reduced: list[tuple[Any, str]]) -> Iterator[None]:
    try:
        for setting, _ in reduced:
            setting.fp32_precision = "ieee"
        yield
    finally:
        for setting, precision in reduced:
            setting.fp32_precision = precision


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
    multiply = torch.bmm if batched else torch.mm
    with full_precision("matmul", a.device):
        return multiply(a, b) if out is None else multiply(a, b, out=out)


def along(numbers: Tensor, x: Tensor) -> Tensor:
    """One number for each row of ``x``, ``[B]``, in a shape that stands beside its rows, ``[B, 1, …]``."""
    return numbers.view(-1, *[1] * (x.dim() - 1))


def scale(x: Tensor, factors: Tensor) -> Tensor:
    """Multiply example i of ``x`` (``[B, ...]``) by ``factors[i]``, in float32 at least.

    Rounded to 16 bits, the scaled gradient would be up to 2^-9 longer than its threshold.
    """
    return x * along(factors.to(wide(x.dtype)), x)


def scale_smaller(first: Tensor, second: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    """Two tensors that are multiplied, and the smaller of them by the factors of its examples first."""
    if first.numel() <= second.numel():
        return scale(first, factors), second
    return first, scale(second, factors)


def product_into(out: Tensor, a: Tensor, b: Tensor, beta: int) -> None:
    """``out = beta * out + a @ b``, as exact as float32 where one of the matrices has 16 bits and the other has not.

    A GPU multiplies a bfloat16 matrix with each of the three bfloat16 numbers that a float32 is the sum of, which is faster
    than to widen it.

    Args:
        out: ``[n, m]``, float64 or float32.
        a: ``[n, K]``, ``b``: ``[K, m]``, of the dtype of ``out`` or 16 bits.
        beta: 0 or 1; with 0, what ``out`` held does not matter.
    """
    for left, right in _pieces(a, b, out):
        if left.dtype == out.dtype and left.dim() == 2:
            with full_precision("matmul", out.device):
                out.addmm_(left, right) if beta else torch.mm(left, right, out=out)
        else:
            part = product(left, right)
            part = part.sum(0) if part.dim() == 3 else part
            out.add_(part) if beta else out.copy_(part)
        beta = 1


def _pieces(a: Tensor, b: Tensor, out: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Products that add up to ``a @ b``: matrices, or batches of matrices of which to take the sum."""
    if a.is_cuda and torch.bfloat16 in (a.dtype, b.dtype) and torch.float16 not in (a.dtype, b.dtype):
        for _ in range(1 if a.dtype == b.dtype else 3):
            left, right = a.bfloat16(), b.bfloat16()
            yield left, right
            a, b = (a, b - right) if b.dtype == out.dtype else (a - left, b)
        return
    a, b, inner = a.to(out.dtype), b.to(out.dtype), a.shape[1]
    if min(out.shape) <= NARROW and inner > LONGEST_RUN:
        # the whole run of a narrow result would be added up in one register: 4096 equal numbers with an error of 4e-5
        whole, runs = inner - inner % LONGEST_RUN, (-1, LONGEST_RUN)
        yield a[:, :whole].unflatten(1, runs).transpose(0, 1), b[:whole].unflatten(0, runs)
        a, b = a[:, whole:], b[whole:]
    yield a, b


def by_example(x: Tensor, num_examples: int, features: int) -> Tensor:
    """``[R, ..., *features]`` -> ``[B, T, *features]``: the rows and positions of an example side by side.

    Args:
        x: R = B * m rows, those of one example adjacent.
        num_examples: B; may be 0.
        features: how many trailing dimensions are features and stay.
    """
    if x.dim() == features + 2 and x.shape[0] == num_examples:
        return x
    kept = x.shape[x.dim() - features :]
    rows = x.shape[0] // num_examples if num_examples else 1
    positions = rows * math.prod(x.shape[1 : x.dim() - features])
    return x.reshape(num_examples, positions, *kept)


def combine(rows: Tensor, factors: Tensor) -> Tensor:
    """``sum_i factors[i] * rows[i]``; ``rows`` is contiguous, ``[B, *shape]``."""
    if rows.dim() == 2:
        return torch.mv(rows.t(), factors.to(rows.dtype))
    matrix = rows.view(rows.shape[0], math.prod(rows.shape[1:]))
    return torch.mv(matrix.t(), factors.to(rows.dtype)).view(rows.shape[1:])


def accumulate(rows: Tensor, factors: Tensor, total: Tensor | None) -> Tensor:
    """``total`` and what `combine` gives for a chunk of the examples, in place where there is a total already."""
    factors = factors.to(rows.dtype)
    if rows.shape[0] == 1:
        return rows[0] * factors[0] if total is None else total.addcmul_(rows[0], factors[0])
    if total is None:
        return combine(rows, factors)
    total.view(-1).addmv_(rows.view(rows.shape[0], total.numel()).t(), factors)
    return total


def add_to(out: Tensor | None, value: Tensor) -> Tensor:
    """``out += value`` in place, or ``value`` itself where there is nothing to add to."""
    return value if out is None else out.add_(value)


def zero_examples(x: Tensor, keep: Tensor) -> Tensor:
    """A copy of ``x`` (``[B, ...]``) whose examples with ``keep[i] == False`` are zero, also where they were NaN."""
    return x.masked_fill(~along(keep, x), 0)


def all_finite(x: Tensor) -> bool:
    """Whether nothing is NaN or Inf, at the price of one sum; may say no to finite numbers whose sum overflows."""
    return math.isfinite(x.sum().item())


def static(x: Tensor) -> bool:
    """Whether branching on values is free, because no device has to be waited for."""
    return x.device.type == "cpu"


def has_generator(device: torch.device) -> bool:
    """Whether a device has generators whose states torch keeps as it keeps those of CUDA; Apple's are kept in another way."""
    return device.type not in ("cpu", "mps")


def states_of_chance(device: torch.device) -> tuple[Any, ...]:
    """Where the generators of the process stand, which a hook, or a forward that is computed again, may draw from."""
    numpy: Any = np.random.get_state()
    here = torch.get_device_module(device).get_rng_state(device).tolist() if has_generator(device) else None
    torchs = torch.get_rng_state().numpy().tobytes()
    return random.getstate(), numpy[1].tobytes(), numpy[2:], torchs, here
