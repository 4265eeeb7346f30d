"""Weight-standardised convolutions: timm's ``StdConv2d``, ``ScaledStdConv2d`` and their "same" variants."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from dpexp.clipping.contributions import Contribution, Pulled
from dpexp.clipping.contributions.numerics import wide
from dpexp.clipping.layers.base import check_rank
from dpexp.clipping.layers.conv import bias_contribution, weight_contribution


class StandardisedConvolution:
    """Convolution with ``(W - mean) / sqrt(variance + eps) * gain`` per output channel (Qiao et al. 2019;
    Brock et al. 2021).

    Per-example gradients of the standardised weight are pulled back through the standardisation, which is the
    same for all examples. A module of this kind has ``eps``, may have a parameter ``gain`` (one number per
    output channel) with a constant ``scale``, and ``same_pad`` for TensorFlow's "same" padding.
    """

    name = "weight-standardised convolution"
    parameters = frozenset({"weight", "bias", "gain"})

    def refusal(self, module: nn.Module) -> str | None:
        return None

    def contributions(
        self, module: nn.Module, x: tuple[Tensor, ...], gy: Tensor, num_examples: int, names: set[str]
    ) -> dict[str, Contribution]:
        assert isinstance(module, nn.Conv2d)
        check_rank(type(module).__name__, x[0], 4)
        settings: Any = module
        found: dict[str, Contribution] = {}
        if names & {"weight", "gain"}:
            padded = _same_padding(module, x[0]) if getattr(settings, "same_pad", False) else x[0]
            used = weight_contribution(module, padded, gy, num_examples)
            gain = settings.gain.detach() if hasattr(settings, "gain") else None
            scale = settings.scale if gain is not None else 1.0
            rows = module.weight.detach().flatten(1).to(wide(module.weight.dtype))
            centred = rows - rows.mean(1, keepdim=True)
            rstd = (rows.var(1, correction=0, keepdim=True) + settings.eps).rsqrt()
            standard = centred * rstd
            if "weight" in names:
                factor = rstd * scale if gain is None else rstd * scale * gain.to(rows.dtype).view(-1, 1)
                found["weight"] = Pulled(used, partial(pull_back, standard, factor), module.weight.shape)
            if "gain" in names:
                assert gain is not None
                found["gain"] = Pulled(used, partial(_pull_gain, standard * scale, gain.shape), gain.shape)
        if "bias" in names:
            found["bias"] = bias_contribution(gy, num_examples)
        return found


def pull_back(standard: Tensor, factor: Tensor, grads: Tensor) -> Tensor:
    """Gradients of the weight from those of the standardised weight.

    Args:
        standard: the standardised weight before its gain, ``[O, F]``.
        factor: gain over standard deviation, ``[O, 1]``.
        grads: ``[b, O, ...]`` with F numbers per output channel.
    """
    flat = grads.flatten(2)
    along = (flat * standard).mean(2, keepdim=True)
    return ((flat - flat.mean(2, keepdim=True) - standard * along) * factor).view(grads.shape)


def _pull_gain(standard: Tensor, shape: tuple[int, ...], grads: Tensor) -> Tensor:
    return (grads.flatten(2) * standard).sum(2).view(-1, *shape)


def _same_padding(module: nn.Conv2d, x: Tensor) -> Tensor:
    """Zeros until the output has ``ceil(size / stride)`` pixels, the odd one after."""
    amounts: list[int] = []
    for n, k, s, d in zip(x.shape[2:], module.kernel_size, module.stride, module.dilation, strict=True):
        total = max((math.ceil(n / s) - 1) * s + (k - 1) * d + 1 - n, 0)
        amounts = [total // 2, total - total // 2, *amounts]
    return F.pad(x, amounts)
