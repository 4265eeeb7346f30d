"""Optimisers, and the learning rate as a function of the step alone (so that a resumed run needs no state for it)."""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dpexp.errors import UserError
from dpexp.training.adadp import ADADP

if TYPE_CHECKING:
    from dpexp.config import OptimConfig


def build_optimizer(optim: "OptimConfig", parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """An optimiser (torch's own, or ADADP) on the noisy, averaged `p.grad`: post-processing, whatever it does with it."""
    parameters = list(parameters)
    if optim.name == "sgd":
        return torch.optim.SGD(
            parameters, lr=optim.lr, momentum=optim.momentum, weight_decay=optim.weight_decay
        )
    if optim.name in {"adam", "adamw"}:
        kind = torch.optim.Adam if optim.name == "adam" else torch.optim.AdamW
        return kind(
            parameters,
            lr=optim.lr,
            betas=(float(optim.betas[0]), float(optim.betas[1])),
            eps=optim.eps,
            weight_decay=optim.weight_decay,
        )
    if optim.name == "adadp":
        return ADADP(parameters, optim.lr, optim.tolerance, (float(optim.ratios[0]), float(optim.ratios[1])))
    raise UserError(f"optim.name={optim.name!r} is not known: choose adadp, adam, adamw or sgd")


def learning_rate(step: int, steps: int, peak: float, schedule: str, warmup_ratio: float) -> float:
    """The learning rate of step `step` (0-based) of `steps`.

    A linear warm-up over the first `warmup_ratio` of the steps, then ``constant``, or down to zero, which would be reached one
    step after the last: ``linear``, or ``cosine`` (half a period).
    """
    warmup = round(warmup_ratio * steps)
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    if schedule == "constant":
        return peak
    if schedule == "linear":
        return peak * (steps - step) / max(1, steps - warmup)
    if schedule == "cosine":
        return peak * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup))) / 2
    raise UserError(f"optim.lr_schedule={schedule!r} is not known: choose constant, linear or cosine")
