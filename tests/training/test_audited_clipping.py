"""Every way to clip, audited in whole steps: who knows all but one example and sees each noisy sum learns no more than ε says."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from dpexp.auditing.gaussian import pair_lower_bound
from dpexp.clipping.methods.whole import VectorClipper
from dpexp.privacy.accountants import epsilon
from dpexp.privacy.users import Users
from dpexp.schemas import UnitConfig
from dpexp.tasks.users import ByUser
from dpexp.training import release
from tests.training.tiny import TinyTask, counted_noise, make_trainer, tiny_run

WIDTH, TRIALS, DELTA, CONFIDENCE = 10, 300, 1e-5, 1 - 1e-5
SIGMA = 0.4
# name -> settings of clip=
METHODS = {
    "flat": {},
    "perlayer": {"groups": "layer"},
    "adaptive_perlayer": {"groups": "layer", "adaptive": True, "quantile_budget": 0.3},
    "norm_perlayer": {
        "groups": "layer", "adaptive": True, "quantile_budget": 0.3, "follows": "norm", "norm_factor": 1.2, "norm_bound": 1.5,
    },
    "auto_s": {"rule": "automatic"},
    "adaclip": {"method": "adaclip"},
    "scaled": {"method": "scaled"},
    "ellipsoid": {"method": "ellipsoid", "public_examples": 12},
    "embedding": {"method": "embedding", "basis": 3, "public_examples": 12, "allocation": "equal_budget"},
    "microbatch": {"method": "microbatch", "microbatch": 2},
    "fedavg": {"method": "fedavg", "groups": "layer", "local_epochs": 2, "local_lr": 10.0},
}  # fmt: skip


class Two(TinyTask):
    """Two examples: one that everybody knows, and the candidate, which pulls the other way. Their gradients are constant."""

    def __init__(self):
        super().__init__(2)
        generator = torch.Generator().manual_seed(0)
        known = torch.randn(WIDTH, generator=generator)
        other = torch.randn(WIDTH, generator=generator)
        self.train = [(800 * known, torch.tensor(0)), (-900 * known + 30 * other, torch.tensor(0))]

    def losses(self, model, batch):
        return model(batch["x"])

    def evaluate(self, model, device, batch_size, progress=None):
        return {}


class Layers(nn.Module):
    """Two layers, so that there are two groups."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 1, bias=False), nn.Linear(WIDTH, 1, bias=False)

    def forward(self, x):
        return (self.a(x) + 3 * self.b(x))[:, 0]


class Coins:
    """The candidate is in the batch where a coin says so."""

    def __init__(self, coins):
        self.coins = coins

    def draw(self, step, attempt=0):
        return np.arange(1 + int(self.coins[step]))


def trainer_of(folder, name, coins):
    run = tiny_run(steps=len(coins), batch_size=2.0, adaptive=False)
    run.clip.name, run.clip.groups, run.clip.clip_norm, run.engine.name = name, "flat", 1.0, "auto"
    run.privacy.noise_multiplier, run.optim.name, run.runtime.checkpoint_every = SIGMA, "sgd", 0
    for key, value in METHODS[name].items():
        setattr(run.clip, key, value)
    task = Two()
    if name == "fedavg":
        run.unit = UnitConfig("user", file="somewhere", rows=1)
        task = ByUser(task, Users(["known", "candidate"], 1))
    trainer = make_trainer(folder, run, task, Layers(), sampler=Coins(coins))
    _begin_alike(trainer)
    return trainer


def _begin_alike(trainer):
    """Each step starts from the same weights, thresholds and scales: the trials are then of one mechanism."""
    start = [p.detach().clone() for p in trainer.model.parameters()]
    thresholds = trainer.policy.estimates.clone()
    method = trainer.clipper.method if isinstance(trainer.clipper, VectorClipper) else None
    # deep: methods learn in place
    state = None if method is None else copy.deepcopy(method.state_dict())

    def back():
        with torch.no_grad():
            for p, value in zip(trainer.model.parameters(), start, strict=True):
                p.copy_(value)
        trainer.policy.estimates = thresholds.clone()
        if method is not None:
            method.load_state_dict(copy.deepcopy(state))

    trainer.stepper.on_taken = back


def released(trainer, steps):
    """``[steps, d]`` all that each step releases, in units of the standard deviations of the noise that was asked for."""
    add_noise, seen = trainer.stepper.release.add_noise, []

    def watched(step, attempt, counts):
        noisy = add_noise(step, attempt, counts)
        made = trainer.stepper.release
        stds, asked = made.stds(step), made.noise(step)["counts"]
        parts = [p.grad.double().reshape(-1) / stds[id(p)] for p in made.parameters]
        if noisy is not None:
            parts.append(noisy / torch.as_tensor(asked, dtype=torch.float64))
        seen.append(torch.cat(parts).numpy())
        return noisy

    trainer.stepper.release.add_noise = watched
    for _ in range(steps):
        assert trainer.take_step(type("I", (), {"requested": False})()) is not None
    return np.stack(seen)


def audited(folder, monkeypatch, name, noise):
    """Claim and lower bound of one step."""
    with monkeypatch.context() as quiet:
        quiet.setattr(release, "add_gaussian_", lambda *_, **__: None)
        without, there = released(trainer_of(folder / "known", name, [False, True]), 2)
    monkeypatch.setattr(release, "add_gaussian_", counted_noise(noise))
    coins = np.random.default_rng(1).random(TRIALS) < 0.5
    trainer = trainer_of(folder / "attacked", name, coins)
    scores = released(trainer, TRIALS) @ (there - without)
    claimed = epsilon(trainer.plan.step_event(0), DELTA, "pld")
    assert trainer.ledger.epsilon(DELTA, "pld") > claimed
    return claimed, pair_lower_bound(scores, coins, DELTA, CONFIDENCE)


@pytest.mark.parametrize("name", list(METHODS))
def test_a_step_tells_what_its_event_says_and_no_more(tmp_path, monkeypatch, name):
    claimed, lower = audited(tmp_path, monkeypatch, name, 1.0)
    assert claimed == pytest.approx(13.2, abs=0.1)
    assert 0.6 * claimed < lower <= claimed


@pytest.mark.parametrize("name", list(METHODS))
def test_noise_that_is_too_small_by_a_third_is_found_out(tmp_path, monkeypatch, name):
    claimed, lower = audited(tmp_path, monkeypatch, name, 0.67)
    assert lower > claimed
