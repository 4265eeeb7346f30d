"""Small rows and losses, and the proof that every step of a clipped model equals the gradients of each example alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dpexp.clipping import attach
from dpexp.errors import UserError
from tests.clipping.test_engines import check, expected, naive
from tests.clipping.zoo import Problem

WIDTH = 4
D = WIDTH
ENGINES = ["auto", "ghost", "loop"]
Batch = dict[str, Any]
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


def positional(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch["x"]).square().sum(1)


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3)).double()


def exact_in_company(
    model: nn.Module,
    batches: list[Batch],
    engine: str,
    losses: Callable[..., Tensor] = square,
    patient: bool = False,
) -> None:
    """Every step equals the loss-by-loss gradients of a model without a clipper, on the same batch.

    ``patient``: one that says so is run again.
    """
    model.double()
    plain = copy.deepcopy(model)
    clipper = attach(model, clip_norm=0.5, engine=engine)
    for batch in batches:
        each = [
            torch.autograd.grad(loss, list(plain.parameters()), retain_graph=True, materialize_grads=True)
            for loss in losses(plain, batch)
        ]
        per_example = {
            name: torch.stack([grads[j] for grads in each])
            for j, (name, _) in enumerate(plain.named_parameters())
        }
        model.zero_grad()
        try:
            report = clipper.backward(losses(model, batch))
        except UserError as error:
            if not patient or "run this step again" not in str(error):
                raise
            report = clipper.backward(losses(model, batch))
        norms, sums = expected(per_example, clipper.groups, clipper.thresholds)
        torch.testing.assert_close(report.norms, norms, rtol=1e-9, atol=1e-12)
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.grad, sums[name], rtol=1e-9, atol=1e-11)
