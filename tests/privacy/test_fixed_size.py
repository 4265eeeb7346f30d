"""Batches of a fixed size without replacement: a guarantee for replacing an example, never below what an attacker can see."""

import math

import numpy as np
import pytest
from scipy.stats import norm

from dpexp.errors import UserError
from dpexp.privacy.accountants import epsilon, epsilons
from dpexp.privacy.caveats import caveats
from dpexp.privacy.events import REPLACE_ONE, composed, fixed_size_event, neighbouring, step_event
from dpexp.privacy.gaussian import gaussian_epsilon
from dpexp.privacy.ledger import Ledger
from dpexp.privacy.plan import make_plan
from dpexp.privacy.sampling import FixedSizeSampler
from tests.training.tiny import make_trainer, tiny_run, train

DELTA = 1e-5


def test_the_whole_data_set_is_a_gaussian_of_twice_the_sensitivity():
    whole = fixed_size_event(50, 50, [4.0])
    exact = gaussian_epsilon(DELTA, 2 / 4.0)
    assert exact <= epsilon(whole, DELTA) == pytest.approx(epsilon(step_event(1.0, [2.0]), DELTA), rel=0.02)


@pytest.mark.parametrize(
    ("q", "sigma", "loose"), [(0.02, 1.5, 20), (0.1, 3.0, 5), (0.5, 4.0, 2), (0.9, 4.0, 1.3)]
)
def test_it_covers_the_pair_that_is_furthest_apart(q, sigma, loose):
    """All others contribute nothing; the example at stake contributes +C, its replacement -C."""
    x = np.linspace(-12 * sigma, 12 * sigma, 400_001)

    def density(centre):
        return (1 - q) * norm.pdf(x, 0, sigma) + q * norm.pdf(x, centre, sigma)

    p, r = density(1.0), density(-1.0)
    claimed = epsilon(fixed_size_event(1000, int(1000 * q), [sigma]), DELTA)
    delta = np.maximum(p - math.exp(claimed) * r, 0).sum() * (x[1] - x[0])
    assert delta <= DELTA
    # The bound is loose for rare examples, in one step; the pair is told apart at the share of it that is given here.
    assert np.maximum(p - math.exp(claimed / loose) * r, 0).sum() * (x[1] - x[0]) > DELTA


def test_what_is_released_together_is_composed_inside_the_sample():
    together = fixed_size_event(1000, 20, [3.0, 4.0])
    alone = fixed_size_event(1000, 20, [(3.0**-2 + 4.0**-2) ** -0.5])
    assert epsilon(together, DELTA) == pytest.approx(epsilon(alone, DELTA))


def test_only_rdp_knows_it_and_no_noise_is_no_guarantee(tmp_path):
    event = composed([(fixed_size_event(1000, 20, [3.0]), 50)])
    assert neighbouring(event) == REPLACE_ONE
    found = epsilons(event, DELTA)
    assert found["rdp"] > 0
    assert [found[name] for name in ("gdp", "prv", "pld")] == [None] * 3
    assert epsilon(fixed_size_event(1000, 20, [0.0]), DELTA) == math.inf
    ledger = Ledger(tmp_path / "ledger.jsonl", b"k")
    for step in range(50):
        ledger.begin_step(step, fixed_size_event(1000, 20, [3.0]), "a")
    assert Ledger(tmp_path / "ledger.jsonl", b"k").epsilon(DELTA) == found["rdp"]


def test_a_plan_calibrates_to_it():
    plan = make_plan(
        num_examples=1000, expected_batch_size=20, steps=50, delta=DELTA, epsilon=2.0, sampling="fixed"
    )
    assert 1.99 < plan.epsilon() <= 2.0
    assert plan.neighbouring == REPLACE_ONE
    assert "replacing an example" in caveats(plan)[0]
    with pytest.raises(UserError, match="whole number of examples"):
        make_plan(
            num_examples=1000, expected_batch_size=20.5, steps=5, delta=DELTA, epsilon=2.0, sampling="fixed"
        )
    with pytest.raises(UserError, match="choose rdp or pld"):
        make_plan(
            num_examples=1000,
            expected_batch_size=20,
            steps=5,
            delta=DELTA,
            epsilon=2.0,
            sampling="fixed",
            accountant="prv",
        )


def test_every_set_of_the_size_is_equally_likely_and_attempts_are_fresh():
    sampler = FixedSizeSampler(5, 2, b"k" * 32)
    draws = [tuple(sampler.draw(step)) for step in range(5000)]
    counts = np.unique([10 * a + b for a, b in draws], return_counts=True)[1]
    assert len(counts) == 10
    assert ((counts - 500) ** 2 / 500).sum() < 27.9  # χ² with 9 degrees of freedom, one in a thousand
    assert [tuple(sampler.draw(step, attempt=1)) for step in range(50)] != draws[:50]
    assert tuple(FixedSizeSampler(5, 2, b"k" * 32).draw(7)) == draws[7]
    with pytest.raises(UserError, match="cannot draw 6 of 5"):
        FixedSizeSampler(5, 6, b"k" * 32)


def test_training_draws_batches_of_one_size_and_pays_for_replacing(tmp_path):
    run = tiny_run(steps=4)
    run.privacy.sampling, run.privacy.noise_multiplier, run.privacy.epsilon = "fixed", None, 8.0
    trainer = make_trainer(tmp_path, run)
    assert [len(trainer.stepper.sampler.draw(step)) for step in range(4)] == [20] * 4
    train(trainer)
    assert neighbouring(trainer.ledger.event()) == REPLACE_ONE
    assert 7.9 < trainer.ledger.epsilon(trainer.plan.delta) == trainer.plan.epsilon() <= 8.0
