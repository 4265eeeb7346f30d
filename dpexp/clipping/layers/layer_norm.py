"""``nn.LayerNorm``."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from dpexp.clipping.contributions import Contribution, Dense
from dpexp.clipping.contributions.numerics import by_example, wide
from dpexp.clipping.layers.base import WEIGHT_AND_BIAS


class LayerNorm:
    """Any ``normalized_shape``, with or without bias. The input is normalised again, in float32 at least."""

    name = "layer norm"
    parameters = WEIGHT_AND_BIAS

    def refusal(self, module: nn.Module) -> str | None:
        return None

    def contributions(
        self, module: nn.Module, x: tuple[Tensor, ...], gy: Tensor, num_examples: int, names: set[str]
    ) -> dict[str, Contribution]:
        assert isinstance(module, nn.LayerNorm)
        found: dict[str, Contribution] = {}
        shape = module.normalized_shape
        if "weight" in names:
            normalised = F.layer_norm(x[0].to(wide(x[0].dtype)), shape, None, None, module.eps)
            found["weight"] = Dense(scale_gradient(normalised, gy, len(shape), num_examples))
        if "bias" in names:
            found["bias"] = Dense(by_example(gy, num_examples, len(shape)).sum(1, dtype=wide(gy.dtype)))
        return found


def scale_gradient(normalised: Tensor, gy: Tensor, features: int, num_examples: int) -> Tensor:
    """Per-example gradients ``[B, *features]`` of a scale that multiplies ``normalised``, which is overwritten."""
    return by_example(normalised.mul_(gy), num_examples, features).sum(1)
