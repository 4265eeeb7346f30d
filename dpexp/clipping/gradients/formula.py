"""Whether per-example gradients add up to the gradient that autograd itself finds."""

from __future__ import annotations

import torch
from torch import Tensor

from dpexp.clipping.gradients.base import PerExampleGradient

# How far two ways to compute one sum may be apart, in units of u times the magnitudes of its terms; fewer where u is large.
WIDE, NARROW = 1000.0, 16.0


def formula_holds(
    per_example: PerExampleGradient, weights: Tensor, gradient: Tensor, dtype: torch.dtype | None = None
) -> bool | None:
    """Compare ``weighted_sum(weights)`` with the plain gradient of the same use of the parameter, to rounding.

    A formula that forgets a term, a factor or an option of an operation fails this, whatever the layout of its rows.

    Args:
        per_example: the per-example gradients of one use, B examples.
        weights: ``[B]``; random, so that no error is weighed out by another.
        gradient: of the parameter's shape: that of ``sum_i weights[i] * loss_i`` through this use alone.
        dtype: in which the operation itself was computed, where that is lower than the gradient's own (autocast).

    Returns:
        None where nothing can be told: all is zero or not finite, or so much of it cancels that only rounding is left.
    """
    found = per_example.weighted_sum(weights).double()
    magnitudes = per_example.magnitudes().sqrt().double()
    info = torch.finfo(dtype or gradient.dtype)
    units = WIDE if info.bits >= 32 else NARROW
    allowed = units * info.eps / 2 * float((weights.double().abs() * magnitudes).sum())
    error = float((found - gradient.double()).norm())
    size = max(float(found.norm()), float(gradient.double().norm()))
    if not (torch.isfinite(torch.tensor([error, allowed, size])).all() and size > 2 * allowed):
        return None
    return error <= allowed
