"""What traps are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpexp.conform.case import B, Batch, Builder, Case, plain_sum_of_squares

T, D, V, C = 5, 6, 11, 3
"""Positions, features, words, classes: no two alike, nor like `B`."""


@dataclass(frozen=True)
class Trap:
    """One trap: its name in the table, what builds it, and the precision that it is asked in (None: as it is built)."""

    name: str
    build: Builder
    dtype: torch.dtype | None = torch.float64


class Family:
    """Collects the traps of a file: ``@family("name")`` above a function that builds a `Case`."""

    def __init__(self) -> None:
        self.traps: dict[str, Trap] = {}

    def __call__(self, name: str, dtype: torch.dtype | None = torch.float64) -> Callable[[Builder], Builder]:
        def add(build: Builder) -> Builder:
            assert name not in self.traps
            self.traps[name] = Trap(name, build, dtype)
            return build

        return add


def floats(*shape: int, examples: int = B) -> Batch:
    """Features ``[examples, *shape]``, the last example 20 times as large as the others."""
    x = torch.randn(examples, *shape)
    x[-1] *= 20
    return {"x": x}


def words(length: int = T, examples: int = B) -> Batch:
    """Tokens ``[examples, length]``."""
    return {"ids": torch.randint(0, V, (examples, length))}


def on(model: nn.Module, batch: Batch | None = None, **options: object) -> Case:
    """The plain case: features ``[B, D]`` unless given, and the sum of squares."""
    return Case(model, floats(D) if batch is None else batch, plain_sum_of_squares, **options)  # type: ignore[arg-type]


class Then(nn.Module):
    """A body, and a linear map of width `C` over its last dimension."""

    def __init__(self, body: nn.Module, width: int = D):
        super().__init__()
        self.body, self.out = body, nn.Linear(width, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.body(x)))
