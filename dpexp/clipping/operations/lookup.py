"""``F.embedding`` and ``table[ids]``: rows of a table, by index, with repeats and ``padding_idx``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dpexp.clipping.gradients import Lookup, PerExampleGradient
from dpexp.clipping.tapping.uses import Arrival, Formula


class Embedding(Formula):
    """``F.embedding``, without the options that make it more than a lookup."""

    label = "embedding"
    names: tuple[str, ...] = (
        "input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse",
    )  # fmt: skip

    def covers(self, given: dict[str, Any]) -> bool:
        return not any(given.get(option) for option in ("max_norm", "scale_grad_by_freq", "sparse"))

    def gradient(self, name: str, arrived: Arrival) -> PerExampleGradient:
        ids, count = arrived.tensor("input"), arrived.value("weight").shape[0]
        skipped = arrived.option("padding_idx")
        ids = ids.reshape(arrived.num_examples, -1)
        return Lookup(ids, arrived.output_gradient(1), count, None if skipped is None else skipped % count)


class Indexed(Embedding):
    """``table[ids]`` with whole rows of a matrix and one index per position, which may count from the end."""

    names = ("weight", "input")

    def covers(self, given: dict[str, Any]) -> bool:
        table, ids = given["weight"], given["input"]
        whole = isinstance(ids, Tensor) and ids.dtype in (torch.int32, torch.int64)
        return table.dim() == 2 and whole and ids.dim() > 0

    def gradient(self, name: str, arrived: Arrival) -> PerExampleGradient:
        ids, count = arrived.tensor("input"), arrived.value("weight").shape[0]
        ids = torch.where(ids < 0, ids + count, ids).reshape(arrived.num_examples, -1)
        return Lookup(ids, arrived.output_gradient(1), count)
