"""``nn.Conv1d``, ``nn.Conv2d``, ``nn.Conv3d``."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from dpexp.clipping.contributions import Contribution, Conv, Dense, Geometry, Outer
from dpexp.clipping.contributions.numerics import by_example, wide
from dpexp.clipping.layers.base import WEIGHT_AND_BIAS, check_rank


class Convolution:
    """Convolutions with every option: stride, dilation, groups, all paddings and padding modes."""

    name = "convolution"
    parameters = WEIGHT_AND_BIAS

    def refusal(self, module: nn.Module) -> str | None:
        return None

    def contributions(
        self, module: nn.Module, x: tuple[Tensor, ...], gy: Tensor, num_examples: int, names: set[str]
    ) -> dict[str, Contribution]:
        assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
        check_rank(type(module).__name__, x[0], 2 + len(module.kernel_size))
        found: dict[str, Contribution] = {}
        if "weight" in names:
            found["weight"] = weight_contribution(module, x[0], gy, num_examples)
        if "bias" in names:
            found["bias"] = bias_contribution(gy, num_examples)
        return found


def weight_contribution(
    module: nn.Conv1d | nn.Conv2d | nn.Conv3d, x: Tensor, gy: Tensor, num_examples: int
) -> Contribution:
    """Per-example gradients of the weight that the convolution was computed with."""
    shape = (module.out_channels, module.in_channels // module.groups, *module.kernel_size)
    x, padding = explicit_padding(module, x)
    if module.groups == 1 and all(k == 1 for k in module.kernel_size) and not any(padding):
        for dim, stride in enumerate(module.stride, start=2):
            x = x[(slice(None),) * dim + (slice(None, None, stride),)] if stride > 1 else x
        a, g = (by_example(t.movedim(1, -1), num_examples, 1) for t in (x, gy))
        return Outer(a, g, shape)  # every pixel alone: a linear layer
    geometry = Geometry(module.stride, padding, module.dilation, module.groups)
    return Conv(x, gy, shape, geometry, num_examples)


def bias_contribution(gy: Tensor, num_examples: int) -> Dense:
    """Sums of the output gradient over all positions of an example, ``[B, O]``."""
    per_row = gy.flatten(2).sum(2, dtype=wide(gy.dtype))
    return Dense(by_example(per_row, num_examples, 1).sum(1))


def explicit_padding(module: nn.Conv1d | nn.Conv2d | nn.Conv3d, x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Apply what is not symmetric padding with zeros; returns the input and the zero padding that remains."""
    zeros = (0,) * len(module.kernel_size)
    if module.padding == "valid":
        return x, zeros
    both = module._reversed_padding_repeated_twice  # last dimension first, a number for either side
    if module.padding_mode != "zeros":
        return F.pad(x, both, mode=module.padding_mode), zeros
    before, after = both[-2::-2], both[-1::-2]
    if before != after:  # "same" with a kernel of even size
        return F.pad(x, both), zeros
    return x, tuple(before)
