"""Layer kinds: what is known about modules of a class. A new kind is one small file and one line here."""

from __future__ import annotations

from torch import nn

from dpexp.clipping.layers.base import LayerKind
from dpexp.clipping.layers.batch_norm import BatchNorm
from dpexp.clipping.layers.conv import Convolution
from dpexp.clipping.layers.conv_transpose import TransposedConvolution
from dpexp.clipping.layers.embedding import Embedding
from dpexp.clipping.layers.group_norm import GroupNorm, InstanceNorm
from dpexp.clipping.layers.layer_norm import LayerNorm
from dpexp.clipping.layers.linear import Linear
from dpexp.clipping.layers.rms_norm import RMSNorm
from dpexp.clipping.layers.std_conv import StandardisedConvolution

KINDS: dict[type[nn.Module], LayerKind] = {
    nn.Linear: Linear(),
    nn.modules.linear.NonDynamicallyQuantizableLinear: Linear(),
    nn.Embedding: Embedding(),
    nn.Conv1d: Convolution(),
    nn.Conv2d: Convolution(),
    nn.Conv3d: Convolution(),
    nn.ConvTranspose1d: TransposedConvolution(),
    nn.ConvTranspose2d: TransposedConvolution(),
    nn.ConvTranspose3d: TransposedConvolution(),
    nn.LayerNorm: LayerNorm(),
    nn.RMSNorm: RMSNorm(),
    nn.GroupNorm: GroupNorm(),
    nn.InstanceNorm1d: InstanceNorm(),
    nn.InstanceNorm2d: InstanceNorm(),
    nn.InstanceNorm3d: InstanceNorm(),
    nn.BatchNorm1d: BatchNorm(),
    nn.BatchNorm2d: BatchNorm(),
    nn.BatchNorm3d: BatchNorm(),
    nn.SyncBatchNorm: BatchNorm(),
}

# Classes of packages that need not be installed, by where they are defined.
NAMED: dict[str, LayerKind] = {
    "transformers.pytorch_utils.Conv1D": Linear("conv1d", input_first=True),
    "dpexp.models.wide_resnet.StandardisedConv2d": StandardisedConvolution(),
    "timm.layers.std_conv.StdConv2d": StandardisedConvolution(),
    "timm.layers.std_conv.StdConv2dSame": StandardisedConvolution(),
    "timm.layers.std_conv.ScaledStdConv2d": StandardisedConvolution(),
    "timm.layers.std_conv.ScaledStdConv2dSame": StandardisedConvolution(),
    "timm.layers.norm.LayerNorm": LayerNorm(),
    "timm.layers.norm.LayerNormFp32": LayerNorm(),
    "timm.layers.norm.GroupNorm": GroupNorm(),
    "timm.layers.norm.GroupNorm1": GroupNorm(),
}

_COMPUTES = (
    "forward",
    "_conv_forward",
    "__call__",
)  # a subclass that overrides one of these may compute something else


def kind_of(module: nn.Module, cls: type[nn.Module] | None = None) -> LayerKind | None:
    """The kind of a module, or None where nothing is known for certain.

    Args:
        module: any module.
        cls: its class, where ``type(module)`` is not what it was built as.

    Subclasses count while they compute as their base does. A module with parameters that its kind does not
    know, or whose weight is no plain parameter (parametrised, weight-normalised), has no kind.
    """
    if "forward" in module.__dict__:
        return None
    cls = cls or type(module)
    base, kind = _nearest(cls)
    if kind is None:
        return None
    same = all(getattr(cls, method, None) is getattr(base, method, None) for method in _COMPUTES)
    plain = "parametrizations" not in module._modules and kind.parameters >= set(module._parameters)
    return kind if same and plain else None


def refusal(module: nn.Module) -> str | None:
    """Why a module cannot be part of a clipped model, frozen or not, and the way out; None where nothing
    speaks against it.

    Subclasses answer for their base, whatever they override: a batch norm with another forward still is one.
    """
    _, kind = _nearest(type(module))
    return None if kind is None else kind.refusal(module)


def _nearest(cls: type[nn.Module]) -> tuple[type | None, LayerKind | None]:
    """The nearest class among a class and its bases whose kind is known, and the kind."""
    for base in cls.__mro__:
        kind = KINDS.get(base) or NAMED.get(f"{base.__module__}.{base.__qualname__}")
        if kind is not None:
            return base, kind
    return None, None


__all__ = ["KINDS", "NAMED", "LayerKind", "kind_of", "refusal"]
