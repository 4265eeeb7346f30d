"""Matrix products with a weight: ``F.linear``, ``x @ W``, ``addmm``."""

from __future__ import annotations

from typing import Any, ClassVar

from dpexp.clipping.gradients import Dense, Outer, PerExampleGradient
from dpexp.clipping.gradients.numerics import wide
from dpexp.clipping.tapping.uses import Arrival, Formula


class Linear(Formula):
    """``y = x Wᵀ + b``: the weight's gradient is a sum of outer products, the bias's the sum of output gradients."""

    label, autocast = "linear", True
    names: tuple[str, ...] = ("input", "weight", "bias")

    def covers(self, given: dict[str, Any]) -> bool:
        return given["weight"].dim() == 2

    def gradient(self, name: str, arrived: Arrival) -> PerExampleGradient:
        if name == "bias":
            return shift(arrived)
        return Outer(arrived.rows("input"), arrived.output_gradient(1))


class Product(Linear):
    """``y = x W`` with a matrix W, which is stored as ``[inputs, outputs]``."""

    label = "matrix product"
    names: tuple[str, ...] = ("input", "weight")
    keywords: ClassVar[dict[str, str]] = {"other": "weight", "mat2": "weight"}

    def covers(self, given: dict[str, Any]) -> bool:
        return given["input"].dim() >= 2 and super().covers(given)

    def gradient(self, name: str, arrived: Arrival) -> PerExampleGradient:
        if name == "bias":
            return shift(arrived)
        return Outer(arrived.output_gradient(1), arrived.rows("input"))


class AddedProduct(Product):
    """``y = b + x W``, as transformers' ``Conv1D`` calls it."""

    label = "linear"
    names = ("bias", "input", "weight")
    keywords: ClassVar[dict[str, str]] = {"input": "bias", "mat1": "input", "mat2": "weight"}

    def covers(self, given: dict[str, Any]) -> bool:
        plain = given.get("beta", 1) == 1 and given.get("alpha", 1) == 1 and given["bias"].dim() == 1
        return plain and super().covers(given)


def shift(arrived: Arrival) -> Dense:
    """Sum the output gradients ``[B, T, p]`` over the positions of each example."""
    g = arrived.output_gradient(1)
    total = g.squeeze(1) if g.shape[1] == 1 else g.sum(1, dtype=wide(g.dtype))
    return Dense(total.reshape(arrived.num_examples, *arrived.value("bias").shape))
