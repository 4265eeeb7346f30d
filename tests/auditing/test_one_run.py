"""The bound of the one-run audit, against mechanisms whose privacy is known exactly."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dpexp.auditing.one_run import attempts, epsilon_lower_bound, guess, p_value
from dpexp.errors import UserError


def accuracy(epsilon):
    return math.exp(epsilon) / (1 + math.exp(epsilon))


def chance_of_exceeding(epsilon, delta, right, canaries, confidence=0.95):
    """P[bound > epsilon], exactly, for V distributed as `right` says: `[m + 1]` probabilities."""
    bounds = [epsilon_lower_bound(canaries, canaries, v, delta, confidence) for v in range(canaries + 1)]
    return float(sum(p for p, bound in zip(right, bounds, strict=True) if bound > epsilon + 1e-9))


@pytest.mark.parametrize("epsilon", [0.0, 0.5, 2.0])
def test_randomized_response_is_exceeded_as_seldom_as_promised_and_not_much_more_seldom(epsilon):
    canaries = 60
    right = stats.binom.pmf(np.arange(canaries + 1), canaries, accuracy(epsilon))
    chance = chance_of_exceeding(epsilon, 0.0, right, canaries)
    assert 0.005 < chance <= 0.05


@pytest.mark.parametrize("epsilon", [0.3, 1.0])
def test_randomized_response_that_now_and_then_tells_the_truth_about_each_coin(epsilon):
    canaries, delta = 60, 0.01
    right = stats.binom.pmf(np.arange(canaries + 1), canaries, delta + (1 - delta) * accuracy(epsilon))
    assert chance_of_exceeding(epsilon, delta, right, canaries) <= 0.05


def test_a_mechanism_that_tells_all_coins_at_once_needs_the_term_with_delta():
    """It is (epsilon, delta)-private for each coin; the bound for pure epsilon promises too much about it."""
    canaries, epsilon, delta = 60, 1.0, 0.04
    right = (1 - delta) * stats.binom.pmf(np.arange(canaries + 1), canaries, accuracy(epsilon))
    right[canaries] += delta
    assert chance_of_exceeding(epsilon, delta, right, canaries) <= 0.05
    assert chance_of_exceeding(epsilon, 0.0, right, canaries) > 0.05


@pytest.mark.parametrize("delta", [0.0, 1e-7])
@pytest.mark.parametrize("epsilon", [0.5, 1.0, 4.0])
def test_it_is_near_the_truth_for_many_canaries(epsilon, delta):
    canaries = 100_000
    found = epsilon_lower_bound(canaries, canaries, round(canaries * accuracy(epsilon)), delta)
    assert epsilon - 0.06 < found < epsilon


def test_without_delta_it_is_the_bound_of_clopper_and_pearson():
    guesses, right = 80, 66
    lowest = float(stats.beta.ppf(0.05, right, guesses - right + 1))
    assert epsilon_lower_bound(100, guesses, right, 0.0) == pytest.approx(math.log(lowest / (1 - lowest)))


def test_the_p_value_is_that_of_the_formula_term_by_term():
    canaries, guesses, right, epsilon, delta = 30, 20, 17, 0.8, 1e-3

    def f(v):
        q = accuracy(epsilon)
        return sum(
            math.comb(guesses, k) * q**k * (1 - q) ** (guesses - k) for k in range(max(v, 0), guesses + 1)
        )

    steepest = max((f(right - i) - f(right)) / i for i in range(1, canaries + 1))
    expected = f(right) + 2 * canaries * delta * steepest
    assert p_value(canaries, guesses, right, epsilon, delta) == pytest.approx(expected, rel=1e-10)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 80), st.data(), st.sampled_from([0.0, 1e-6, 1e-3]))
def test_more_right_guesses_refute_more_and_a_larger_delta_or_confidence_refutes_less(guesses, data, delta):
    right = data.draw(st.integers(0, guesses - 1))
    found = epsilon_lower_bound(100, guesses, right, delta)
    assert 0 <= found <= epsilon_lower_bound(100, guesses, right + 1, delta)
    assert found >= epsilon_lower_bound(100, guesses, right, delta + 1e-3)
    assert found >= epsilon_lower_bound(100, guesses, right, delta, 0.99)
    if found:
        assert p_value(100, guesses, right, found, delta) <= 0.05 + 1e-9
        assert p_value(100, guesses, right, found + 1e-6, delta) > 0.05


def test_guesses_are_the_surest_ones():
    assert guess([0.1, 3.0, -2.0, 0.5, 9.0], 3).tolist() == [0, 1, -1, 0, 1]
    assert guess([1.0, 2.0], 0).tolist() == [0, 0]
    assert guess([2.0, 1.0, 1.0, 0.0], 4).tolist() == [1, 1, -1, -1]


def test_several_attempts_share_the_error():
    included = np.arange(100) % 2 == 0
    scores = np.where(included, 1.0, 0.0)
    alone = attempts(scores, included, [1.0], 1e-5)
    together = attempts(scores, included, [1.0, 0.2], 1e-5)
    assert [(a.guesses, a.correct) for a in together] == [(100, 100), (20, 20)]
    assert together[0].epsilon_lower == epsilon_lower_bound(100, 100, 100, 1e-5, 0.975)
    assert 0 < together[0].epsilon_lower < alone[0].epsilon_lower


@pytest.mark.parametrize(
    "mistake",
    [
        lambda: p_value(10, 11, 3, 1.0, 0.0),
        lambda: p_value(10, 5, 6, 1.0, 0.0),
        lambda: p_value(10, 5, 3, -1.0, 0.0),
        lambda: p_value(10, 5, 3, 1.0, 2.0),
        lambda: epsilon_lower_bound(10, 5, 3, 0.0, 1.0),
        lambda: guess([0.0, math.nan], 1),
        lambda: guess([0.0, 1.0], 3),
        lambda: attempts([0.0], np.array([True]), [], 0.0),
        lambda: attempts([0.0], np.array([True]), [1.5], 0.0),
    ],
)
def test_what_makes_no_sense_is_refused(mistake):
    with pytest.raises(UserError):
        mistake()
