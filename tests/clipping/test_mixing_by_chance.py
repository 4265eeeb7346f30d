"""Models that draw random numbers: mixing is seen on whichever side a coin falls, and other chance is innocent."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpexp.clipping.independence.chance import Chance, WithoutChance
from dpexp.errors import UserError
from tests.clipping.stepping import D, Net, step, x


class Mixup(nn.Module):
    """Mixes its inputs, which no gradient shows, when a coin falls on one side; or scales them then, which is innocent."""

    def __init__(self, coin: Callable[[Tensor], Any], mixes: bool = True):
        super().__init__()
        self.coin, self.mixes, self.first, self.last = coin, mixes, nn.Linear(D, D), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.as_tensor(self.coin(x), dtype=x.dtype).reshape(-1, 1)
        return self.last(torch.tanh(self.first(x + weight * (x.flip(0) if self.mixes else x))))


COINS: dict[str, Callable[[Tensor], Any]] = {
    "python, often": lambda x: random.random() < 0.5,
    "python, rarely": lambda x: random.random() < 0.05,
    "python, mostly": lambda x: random.random() > 0.05,
    "numpy": lambda x: np.random.rand() > 0.9,
    "a numpy law that is nearly a coin": lambda x: np.random.beta(0.1, 0.1),
    "torch, below": lambda x: torch.rand(()) < 0.3,
    "torch, above": lambda x: torch.rand(1).item() > 0.9,
    "torch, a number": lambda x: torch.randint(0, 10, ()) == 9,
    "torch, bernoulli": lambda x: torch.bernoulli(torch.tensor(0.2)),
    "the second toss": lambda x: torch.rand(()) < 2 and torch.rand(()) > 0.6,
    "one for each row": lambda x: torch.rand(len(x)) < 0.2,
}


@pytest.mark.parametrize("name", COINS)
def test_mixing_that_a_coin_decides_is_seen_on_whichever_side_it_falls(name: str) -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    with pytest.raises(UserError, match="mixes examples"):
        step(Mixup(COINS[name]), x())


def test_a_coin_that_mixes_nothing_is_innocent_and_dropout_is_no_coin() -> None:
    for coin in (*COINS.values(), lambda x: torch.randn(len(x)), lambda x: [random.random() for _ in x]):
        step(Mixup(coin, mixes=False), x())
    h = x()
    with WithoutChance(Chance()) as chance:
        F.dropout(h, 0.3, training=True)
        assert not chance.drew
        torch.rand(3)
    assert chance.drew


def test_numbers_that_are_drawn_in_some_batches_alone_are_none_of_chance_there() -> None:
    """Read as a list, a number decides unseen: batches of the same shapes run without a look at each operation."""
    drawn = []

    def some(h: Tensor) -> Tensor:
        if h[0].detach().tolist() == first:
            return h
        drawn.append(torch.rand(len(h), 1))
        return h + 0 * drawn[-1]

    model = Net(some)
    first = torch.tanh(model.first(x()))[0].tolist()
    assert step(model, x()).notes == []
    drawn_by_chance = [bool((numbers != numbers[0]).any()) for numbers in drawn]
    assert drawn_by_chance.count(True) == 1
    assert not drawn_by_chance[-1]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("kept", [0.1, 0.9])
def test_a_mask_of_one_number_for_each_example_is_no_coin_where_one_is_alone(size: int, kept: float) -> None:
    """Stochastic depth: half of a batch of two is one example, whose mask has one number."""

    def depth(h: Tensor) -> Tensor:
        return h + 2 * h * h.new_empty(len(h), 1).bernoulli_(kept)

    step(Net(depth), x(size, D))
    with pytest.raises(UserError, match="mixes examples"):
        step(Net(lambda h: depth(h - h.mean(0).detach())), x(size, D))
