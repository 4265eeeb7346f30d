"""``nn.Linear`` on inputs of any rank."""

from __future__ import annotations

from torch import Tensor, nn

from dpexp.clipping.contributions import Contribution, Dense, Outer
from dpexp.clipping.contributions.numerics import by_example, wide
from dpexp.clipping.layers.base import WEIGHT_AND_BIAS


class Linear:
    """``y = x Wᵀ + b``: the weight's gradient is a sum of outer products, the bias's the sum of output
    gradients.

    Args:
        name: for the coverage table.
        input_first: the weight is stored as ``[inputs, outputs]``, as transformers' ``Conv1D`` does.
    """

    parameters = WEIGHT_AND_BIAS

    def __init__(self, name: str = "linear", input_first: bool = False):
        self.name, self.input_first = name, input_first

    def refusal(self, module: nn.Module) -> str | None:
        return None

    def contributions(
        self, module: nn.Module, x: tuple[Tensor, ...], gy: Tensor, num_examples: int, names: set[str]
    ) -> dict[str, Contribution]:
        found: dict[str, Contribution] = {}
        g = by_example(gy, num_examples, 1)
        if "weight" in names:
            a = by_example(x[0], num_examples, 1)
            found["weight"] = Outer(g, a) if self.input_first else Outer(a, g)
        if "bias" in names:
            found["bias"] = Dense(g.squeeze(1) if g.shape[1] == 1 else g.sum(1, dtype=wide(g.dtype)))
        return found
