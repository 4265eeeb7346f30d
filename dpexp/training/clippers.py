"""From the settings of clip= to what clips: `attach`, or a clipper that needs more than norms of per-example gradients."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from dpexp.clipping import attach
from dpexp.clipping.base import AnyClipper
from dpexp.clipping.devices import device_groups
from dpexp.clipping.groups import GroupsSpec
from dpexp.clipping.methods.coordinates import AdaClip, Ellipsoid, ScaleThenPrivatise
from dpexp.clipping.methods.embedding import Embedding
from dpexp.clipping.methods.local_training import LocalClipper
from dpexp.clipping.methods.microbatches import MicrobatchClipper
from dpexp.clipping.methods.projected import ProjectedClipper
from dpexp.clipping.methods.whole import Method, VectorClipper
from dpexp.errors import UserError

if TYPE_CHECKING:
    from dpexp.schemas import ClipConfig, EngineConfig
    from dpexp.tasks.base import Task


def build_clipper(
    model: nn.Module,
    clip: "ClipConfig",
    engine: "EngineConfig",
    task: "Task",
    losses: Callable[[dict[str, Tensor]], Tensor],
    *,
    expected_batch: float,
    max_clip_scale: float,
) -> AnyClipper:
    """Attach the clipper of a configuration to a model.

    Args:
        model: what is trained here.
        clip, engine: settings.
        task: how its rows make examples.
        losses: collated batch -> `[b]` losses, for clipping that trains by itself.
        expected_batch: B.
        max_clip_scale: the largest factor of a threshold, where examples have budgets of their own.

    Raises:
        UserError: the model can't be clipped exactly.
    """
    if clip.method == "microbatch":
        return MicrobatchClipper(model, clip.microbatch, clip.clip_norm, clip.rule)
    if clip.method == "fedavg":
        return LocalClipper(
            model, losses,
            epochs=clip.local_epochs, batch_size=clip.local_batch, lr=clip.local_lr,
            groups=groups_of(model, clip), clip_norm=clip.clip_norm, rule=clip.rule,
        )  # fmt: skip
    rows: dict[str, Any] = {
        "rows_per_example": task.rows_per_example,
        "fixed_length": task.pad_to is not None,
    }
    if clip.method == "jl":
        return ProjectedClipper(model, clip.projections, clip.clip_norm, clip.rule, **rows)
    if clip.method != "norm":
        return VectorClipper(model, build_method(clip, expected_batch), clip.clip_norm, clip.rule, **rows)
    return attach(
        model,
        groups=groups_of(model, clip),
        clip_norm=clip.clip_norm,
        rule=clip.rule,
        engine=engine.name,
        choice=choice_of(engine),
        memory_cap_mib=engine.memory_cap_mib,
        max_clip_scale=max_clip_scale,
        **rows,
    )


def groups_of(model: nn.Module, clip: "ClipConfig") -> GroupsSpec:
    """The clipping groups of a configuration, for `attach`."""
    return device_groups(model, clip.devices) if clip.groups == "device" else clip.groups


def choice_of(engine: "EngineConfig") -> str | None:
    """How norms are computed; None (measured) leaves it to each engine's own way."""
    return None if engine.choice == "measured" else engine.choice


def build_method(clip: "ClipConfig", expected_batch: float) -> Method:
    """The method of a configuration, not attached to a model yet.

    Raises:
        UserError: there is no such method.
    """
    if clip.method == "adaclip":
        memory = (float(clip.memory[0]), float(clip.memory[1]))
        bounds = (float(clip.variance_range[0]), float(clip.variance_range[1]))
        return AdaClip(memory, bounds, clip.init_norm, expected_batch)
    if clip.method == "scaled":
        return ScaleThenPrivatise(float(clip.memory[1]), clip.scale_floor)
    if clip.method == "ellipsoid":
        return Ellipsoid(clip.scale_floor)
    if clip.method == "embedding":
        return Embedding(clip.basis, clip.residual_norm)
    raise UserError(f"clip.method={clip.method} is not known")
