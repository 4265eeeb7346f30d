"""The node that a tap puts into autograd's graph.

What is saved goes through ``save_for_backward`` and is read once, which is what activation checkpointing, saved-tensor hooks and
version counters ask for.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from dpexp.clipping.tapping.forwards import PLAIN
from dpexp.clipping.tapping.messages import OVERWRITTEN, PLAINLY, TWICE
from dpexp.clipping.tapping.uses import Use
from dpexp.errors import LateError, UserError


class Tap(torch.autograd.Function):
    """Identity in forward; in backward the running visit sees the use, its saved tensors and the output gradient."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, anchor: Tensor, recorder: Any, owner: Any, use: Use, *saved: Tensor
    ) -> Tensor:
        ctx.recorder, ctx.owner, ctx.use, ctx.num_saved = recorder, owner, use, len(saved)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        if y._is_view():
            # marking a view dirty would make autograd copy the whole gradient of its base
            return y.view_as(y)
        # an in-place identity: later in-place operations on the output stay legal
        ctx.mark_dirty(y)
        return y

    @staticmethod
    def backward(ctx: Any, gy: Tensor | None) -> Any:
        saved = _saved(ctx)
        visit = ctx.recorder.visiting
        if visit is None:
            if not torch.is_grad_enabled() and not ctx.recorder.asked():
                # of an input, of a generator in front of the model: the gradient passes by
                return (gy,) + (None,) * (4 + ctx.num_saved)
            if torch.is_grad_enabled():
                raise UserError(TWICE)
            raise RuntimeError(PLAINLY)
        if gy is not None:
            visit.arrive(ctx.owner, ctx.use, saved, gy)
        return (gy,) + (None,) * (4 + ctx.num_saved)


def _saved(ctx: Any) -> tuple[Tensor, ...]:
    """What a tap has saved. Of a function of which nothing is known, that is every tensor that it was given.

    Raises:
        LateError: the model has written to one of these.
    """
    try:
        return cast(tuple[Tensor, ...], ctx.saved_tensors)
    except RuntimeError as error:
        if ctx.use.formula.label is not None or "inplace operation" not in str(error):
            raise
        ctx.recorder.roles[ctx.use.place[0]] = PLAIN
        raise LateError(f"{ctx.use.owner} ({ctx.use.label}) {OVERWRITTEN}") from error


# of the nodes of a graph, those that a tap has put there
BY_TAP: Any = Tap._backward_cls
