"""Optimisers, and the learning rate as a function of the step alone (so that a resumed run needs no state for it)."""

import inspect
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dpexp.errors import UserError, either
from dpexp.importing import imported
from dpexp.schemas.choices import CHOICES, FILTERS
from dpexp.training.optimizers.adadp import ADADP
from dpexp.training.optimizers.adam_bc import AdamBC
from dpexp.training.optimizers.filters import DiSK, Doppler

if TYPE_CHECKING:
    from dpexp.schemas import OptimConfig


def build_optimizer(optim: "OptimConfig", parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """An optimiser on the noisy, averaged `p.grad`: post-processing, whatever it does with it.

    Raises:
        UserError: there is no such optimiser, its settings make none, or its library is missing.
    """
    parameters = list(parameters)
    if optim.name in FILTERS:
        base = build_optimizer(replace(optim, name=optim.base), parameters)
        return (
            Doppler(base, optim.filter_a, optim.filter_b)
            if optim.name == "doppler"
            else DiSK(base, optim.kappa)
        )
    betas = (float(optim.betas[0]), float(optim.betas[1]))
    usual: dict[str, Any] = {"lr": optim.lr, "weight_decay": optim.weight_decay}
    if optim.name == "sgd":
        return torch.optim.SGD(parameters, momentum=optim.momentum, **usual)
    if optim.name in {"adam", "adamw"}:
        kind = torch.optim.Adam if optim.name == "adam" else torch.optim.AdamW
        return kind(parameters, betas=betas, eps=optim.eps, **usual)
    if optim.name in {"adam_bc", "adamw_bc"}:
        return AdamBC(
            parameters, optim.lr, betas, optim.floor, optim.weight_decay, decoupled=optim.name == "adamw_bc"
        )
    if optim.name == "adagrad":
        return torch.optim.Adagrad(parameters, eps=optim.eps, **usual)
    if optim.name == "lamb":
        # without always_adapt timm's is Adam without weight decay
        return _lamb()(parameters, betas=betas, eps=optim.eps, max_grad_norm=None, always_adapt=True, **usual)
    if optim.name == "custom":
        return own_optimizer(optim, parameters)
    if optim.name == "adadp":
        return ADADP(parameters, optim.lr, optim.tolerance, (float(optim.ratios[0]), float(optim.ratios[1])))
    raise UserError(
        f"optim.name={optim.name!r} is not known: choose one of {', '.join(CHOICES['optim.name'])}"
    )


def own_optimizer(optim: "OptimConfig", parameters: list[Tensor]) -> torch.optim.Optimizer:
    """Return what `optim.factory` makes of the parameters, of `optim.lr` as ``lr`` and of `optim.config`.

    If it has a method ``tell_noise(stds)``, it is told before each step the standard deviation of the noise in `p.grad`, by
    ``id(p)``.

    Raises:
        UserError: no such function, it does not take these arguments, or what it makes is no optimiser, moves other parameters,
            or asks for a closure: gradients at other weights would be another look at the data, and nothing pays for it; or it
            has other weights for evaluation, as schedule-free ones do.
    """
    where = f"optim.factory={optim.factory}"
    function = imported("optim.factory", optim.factory)
    try:
        made = function(parameters, lr=optim.lr, **optim.config)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{where}: {error}; it is called with the parameters, with lr={optim.lr:g}, and with optim.config"
        ) from error
    if not isinstance(made, torch.optim.Optimizer):
        raise UserError(f"{where} made a {type(made).__name__}, and a torch.optim.Optimizer is wanted")
    moved = [id(p) for group in made.param_groups for p in group["params"]]
    if sorted(moved) != sorted(map(id, parameters)):
        raise UserError(
            f"{where} moves {len(moved)} of the {len(parameters)} parameters that it was given, or others: give all of them "
            "to it, and freeze what shall not move (model.trainable, peft)"
        )
    if callable(getattr(made, "eval", None)):
        raise UserError(
            f"{where}: {type(made).__name__} trains other weights than those to evaluate (schedule-free), and switches by its "
            "train() and eval(), which nobody calls here: the trained ones would be exported. Use it in a loop of your own "
            "(dpexp.PrivacyEngine), or choose an optimiser without"
        )
    try:
        inspect.signature(made.step).bind()
    except TypeError:
        raise UserError(
            f"{where}: its step() asks for a closure, which finds gradients again, and no noise is drawn for those: choose an "
            "optimiser that takes one gradient a step"
        ) from None
    return made


def _lamb() -> Any:
    """timm's, without its own clipping of the whole gradient."""
    try:
        from timm.optim.lamb import Lamb
    except ImportError:
        raise UserError("optim=lamb is timm's: pip install timm, or choose another optimiser") from None
    return Lamb


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
    raise UserError(
        f"optim.lr_schedule={schedule!r} is not known: choose {either(CHOICES['optim.lr_schedule'])}"
    )
