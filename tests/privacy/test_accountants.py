"""Accountants: against closed forms, against one another, and at the ends of their range."""

import logging
import math

import numpy as np
import pytest
from dp_accounting import (
    GaussianDpEvent,
    LaplaceDpEvent,
    NonPrivateDpEvent,
    SelfComposedDpEvent,
    get_epsilon_gaussian,
)
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import logsumexp

from dpexp.errors import UserError
from dpexp.privacy.accountants import ACCOUNTANTS, epsilon, epsilons, loss_distribution, prv_bounds
from dpexp.privacy.events import composed, releases, step_event
from dpexp.privacy.gaussian import gaussian_delta, gaussian_epsilon
from dpexp.privacy.renyi import _curve, _log_sum, renyi_epsilon


def sampled(q, sigma, steps):
    return composed([(step_event(q, [sigma]), steps)])


# --- The Gaussian mechanism in closed form ---


@pytest.mark.parametrize("sigma", [0.3, 0.7, 1.0, 4.0, 30.0, 300.0])
@pytest.mark.parametrize("delta", [1e-10, 1e-5, 0.1])
def test_gaussian_epsilon_agrees_with_the_analytic_gaussian_of_dp_accounting(sigma, delta):
    assert gaussian_epsilon(delta, 1 / sigma) == pytest.approx(
        get_epsilon_gaussian(sigma, delta), rel=1e-6, abs=1e-9
    )


@settings(deadline=None)
@given(mu=st.floats(1e-3, 1e3), delta=st.floats(1e-14, 0.9))
def test_gaussian_epsilon_inverts_gaussian_delta(mu, delta):
    found = gaussian_epsilon(delta, mu)
    if found > 0:
        assert gaussian_delta(found, mu) == pytest.approx(delta, rel=1e-5)
    else:
        assert gaussian_delta(0.0, mu) <= delta * (1 + 1e-9)


def test_gaussian_delta_is_the_textbook_formula():
    from scipy.stats import norm

    for e, mu in [(0.5, 1.0), (3.0, 1.5), (0.0, 0.2)]:
        textbook = norm.cdf(-e / mu + mu / 2) - math.exp(e) * norm.cdf(-e / mu - mu / 2)
        assert gaussian_delta(e, mu) == pytest.approx(textbook, rel=1e-10)


def test_gaussian_epsilon_for_a_huge_mu_is_its_leading_term():
    assert gaussian_epsilon(1e-5, 1e6) == pytest.approx(0.5e12, rel=1e-5)
    assert gaussian_epsilon(1e-5, math.inf) == math.inf
    assert gaussian_epsilon(1e-5, 1e200) == math.inf


@pytest.mark.parametrize("accountant", ["prv", "pld", "gdp"])
def test_without_sampling_the_answer_is_the_exact_gaussian(accountant):
    exact = get_epsilon_gaussian(5 / math.sqrt(12), 1e-5)
    for event in (sampled(1.0, 5.0, 12), SelfComposedDpEvent(GaussianDpEvent(5.0), 12)):
        assert epsilon(event, 1e-5, accountant) == pytest.approx(exact, rel=1e-6)


def test_without_sampling_renyi_is_a_little_above_the_exact_gaussian():
    exact = get_epsilon_gaussian(5 / math.sqrt(12), 1e-5)
    assert exact < epsilon(sampled(1.0, 5.0, 12), 1e-5, "rdp") < 1.1 * exact


# --- Rényi against the library ---


@pytest.mark.parametrize(
    ("q", "sigma", "steps"), [(0.0243, 1.07, 410), (0.1, 0.6, 30), (0.5, 3.0, 100), (0.01, 2.0, 10**4)]
)
def test_renyi_agrees_with_dp_accounting(q, sigma, steps):
    """Ours is never above: it has more orders, and the library adds the magnitudes of a fractional order's
    alternating terms (at q = 0.5 that is 1% of ε)."""
    logging.getLogger("absl").setLevel(logging.ERROR)
    library = RdpAccountant([*(1 + x / 10 for x in range(1, 100)), *range(11, 65), 128, 256, 512])
    theirs = library.compose(sampled(q, sigma, steps)).get_epsilon(1e-5)
    assert epsilon(sampled(q, sigma, steps), 1e-5) == pytest.approx(theirs, rel=0.012)
    assert epsilon(sampled(q, sigma, steps), 1e-5) <= theirs * (1 + 1e-9)


@pytest.mark.parametrize(("q", "sigma", "steps"), [(2e-5, 0.4, 100_000), (1e-6, 0.3, 10_000)])
def test_renyi_of_a_rare_example_under_little_noise_has_fractional_orders_too(q, sigma, steps):
    """Its best order lies between whole ones: without it ε was 7 to 13% too large."""
    library = RdpAccountant().compose(sampled(q, sigma, 1), steps).get_epsilon(1e-8)
    assert epsilon(sampled(q, sigma, steps), 1e-8) == pytest.approx(library, rel=1e-3)


def test_renyi_of_whole_orders_agrees_with_dp_accounting():
    """With whole orders only, the same minimum over the same numbers."""
    orders = (2, 3, 5, 17, 64, 200)
    for q, sigma in [(0.0243, 1.07), (0.3, 0.4), (0.001, 20.0)]:
        theirs = RdpAccountant(orders).compose(sampled(q, sigma, 1)).get_epsilon_and_optimal_order(1e-5)
        index = orders.index(theirs[1])
        ours = (
            _curve(q, sigma, orders)[index]
            + math.log1p(-1 / theirs[1])
            - math.log(1e-5 * theirs[1]) / (theirs[1] - 1)
        )
        assert ours == pytest.approx(theirs[0], rel=1e-9)


@pytest.mark.parametrize(
    ("q", "sigma", "order"), [(0.5, 3.0, 3.3), (0.0243, 1.07, 1.5), (0.5, 0.06, 7.7), (0.01, 2.0, 2.1)]
)
def test_renyi_of_fractional_orders_is_its_defining_integral(q, sigma, order):
    import mpmath

    def integrand(x):
        return mpmath.npdf(x, 0, sigma) * (1 - q + q * mpmath.exp((2 * x - 1) / (2 * sigma**2))) ** order

    peaks = [-20 * sigma, -5 * sigma, 0, 0.5, 1, order, order + 5 * sigma, order + 20 * sigma]
    exact = float(mpmath.log(mpmath.quad(integrand, peaks))) / (order - 1)
    assert _curve(q, sigma, (order,))[0] == pytest.approx(exact, rel=1e-7)


@pytest.mark.parametrize(
    "logs", [[0.3], [-800.0, 700.0, 3.0], [-math.inf, 2.0], [-math.inf] * 2, [math.inf, 1.0]]
)
def test_a_sum_of_exponentials_is_scipy_s(logs):
    assert _log_sum(np.asarray(logs)) == pytest.approx(float(logsumexp(logs)), rel=1e-13)


def test_renyi_of_tiny_releases_is_not_lost_to_cancellation():
    """One step costs about α q²/(2σ²) = 5e-17 α, far below the rounding error of 1; a million million of them count."""
    one = renyi_epsilon({(1e-4, 1e4): 10**12}, 1e-5)
    # q/σ · √T = 1e-2: as good as a Gaussian without sampling of that μ
    assert one == pytest.approx(renyi_epsilon({(1.0, 100.0): 1}, 1e-5), rel=0.02)


# --- The order among accountants ---

CASES = [
    (0.0243, 1.07, 410, 1.2e-5),
    (0.01, 0.8, 2000, 1e-5),
    (0.3, 5.0, 500, 1e-6),
    (0.001, 0.5, 5000, 1e-6),
    (0.02, 1.0, 1, 1e-5),
    (0.9, 2.0, 3, 1e-5),
]


@pytest.mark.parametrize(("q", "sigma", "steps", "delta"), CASES)
def test_upper_bounds_stand_in_their_order(q, sigma, steps, delta):
    found = epsilons(sampled(q, sigma, steps), delta)
    assert found["pld"] <= found["rdp"]
    assert found["prv"] <= found["rdp"]
    lower, estimate, upper = prv_bounds(releases(sampled(q, sigma, steps)), delta)
    assert lower <= estimate <= upper == found["prv"]
    assert lower <= found["pld"] * 1.001  # both hold of the same number
    assert found["pld"] == pytest.approx(found["prv"], rel=0.02, abs=2e-3)


def test_the_central_limit_theorem_underestimates_where_it_is_used():
    """Gopi et al.'s observation, and the reason why gdp may not decide by default."""
    found = epsilons(sampled(0.0243, 1.07, 410), 1.2e-5)
    assert found["gdp"] < 0.9 * found["pld"]


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_heterogeneous_compositions(accountant):
    """Different q and σ in one run: between the run all of whose steps are the dearest and the cheapest."""
    kinds = [(0.02, 1.0), (0.02, 1.3), (0.05, 2.0)]
    mixed = epsilon(composed((step_event(q, [s]), 100) for q, s in kinds), 1e-5, accountant)
    alone = [epsilon(sampled(q, s, 300), 1e-5, accountant) for q, s in kinds]
    assert min(alone) < mixed < max(alone)
    split = composed([(step_event(0.02, [1.0]), 100), (step_event(0.02, [1.0]), 200)])
    assert epsilon(split, 1e-5, accountant) == pytest.approx(alone[0], rel=1e-9)


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_sampled_and_unsampled_releases_in_one_run(accountant):
    both = composed([(step_event(0.02, [1.0]), 100), (GaussianDpEvent(5.0), 1)])
    alone = epsilon(sampled(0.02, 1.0, 100), 1e-5, accountant)
    assert alone < epsilon(both, 1e-5, accountant) < alone + get_epsilon_gaussian(5.0, 1e-5) + 0.5


@pytest.mark.parametrize("accountant", ["rdp", "gdp", "pld", pytest.param("prv", marks=pytest.mark.slow)])
def test_noise_that_changes_in_every_step_is_bounded_from_above(accountant):
    steps = 100
    changing = composed((step_event(0.02, [1.0 + t / steps]), 1) for t in range(steps))
    blocks = composed((step_event(0.02, [1.0 + t / steps]), 10) for t in range(0, steps, 10))
    found = epsilon(changing, 1e-5, accountant)
    assert epsilon(sampled(0.02, 2.0, steps), 1e-5, accountant) < found
    assert found <= epsilon(blocks, 1e-5, accountant) * 1.001  # whose every step has no more noise
    assert found >= epsilon(blocks, 1e-5, accountant) * 0.9


# --- The ends of the range: an answer, never a hang or a NaN ---

EXTREMES = [
    (0.0243, 1e-3, 410, 1e-5),
    (0.0243, 1e4, 410, 1e-5),
    (0.0243, 1e4, 1, 1e-5),
    (1.0, 1e-3, 10**6, 1e-5),
    (1.0, 1e4, 10**6, 1e-5),
    (0.5, 0.2, 1, 1e-5),
    (1e-6, 1.0, 1, 1e-5),
    (1e-12, 1e4, 5, 1e-5),
    (0.999999, 1.0, 2, 1e-5),
    (0.01, 1.0, 10, 1e-15),
    (0.01, 1.0, 10, 0.999),
    (0.01, 0.05, 100, 1e-5),
    (0.9, 0.5, 1000, 1e-5),
]


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
@pytest.mark.parametrize(("q", "sigma", "steps", "delta"), EXTREMES)
def test_extremes_have_an_answer(q, sigma, steps, delta, accountant):
    found = epsilon(sampled(q, sigma, steps), delta, accountant)
    assert found >= 0  # which NaN is not


@pytest.mark.slow
@pytest.mark.parametrize("accountant", ACCOUNTANTS)
@pytest.mark.parametrize(("q", "sigma"), [(0.01, 5.0), (1e-4, 0.5), (0.01, 1e4), (0.02, 1e-3)])
def test_a_million_steps_have_an_answer(q, sigma, accountant):
    assert epsilon(sampled(q, sigma, 10**6), 1e-5, accountant) >= 0


def test_tiny_epsilons_are_not_lost():
    """σ = 1e4: the exact ε of the unsampled Gaussian is 9e-5, and Rényi needs orders of tens of thousands to see it."""
    exact = get_epsilon_gaussian(1e4, 1e-5)
    assert exact < epsilon(sampled(1.0, 1e4, 1), 1e-5, "rdp") < 1.6 * exact


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
class TestBoundaries:
    def test_nothing_released_costs_nothing(self, accountant):
        assert epsilon(sampled(0.0, 1.0, 10), 1e-5, accountant) == 0
        assert epsilon(sampled(0.1, 1.0, 0), 1e-5, accountant) == 0
        assert epsilon(sampled(0.0, 0.0, 10), 0.0, accountant) == 0

    def test_no_noise_is_no_privacy(self, accountant):
        assert epsilon(sampled(0.1, 0.0, 1), 1e-5, accountant) == math.inf
        assert epsilon(NonPrivateDpEvent(), 1e-5, accountant) == math.inf

    def test_delta_zero_needs_infinite_epsilon(self, accountant):
        assert epsilon(sampled(0.1, 1.0, 1), 0.0, accountant) == math.inf

    @pytest.mark.parametrize("delta", [-1e-9, 1.0, 2.0, math.nan, math.inf])
    def test_delta_must_be_a_probability(self, accountant, delta):
        with pytest.raises(UserError, match="delta"):
            epsilon(sampled(0.1, 1.0, 1), delta, accountant)

    def test_more_steps_more_sampling_and_less_noise_cost_more(self, accountant):
        base = epsilon(sampled(0.02, 1.0, 100), 1e-5, accountant)
        for q, sigma, steps in [(0.02, 1.0, 200), (0.03, 1.0, 100), (0.02, 0.9, 100)]:
            assert epsilon(sampled(q, sigma, steps), 1e-5, accountant) > base
        assert epsilon(sampled(0.02, 1.0, 100), 1e-6, accountant) > base


def test_other_mechanisms_are_left_to_the_library():
    laplace = LaplaceDpEvent(2.0)
    assert epsilon(laplace, 1e-5, "pld") == pytest.approx(0.5, abs=1e-3)
    assert epsilon(laplace, 1e-5, "rdp") <= 0.51
    with pytest.raises(UserError, match="choose rdp or pld"):
        epsilon(laplace, 1e-5, "prv")
    found = epsilons(laplace, 1e-5)
    assert found["gdp"] is None
    assert found["prv"] is None


def test_an_unknown_accountant_is_named_with_the_choices():
    with pytest.raises(UserError, match=r"moments.*rdp, gdp, prv, pld"):
        epsilon(sampled(0.1, 1.0, 1), 1e-5, "moments")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["rdp", "gdp", "prv", "pld"])
@pytest.mark.parametrize(
    ("rate", "sigma", "delta", "least"),
    [
        (0.02, 1e-200, 1e-5, math.inf),
        (0.02, 1e200, 1e-5, 0.0),
        (1.0, 1e-200, 1e-5, math.inf),
        (1.0, 1e200, 1e-5, 0.0),
        (5e-324, 1.0, 1e-5, 0.0),
        (0.02, 1.0, 1e-320, 20.0),
    ],
)
def test_numbers_at_the_ends_of_what_a_float_holds_are_answered(name, rate, sigma, delta, least):
    found = epsilon(composed([(step_event(rate, [sigma]), 400)]), delta, name)
    assert found == least or found > least == 20.0


@pytest.mark.parametrize("mu", [1.0, 8.0])
@pytest.mark.parametrize("delta", [1e-5, 1e-9, 1e-10])
def test_pld_is_an_upper_bound_after_many_steps_although_fourier_transforms_round(mu, delta):
    """Of 10^5 steps the rounding takes some 1e-11 off δ: without sampling, where the exact ε is known, it was too small."""
    found = loss_distribution({(1.0, math.sqrt(1e5) / mu): 10**5}, delta).get_epsilon_for_delta(delta)
    # where a long double has no more bits than a double, more is set aside
    above = 1.001 if np.finfo(np.longdouble).eps < 1e-18 else 1.2
    assert gaussian_epsilon(delta, mu) <= found <= above * gaussian_epsilon(delta, mu)


@pytest.mark.parametrize(("rate", "sigma", "steps"), [(1e-5, 0.471, 10**7), (1e-4, 10.565, 10**9)])
def test_prv_is_an_upper_bound_after_very_many_steps(rate, sigma, steps):
    """The grid of the package wanders off by T times its shift, and found an epsilon below 0."""
    event = composed([(step_event(rate, [sigma]), steps)])
    lower, estimate, upper = prv_bounds(releases(event), 1e-6)
    assert lower < estimate < upper
    assert epsilon(event, 1e-6, "gdp") * 0.999 <= upper <= epsilon(event, 1e-6, "rdp") + 2 * (upper - lower)
