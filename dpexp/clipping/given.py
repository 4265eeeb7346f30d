"""What a user gives to a clipper, checked: losses, thresholds, scales, and which parameters train."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Real

import torch
from torch import Tensor, nn

from dpexp.clipping.refusals import refuse_hooks
from dpexp.clipping.rules import SMALLEST
from dpexp.clipping.sharding import Shards, sharded_modules
from dpexp.errors import UserError


def check_losses(losses: Tensor) -> None:
    """Refuse losses that are not one number with a graph for each example."""
    if not isinstance(losses, Tensor):
        raise UserError(f"losses must be a tensor of shape [B], got {type(losses).__name__}")
    if losses.dim() != 1:
        raise UserError(
            f"losses must be 1-D, one loss per example, got shape {list(losses.shape)}: "
            "use reduction='none' and reduce over everything but the batch"
        )
    if losses.is_complex():
        raise UserError("losses are complex numbers: give real ones, one for each example")
    if torch.is_inference_mode_enabled():
        raise UserError("back-propagation needs gradients: call this outside of torch.inference_mode()")
    if losses.shape[0] and not losses.requires_grad:
        raise UserError(
            "losses carry no graph: compute them with gradients enabled, from the attached model, and through parameters that "
            "train (not through adapters of PEFT alone that are merged or disabled)"
        )


def modules_of(model: nn.Module) -> list[nn.Module]:
    """Return a model and all modules in it, each once.

    As ``model.modules()`` would, which takes three times as long; this is asked twice in every step.
    """
    found, seen = [model], {id(model)}
    for module in found:
        for child in module._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                found.append(child)
    return found


def initial_thresholds(clip_norm: float | Sequence[float] | Tensor, num_groups: int) -> Tensor:
    """Return K thresholds, float64: ``C / sqrt(K)`` each for one C, or the K that were given."""
    if isinstance(clip_norm, Tensor):
        clip_norm = clip_norm.tolist()
    several = list(clip_norm) if isinstance(clip_norm, Iterable) else [clip_norm]
    if any(isinstance(c, bool) or not isinstance(c, Real) for c in several):
        raise UserError(f"clip_norm={clip_norm!r} is no number, nor one for each of {num_groups} groups")
    values = [float(c) for c in several]
    if not isinstance(clip_norm, Iterable):
        values = [values[0] / math.sqrt(num_groups)] * num_groups
    if len(values) != num_groups:
        raise UserError(f"clip_norm has {len(values)} thresholds, but there are {num_groups} groups")
    found = torch.tensor(values, dtype=torch.float64, device="cpu")
    check_thresholds(found, f"clip_norm={clip_norm}")
    return found


def check_thresholds(values: Tensor, name: str) -> None:
    """Refuse thresholds that norms in float32 cannot be held against."""
    if not bool((values.isfinite() & (values >= SMALLEST)).all()):
        raise UserError(
            f"{name} must be positive and finite, and no threshold below {SMALLEST:g}: norms are squared in 32-bit numbers"
        )


def checked_scale(
    clip_scale: Tensor | None, num_examples: int, largest: float, thresholds: Tensor
) -> Tensor | None:
    """Return the scales ``[B]`` as the thresholds' dtype; refuse what would exceed the sensitivity."""
    if clip_scale is None:
        return None
    scale = torch.as_tensor(clip_scale, device=thresholds.device).detach().to(thresholds.dtype)
    if scale.shape != (num_examples,):
        raise UserError(f"clip_scale must have shape {[num_examples]} like losses, got {list(scale.shape)}")
    if not bool(((scale >= 0) & (scale <= largest)).all()):
        raise UserError(
            f"clip_scale must lie in [0, {largest}] (max_clip_scale): a larger value would exceed the sensitivity"
        )
    return scale


def check_same_parameters(model: nn.Module, params: dict[str, nn.Parameter], shards: Shards | None) -> None:
    """Refuse a model whose trainable parameters changed after attach (PEFT, unfreezing), or have hooks on their gradients."""
    parameters = (p for module in modules_of(model) for p in module._parameters.values())
    now = {id(p) for p in parameters if p is not None and p.requires_grad}
    if shards is not None:
        # while FSDP has a module whole, other objects stand in the shards' places
        wholes = {id(shards.whole(name)): id(p) for name, p in params.items()}
        now = {wholes.get(number, number) for number in now}
    then = {id(p) for p in params.values()}
    if now == then:
        refuse_hooks(params)
        return
    if shards is None and sharded_modules(model):
        raise UserError(
            "the model was sharded after attach: call clipper.detach(), fully_shard, then attach() again"
        )
    if not now:
        raise UserError(
            "no parameter of this model trains any more. A frozen copy of a model with a clipper (a teacher, a reference) has a "
            "clipper too: run it inside of torch.no_grad(), or copy the model before the clipper or the PrivacyEngine is made"
        )
    names = {id(p): n for n, p in model.named_parameters()}
    new = [names[i] for i in now - then]
    gone = [name for name, p in params.items() if id(p) not in now]
    if new and new[0] in params:
        raise UserError(
            f"{new[0]!r} is another tensor than at attach (torch.func.functional_call, or a parameter that was assigned "
            "anew): run the model with its own parameters, or change it before the clipper or the PrivacyEngine is made"
        )
    what = f"{new[0]!r} is new" if new else f"{gone[0]!r} is frozen or gone"
    raise UserError(
        f"the trainable parameters changed after attach ({what}): freeze, unfreeze and wrap (PEFT) before the "
        "clipper or the PrivacyEngine is made; else close() this engine and begin another run in another folder, or detach() "
        "this clipper and attach() again"
    )


@contextmanager
def unwritten(params: dict[str, nn.Parameter]) -> Iterator[None]:
    """Refuse what somebody else adds to gradients inside, where a model is back-propagated: nobody clips it. It is
    taken out, also where the pass is refused for another reason.

    Raises:
        UserError: names the parameter.
    """

    def written_to(grad: Tensor | None) -> int:
        return -1 if grad is None else grad._version

    before = {name: (p.grad, written_to(p.grad)) for name, p in params.items()}
    found = ""
    try:
        yield
    finally:
        for name, p in params.items():
            grad, version = before[name]
            if p.grad is not grad or written_to(p.grad) != version:
                found = found or name
                p.grad = grad if written_to(grad) == version else None
    if found:
        raise UserError(
            f"something in this model writes to the gradient of {found} while it is back-propagated (a hook, a backward that "
            "adds to p.grad by itself: fused accumulation), and nobody clips that: turn it off, and call zero_grad()"
        )
