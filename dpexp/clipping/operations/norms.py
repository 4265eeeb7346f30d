"""Scales and shifts of normalisations: layer, RMS, group, instance norm, and batch norm with constant statistics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpexp.clipping.gradients import Dense, PerExampleGradient
from dpexp.clipping.gradients.numerics import by_example, wide
from dpexp.clipping.tapping.uses import Arrival, Formula, is_one_of


class Normalisation(Formula):
    """What all have in common: rows are normalised, multiplied by a weight, and a bias is added."""

    def covers(self, given: dict[str, Any]) -> bool:
        return given["input"].dim() > 1


class LayerNorm(Normalisation):
    """Any ``normalized_shape``. The input is normalised again, in float32 at least."""

    label = "layer norm"
    names: tuple[str, ...] = ("input", "normalized_shape", "weight", "bias", "eps")

    def gradient(self, name: str, arrived: Arrival) -> PerExampleGradient:
        shape = tuple(arrived.option("normalized_shape"))
        if name == "bias":
            g = arrived.output_gradient(len(shape))
            return Dense(g.sum(1, dtype=wide(g.dtype)))
        x = arrived.tensor("input")
        terms = self.normalised(x.to(wide(x.dtype)), shape, arrived).mul_(arrived.gy)
        return Dense(by_example(terms, arrived.num_examples, len(shape)).sum(1))

    def normalised(self, x: Tensor, shape: tuple[int, ...], arrived: Arrival) -> Tensor:
        """Return the input before it is multiplied by the weight, a new tensor."""
        return F.layer_norm(x, shape, None, None, arrived.option("eps", 1e-5))


class RMSNorm(LayerNorm):
    """The same without a mean and a bias."""

    label = "rms norm"
    names = ("input", "normalized_shape", "weight", "eps")

    def normalised(self, x: Tensor, shape: tuple[int, ...], arrived: Arrival) -> Tensor:
        return F.rms_norm(x, shape, None, arrived.option("eps"))


class GroupNorm(Normalisation):
    """Statistics over groups of channels of one row."""

    label = "group norm"
    names: tuple[str, ...] = ("input", "num_groups", "weight", "bias", "eps")

    def num_groups(self, arrived: Arrival) -> int:
        """Return how many groups of channels there are."""
        return arrived.option("num_groups")

    def per_example(self, arrived: Arrival, wanted: set[int]) -> dict[int, PerExampleGradient]:
        slots = {name: slot for name, slot in arrived.slots.items() if slot in wanted}
        x = arrived.tensor("input") if "weight" in slots else arrived.gy
        eps, groups = arrived.option("eps", 1e-5), self.num_groups(arrived)
        found = channel_gradients(x, arrived.gy, groups, eps, arrived.num_examples, set(slots))
        return {slots[name]: gradient for name, gradient in found.items()}


class InstanceNorm(GroupNorm):
    """Statistics over one channel of one row: a group norm with as many groups as channels."""

    label = "instance norm"
    names = ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps")

    def covers(self, given: dict[str, Any]) -> bool:
        return bool(given.get("use_input_stats", True)) and super().covers(given)

    def num_groups(self, arrived: Arrival) -> int:
        return arrived.gy.shape[1]


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

    def gradient(self, name: str, arrived: Arrival) -> PerExampleGradient:
        gy, count = arrived.gy, arrived.num_examples
        dtype = wide(gy.dtype)
        gy = gy.flatten(2) if gy.dim() > 2 else gy.unsqueeze(2)
        shift = gy.sum(2, dtype=dtype)
        if name == "bias":
            return Dense(by_example(shift, count, 1).sum(1))
        parts = ("input", "running_mean", "running_var")
        x, mean, variance = (arrived.tensor(part).to(dtype) for part in parts)
        rstd = (variance + arrived.option("eps", 1e-5)).rsqrt()
        scale = ((x.reshape(gy.shape) * gy).sum(2) - mean * shift) * rstd
        return Dense(by_example(scale, count, 1).sum(1))


def channel_gradients(
    x: Tensor, gy: Tensor, groups: int, eps: float, num_examples: int, names: set[str]
) -> dict[str, PerExampleGradient]:
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
