"""The weights of a proof tell examples apart, and the proof uses them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from dpexp.clipping import attach
from dpexp.clipping.layouts import SIGNED, UNSIGNED, proven, weights
from dpexp.errors import UserError
from tests.clipping.zoo import C, D

EXCHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "mirror images": lambda h: h.flip(0),
    "neighbours": lambda h: h.roll(1, 0),
    "halves": lambda h: h.roll(len(h) // 2, 0),
}


@pytest.mark.parametrize("levels", [SIGNED, UNSIGNED])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_weights_change_when_examples_are_exchanged(exchange: str, levels: tuple[float, ...]) -> None:
    for size in range(2, 200):
        found = weights(size, levels)
        assert not torch.equal(found, EXCHANGES[exchange](found)), size


@pytest.mark.parametrize("levels", [SIGNED, UNSIGNED])
def test_multiplying_by_a_weight_rounds_nothing(levels: tuple[float, ...]) -> None:
    x = torch.randn(100)
    for level in levels:
        assert level == 0 or torch.equal(x * level / level, x)


def test_a_proof_fails_for_one_row_and_says_nothing_about_zeros() -> None:
    value = torch.randn(6, 2)
    by_row = weights(6, SIGNED)
    plain, right = (value, value.abs()), (by_row[:, None] * value, value.abs())
    assert proven(plain, right, by_row, torch.float32)
    wrong = right[0].clone()
    wrong[4, 1] *= -1
    assert proven(plain, (wrong, value.abs()), by_row, torch.float32) is False
    zero = torch.zeros(6, 2)
    assert proven((zero, zero), (zero, zero), by_row, torch.float32) is None


class Mixed(nn.Module):
    """Each example is mixed with another one of its batch."""

    def __init__(self, exchange: Callable[[Tensor], Tensor]):
        super().__init__()
        self.first, self.second, self.exchange = nn.Linear(D, 6), nn.Linear(6, C), exchange

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.second(torch.tanh(0.7 * h + 0.3 * self.exchange(h)))


@pytest.mark.parametrize("engine", ["auto", "ghost", "opacus"])
@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_examples_mixed_with_each_other_are_refused(exchange: str, size: int, engine: str) -> None:
    model = Mixed(EXCHANGES[exchange])
    clipper = attach(model, engine=engine)
    with pytest.raises(UserError):
        clipper.backward(model(torch.randn(size, D)).pow(2).sum(1))
    assert all(p.grad is None for p in model.parameters())
