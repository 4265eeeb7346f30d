"""Searches as events: dominated by their Gaussians, composed inside the sampling, and kept under the filter's budget."""

import json
import math
from itertools import pairwise

import numpy as np
import pytest
from dp_accounting import ComposedDpEvent, GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.rdp import RdpAccountant
from scipy.integrate import quad
from scipy.stats import norm

from dpexp.errors import UserError
from dpexp.privacy.accountants import epsilon
from dpexp.privacy.events import composed, decode, encode, releases
from dpexp.privacy.gaussian import gaussian_delta
from dpexp.privacy.mechanisms import (
    BoundedRangeDpEvent,
    PureDpEvent,
    dominating_mu,
    noise_multiplier,
    pure_epsilon,
)
from dpexp.privacy.plan import Plan, make_plan
from dpexp.privacy.searches import MECHANISMS, ORDERS, SearchBudget, filter_orders
from dpexp.training.searches.noisybtls import THRESHOLD_SHARE

SETTINGS = {"num_examples": 1000, "expected_batch_size": 50, "steps": 40, "delta": 1e-5}


@pytest.mark.parametrize("eps", [1e-3, 0.1, 1.0, 5.0, 40.0, 600.0])
def test_a_gaussian_dominates_every_pure_mechanism(eps):
    """Nothing that is ε-DP is worse than randomised response; δ of both at each ε'."""
    mu = dominating_mu(eps)
    assert pure_epsilon(mu) == pytest.approx(eps, rel=1e-9)
    for smaller in np.linspace(0, min(eps, 100.0) * 0.999, 40):
        exact = -math.expm1(smaller - eps) / (1 + math.exp(-eps))
        assert exact <= gaussian_delta(smaller, mu) * (1 + 1e-9) + 1e-15
    # and no smaller μ would do: at ε' = 0 the two are equal
    assert gaussian_delta(0.0, mu) == pytest.approx(math.tanh(eps / 2), rel=1e-9)


@pytest.mark.parametrize("eps", [0.01, 0.5, 2.0, 8.0])
def test_a_gaussian_dominates_losses_of_a_bounded_range(eps):
    mu = 1 / noise_multiplier(BoundedRangeDpEvent(eps))
    assert mu == pytest.approx(dominating_mu(eps / 2))
    for t in np.linspace(0, eps, 41):
        # two points with losses t and t - ε
        q = -math.expm1(t - eps) / (math.exp(t) - math.exp(t - eps))
        p = q * math.exp(t)
        if 0 < q < 1 and 0 < p < 1:
            assert norm.cdf(norm.isf(q) - mu) <= 1 - p + 1e-12


def sums_of_neighbours():
    """Sums of bounded losses (C = 1) for three step sizes without one example, and all that it may add."""
    base = np.array([3.0, 2.4, 2.9])
    steps = (0.0, 0.5, 1.0)
    added = [np.array([a, b, c]) for a in steps for b in steps for c in steps]
    return base, added


def density_of(x, scale):
    """Of Laplace noise; scipy's own takes a hundred times longer for one number."""
    return math.exp(-abs(x) / scale) / (2 * scale)


def below(x, scale):
    """The probability that Laplace noise is below x."""
    tail = math.exp(-abs(x) / scale) / 2
    return tail if x < 0 else 1 - tail


def noisy_max_laplace(totals, scale):
    """P(index) of the noisily smallest sum, by numerical integration."""
    scores = -totals

    def density(x, i):
        others = [below(x - s, scale) for j, s in enumerate(scores) if j != i]
        return density_of(x - scores[i], scale) * math.prod(others)

    corners = sorted(scores)
    return np.array([
        sum(
            quad(density, a, b, args=(i,))[0]
            for a, b in zip([-60.0, *corners], [*corners, 60.0], strict=True)
        )
        for i in range(len(scores))
    ])  # fmt: skip


def test_noisymax_with_laplace_noise_costs_epsilon_for_losses_that_are_bounded_below_by_zero():
    """Scale C/ε, not 2C/ε: one example moves all sums upwards. The exact probabilities of all indices, for all neighbours."""
    eps = 1.3
    base, added = sums_of_neighbours()
    before = noisy_max_laplace(base, 1 / eps)
    assert before.sum() == pytest.approx(1, abs=1e-7)
    worst = max(np.abs(np.log(noisy_max_laplace(base + one, 1 / eps) / before)).max() for one in added)
    assert 0.8 * eps < worst <= eps * (1 + 1e-6)


def test_the_exponential_mechanism_has_losses_in_a_range_of_epsilon():
    eps = 1.3
    base, added = sums_of_neighbours()

    def probabilities(totals):  # Gumbel noise of scale C/ε
        return np.exp(-eps * totals) / np.exp(-eps * totals).sum()

    for one in added:
        losses = np.log(probabilities(base + one) / probabilities(base))
        assert losses.max() - losses.min() <= eps * (1 + 1e-12)


def test_above_threshold_costs_epsilon():
    """Laplace C/ε₁ on the threshold and 2C/ε₂ on three queries that one example moves by ±C: exact probabilities."""
    eps = 1.1
    first, second = eps * THRESHOLD_SHARE, eps * (1 - THRESHOLD_SHARE)

    def answers(queries):
        def density(z, stop):
            all_below = math.prod(below(z - q, 2 / second) for q in queries[:stop])
            above = below(queries[stop] - z, 2 / second) if stop < len(queries) else 1.0
            return density_of(z, 1 / first) * all_below * above

        corners = sorted({0.0, *queries})
        edges = [-120.0, *corners, 120.0]
        return np.array([
            sum(quad(density, a, b, args=(stop,))[0] for a, b in pairwise(edges))
            for stop in range(len(queries) + 1)
        ])  # fmt: skip

    base = np.array([-1.5, 0.2, 1.0])
    before = answers(base)
    assert before.sum() == pytest.approx(1, abs=1e-6)
    moves = [np.array([a, b, c]) for a in (-1, 1) for b in (-1, 1) for c in (-1, 1)]
    worst = max(np.abs(np.log(answers(base + move) / before)).max() for move in moves)
    assert 0.3 * eps < worst <= eps * (1 + 1e-6)


@pytest.mark.parametrize("mechanism", [name for name in MECHANISMS if name != "gaussian"])
@pytest.mark.parametrize("share", [0.05, 0.6])
def test_gradient_and_search_share_what_one_sigma_costs(mechanism, share):
    plan = make_plan(**SETTINGS, epsilon=2.0, search=SearchBudget(mechanism, share))
    alone = make_plan(**SETTINGS, epsilon=2.0)
    assert alone.noise_multiplier < plan.noise_multiplier < 1.07 * alone.noise_multiplier
    assert plan.noise_multiplier == pytest.approx(
        make_plan(**{**SETTINGS, "delta": 1e-5 / ORDERS}, epsilon=2.0).noise_multiplier, rel=2e-4
    )
    assert plan.epsilon() <= 2.0
    # with dp_accounting alone: the search's dominating Gaussian by its definition, inside the sampling
    eps = plan.search.epsilon(plan.noise_multiplier)
    half = eps / 2 if mechanism == "exponential" else eps
    mu = -2 * norm.ppf(1 / (1 + math.exp(half)))
    step = PoissonSampledDpEvent(
        0.05, ComposedDpEvent([GaussianDpEvent(plan.sigma_new(0)), GaussianDpEvent(1 / mu)])
    )
    assert plan.epsilon() == pytest.approx(epsilon(SelfComposedDpEvent(step, 40), 1e-5 / ORDERS), rel=1e-6)
    event = plan.step_event(0)
    assert decode(json.loads(json.dumps(encode(event)))) == event
    assert Plan(**json.loads(json.dumps(plan.to_dict()))) == plan
    assert next(iter(releases(event))) == (0.05, pytest.approx(plan.noise_multiplier))


def test_the_filter_admits_the_planned_steps_and_charges_raises_with_steps():
    plan = make_plan(**SETTINGS, epsilon=2.0, search=SearchBudget("laplace", 0.2))
    steps = [(plan.step_event(0), 39)]
    assert plan.affords(composed(steps), 39)
    assert not plan.affords(composed([(plan.step_event(0), 40)]), 39)
    raised = plan.raised(1.1, 1.0)
    assert not raised.affords(composed(steps), 39)
    taken = 0
    while raised.affords(composed([(raised.step_event(0), taken)]), 0):
        taken += 1
    assert 20 < taken < 40
    # whatever the path, epsilon is that of the plan
    assert raised.guaranteed({"rdp": 0.5, "pld": 0.4}) == {"rdp": plan.epsilon(), "pld": None}


def test_whatever_the_path_one_order_of_the_filter_keeps_its_budget():
    """Budgets that jump up and down at random; the filter's own statement, computed with dp_accounting alone."""
    plan = make_plan(**SETTINGS, epsilon=2.0, search=SearchBudget("exponential", 0.2))
    orders = filter_orders(releases(plan.event()), plan.delta)
    assert len(set(orders)) == ORDERS
    assert min(orders) > 1
    rng = np.random.default_rng(0)
    for _ in range(3):
        taken = []
        while True:
            level = plan.raised(*rng.choice([0.7, 1.0, 1.05, 1.3], 2))
            if not level.affords(composed([(event, 1) for event in taken]), 0):
                break
            taken.append(level.step_event(0))
        assert 5 < len(taken) < 60
        accountant = RdpAccountant(orders)
        for event in taken:
            (q, sigma), _ = next(iter(releases(event).items()))
            accountant.compose(PoissonSampledDpEvent(q, GaussianDpEvent(sigma)))
        # δ/m at one of the orders: what the proof needs
        assert accountant.get_epsilon(1e-5 / ORDERS) <= 2.0 * (1 + 1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"accountant": "pld"}, "accountant=pld knows nothing"),
        ({"sampling": "fixed"}, "needs Poisson batches"),
        ({"quantile_budget": 0.1}, "without adaptive"),
        ({"epsilon": None, "noise_multiplier": 0.0}, "without a budget"),
    ],
)
def test_what_no_filter_covers_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        make_plan(**{**SETTINGS, "epsilon": 2.0, "search": SearchBudget("laplace", 0.2), **changes})


def test_a_search_without_budget_is_refused():
    with pytest.raises(UserError, match="without budget"):
        SearchBudget("laplace", 0.0)
    with pytest.raises(UserError, match="0 or larger"):
        releases(PureDpEvent(-1.0))
