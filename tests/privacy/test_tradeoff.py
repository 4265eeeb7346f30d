"""The trade-off curve and what sums it up, against closed forms, an exact single step, and a published number."""

import math

import numpy as np
import pytest
from dp_accounting import LaplaceDpEvent
from scipy.optimize import brentq
from scipy.stats import norm

from dpexp.privacy.events import composed, step_event
from dpexp.privacy.gaussian import gaussian_delta
from dpexp.privacy.tradeoff import attack, curve, fitted_mu, regret


def steps(q, sigma, number):
    return composed([(step_event(q, [sigma]), number)])


def test_without_sampling_it_is_the_gaussian():
    found = attack(steps(1.0, 2.0, 9))
    assert found.mu == pytest.approx(1.5)
    assert found.regret == 0
    assert found.tpr == pytest.approx(norm.sf(norm.isf(1e-3) - 1.5))


def test_the_numbers_of_gomez_and_others():
    """arXiv 2503.10945; their implementation documents this μ and this regret for DP-SGD with σ = 9.4, q = 0.328, 2000 steps."""
    found = attack(steps(0.328, 9.4, 2000))
    assert found.mu == pytest.approx(1.5685621993129137, rel=1e-4)
    assert found.mu > 1.56856  # rounded to the safe side
    assert found.regret == pytest.approx(0.0010208130697719753, abs=5e-6)


@pytest.mark.parametrize(("q", "sigma"), [(0.01, 1.0), (0.1, 0.7), (0.5, 3.0)])
def test_one_sampled_step_against_the_neyman_pearson_test(q, sigma):
    """Both directions exactly: N(0, σ²) against (1-q)N(0, σ²) + qN(1, σ²), told apart by a threshold."""

    def mixed(t):
        return (1 - q) * norm.sf(t / sigma) + q * norm.sf((t - 1) / sigma)

    def mixed_below(t):
        return (1 - q) * norm.cdf(t / sigma) + q * norm.cdf((t - 1) / sigma)

    added = mixed(sigma * norm.isf(1e-3))
    threshold = brentq(lambda t: mixed_below(t) - 1e-3, -40, 40)
    removed = norm.cdf(threshold / sigma)
    exact = max(added, removed)
    found = attack(steps(q, sigma, 1))
    assert exact <= found.tpr * (1 + 1e-6)
    assert found.tpr == pytest.approx(exact, rel=2e-3)
    # μ by the definition: the largest over all tests of either direction whose errors are both above 1e-10
    t = np.linspace(-8 * sigma, 8 * sigma + 1, 100_001)
    errors = norm.sf(t / sigma), mixed_below(t)
    seen = np.minimum(*errors) > 1e-10
    mu = (norm.isf(errors[0][seen]) - norm.ppf(errors[1][seen])).max()
    assert mu <= found.mu * (1 + 1e-6)
    assert found.mu == pytest.approx(mu, rel=5e-3)


@pytest.mark.parametrize("mu", [0.05, 0.7, 3.0])
def test_a_gaussian_profile_gives_its_mu_back(mu):
    epsilons = np.linspace(0, mu * mu / 2 + 8 * mu, 4001)
    corners = curve(epsilons, np.array([gaussian_delta(e, mu) for e in epsilons]))
    assert fitted_mu(*corners) == pytest.approx(mu, rel=1e-3)
    assert fitted_mu(*corners) >= mu * (1 - 1e-9)
    assert regret(*corners, mu) < 1e-4


def test_the_regret_is_the_least_shift_that_brings_the_curve_below():
    """By bisection on its definition, where the program takes half a distance along a diagonal."""
    q, sigma = 0.02, 0.8
    t = np.linspace(-12, 12, 20001)
    alphas, betas = norm.sf(t / sigma), (1 - q) * norm.cdf(t / sigma) + q * norm.cdf((t - 1) / sigma)
    alphas, betas = alphas[::-1], betas[::-1]
    mu, grid = 0.9, np.linspace(0, 1, 200_001)
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        below = np.interp(grid + middle, alphas, betas) - middle <= norm.cdf(norm.isf(grid) - mu)
        low, high = (low, middle) if below.all() else (middle, high)
    assert regret(alphas, betas, mu) == pytest.approx(high, abs=1e-5)


def test_more_steps_and_less_noise_tell_more():
    few, many, loud = (attack(e) for e in (steps(0.02, 1.0, 50), steps(0.02, 1.0, 200), steps(0.02, 0.7, 50)))
    assert few.mu < min(many.mu, loud.mu)
    assert 1e-3 < few.tpr < min(many.tpr, loud.tpr) < 1


def test_noise_that_changes_in_every_step_is_rounded_to_the_safe_side():
    """More kinds than are composed as they are: no more than all steps at the least noise, no less than at the most."""
    sigmas = np.linspace(1.0, 1.5, 120)
    found = attack(composed([(step_event(0.05, [sigma]), 1) for sigma in sigmas]))
    loudest, most_silent = attack(steps(0.05, 1.0, 120)), attack(steps(0.05, 1.5, 120))
    assert most_silent.mu < found.mu < loudest.mu
    assert most_silent.tpr < found.tpr < loudest.tpr
    # q²(e^{1/σ²} - 1), added up, is the central limit theorem's μ²: below the truth
    assert math.sqrt(sum(0.05**2 * math.expm1(sigma**-2) for sigma in sigmas)) < found.mu


def test_what_has_no_such_numbers():
    silent = attack(steps(0.1, 0.0, 1))
    assert (silent.mu, silent.tpr) == (math.inf, 1.0)
    assert silent.plain() == {"mu": None, "mu_regret": None, "tpr_at_fpr_0.001": 1.0}
    assert attack(steps(0.5, 0.01, 1000)).tpr == 1.0
    assert attack(LaplaceDpEvent(1.0)) is None
    nothing = attack(composed([]))
    assert nothing.mu == nothing.regret == 0
    assert nothing.tpr == pytest.approx(1e-3)
    # what no grid of losses holds
    for out_of_reach in (steps(1e-300, 1.0, 1), steps(0.01, 1e200, 1)):
        assert attack(out_of_reach).plain() == silent.plain()
