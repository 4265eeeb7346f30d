"""Scales and shifts of normalisations: layer, RMS, group, instance norm, and batch norm with constant statistics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpexp.clipping.contributions import Contribution, Dense
from dpexp.clipping.contributions.numerics import by_example, wide
from dpexp.clipping.operations.base import Formula, is_one_of
from dpexp.clipping.uses import ValueSlot

if TYPE_CHECKING:
    from dpexp.clipping.uses import Use


class Normalisation(Formula):
    """What all have in common: rows are normalised, multiplied by a weight, and a bias is added."""

    def applies(self, given: dict[str, Any], values: Sequence[Tensor], batched: Sequence[Tensor]) -> bool:
        others = [item for name, item in given.items() if name != "input"]
        x = given["input"]
        return x.dim() > 1 and not is_one_of(x, values) and not any(is_one_of(t, others) for t in batched)


class LayerNorm(Normalisation):
    """Any ``normalized_shape``. The input is normalised again, in float32 at least."""

    label = "layer norm"
    names = ("input", "normalized_shape", "weight", "bias", "eps")

    def gradient(
        self,
        name: str,
        use: Use,
        given: dict[str, Any],
        saved: tuple[Tensor, ...],
        gy: Tensor,
        num_examples: int,
    ) -> Contribution:
        shape = tuple(given["normalized_shape"])
        if name == "bias":
            return Dense(by_example(gy, num_examples, len(shape)).sum(1, dtype=wide(gy.dtype)))
        x = saved[given["input"]]
        normalised = F.layer_norm(x.to(wide(x.dtype)), shape, None, None, given.get("eps", 1e-5))
        return Dense(by_example(normalised.mul_(gy), num_examples, len(shape)).sum(1))


class RMSNorm(Normalisation):
    """Any ``normalized_shape``. The input is normalised again, in float32 at least."""

    label = "rms norm"
    names = ("input", "normalized_shape", "weight", "eps")

    def gradient(
        self,
        name: str,
        use: Use,
        given: dict[str, Any],
        saved: tuple[Tensor, ...],
        gy: Tensor,
        num_examples: int,
    ) -> Contribution:
        shape, x = tuple(given["normalized_shape"]), saved[given["input"]]
        dtype, eps = wide(x.dtype), given.get("eps")
        # torch takes the smallest step of the wider dtype, too
        eps = torch.finfo(dtype).eps if eps is None else eps
        normalised = F.rms_norm(x.to(dtype), shape, None, eps)
        return Dense(by_example(normalised.mul_(gy), num_examples, len(shape)).sum(1))


class GroupNorm(Normalisation):
    """Statistics over groups of channels of one row."""

    label = "group norm"
    names: tuple[str, ...] = ("input", "num_groups", "weight", "bias", "eps")

    def num_groups(self, given: dict[str, Any], x: Tensor) -> int:
        """Return how many groups of channels there are."""
        return given["num_groups"]

    def per_example(
        self, use: Use, saved: tuple[Tensor, ...], gy: Tensor, num_examples: int, wanted: set[int]
    ) -> dict[int, Contribution]:
        given = use.template.given
        slots = {
            name: int(item)
            for name, item in given.items()
            if isinstance(item, ValueSlot) and int(item) in wanted
        }
        x = saved[given["input"]] if "weight" in slots else gy
        found = channel_gradients(
            x, gy, self.num_groups(given, x), given.get("eps", 1e-5), num_examples, set(slots)
        )
        return {slots[name]: gradient for name, gradient in found.items()}


class InstanceNorm(GroupNorm):
    """Statistics over one channel of one row: a group norm with as many groups as channels."""

    label = "instance norm"
    names = ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps")

    def applies(self, given: dict[str, Any], values: Sequence[Tensor], batched: Sequence[Tensor]) -> bool:
        return bool(given.get("use_input_stats", True)) and super().applies(given, values, batched)

    def num_groups(self, given: dict[str, Any], x: Tensor) -> int:
        return x.shape[1]


class BatchNorm(Normalisation):
    """With constant statistics: an affine map of each pixel alone. Anything else couples examples, and is refused."""

    label = "batch norm"
    names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")

    def applies(self, given: dict[str, Any], values: Sequence[Tensor], batched: Sequence[Tensor]) -> bool:
        statistics = [given.get("running_mean"), given.get("running_var")]
        constant = all(isinstance(s, Tensor) and not is_one_of(s, values) for s in statistics)
        return constant and not given.get("training", False) and super().applies(given, values, batched)

    def reads(self, valued: set[str]) -> set[str]:
        return {"input", "running_mean", "running_var"} if "weight" in valued else set()

    def gradient(
        self,
        name: str,
        use: Use,
        given: dict[str, Any],
        saved: tuple[Tensor, ...],
        gy: Tensor,
        num_examples: int,
    ) -> Contribution:
        dtype = wide(gy.dtype)
        gy = gy.flatten(2) if gy.dim() > 2 else gy.unsqueeze(2)
        shift = gy.sum(2, dtype=dtype)
        if name == "bias":
            return Dense(by_example(shift, num_examples, 1).sum(1))
        x, mean, variance = (
            saved[given[part]].to(dtype) for part in ("input", "running_mean", "running_var")
        )
        rstd = (variance + given.get("eps", 1e-5)).rsqrt()
        scale = ((x.reshape(gy.shape) * gy).sum(2) - mean * shift) * rstd
        return Dense(by_example(scale, num_examples, 1).sum(1))


def channel_gradients(
    x: Tensor, gy: Tensor, groups: int, eps: float, num_examples: int, names: set[str]
) -> dict[str, Contribution]:
    """Find the per-example gradients of scale and shift, ``[B, C]`` each.

    The rows are folded into the channels, ``[1, R * C, positions]`` with R * groups groups: the library's own
    backward then returns what are sums over the batch for it and gradients of single rows for us.
    """
    rows, channels, positions = *x.shape[:2], math.prod(x.shape[2:])
    dtype = torch.promote_types(wide(x.dtype), wide(gy.dtype))
    folded = x.to(dtype).reshape(1, rows * channels, positions)
    gy = gy.to(dtype).reshape(1, rows * channels, positions)
    if folded.numel() == 0:
        return {name: Dense(folded.new_zeros(num_examples, channels)) for name in names}
    if names == {"bias"}:
        shift = gy.sum(2)
        return {"bias": Dense(by_example(shift.view(rows, channels), num_examples, 1).sum(1))}
    # The forward's own kernel finds the statistics 40 times faster than torch.var_mean on a CPU.
    _, mean, rstd = torch.native_group_norm(
        folded.view(rows, channels, positions), None, None, rows, channels, positions, groups, eps
    )
    # older versions of torch cannot do without a weight here; its values play no part in its gradient
    weight = folded.new_ones(rows * channels)
    _, scale, shift = torch.ops.aten.native_group_norm_backward(
        gy, folded, mean.view(1, -1), rstd.view(1, -1), weight, 1, rows * channels, positions, rows * groups,
        (False, True, True),
    )  # fmt: skip
    found = {"weight": scale, "bias": shift}
    return {
        name: Dense(by_example(value.view(rows, channels), num_examples, 1).sum(1))
        for name, value in found.items()
        if name in names
    }
