"""A small network, its losses, and the names of all engines."""

from __future__ import annotations

import torch
from torch import nn

from dpexp.clipping.engines import ENGINES
from tests.clipping.zoo import C, D

ALL = list(ENGINES)


def mlp(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.Linear(8, C)).to(dtype)


def losses_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).pow(2).sum(1)
