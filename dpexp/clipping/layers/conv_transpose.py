"""``nn.ConvTranspose1d``, ``nn.ConvTranspose2d``, ``nn.ConvTranspose3d``."""

from __future__ import annotations

from torch import Tensor, nn

from dpexp.clipping.contributions import Contribution, Conv, Geometry
from dpexp.clipping.layers.base import WEIGHT_AND_BIAS, check_rank
from dpexp.clipping.layers.conv import bias_contribution


class TransposedConvolution:
    """Transposed convolutions, with ``output_padding`` or an ``output_size`` given in the call."""

    name = "transposed convolution"
    parameters = WEIGHT_AND_BIAS

    def refusal(self, module: nn.Module) -> str | None:
        return None

    def contributions(
        self, module: nn.Module, x: tuple[Tensor, ...], gy: Tensor, num_examples: int, names: set[str]
    ) -> dict[str, Contribution]:
        assert isinstance(module, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d)
        check_rank(type(module).__name__, x[0], 2 + len(module.kernel_size))
        found: dict[str, Contribution] = {}
        if "weight" in names:
            shape = (module.in_channels, module.out_channels // module.groups, *module.kernel_size)
            found["weight"] = Conv(x[0], gy, shape, _geometry(module, x[0], gy), num_examples)
        if "bias" in names:
            found["bias"] = bias_contribution(gy, num_examples)
        return found


def _geometry(
    module: nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d, x: Tensor, gy: Tensor
) -> Geometry:
    padding = module.padding
    assert not isinstance(padding, str)  # torch allows "same" and "valid" only for plain convolutions
    sizes = zip(
        x.shape[2:], gy.shape[2:], module.kernel_size, module.stride, padding, module.dilation, strict=True
    )
    output_padding = tuple(out - ((n - 1) * s - 2 * p + d * (k - 1) + 1) for n, out, k, s, p, d in sizes)
    return Geometry(module.stride, padding, module.dilation, module.groups, True, output_padding)
