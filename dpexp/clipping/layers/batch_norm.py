"""``nn.BatchNorm1d/2d/3d`` and ``nn.SyncBatchNorm``: refused, unless their statistics are constants."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dpexp.clipping.contributions import Contribution, Dense
from dpexp.clipping.contributions.numerics import by_example, wide
from dpexp.clipping.layers.base import WEIGHT_AND_BIAS

_WAY_OUT = (
    "replace it by nn.GroupNorm(groups, channels); to keep the statistics of a public model as constants, call "
    ".eval() on it and set its track_running_stats=False"
)


class BatchNorm:
    """Batch normalisation couples examples. With constant statistics it is an affine map of each pixel alone."""

    name = "batch norm"
    parameters = WEIGHT_AND_BIAS

    def refusal(self, module: nn.Module) -> str | None:
        assert isinstance(module, _BatchNorm)
        if module.training or module.running_mean is None:
            return (
                "it normalises by statistics of the whole batch, so one example's gradient depends on the others: "
                + _WAY_OUT
            )
        if module.track_running_stats:
            return (
                "in training mode it tracks statistics of the private data, which leave the model without noise: "
                + _WAY_OUT
            )
        return None

    def contributions(
        self, module: nn.Module, x: tuple[Tensor, ...], gy: Tensor, num_examples: int, names: set[str]
    ) -> dict[str, Contribution]:
        assert isinstance(module, _BatchNorm)
        assert module.running_mean is not None
        assert module.running_var is not None
        dtype = wide(gy.dtype)
        gy = gy.flatten(2) if gy.dim() > 2 else gy.unsqueeze(2)
        shift = gy.sum(2, dtype=dtype)
        found: dict[str, Contribution] = {}
        if "weight" in names:
            pixels = x[0].to(dtype).reshape(gy.shape)
            mean, rstd = module.running_mean.to(dtype), (module.running_var.to(dtype) + module.eps).rsqrt()
            scale = ((pixels * gy).sum(2) - mean * shift) * rstd
            found["weight"] = Dense(by_example(scale, num_examples, 1).sum(1))
        if "bias" in names:
            found["bias"] = Dense(by_example(shift, num_examples, 1).sum(1))
        return found
