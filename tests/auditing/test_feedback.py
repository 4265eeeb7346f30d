"""Noise that follows the training, audited: a run whose noise moves by what it has released tells no more than its budget."""

import hashlib
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dpexp.auditing.gaussian import pair_lower_bound
from dpexp.privacy.events import composed
from dpexp.privacy.noise import KeyedGenerator, add_gaussian_
from dpexp.privacy.plan import make_plan
from dpexp.privacy.schedules import Schedule
from dpexp.training.feedback import build_feedback

TRIALS, STEPS, DELTA, ERROR = 600, 4, 1e-3, 1e-6
SCHEDULES = {
    "validation": {"threshold": 0.0, "decay_rate": 0.6, "window": 1, "every": 1, "start": 1.5},
    "privacy_utility_released": {"window": 1, "start": 1.0},
}


@cache
def plan_of(name):
    return make_plan(
        num_examples=10, expected_batch_size=10, steps=STEPS, delta=DELTA, epsilon=4.0,
        schedule={"name": name} | SCHEDULES[name],
    )  # fmt: skip


def run(name, there, trial, noise):
    """A run with the example at stake or without it: what was released of it, in units of its noise, and the noise of each step.

    Its gradient has length 1, the threshold, in a direction that is known; all others are 0. Every step has every example.
    """
    release = SimpleNamespace(plan=plan_of(name))
    feedback = build_feedback(Schedule(name, **SCHEDULES[name]), release, "accuracy")
    events, sigmas, ratio = [], [], 0.0
    while len(events) < STEPS and release.plan.affords(composed([(e, 1) for e in events]), len(events)):
        step, sigma = len(events), release.plan.sigma(len(events))
        gradient = torch.tensor([float(there), 0.0, 0.0, 0.0], dtype=torch.float64)
        key = hashlib.sha256(repr((name, trial, step)).encode()).digest()
        add_gaussian_([gradient], noise * sigma, generator=KeyedGenerator(key))
        events.append(release.plan.step_event(step))
        sigmas.append(sigma)
        ratio += (float(gradient[0]) - 0.5) / sigma**2
        feedback.stepped([gradient], 4 * sigma**2)
        if feedback.validates_after(step + 1):
            # worst for the example: less noise as soon as it shows itself
            feedback.validated(-ratio)
    return ratio / np.sqrt(np.sum(np.square(sigmas) ** -1.0)), sigmas


@pytest.mark.parametrize("noise", [1.0, 0.35])
@pytest.mark.parametrize("name", list(SCHEDULES))
def test_a_run_tells_no_more_than_its_budget_and_less_noise_is_found_out(name, noise):
    coins = np.random.default_rng(3).random(TRIALS) < 0.5
    runs = [run(name, there, trial, noise) for trial, there in enumerate(coins)]
    if noise == 1:
        # it followed what was released, and some runs ended early
        assert len({tuple(sigmas) for _, sigmas in runs}) > 3
        assert len({len(sigmas) for _, sigmas in runs}) > 1
    claimed = plan_of(name).epsilon()
    lower = pair_lower_bound(np.array([score for score, _ in runs]), coins, DELTA, 1 - ERROR)
    assert 0.2 * claimed < lower
    assert (lower > claimed) == (noise < 1)
