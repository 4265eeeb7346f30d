"""``F.conv1d/2d/3d`` and their transposes, with every option."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from dpexp.clipping.gradients import Conv, Dense, Geometry, Outer, PerExampleGradient
from dpexp.clipping.gradients.numerics import by_example, wide
from dpexp.clipping.tapping.uses import Arrival, Formula


class Convolution(Formula):
    """Convolutions with any stride, padding, dilation and groups. A module's padding mode has been applied before."""

    label, autocast = "convolution", True
    names: tuple[str, ...] = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")

    def covers(self, given: dict[str, Any]) -> bool:
        return given["input"].dim() == given["weight"].dim()

    def gradient(self, name: str, arrived: Arrival) -> PerExampleGradient:
        gy, count = arrived.gy, arrived.num_examples
        if name == "bias":
            # sums of the output gradient over all positions of an example
            return Dense(by_example(gy.flatten(2).sum(2, dtype=wide(gy.dtype)), count, 1).sum(1))
        shape, options = arrived.value("weight").shape, arrived.use.template.given
        return self.weight(arrived.tensor("input"), gy, shape, options, count)

    def weight(
        self, x: Tensor, gy: Tensor, shape: Sequence[int], options: dict[str, Any], count: int
    ) -> PerExampleGradient:
        """Find the per-example gradients of a weight of this shape, for ``count`` examples."""
        kernel = tuple(shape[2:])
        stride, dilation = (several(options.get(o, 1), len(kernel)) for o in ("stride", "dilation"))
        groups = options.get("groups", 1)
        x, padding = explicit_padding(x, options.get("padding", 0), kernel, dilation)
        if groups == 1 and all(k == 1 for k in kernel) and not any(padding):
            for dim, step in enumerate(stride, start=2):
                x = x[(slice(None),) * dim + (slice(None, None, step),)] if step > 1 else x
            # every pixel alone: a linear layer
            a, g = (by_example(t.movedim(1, -1), count, 1) for t in (x, gy))
            return Outer(a, g, shape)
        return Conv(x, gy, shape, Geometry(stride, padding, dilation, groups), count)


class TransposedConvolution(Convolution):
    """Transposed convolutions, with ``output_padding`` or an ``output_size`` given in the call."""

    label = "transposed convolution"
    names = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")

    def weight(
        self, x: Tensor, gy: Tensor, shape: Sequence[int], options: dict[str, Any], count: int
    ) -> PerExampleGradient:
        kernel = tuple(shape[2:])
        stride, dilation, padding = (
            several(options.get(option, default), len(kernel))
            for option, default in (("stride", 1), ("dilation", 1), ("padding", 0))
        )
        sizes = zip(x.shape[2:], gy.shape[2:], kernel, stride, padding, dilation, strict=True)
        rest = tuple(out - ((n - 1) * s - 2 * p + d * (k - 1) + 1) for n, out, k, s, p, d in sizes)
        geometry = Geometry(stride, padding, dilation, options.get("groups", 1), True, rest)
        return Conv(x, gy, shape, geometry, count)


def several(option: int | Sequence[int], dims: int) -> tuple[int, ...]:
    """Return an option as one number per spatial dimension."""
    given = (option,) if isinstance(option, int) else tuple(option)
    return given * dims if len(given) == 1 else given


def explicit_padding(
    x: Tensor, padding: str | int | Sequence[int], kernel: tuple[int, ...], dilation: tuple[int, ...]
) -> tuple[Tensor, tuple[int, ...]]:
    """Apply what is not symmetric; returns the input and the padding with zeros that remains."""
    zeros = (0,) * len(kernel)
    if padding == "valid":
        return x, zeros
    if padding != "same":
        assert not isinstance(padding, str)
        return x, several(padding, len(kernel))
    total = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    if all(n % 2 == 0 for n in total):
        return x, tuple(n // 2 for n in total)
    # a kernel of even size; the last dimension comes first
    return F.pad(x, [part for n in reversed(total) for part in (n // 2, n - n // 2)]), zeros
