"""Whether a formula gives what autograd gives for the same operation, under random weights of the examples."""

from __future__ import annotations

import torch
from torch import Tensor

from dpexp.clipping import layouts
from dpexp.clipping.gradients.numerics import wide
from dpexp.clipping.layouts import per_example
from dpexp.clipping.taps import Visit
from dpexp.clipping.uses import Use


def formula_is_right(
    use: Use, saved: tuple[Tensor, ...], gy: Tensor, layout: str, visit: Visit, weights: Tensor
) -> bool:
    """Tell whether a formula's sum under ``weights``, ``[B]``, is autograd's own gradient of the weighted outputs."""
    names, numbers = set(use.names), [s for s in saved if s.is_floating_point()]
    by_row = weights.repeat_interleave(visit.rows // visit.num_examples)
    try:
        found = per_example(use, saved, gy, layout, visit, names)
        if not all(bool(t.isfinite().all()) for t in (gy, *numbers)):
            # one example's NaN would hide all others: that the formula can be evaluated has to do
            return True
        reference = use.plain_gradients(saved, layouts.weighted_rows(gy, layout, visit.rows, by_row), names)
    except (RuntimeError, ValueError, IndexError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        return False
    exact = torch.finfo(gy.dtype).bits >= 32 and use.autocast is None
    tolerance = 1e-3 if exact else 0.05
    # where a gradient vanishes for a reason (the bias of keys before a softmax), rounding is all there is to see
    largest = max([1.0, *(float(_norm(s)) for s in numbers)])
    floor = 1e3 * torch.finfo(gy.dtype if exact else torch.bfloat16).eps * _norm(gy) * largest
    for name in names:
        if name not in found:
            return name not in reference
        scale = found[name].sq_norms("ghost").sum().sqrt()
        difference = found[name].weighted_sum(weights)
        if name in reference:
            # in place: of a large vocabulary's table there are two at this moment, and no third
            expected = reference.pop(name).to(difference.dtype)
            scale = scale + _norm(expected)
            difference.sub_(expected)
        if not bool(_norm(difference) <= tolerance * scale + floor):
            return False
    return True


def _norm(tensor: Tensor) -> Tensor:
    """The Euclidean norm, in float32 at least."""
    return torch.linalg.vector_norm(tensor.to(wide(tensor.dtype)))
