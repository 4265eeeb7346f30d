"""Searches for a step size, audited: what their answers tell about one example is no more than their events say."""

import hashlib
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from dpexp.auditing.gaussian import two_world_lower_bound
from dpexp.privacy.gaussian import gaussian_epsilon
from dpexp.privacy.noise import KeyedGenerator
from dpexp.privacy.plan import make_plan
from dpexp.privacy.searches import SearchBudget
from dpexp.schemas import SearchConfig
from dpexp.training.searches.choice import SEARCHES

TRIALS, ERROR, DELTA, BOUND = 1500, 1e-6, 1e-5, 1.0
KINDS = [
    ("noisymax", "laplace"),
    ("noisymax", "exponential"),
    ("noisybtls", "above_threshold"),
    ("hyfreedp", "gaussian"),
]
# of a step, nearly all of whose budget is the search's
SIGMA = {"laplace": 0.25, "exponential": 0.25, "above_threshold": 0.25, "gaussian": 0.5}


def losses_of(weight, piece):
    """The example at stake falls from the largest loss that counts to nothing as soon as the weights move."""
    return torch.full((len(piece),), 0.0 if float(weight) else BOUND, dtype=torch.float64)


def losses_everywhere(weight, piece):
    """It has the largest loss that counts wherever the weights are: three losses move together."""
    return torch.full((len(piece),), BOUND, dtype=torch.float64)


@cache
def plan_of(mechanism):
    return make_plan(
        num_examples=10, expected_batch_size=10, steps=1, delta=DELTA, noise_multiplier=SIGMA[mechanism],
        search=SearchBudget(mechanism, 0.999),
    )  # fmt: skip


def answer(name, mechanism, there, trial):
    """One step with the example at stake or without it; the number that an observer scores: larger looks more like "with"."""
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    plan = plan_of(mechanism)
    release = SimpleNamespace(
        plan=plan,
        clipper=SimpleNamespace(groups=[SimpleNamespace(params={"w": model.w})]),
        policy=SimpleNamespace(values=torch.ones(1), estimates=torch.ones(1)),
        generator=lambda *use: KeyedGenerator(
            hashlib.sha256(repr((trial, name, mechanism, *use)).encode()).digest()
        ),
    )
    settings = SearchConfig(
        name=name, mechanism=mechanism, share=0.999, objective_clip=BOUND, candidates=1, tries=1, armijo=0.0
    )
    losses = losses_everywhere if name == "hyfreedp" else losses_of
    search = SEARCHES[name](
        settings, release, model, lambda piece: losses(model.w, piece), expected_batch=1.0, largest=0.5
    )
    model.w.grad = torch.ones(1, dtype=torch.float64)
    search.move(0, 0, [np.arange(int(there))])
    event = plan.search.event(plan.sigma(0))
    claimed = gaussian_epsilon(DELTA, 1 / event.noise_multiplier) if name == "hyfreedp" else event.epsilon
    return (search.bound if name == "hyfreedp" else search.chosen), claimed


def audited(name, mechanism):
    coins = np.random.default_rng(7).random(TRIALS) < 0.5
    found = [answer(name, mechanism, there, trial) for trial, there in enumerate(coins)]
    scores = np.array([score for score, _ in found])
    # of HyFreeDP an observer sees the next bound, twice the largest noisy loss; of the others whether there was a step
    threshold = 1.95 * BOUND if name == "hyfreedp" else 0.0
    return two_world_lower_bound(scores, coins, threshold, DELTA, 1 - ERROR), found[0][1]


@pytest.mark.parametrize(("name", "mechanism"), KINDS)
def test_an_answer_tells_no_more_than_its_event(name, mechanism):
    lower, claimed = audited(name, mechanism)
    assert 3 < claimed < 12
    assert 0.03 * claimed < lower <= claimed
