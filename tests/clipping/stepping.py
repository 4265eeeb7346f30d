"""A small network, its inputs and one step with a clipper, for tests of models that may mix examples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dpexp.clipping import attach

B, T, D = 5, 4, 6


class Net(nn.Module):
    """Two layers with something between them."""

    def __init__(self, between: Callable[..., Tensor] | nn.Module):
        super().__init__()
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, 3)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(torch.tanh(self.first(x))))


def step(model: nn.Module, *batch: Any, engine: str = "auto", dim: int = 0, **settings: Any) -> Any:
    clipper = attach(model, engine=engine, **settings)
    losses = model(*batch).square()
    clipper.backward(losses.transpose(0, dim).flatten(1).sum(1))
    return clipper


def x(*shape: int) -> Tensor:
    return torch.randn(*(shape or (B, D)), generator=torch.Generator().manual_seed(1))


class Forces(Net):
    """Its features are the gradients of an energy."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (forces,) = torch.autograd.grad(super().forward(x).square().sum(), x)
        return super().forward(forces)
