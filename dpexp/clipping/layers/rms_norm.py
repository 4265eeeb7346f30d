"""``nn.RMSNorm``."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpexp.clipping.contributions import Contribution, Dense
from dpexp.clipping.contributions.numerics import wide
from dpexp.clipping.layers.layer_norm import scale_gradient


class RMSNorm:
    """Any ``normalized_shape``. The input is normalised again, in float32 at least."""

    name = "rms norm"
    parameters = frozenset({"weight"})

    def refusal(self, module: nn.Module) -> str | None:
        return None

    def contributions(
        self, module: nn.Module, x: tuple[Tensor, ...], gy: Tensor, num_examples: int, names: set[str]
    ) -> dict[str, Contribution]:
        assert isinstance(module, nn.RMSNorm)
        if "weight" not in names:
            return {}
        shape, dtype = module.normalized_shape, wide(x[0].dtype)
        eps = (
            torch.finfo(dtype).eps if module.eps is None else module.eps
        )  # torch takes that of the wider dtype, too
        normalised = F.rms_norm(x[0].to(dtype), shape, None, eps)
        return {"weight": Dense(scale_gradient(normalised, gy, len(shape), num_examples))}
