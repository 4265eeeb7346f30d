"""A run whose noise decays: what training adds, what the ledger charges, and both again after a crash."""

import json

import numpy as np
import pytest
import torch
from dp_accounting import ComposedDpEvent

from dpexp.privacy.accountants import epsilon
from dpexp.privacy.events import encode
from dpexp.schemas import ScheduleConfig
from dpexp.training import release
from tests.training.tiny import crash_in_step, make_trainer, run_to_end, tiny_run, train, weights

SIGMAS = [1.0 / (1 + 0.5 * t) for t in (0, 1 / 3, 2 / 3, 1, 4 / 3, 5 / 3)]  # an epoch is three steps


def decaying_run(adaptive=True):
    run = tiny_run(adaptive=adaptive)
    run.schedule = ScheduleConfig(name="time", decay_rate=0.5, updates_per_epoch=3)
    run.runtime.checkpoint_every = 3
    return run


def charged(folder):
    return [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]


def test_training_adds_the_noise_that_the_ledger_charges(tmp_path, monkeypatch):
    asked = []

    def record(tensors, std, generator=None):
        asked.append(np.asarray(torch.as_tensor(std, dtype=torch.float64)).reshape(-1)[0])

    monkeypatch.setattr(release, "add_gaussian_", record)
    run = decaying_run(adaptive=False)
    trainer = run_to_end(tmp_path, run)
    assert np.asarray(asked) / asked[0] == pytest.approx(SIGMAS)
    multipliers = [line["event"]["event"]["noise_multiplier"] for line in charged(tmp_path)]
    assert multipliers == pytest.approx(SIGMAS)
    assert asked == pytest.approx([sigma * run.clip.clip_norm for sigma in multipliers])
    assert trainer.ledger.epsilon(1e-3) == trainer.plan.epsilon()


def test_counts_and_gradients_decay_together(tmp_path):
    trainer = run_to_end(tmp_path, decaying_run())
    for line, step in zip(charged(tmp_path), range(6), strict=True):
        assert line["event"] == encode(trainer.plan.step_event(step))
        gradient, counts = (part["noise_multiplier"] for part in line["event"]["event"]["events"])
        assert (gradient**-2 + counts**-2) ** -0.5 == pytest.approx(SIGMAS[step])


def test_killed_the_same_run_ends_the_same_and_pays_every_step_once(tmp_path, monkeypatch):
    crash_in_step(monkeypatch, make_trainer(tmp_path / "cut", decaying_run()), 5)
    resumed = make_trainer(tmp_path / "cut", decaying_run())
    assert (resumed.step, resumed.ledger.steps_charged) == (3, 6)
    train(resumed)
    whole = run_to_end(tmp_path / "whole", decaying_run())
    assert np.array_equal(weights(resumed), weights(whole))
    assert resumed.ledger.steps_charged == 6
    assert resumed.ledger.epsilon(1e-3) == pytest.approx(whole.plan.epsilon(), rel=1e-12)


@pytest.mark.parametrize("change", ["engine", "noise"])
def test_killed_and_changed_the_repeated_steps_are_charged_again_each_with_its_own_noise(
    tmp_path, monkeypatch, change
):
    crash_in_step(monkeypatch, make_trainer(tmp_path, decaying_run()), 5)
    run = decaying_run()
    if change == "engine":
        run.engine.name = "loop"
    else:
        run.schedule.decay_rate = 0.25
    resumed = make_trainer(tmp_path, run)
    train(resumed)
    first = make_trainer(tmp_path / "first", decaying_run()).plan
    paid = [
        *(first.step_event(step) for step in range(6)),
        *(resumed.plan.step_event(step) for step in (3, 4, 5)),
    ]
    assert [(line["step"], line["attempt"]) for line in charged(tmp_path)[6:]] == [(3, 1), (4, 1), (5, 1)]
    assert resumed.ledger.epsilon(1e-3) == pytest.approx(epsilon(ComposedDpEvent(paid), 1e-3), rel=1e-12)
    assert resumed.ledger.epsilon(1e-3) > first.epsilon()
