"""Optimisers that know about the noise: DP-AdamBC, DOPPLER, DiSK, LAMB and averages; none of them releases anything."""

import json

import numpy as np
import pytest
import torch

from dpexp.config import compose
from dpexp.errors import UserError
from dpexp.schemas import OptimConfig
from dpexp.training.optimizers.adam_bc import AdamBC
from dpexp.training.optimizers.averaging import Averages
from dpexp.training.optimizers.choice import build_optimizer
from dpexp.training.optimizers.filters import DiSK, Doppler
from tests.training.tiny import cut_short, run_to_end, tiny_run, train, weights

GRADIENTS = np.random.default_rng(0).standard_normal((12, 5))


def path(optimizer, parameter, gradients=GRADIENTS, before=lambda step: None):
    """The weights after each step."""
    found = []
    for step, gradient in enumerate(gradients):
        parameter.grad = torch.tensor(gradient)
        before(step)
        optimizer.step()
        found.append(parameter.detach().numpy().copy())
    return np.asarray(found)


def start():
    return torch.nn.Parameter(torch.linspace(-1, 1, 5, dtype=torch.float64))


@pytest.mark.parametrize("decoupled", [False, True])
def test_adam_bc_is_its_formula_with_noise_that_changes(decoupled):
    parameter, stds = start(), np.linspace(1.5, 0.2, 12)
    optimizer = AdamBC([parameter], 0.1, (0.8, 0.9), 1e-3, weight_decay=0.05, decoupled=decoupled)
    found = path(optimizer, parameter, before=lambda t: optimizer.tell_noise({id(parameter): stds[t]}))
    x, floors = np.linspace(-1, 1, 5), 0
    for t in range(12):
        past = GRADIENTS[: t + 1]
        if decoupled:
            x = x * (1 - 0.1 * 0.05)
        elif t:
            past = past + 0.05 * np.concatenate([[np.linspace(-1, 1, 5)], found[:t]])
        else:
            past = past + 0.05 * x
        share = np.arange(t, -1, -1)
        m = (0.2 * 0.8**share) @ past / (1 - 0.8 ** (t + 1))
        v = (0.1 * 0.9**share) @ past**2 / (1 - 0.9 ** (t + 1))
        phi = (0.1 * 0.9**share) @ stds[: t + 1] ** 2 / (1 - 0.9 ** (t + 1))
        floors += int((v - phi < 1e-3).sum())
        x = x - 0.1 * m / np.sqrt(np.maximum(v - phi, 1e-3))
        np.testing.assert_allclose(found[t], x, rtol=1e-12, atol=1e-12)
    assert 0 < floors < 60


def test_adam_bc_without_noise_is_adam():
    ours, theirs = start(), start()
    settings = {"lr": 0.1, "betas": (0.8, 0.9), "weight_decay": 0.01}
    np.testing.assert_allclose(
        path(AdamBC([ours], floor=1e-30, **settings), ours),
        path(torch.optim.Adam([theirs], eps=0, **settings), theirs),
    )


def test_training_tells_the_noise_of_each_group_and_step(tmp_path, monkeypatch):
    """σ_new·S·γ_k/B, as the sums got it."""
    told, added = [], []
    monkeypatch.setattr(AdamBC, "tell_noise", lambda self, stds: told.append(sorted(stds.values())))
    monkeypatch.setattr(
        "dpexp.training.release.add_gaussian_", lambda t, std, generator=None: added.append(std)
    )
    run = tiny_run(adaptive=False)
    run.optim.name, run.schedule.name, run.schedule.decay_rate = "adam_bc", "time", 0.5
    run.schedule.updates_per_epoch, run.clip.allocation = 3, "weighted"
    run_to_end(tmp_path, run)
    assert len(told) == 6
    for one, other in zip(told, added, strict=True):
        assert one == pytest.approx(sorted(std / 20 for std in other))
    assert told[0][0] < told[0][-1]
    assert told[1][0] < told[0][0]


def test_doppler_is_its_recursion_and_first_order_is_adams_first_moment():
    a, b = [-1.2, 0.4], [0.05, 0.1, 0.05]
    parameter = start()
    found = path(Doppler(torch.optim.SGD([parameter], lr=1.0), a, b), parameter)
    moved = -np.diff(np.concatenate([[np.linspace(-1, 1, 5)], found]), axis=0)
    m, c = np.zeros((12, 5)), np.zeros(12)
    for t in range(12):
        for tau, value in enumerate(b):
            if t >= tau:
                m[t] += value * GRADIENTS[t - tau]
                c[t] += value
        for tau, value in enumerate(a, 1):
            if t >= tau:
                m[t] -= value * m[t - tau]
                c[t] -= value * c[t - tau]
        np.testing.assert_allclose(moved[t], m[t] / c[t], atol=1e-12)
    parameter = start()
    first = path(Doppler(torch.optim.SGD([parameter], lr=1.0), [-0.9], [0.1]), parameter)
    share = [0.1 * 0.9**k / (1 - 0.9**12) for k in range(11, -1, -1)]
    np.testing.assert_allclose(first[-2] - first[-1], np.asarray(share) @ GRADIENTS, atol=1e-12)


@pytest.mark.parametrize(
    ("a", "b"), [([-1.0], [0.1]), ([-0.9], []), ([-0.9], [0.1, -0.1]), ([0.0, 1.1], [1.0])]
)
def test_what_is_no_low_pass_filter_is_refused(a, b):
    with pytest.raises(UserError, match="no low-pass filter"):
        Doppler(torch.optim.SGD([start()], lr=1.0), a, b)
    overrides = ["task=sst2", "scale=demo", "optim=doppler", f"optim.filter_a={a}", f"optim.filter_b={b}"]
    with pytest.raises(UserError, match="no low-pass filter"):
        compose(overrides)


def test_what_corrects_for_the_noise_stands_behind_no_filter_of_it():
    for make in (lambda base: Doppler(base, [-0.9], [0.1]), lambda base: DiSK(base, 0.7)):
        with pytest.raises(UserError, match="AdamBC corrects for the noise"):
            make(AdamBC([start()], 0.1))


def test_disk_measures_ahead_and_averages():
    """On f(x) = ½·h·x², where the gradient at a point is known."""
    kappa, rate, h = 0.6, 0.3, np.array([1.0, 0.5, 0.2, 0.1, 2.0])
    parameter = start()
    optimizer = DiSK(torch.optim.SGD([parameter], lr=rate), kappa)
    x, last, mean = np.linspace(-1, 1, 5), np.zeros(5), None
    for _ in range(10):
        optimizer.ahead()
        at = parameter.detach().numpy().copy()
        np.testing.assert_allclose(at, x + (1 - kappa) / kappa * last, atol=1e-12)
        parameter.grad = torch.tensor(h * at)
        optimizer.step()
        mean = h * at if mean is None else (1 - kappa) * mean + kappa * h * at
        last = -rate * mean
        x = x + last
        np.testing.assert_allclose(parameter.detach().numpy(), x, atol=1e-12)
    optimizer.ahead()
    optimizer.back()
    np.testing.assert_allclose(parameter.detach().numpy(), x, atol=1e-12)


def test_uniform_averages_are_the_mean_of_the_steps():
    weight = torch.zeros(2, dtype=torch.float64)
    averages = Averages([weight], None)
    for step, row in enumerate(GRADIENTS[:, :2]):
        weight.copy_(torch.tensor(row))
        averages.update(step)
    np.testing.assert_allclose(averages.values[0], GRADIENTS[:, :2].mean(0))


def test_lamb_gives_every_layer_an_update_as_long_as_its_weights():
    layers = [torch.nn.Parameter(scale * torch.ones(4)) for scale in (0.1, 3.0)]
    before = [p.detach().clone() for p in layers]
    optimizer = build_optimizer(OptimConfig(name="lamb", lr=0.01, weight_decay=0.01), layers)
    for p in layers:
        p.grad = torch.randn(4, generator=torch.Generator().manual_seed(1))
    optimizer.step()
    for p, old in zip(layers, before, strict=True):
        assert float((p.detach() - old).norm()) == pytest.approx(0.01 * float(old.norm()), rel=1e-4)


@pytest.mark.parametrize(
    "name", ["adamw", "adam_bc", "adamw_bc", "lamb", "adagrad", "doppler", "disk", "uniform"]
)
def test_it_releases_nothing_and_a_killed_run_ends_with_the_same_weights(name, tmp_path):
    """The ledger's events are those of DP-SGD: all that an optimiser sees is charged already."""

    def run():
        made = tiny_run(steps=5)
        made.optim.name = "sgd" if name == "uniform" else name
        made.optim.uniform_average = name == "uniform"
        made.runtime.checkpoint_every = 2
        return made

    whole = run_to_end(tmp_path / "whole", run())
    plain = run()
    plain.optim.name, plain.optim.uniform_average = "sgd", False
    run_to_end(tmp_path / "plain", plain)
    events = [
        [json.loads(line)["event"] for line in (tmp_path / folder / "ledger.jsonl").read_text().splitlines()]
        for folder in ("whole", "plain")
    ]
    assert events[0] == events[1]
    again = cut_short(tmp_path / "killed", run(), steps=3)
    train(again)
    np.testing.assert_array_equal(weights(again), weights(whole))
    assert again.ledger.steps_charged == 5
