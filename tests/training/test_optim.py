"""The learning rate as a function of the step, and the optimisers."""

import pytest
import torch

from dpexp.errors import UserError
from dpexp.schemas import OptimConfig
from dpexp.training.optimizers.choice import build_optimizer, learning_rate


def test_linear_decay_after_a_warm_up():
    rates = [learning_rate(step, 10, 1.0, "linear", 0.2) for step in range(10)]
    assert rates == pytest.approx([1 / 3, 2 / 3, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8])


def test_constant_without_a_warm_up():
    assert {learning_rate(step, 7, 0.3, "constant", 0.0) for step in range(7)} == {0.3}


def test_one_step_is_a_full_step():
    assert learning_rate(0, 1, 0.5, "linear", 0.0) == 0.5


def test_an_unknown_schedule_is_refused():
    with pytest.raises(UserError, match="linear"):
        learning_rate(5, 10, 1.0, "stairs", 0.0)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_settings_reach_the_optimiser(name):
    optim = OptimConfig(name=name, lr=0.1, betas=[0.8, 0.9], eps=1e-3, weight_decay=0.5, momentum=0.7)
    parameter = torch.nn.Parameter(torch.zeros(1))
    defaults = build_optimizer(optim, [parameter]).defaults
    assert (defaults["lr"], defaults["weight_decay"]) == (0.1, 0.5)
    if name == "sgd":
        assert defaults["momentum"] == 0.7
    else:
        assert (defaults["betas"], defaults["eps"]) == ((0.8, 0.9), 1e-3)


def test_an_unknown_optimiser_is_refused():
    with pytest.raises(UserError, match="adamw"):
        build_optimizer(OptimConfig(name="lion"), [torch.nn.Parameter(torch.zeros(1))])


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_lamb_moves_each_layer_by_its_own_length_with_and_without_weight_decay(weight_decay):
    """You et al. 2020, Algorithm 2: the ratio of the norms is part of LAMB, not of its weight decay."""
    layers = [torch.nn.Parameter(torch.full((n,), size)) for n, size in ((4, 3.0), (9, 0.5))]
    optim = OptimConfig(name="disk", base="lamb", lr=0.1, weight_decay=weight_decay, kappa=1.0)
    before = [layer.detach().clone() for layer in layers]
    for layer in layers:
        layer.grad = torch.ones_like(layer)
    build_optimizer(optim, layers).step()
    for layer, old in zip(layers, before, strict=True):
        assert float((layer.detach() - old).norm()) == pytest.approx(0.1 * float(old.norm()))
