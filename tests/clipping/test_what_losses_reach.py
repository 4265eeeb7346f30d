"""Trainable weights outside of the model, behind its losses or left by it, are refused or named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpexp.clipping import attach
from dpexp.errors import UserError
from tests.clipping.stepping import D, Net, x


@pytest.mark.parametrize("engine", ["auto", "ghost", "opacus"])
def test_a_trainable_head_outside_of_the_model_is_refused(engine: str) -> None:
    model, head = nn.Linear(D, D), nn.Linear(D, 3)
    clipper = attach(model, engine=engine)
    with pytest.raises(UserError, match=r"shape \[3, 6\].*not in the attached model"):
        clipper.backward(head(model(x())).square().sum(1))
    assert model.weight.grad is None
    clipper.detach()
    head.requires_grad_(False)
    clipper = attach(model, engine=engine)
    clipper.backward(head(model(x())).square().sum(1))
    assert model.weight.grad is not None


def test_what_is_made_of_a_frozen_weight_is_refused_where_it_is_to_train() -> None:
    model = nn.Sequential(nn.Linear(D, D), nn.Linear(D, D).requires_grad_(False))
    clipper, head = attach(model), nn.Linear(D, D, bias=False)
    head.weight = nn.Parameter(model[1].weight)
    with pytest.raises(UserError, match=r"not in the attached model"):
        clipper.backward(head(model(x())).sum(1))
    optimizer = torch.optim.SGD([nn.Parameter(model[1].weight)], lr=1.0)
    with pytest.raises(UserError, match=r"not in the attached model"):
        clipper.backward(F.linear(model(x()), optimizer.param_groups[0]["params"][0]).sum(1))


def test_losses_that_nothing_trained_is_behind_say_what_may_be_merged() -> None:
    model = nn.Linear(D, D)
    with pytest.raises(UserError, match=r"adapters of PEFT alone that are merged or disabled"):
        attach(model).backward(model(x()).detach().sum(1))


def test_a_parameter_that_the_forward_makes_of_a_frozen_weight_is_no_head_beside_the_model() -> None:
    """As HiRA of peft does on the layers of GPT-2."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(D, 3), requires_grad=False)
            self.scale = nn.Parameter(torch.randn(3, D))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, nn.Parameter(self.weight.T) * self.scale)

    model, rows = Scaled(), x()
    (wanted,) = torch.autograd.grad(model(rows).square().sum(), [model.scale])
    clipper = attach(model, rule="none")
    clipper.backward(model(rows).square().sum(1))
    torch.testing.assert_close(model.scale.grad, wanted)


class Pairs(nn.Module):
    """Returns two vectors of each example, and their products with those of all others, as CLIP does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(D, 3), nn.Linear(D, 3)

    def forward(self, a: Tensor) -> Any:
        first, last = self.first(a), self.last(a)
        return {"all": first @ last.T, "first": first, "last": last}


def test_where_the_losses_do_not_use_what_compares_examples_the_way_out_is_to_leave_it_out() -> None:
    model = Pairs()
    clipper = attach(model)
    found = model(x())
    with pytest.raises(UserError, match="let the model return what they use"):
        clipper.backward((found["first"] * found["last"]).sum(1))


@pytest.mark.parametrize("other", [False, True])
@pytest.mark.parametrize("engine", ["auto", "ghost", "loop"])
def test_losses_of_a_forward_that_was_back_propagated_are_refused(engine: str, other: bool) -> None:
    model = Net(lambda h: h)
    clipper = attach(model, engine=engine)
    out = model(x())
    clipper.backward(out.square().sum(1))
    before = model.first.weight.grad.clone()
    with pytest.raises(UserError, match="call backward once for each forward"):
        clipper.backward(out.sin().sum(1) if other else out.square().sum(1))
    assert torch.equal(before, model.first.weight.grad)
