"""ADADP: pairs of half steps, their error, and what a resumed run remembers."""

import numpy as np
import pytest
import torch

from dpexp.config import compose
from dpexp.errors import UserError
from dpexp.training.optimizers.adadp import ADADP
from tests.training.tiny import make_trainer, run_to_end, tiny_run, train, weights


def step(optimizer, parameters, gradients):
    for p, g in zip(parameters, gradients, strict=True):
        p.grad = g.clone()
    optimizer.step()


def two(start, gradients, **options):
    """Parameters and optimiser after one pair of steps with the given gradients."""
    parameters = [torch.tensor(values, dtype=torch.float64) for values in start]
    optimizer = ADADP(parameters, **options)
    for pair in gradients:
        step(optimizer, parameters, [torch.tensor(g, dtype=torch.float64) for g in pair])
    return parameters, optimizer.param_groups[0]["factor"]


def test_a_pair_by_hand():
    """η = 0.2: θ_full = θ - 0.2 g₁, θ_half = θ - 0.1 g₁ - 0.1 g₂, and the error is relative where |θ_full| > 1."""
    start, first, second = [[5.0, 0.5], [1.0]], [[1.0, 2.0], [0.0]], [[3.0, 2.0], [-4.0]]
    full = [np.array([4.8, 0.1]), np.array([1.0])]
    half = [np.array([4.6, 0.1]), np.array([1.4])]
    error = np.sqrt((0.2 / 4.8) ** 2 + 0 + 0.4**2)
    assert error == pytest.approx(
        np.sqrt(sum((((f - h) / np.maximum(1, abs(f))) ** 2).sum() for f, h in zip(full, half, strict=True)))
    )
    moved, factor = two(start, [first, second], lr=0.2, tolerance=0.42, ratios=(0.5, 3.0))
    assert [p.tolist() for p in moved] == [pytest.approx(h) for h in half]
    assert factor == pytest.approx(0.42 / error)


def test_a_pair_above_the_tolerance_is_discarded_and_the_rate_falls():
    moved, factor = two([[5.0]], [[[1.0]], [[-9.0]]], lr=0.2, tolerance=0.01)
    assert moved[0].tolist() == [5.0]
    assert factor == 0.9


def test_without_any_error_the_rate_rises():
    moved, factor = two([[5.0]], [[[1.0]], [[1.0]]], lr=0.2)
    assert moved[0].item() == pytest.approx(4.8)
    assert factor == 1.1


def test_killed_between_the_steps_of_a_pair_it_ends_the_same(tmp_path):
    def run():
        made = tiny_run(steps=8)
        made.optim.name, made.optim.lr, made.optim.tolerance = "adadp", 0.5, 0.3
        made.runtime.checkpoint_every = 3
        return made

    whole = run_to_end(tmp_path / "whole", run())
    cut = make_trainer(tmp_path / "cut", run())
    cut.steps = 3
    train(cut)
    assert cut.optimizer.param_groups[0]["second"]
    resumed = make_trainer(tmp_path / "cut", run())
    assert resumed.step == 3
    train(resumed)
    assert np.array_equal(weights(resumed), weights(whole))
    assert resumed.optimizer.param_groups[0]["factor"] == whole.optimizer.param_groups[0]["factor"] != 1.0
    assert resumed.ledger.steps_charged == 8


def test_settings():
    assert compose(["task=mnist", "scale=demo", "clip=flat", "optim=adadp"]).optim.ratios == [0.9, 1.1]
    with pytest.raises(UserError, match="must be two numbers, one below 1"):
        compose(["task=mnist", "scale=demo", "optim=adadp", "optim.ratios=[1.1,0.9]"])
    with pytest.raises(UserError, match=r"optim\.tolerance=0.* must be above 0"):
        compose(["task=mnist", "scale=demo", "optim=adadp", "optim.tolerance=0"])
