"""Small rows and losses, and the proof that every step of a clipped model equals the gradients of each example alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from dpexp.clipping import attach
from tests.clipping.test_engines import check, naive
from tests.clipping.zoo import Problem

WIDTH = 4
Losses = Callable[[nn.Module, dict[str, Tensor]], Tensor]


def square(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (model(**batch) - 0.3).pow(2).flatten(1).sum(1)


def rows(*shape: int) -> dict[str, Tensor]:
    return {"x": torch.randn(*shape, WIDTH, dtype=torch.float64)}


def exact(model: nn.Module, batches: list[dict[str, Tensor]], engine: str, losses: Losses = square) -> None:
    """Every step equals the naive loop, whatever the steps before have taught the engine."""
    model.double()
    alone = [naive(Problem(model, batch, losses)) for batch in batches]
    clipper = attach(model, clip_norm=0.5, engine=engine)
    for batch, per_example in zip(batches, alone, strict=True):
        check(Problem(model, batch, losses), clipper, per_example, times=1)
