"""The price of selection, against its theorem written out and against what a selection really reveals."""

import math

import numpy as np
import pytest
from scipy.stats import norm

from dpexp.errors import UserError
from dpexp.privacy.accountants import epsilon
from dpexp.privacy.events import composed, step_event
from dpexp.privacy.tuning import tuned_epsilons

DELTA = 1e-5
GAUSSIAN = step_event(1.0, [2.0])
SAMPLED = composed([(step_event(0.02, [1.0]), 100)])


def test_composed_trials_cost_what_as_many_runs_cost():
    assert tuned_epsilons(SAMPLED, DELTA, 5)["pld"] == epsilon(
        composed([(step_event(0.02, [1.0]), 500)]), DELTA, "pld"
    )
    assert tuned_epsilons(SAMPLED, DELTA, 1)["rdp"] == epsilon(SAMPLED, DELTA)


def test_the_geometric_law_is_theorem_2_of_papernot_and_steinke():
    """ρ'(λ) = ρ(λ) + 2(1 - 1/λ̂)ρ(λ̂) + 2 log(mean)/λ̂ + log(mean)/(λ - 1) with η = 1, γ = 1/mean, minimised over λ̂ and λ."""
    mean, orders = 8, np.linspace(1.05, 200, 20000)
    rho = orders / (2 * 2.0**2)
    constant = 2 * ((1 - 1 / orders) * rho + math.log(mean) / orders).min()
    tuned = rho + constant + math.log(mean) / (orders - 1)
    # Canonne, Kamath & Steinke (2020), Proposition 12
    converted = tuned + np.log1p(-1 / orders) - (math.log(DELTA) + np.log(orders)) / (orders - 1)
    found = tuned_epsilons(GAUSSIAN, DELTA, mean, "geometric")["rdp"]
    assert found == pytest.approx(converted.min(), rel=0.02)
    assert found >= converted.min() * (1 - 1e-9)


@pytest.mark.parametrize("mean", [2, 10, 100])
def test_it_covers_what_the_best_of_a_geometric_number_reveals(mean):
    """Each trial releases N(0 or 1/2, 1), a Gaussian of multiplier 2, and the largest is published: its law is known exactly."""
    t = np.linspace(-8, 12, 4001)

    def above(mu):
        one, gamma = norm.cdf(t - mu), 1 / mean
        return 1 - gamma * one / (1 - (1 - gamma) * one)

    claimed = tuned_epsilons(GAUSSIAN, DELTA, mean, "geometric")["rdp"]
    for p, q in ((above(0.5), above(0.0)), (1 - above(0.0), 1 - above(0.5))):
        assert (p - math.exp(claimed) * q).max() <= DELTA
    # ... and a single trial's price would not be enough
    assert claimed > epsilon(GAUSSIAN, DELTA)


@pytest.mark.parametrize("law", ["geometric", "logarithmic", "poisson"])
def test_a_law_is_dearer_than_one_trial_and_cheaper_than_all(law):
    drawn = tuned_epsilons(SAMPLED, DELTA, 30, law)
    assert epsilon(SAMPLED, DELTA) < drawn["rdp"] < tuned_epsilons(SAMPLED, DELTA, 30)["rdp"]
    assert [drawn[name] for name in ("gdp", "prv", "pld")] == [None] * 3


@pytest.mark.parametrize(
    ("trials", "law", "words"),
    [(0, None, "trials=0"), (2.5, None, "whole number"), (3, "normal", "geometric, log")],
)
def test_what_makes_no_selection_is_refused(trials, law, words):
    with pytest.raises(UserError, match=words):
        tuned_epsilons(GAUSSIAN, DELTA, trials, law)
