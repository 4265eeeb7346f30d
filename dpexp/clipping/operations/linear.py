"""Matrix products with a weight: ``F.linear``, ``x @ W``, ``addmm``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from dpexp.clipping.gradients import Dense, Grouped, Outer, PerExampleGradient
from dpexp.clipping.gradients.numerics import wide
from dpexp.clipping.tapping.uses import Arrival, Formula, is_one_of


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


class GroupedProduct(Formula):
    """``y_r = x_r W_e``: the rows of the batch lie by the matrix e that they meet, up to ``offs[e]``, as those of experts do."""

    label, by_place = "product by group", True
    names = ("input", "weight", "offs")
    keywords: ClassVar[dict[str, str]] = {"mat_a": "input", "mat_b": "weight"}

    def applies(self, given: dict[str, Any], values: Sequence[Tensor], batched: Sequence[Tensor]) -> bool:
        plain = given.get("bias") is None and given.get("out_dtype") is None
        shaped = given["input"].dim() == 2 and given["weight"].dim() == 3
        return plain and shaped and given.get("offs") is not None and is_one_of(given["weight"], values)

    def reads(self, valued: set[str]) -> set[str]:
        return {"input", "offs"}

    def gradient(self, name: str, arrived: Arrival) -> PerExampleGradient:
        assert arrived.places is not None
        ends, count = arrived.tensor("offs").long(), len(arrived.value("weight"))
        which = torch.searchsorted(ends, arrived.places, right=True).view(arrived.num_examples, -1)
        # rows behind the last end met none
        g = arrived.output_gradient(1).masked_fill((which == count).unsqueeze(2), 0)
        return Grouped(g, arrived.rows("input"), which.clamp(max=count - 1), count)


class StackedProduct(Formula):
    """``y_e = x_e W_e``: a matrix for each row of the first dimension, as dense experts have one each."""

    label, autocast, by_place = "stacked product", True, True
    names = ("input", "weight")
    keywords: ClassVar[dict[str, str]] = {"mat2": "weight"}

    def gradient(self, name: str, arrived: Arrival) -> PerExampleGradient:
        assert arrived.places is not None
        # the rows of the examples stand in front, and are those of the matrices unless they were turned
        which = arrived.places[None, :] if arrived.turned else arrived.places[:, None]
        which = which.expand(arrived.gy.shape[:2]).reshape(arrived.num_examples, -1)
        count = len(arrived.value("weight"))
        return Grouped(arrived.output_gradient(1), arrived.rows("input"), which, count)


def shift(arrived: Arrival) -> Dense:
    """Sum the output gradients ``[B, T, p]`` over the positions of each example."""
    g = arrived.output_gradient(1)
    total = g.squeeze(1) if g.shape[1] == 1 else g.sum(1, dtype=wide(g.dtype))
    return Dense(total.reshape(arrived.num_examples, *arrived.value("bias").shape))
