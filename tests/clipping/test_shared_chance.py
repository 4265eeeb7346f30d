"""Chance that a physical batch shares: it is told from draws of each example alone, and from draws that change nothing."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.clipping.stepping import D, Net, step, x

WEIGHT = torch.ones(D, D)
SHARED: dict[str, Callable[[Tensor], Tensor]] = {
    "a layer that is skipped": lambda h: h if torch.rand([]) < 0.05 else 2 * h,
    "a layer that is skipped by depth": lambda h: h + h * h.new_empty(1, 1).bernoulli_(0.8),
    "dropout of positions": lambda h: h * F.dropout(WEIGHT[:1], 0.1),
    "dropout of weights": lambda h: h @ F.dropout(WEIGHT, 0.1),
    "noise on weights": lambda h: h @ (WEIGHT + torch.randn_like(WEIGHT)),
    "an order of features": lambda h: h[:, torch.randperm(h.shape[1])],
    "one of several": lambda h: h * torch.randint(1, 4, (1,)),
    "samples": lambda h: h * torch.multinomial(torch.arange(1.0, 5), 1),
    "Python's coin": lambda h: F.dropout(h, 0.1) * (1 + (random.random() < 0.5)),
    "numpy's coin": lambda h: h * (1 + (np.random.rand() < 0.5)),
}
OWN: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda h: F.dropout(h, 0.1),
    "depth of each example": lambda h: h + h * h.new_empty(len(h), 1).bernoulli_(0.8),
    "a coin of torch for each": lambda h: torch.stack([row * (torch.rand([]) < 0.5) for row in h]),
    "a coin of Python for each": lambda h: torch.stack([row * (random.random() < 0.5) for row in h]),
    "noise": lambda h: h + torch.randn_like(h),
    "a coin that changes nothing": lambda h: h if torch.rand([]) < 0.0 else 2 * h,
    "an order of no use": lambda h: h + 0 * torch.randperm(3).sum(),
    "dropout of nothing": lambda h: h * F.dropout(WEIGHT[:1], 0.0),
    "no chance": lambda h: 2 * h,
}


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("name", SHARED)
def test_what_a_batch_shares_of_chance_is_seen(name: str, size: int) -> None:
    assert step(Net(SHARED[name]), x(size, D)).shared


@pytest.mark.parametrize("name", OWN)
def test_what_each_example_draws_alone_and_what_changes_nothing_is_innocent(name: str) -> None:
    assert step(Net(OWN[name]), x(4, D)).shared == ""


def test_a_module_that_is_switched_off_shares_nothing() -> None:
    net = Net(lambda h: h * F.dropout(WEIGHT[:1], 0.1, net.training))
    clipper = step(net, x(4, D))
    assert clipper.shared
    net.eval()
    clipper.new_batch()
    clipper.backward(net(x(4, D)).square().sum(1))
    assert clipper.shared == ""
