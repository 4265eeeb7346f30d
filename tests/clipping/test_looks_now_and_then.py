"""Examples that begin to mix after some steps are noticed, by new operations or now and then; vanishing gradients are fine."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dpexp.clipping import attach
from dpexp.errors import UserError


class Late(nn.Module):
    """Begins to mix examples later."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.mix = nn.Linear(4, 6), nn.Linear(6, 3), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x).tanh()
        return self.last(h + 0.5 * h.flip(0) if self.mix else h)


class LateAlong(Late):
    """By the same operations as before, along another dimension."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x).tanh()
        return self.last(h + 0.5 * h.flip(0 if self.mix else 1))


class LateAlike(Late):
    """By the same operations along the same dimensions as before, with other numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, one = self.first(x).tanh(), torch.eye(len(x))
        partner = one.flip(0) if self.mix else one
        return self.last(h + 0.5 * (h * partner[..., None]).sum(1))


@pytest.mark.parametrize("kind", [Late, LateAlong])
@pytest.mark.parametrize("groups", ["layer", "flat"])
def test_examples_that_begin_to_mix_later_are_noticed_by_new_operations(
    groups: str, kind: type[Late]
) -> None:
    torch.manual_seed(0)
    model, x = kind(), torch.randn(5, 4)
    # no plain switch, which is looked at at once
    model.mix = []
    clipper = attach(model, groups=groups)
    # the second step is proven again in any case
    for _ in range(2):
        clipper.backward(model(x).square().sum(1))
    model.mix.append(True)
    model.zero_grad()
    with pytest.raises(UserError, match="earlier steps did not show"):
        clipper.backward(model(x).square().sum(1))
    with pytest.raises(UserError, match=r"first .* mixes examples"):
        clipper.backward(model(x).square().sum(1))
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("groups", ["layer", "flat"])
def test_examples_that_begin_to_mix_later_are_noticed_now_and_then(groups: str) -> None:
    torch.manual_seed(0)
    model, x = LateAlike(), torch.randn(5, 4)
    # no plain switch, which is looked at at once
    model.mix = []
    clipper = attach(model, groups=groups)
    for _ in range(2):
        clipper.backward(model(x).square().sum(1))
    # steps 3 to 15 are not looked at, step 16 is
    model.mix.append(True)
    for _ in range(3, 16):
        clipper.backward(model(x).square().sum(1))
    model.zero_grad()
    with pytest.raises(UserError, match=r"first .*other than in earlier steps.* mixes examples"):
        clipper.backward(model(x).square().sum(1))
    assert all(p.grad is None for p in model.parameters())


def test_opacus_is_proven_again_now_and_then() -> None:
    torch.manual_seed(0)
    model, x = LateAlike(), torch.randn(5, 4)
    # no plain switch, which is looked at at once
    model.mix = []
    clipper = attach(model, engine="opacus")
    for _ in range(2):
        clipper.backward(model(x).square().sum(1))
    model.mix.append(True)
    for _ in range(3, 16):
        clipper.backward(model(x).square().sum(1))
    with pytest.raises(UserError, match=r"do not add up|mixes examples"):
        clipper.backward(model(x).square().sum(1))


@pytest.mark.parametrize("engine", ["auto", "loop"])
def test_vanishing_gradients_are_no_reason_to_doubt_a_proof(engine: str) -> None:
    """Late in training most gradients are rounding errors: neither look must stop it."""
    model, x = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), torch.randn(9, 4)
    clipper = attach(model, groups="layer", engine=engine)
    scale = torch.tensor([1.0, 1.0, 1e-20, 1e-37, 1e-42, 0.0, *[1e-40] * 3])
    for _ in range(17):
        clipper.backward(model(x).square().sum(1) * scale)
