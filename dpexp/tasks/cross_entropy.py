"""Cross-entropy over a large vocabulary, where logits are by far the largest tensors of a step.

The library's own keeps the logits' log-softmax and makes two more tensors of that size in the backward pass; under bf16 there
is a float32 copy besides. Both functions here know the gradient as soon as they know the loss, because every loss is used once
and with a weight that is known:

* `cross_entropy_` writes the gradient where the logits were, so that `[N, V]` is held once, and a trained output layer finds
  its output gradient there;
* `frozen_head_cross_entropy` is given what a frozen output layer is applied to. It needs the logits of a few rows at a time
  for the gradient `[N, d]` of its input, and no `[N, V]` is ever held.

torch's `F.linear_cross_entropy` works in chunks, too. It adds a trained weight's gradient up over all examples before anyone
could clip it; for a frozen weight it gives the same and takes longer on a CPU, whatever the size of its chunks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

# numbers that are exponentiated at a time: they stay in a core's reach
BLOCK = 1 << 20
# logits of a frozen layer at a time: enough rows for a matrix product at full speed
HEAD_BLOCK = 1 << 25
# what gradients are kept in units of in float16, where a probability of 1e-7 would be almost nothing
UNIT = 1024.0


def cross_entropy_(
    logits: Tensor, targets: Tensor, ignored: int = -100, weights: Tensor | None = None
) -> Tensor:
    """The weighted negative log-likelihood of each target; OVERWRITES the logits where they have a graph.

    Exactly 0, with a gradient of exactly 0, where the target is ``ignored``.

    Args:
        logits: ``[N, V]``, any floating dtype. What was computed from them before must not need their values for its own
            gradient (autograd says so where it does).
        targets: ``[N]`` int64, below V or ``ignored``.
        weights: ``[N]`` of the losses, constants, below 60 for float16; 1 where not given. With the weights in here and a
            plain sum behind, nothing is multiplied in the backward pass.

    Returns:
        ``[N]``, float32 or better.
    """
    result: Tensor = _Overwriting.apply(logits, targets, ignored, weights)
    return result


def frozen_head_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    ignored: int = -100,
    weights: Tensor | None = None,
) -> Tensor:
    """`cross_entropy_` of ``hidden @ weight.T + bias``, without ever holding the logits of all rows.

    Under autocast the products are formed in its dtype, as those of a layer would be.

    Args:
        hidden: ``[N, d]``.
        weight: ``[V, d]``, which gets no gradient.
        bias: ``[V]``, which gets no gradient, or None.
        targets, ignored, weights: see `cross_entropy_`.

    Returns:
        ``[N]``, float32 or better.

    Raises:
        ValueError: weight or bias require a gradient.
    """
    if weight.requires_grad or (bias is not None and bias.requires_grad):
        raise ValueError("frozen_head_cross_entropy gives weight and bias no gradient, but they require one")
    result: Tensor = _FrozenHead.apply(hidden, weight, bias, targets, ignored, weights)
    return result


class _Overwriting(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ignored: int, weights: Tensor | None) -> Tensor:
        wanted, logits = ctx.needs_input_grad[0], logits.detach()
        losses = _losses(targets, logits.dtype)
        for rows in _blocks(logits.shape, BLOCK):
            losses[rows] = _block(logits[rows], *_picked(rows, targets, ignored, weights), wanted)
        if wanted:
            ctx.unit = _unit(logits.dtype)
            # the gradient, by now
            ctx.save_for_backward(logits)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factors: Tensor) -> tuple[Tensor | None, ...]:
        return _scaled(ctx.saved_tensors[0], factors / ctx.unit), None, None, None


class _FrozenHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        ignored: int,
        weights: Tensor | None,
    ) -> Tensor:
        wanted, device = ctx.needs_input_grad[0], hidden.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        gradient = torch.empty_like(hidden) if wanted else hidden
        losses = _losses(targets, weight.dtype)
        with torch.autocast(device, enabled=False):
            for rows in _blocks((hidden.shape[0], weight.shape[0]), HEAD_BLOCK):
                logits = F.linear(hidden[rows].to(weight.dtype), weight, bias)
                picked = _picked(rows, targets, ignored, weights)
                for part in _blocks(logits.shape, BLOCK):
                    asked, counted, given = (x[part] for x in picked)
                    losses[rows][part] = _block(logits[part], asked, counted, given, wanted)
                if wanted:
                    gradient[rows] = (logits @ weight).to(gradient.dtype)
        if wanted:
            ctx.unit = _unit(weight.dtype)
            if gradient.dtype != weight.dtype:
                gradient, ctx.unit = gradient.div_(ctx.unit), 1.0
            ctx.save_for_backward(gradient)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factors: Tensor) -> tuple[Tensor | None, ...]:
        return _scaled(ctx.saved_tensors[0], factors / ctx.unit), None, None, None, None, None


def _losses(targets: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(targets.shape, dtype=torch.promote_types(dtype, torch.float32), device=targets.device)


def _picked(
    rows: slice, targets: Tensor, ignored: int, weights: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Of some rows: targets that can be looked up, whether they count, and their weights."""
    counted = targets[rows] != ignored
    given = torch.ones_like(targets[rows], dtype=torch.float32) if weights is None else weights[rows]
    return targets[rows].where(counted, 0), counted, given


def _block(logits: Tensor, targets: Tensor, counted: Tensor, weights: Tensor, wanted: bool) -> Tensor:
    """Weighted losses of some rows; with ``wanted``, their gradient (in units, for float16) takes the place of the logits."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    weights = weights.to(wide)
    logs = torch.log_softmax(logits, 1, dtype=wide)
    losses = torch.where(counted, -weights * logs.gather(1, targets[:, None]).squeeze(1), 0.0)
    if wanted:
        weights = weights * _unit(logits.dtype)
        gradient = logs.exp_().mul_(weights[:, None])
        gradient.scatter_add_(1, targets[:, None], -weights[:, None])
        logits.copy_(gradient.masked_fill_(~counted[:, None], 0.0))
    return losses


def _unit(dtype: torch.dtype) -> float:
    return UNIT if dtype == torch.float16 else 1.0


def _scaled(gradient: Tensor, factors: Tensor) -> Tensor:
    """The kept gradient for losses that are used with these factors; they are ones wherever losses are only summed up."""
    if bool((factors == 1).all()):
        return gradient
    scaled = torch.empty_like(gradient)
    # of 16 bits, the product is wider for a moment
    for rows in _blocks(gradient.shape, BLOCK):
        scaled[rows] = gradient[rows] * factors[rows, None]
    return scaled


def _blocks(shape: Any, numbers: int) -> Iterator[slice]:
    """The fewest blocks of rows with at most so many numbers (or one row) each, of about one size."""
    count = max(1, math.ceil(shape[0] / max(1, numbers // max(1, shape[1]))))
    for i in range(count):
        yield slice(shape[0] * i // count, shape[0] * (i + 1) // count)
