"""What is refused of an optimiser, its scheduler and the model, before there is a run."""

import inspect
import math
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from dpexp.clipping.independence.comparison import held_in
from dpexp.clipping.sharding import parts_of
from dpexp.errors import UserError

# that may hold NaN, and can be asked whether they do
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def moved_by(optimizer: torch.optim.Optimizer) -> set[int]:
    """Which parameters an optimizer moves."""
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _finite(parameter: nn.Parameter) -> bool:
    """Whether what this process holds of a parameter is numbers."""
    parts = [part for part in held_in(parameter) if part.dtype in FLOATS]
    return all(bool(part.isfinite().all()) for part in parts)


def refuse_misfits(optimizer: torch.optim.Optimizer, scheduler: Any, model: nn.Module) -> None:
    """Refuse an optimiser of other parameters than the trained ones, and what cannot work on a noisy gradient alone."""
    if isinstance(model, nn.DataParallel):
        raise UserError(
            "the model is wrapped in DataParallel: give the plain module, and start a process for each GPU with torchrun"
        )
    # before there is a folder, which the same run with another model would have to leave
    parts_of(model)
    trained = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    moved = moved_by(optimizer)
    if not trained:
        raise UserError("no parameter of the model is trainable (requires_grad): there is nothing to train")
    if missing := [name for number, name in trained.items() if number not in moved]:
        raise UserError(
            f"{missing[0]} is trainable, and not in the optimizer ({len(missing)} such parameters): its share of the noise would "
            "be paid for nothing. Give it to the optimizer, or freeze it with requires_grad_(False)"
        )
    if broken := [name for name, p in model.named_parameters() if not _finite(p)]:
        raise UserError(
            f"{len(broken)} tensors of the model hold NaN or infinity, {broken[0]} for one: nothing can be learnt from "
            "there, and every step would be charged. Load its weights again"
        )
    # None where the optimizer finds its own, as Adafactor does
    rates = [group["lr"] for group in optimizer.param_groups if group.get("lr") is not None]
    if odd := [rate for rate in rates if not math.isfinite(rate)]:
        raise UserError(
            f"the optimizer has a learning rate of {float(odd[0])}: one step with it would spoil the weights"
        )
    frozen = {id(p) for p in model.parameters() if not p.requires_grad}
    if moved - set(trained) - frozen:
        raise UserError(
            "the optimizer holds parameters that are not in the model: make one module of all that trains, and an optimizer of "
            "module.parameters()"
        )
    if any(c.__name__ == "ZeroRedundancyOptimizer" for c in type(optimizer).__mro__):
        raise UserError(
            "ZeroRedundancyOptimizer keeps a part of its states on each rank, and no checkpoint would hold them: give the "
            "optimizer itself; for memory, shard the model with torch.distributed.fsdp.fully_shard"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if hasattr(optimizer, "first_step") or (closure is not None and closure.default is closure.empty):
        raise UserError(
            f"{type(optimizer).__name__} asks for gradients of its own within a step (a closure, as of LBFGS and of "
            "sharpness-aware minimisation), which would be released without noise or a charge: choose SGD, Adam or the like"
        )
    if isinstance(scheduler, ReduceLROnPlateau):
        raise UserError(
            "ReduceLROnPlateau needs a metric: step it yourself with one on public data, and leave out scheduler="
        )
    if scheduler is not None and not callable(getattr(scheduler, "step", None)):
        raise UserError(
            f"scheduler={scheduler!r} is none: give one of torch.optim.lr_scheduler, made of the optimizer"
        )
    if scheduler is not None and not (
        hasattr(scheduler, "state_dict") and hasattr(scheduler, "load_state_dict")
    ):
        raise UserError(
            f"{type(scheduler).__name__} has no state_dict() and load_state_dict(state), and a run that goes on could not put it "
            "back: write both, or leave out scheduler= and compute the learning rate from engine.steps_taken"
        )
    groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", optimizer.param_groups)
    if groups is not optimizer.param_groups:
        raise UserError(
            "the scheduler moves the learning rate of another optimizer than the one given here: make it of this one"
        )
