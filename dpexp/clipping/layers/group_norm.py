"""``nn.GroupNorm`` and ``nn.InstanceNorm1d/2d/3d``."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpexp.clipping.contributions import Contribution, Dense
from dpexp.clipping.contributions.numerics import by_example, wide
from dpexp.clipping.layers.base import WEIGHT_AND_BIAS, check_rank


class GroupNorm:
    """Statistics over groups of channels of one row."""

    name = "group norm"
    parameters = WEIGHT_AND_BIAS

    def refusal(self, module: nn.Module) -> str | None:
        return None

    def contributions(
        self, module: nn.Module, x: tuple[Tensor, ...], gy: Tensor, num_examples: int, names: set[str]
    ) -> dict[str, Contribution]:
        assert isinstance(module, nn.GroupNorm)
        return channel_gradients(x[0], gy, module.num_groups, module.eps, num_examples, names)


class InstanceNorm:
    """Statistics over one channel of one row: a group norm with as many groups as channels."""

    name = "instance norm"
    parameters = WEIGHT_AND_BIAS

    def refusal(self, module: nn.Module) -> str | None:
        assert isinstance(module, nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d)
        if module.track_running_stats or module.running_mean is not None:
            return (
                "its running statistics are averages over the examples of a batch and leave the model without noise: "
                "set track_running_stats=False"
            )
        return None

    def contributions(
        self, module: nn.Module, x: tuple[Tensor, ...], gy: Tensor, num_examples: int, names: set[str]
    ) -> dict[str, Contribution]:
        assert isinstance(module, nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d)
        spatial = {nn.InstanceNorm1d: 1, nn.InstanceNorm2d: 2, nn.InstanceNorm3d: 3}
        rank = next(rank for kind, rank in spatial.items() if isinstance(module, kind))
        check_rank(type(module).__name__, x[0], 2 + rank)
        return channel_gradients(x[0], gy, x[0].shape[1], module.eps, num_examples, names)


def channel_gradients(
    x: Tensor, gy: Tensor, groups: int, eps: float, num_examples: int, names: set[str]
) -> dict[str, Contribution]:
    """Per-example gradients of scale and shift, ``[B, C]`` each.

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
    if torch.compiler.is_compiling():  # a number of groups that depends on the batch would be compiled in
        normalised = F.group_norm(folded.view(rows, channels, positions), groups, eps=eps)
        both = {
            "weight": normalised * gy.view(rows, channels, positions),
            "bias": gy.view(rows, channels, positions),
        }
        return {name: Dense(by_example(both[name].sum(2), num_examples, 1).sum(1)) for name in names}
    # The forward's own kernel finds the statistics 40 times faster than torch.var_mean on a CPU.
    _, mean, rstd = torch.native_group_norm(
        folded.view(rows, channels, positions), None, None, rows, channels, positions, groups, eps
    )
    _, scale, shift = torch.ops.aten.native_group_norm_backward(
        gy,
        folded,
        mean.view(1, -1),
        rstd.view(1, -1),
        None,
        1,
        rows * channels,
        positions,
        rows * groups,
        (False, True, True),
    )
    found = {"weight": scale, "bias": shift}
    return {
        name: Dense(by_example(value.view(rows, channels), num_examples, 1).sum(1))
        for name, value in found.items()
        if name in names
    }
