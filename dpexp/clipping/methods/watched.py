"""What the methods share that let autograd form their gradients, and do not follow a model's parameters: `WatchedClipper`."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from dpexp.clipping.base import SCALES, AnyClipper
from dpexp.clipping.compiling import uncompiled
from dpexp.clipping.distributed import Sums, deliver
from dpexp.clipping.given import check_losses, unwritten
from dpexp.clipping.groups import GroupsSpec
from dpexp.clipping.reports import Report
from dpexp.clipping.rules import CLIPPING, RULES, known_rule, none, shortened
from dpexp.clipping.tapping.forwards import entered
from dpexp.clipping.tapping.roots import Roots
from dpexp.errors import UserError, either


class WatchedClipper(AnyClipper):
    """Clips what a subclass finds by autograd alone, and looks at the forwards of its model now and then.

    Args:
        model, groups, clip_norm, rule, rows_per_example, fixed_length: as for `dpexp.clipping.attach`.

    Attributes:
        whole: whether a batch is one example: nothing may stay in the model from one batch to the next, or for whoever gets it (a
            buffer that its forward writes).
    """

    whole = False

    def __init__(self, model: nn.Module, groups: GroupsSpec, clip_norm: float, rule: str, **named: Any):
        if known_rule(rule) is none:
            raise UserError(f"rule={rule!r} bounds nothing here: choose {either(CLIPPING)}")
        super().__init__(model, groups, clip_norm, rule, **named)
        self._hook()

    def backward(
        self, losses: Tensor, clip_scale: Tensor | None = None, *, loss_scale: float = 1.0
    ) -> Report:
        """Add the clipped sum to ``p.grad``; see `Clipper.backward`. ``clip_scale`` is refused."""
        self._refuse_detached()
        if clip_scale is not None:
            raise UserError(SCALES)
        self.check_losses(losses)
        self._checked_thresholds()
        norms = torch.zeros(len(self.groups), 0, dtype=torch.float64, device=self.thresholds.device)
        sums: Sums = {}
        if len(losses):
            with unwritten(self.params):
                norms, sums = self.clipped(losses, loss_scale)
        deliver(None, self.params, sums)
        return Report.of(norms, self.thresholds)

    def check_losses(self, losses: Tensor) -> None:
        """Refuse losses that `clipped` cannot take."""
        check_losses(losses)

    @abstractmethod
    def clipped(self, losses: Tensor, loss_scale: float) -> tuple[Tensor, Sums]:
        """Return norms ``[K, units]`` of what is clipped, and the clipped sums by parameter."""

    def _gradients(self, loss: Tensor) -> dict[str, Tensor]:
        """The gradients of one number, by parameter, with a look at what they come from."""
        self._independence.begin(Roots.of_losses(loss[None]), self.params.values())
        found = torch.autograd.grad(loss, tuple(self.params.values()), allow_unused=True)
        self._independence.check(1)
        return {name: g for name, g in zip(self.params, found, strict=True) if g is not None}

    def _shortened(self, vectors: dict[str, Tensor], less: float = 1.0) -> tuple[Tensor, Sums]:
        """The norms ``[K, 1]`` of vectors, by parameter, and the vectors clipped, and multiplied by ``less``.

        NaN, and nothing, where one is not finite.
        """
        squares = torch.zeros(len(self.groups), dtype=torch.float64, device=self.thresholds.device)
        for k, group in enumerate(self.groups):
            for name in group.params:
                if name in vectors:
                    squares[k] += vectors[name].double().square().sum()
        sums: Sums = {}
        if finite := bool(squares.isfinite().all()):
            for k, group in enumerate(self.groups):
                factor = RULES[self.rule](squares[k], float(self.thresholds[k])) * less
                sums |= {name: shortened(vectors[name], factor) for name in group.params if name in vectors}
        return (squares.sqrt() if finite else torch.full_like(squares, torch.nan))[:, None], sums

    @uncompiled
    def _enter(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if torch.is_grad_enabled() and not self._independence.looking:
            rows = entered((args, kwargs)).rows
            if self.whole:
                self._independence.rows_per_example = max(1, rows)
            self._independence.enter(args, kwargs, rows)
