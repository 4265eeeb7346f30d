"""Wide residual networks for private training, as De et al. 2022 describe them and He et al. (section 5.1) use them.

Against Zagoruyko & Komodakis 2016: GroupNorm with 16 groups for BatchNorm, which would couple the examples; convolutions with
standardised weights, a gain and a bias; the activation before the norm; a norm on the shortcut where its shape changes. A
block computes ``x + conv(norm(relu(conv(norm(relu(x))))))``.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpexp.errors import UserError
from dpexp.models.cnn import Shape


class StandardisedConv2d(nn.Conv2d):
    """A convolution with weights ``gain · (W - mean) / sqrt(fan_in · variance)`` for each output channel (Brock et al. 2021).

    Mean and variance are those of one output channel's weights. ``scale`` is ``fan_in^-1/2``; ``eps`` is added to the variance.
    """

    def __init__(self, inputs: int, outputs: int, kernel_size: int, stride: int = 1, padding: int = 0):
        super().__init__(inputs, outputs, kernel_size, stride, padding)
        fan_in = self.weight[0].numel()
        self.gain = nn.Parameter(torch.ones(outputs, 1, 1, 1))
        self.scale, self.eps = fan_in**-0.5, 1e-6
        truncated_normal_(self.weight, fan_in)
        assert self.bias is not None
        nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        variance, mean = torch.var_mean(self.weight, dim=(1, 2, 3), correction=0, keepdim=True)
        weight = (self.weight - mean) * (variance + self.eps).rsqrt() * (self.gain * self.scale)
        return self._conv_forward(input, weight, self.bias)


class WideResNet(nn.Module):
    """(depth - 4) / 6 blocks in each of three stages of base · widening · (1, 2, 4) channels, the last two at half the size.

    Args:
        shape: channels, height and width of an image; any size will do.
        classes: outputs.
        depth: 16 for WRN-16-4.
        widening: 4 for WRN-16-4.
        base: channels behind the first convolution.
        groups: of every GroupNorm; a divisor of all numbers of channels.
        standardise: False: ordinary convolutions without bias.

    Raises:
        UserError: a depth or a number of groups that does not come out even.
    """

    def __init__(
        self,
        shape: Shape,
        classes: int,
        *,
        depth: int = 16,
        widening: int = 4,
        base: int = 16,
        groups: int = 16,
        standardise: bool = True,
    ):
        super().__init__()
        if depth < 10 or (depth - 4) % 6:
            raise UserError(
                f"model.config.depth={depth}: a wide ResNet has depth 10, 16, 22, 28, ... (4 + 6n)"
            )
        if base % groups:
            raise UserError(
                f"model.config.groups={groups}: must divide the {base} channels of the first convolution"
            )
        self.stem = _convolution(shape[0], base, 3, 1, standardise)
        widths = [base, *(base * widening * 2**stage for stage in range(3))]
        blocks = []
        for stage, (before, width) in enumerate(pairwise(widths)):
            for number in range((depth - 4) // 6):
                stride = 2 if stage and not number else 1
                inputs = width if number else before
                blocks.append(ResidualBlock(inputs, width, stride, groups, standardise, projected=not number))
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.GroupNorm(groups, widths[-1])
        self.head = nn.Linear(widths[-1], classes)
        truncated_normal_(self.head.weight, widths[-1])
        nn.init.zeros_(self.head.bias)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """`[B, C, H, W]` to logits `[B, classes]`."""
        x = self.norm(F.relu(self.blocks(self.stem(pixel_values))))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits

    def get_classifier(self) -> nn.Module:
        """The output layer."""
        return self.head


class ResidualBlock(nn.Module):
    """Activation, norm, convolution, twice, beside a shortcut: `[B, C, H, W]` to `[B, width, H / stride, W / stride]`.

    `projected`: the shortcut is activation, norm and a convolution of 1 x 1; else the input itself.
    """

    def __init__(
        self, inputs: int, width: int, stride: int, groups: int, standardise: bool, *, projected: bool
    ):
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, inputs)
        self.conv1 = _convolution(inputs, width, 3, stride, standardise)
        self.norm2 = nn.GroupNorm(groups, width)
        self.conv2 = _convolution(width, width, 3, 1, standardise)
        self.shortcut = (
            nn.Sequential(nn.GroupNorm(groups, inputs), _convolution(inputs, width, 1, stride, standardise))
            if projected
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        active = F.relu(x)
        kept: Tensor = x if self.shortcut is None else self.shortcut(active)
        inner = self.conv1(self.norm1(active))
        return kept + self.conv2(self.norm2(F.relu(inner)))


def _convolution(inputs: int, outputs: int, kernel_size: int, stride: int, standardise: bool) -> nn.Conv2d:
    padding = kernel_size // 2
    if standardise:
        return StandardisedConv2d(inputs, outputs, kernel_size, stride, padding)
    return nn.Conv2d(inputs, outputs, kernel_size, stride, padding, bias=False)


def truncated_normal_(weight: Tensor, fan_in: int) -> None:
    """Variance 1 / fan_in, cut off at two deviations of the normal distribution before it was cut."""
    # deviation of a standard normal variable that is cut off at 2
    kept = 0.87962566103423978
    deviation = fan_in**-0.5 / kept
    nn.init.trunc_normal_(weight, std=deviation, a=-2 * deviation, b=2 * deviation)
