"""Sums under personal budgets, in rounds."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy.integrate import quad

from dpexp.errors import UserError
from dpexp.privacy.personal_sums import NOISES, Round, _staircase_step, noisy_sum, personal_sum, plan_rounds


@pytest.mark.parametrize("whole", [False, True])
def test_everybody_spends_the_whole_budget_and_no_more(whole: bool) -> None:
    budgets = np.repeat([0.1, 0.5, 1.3, 4.0], [3, 20, 10, 1])
    rounds = plan_rounds(budgets, 2.0, whole=whole)
    assert 2 <= len(rounds) <= 4
    spent = sum(one.spent() for one in rounds)
    assert np.allclose(spent, budgets, rtol=1e-9)
    assert (spent <= budgets * (1 + 1e-9)).all()
    for one in rounds:
        assert ((one.keep >= 0) & (one.keep <= 1)).all()


def geometric(t: float, size: int) -> np.ndarray:
    """Probabilities of -size … size."""
    law = np.exp(-t * np.abs(np.arange(-size, size + 1)))
    return law / law.sum()


def law_of_a_round(one, there: list[int], size: int) -> np.ndarray:
    """Of the noisy count of those who are kept: the count is a sum of coins."""
    counts = np.array([1.0])
    for i in there:
        counts = np.convolve(counts, [1 - one.keep[i], one.keep[i]])
    return np.convolve(counts, geometric(one.threshold, size))


def test_nobody_can_tell_more_from_all_rounds_than_the_persons_own_epsilon() -> None:
    """The exact law of all answers with a person and without: the largest log-ratio of the rounds together is at most ε_i."""
    budgets = np.array([0.3, 0.3, 0.9, 2.0, 2.0])
    rounds = plan_rounds(budgets, 1.0, whole=True)
    assert all(one.noise == "geometric" for one in rounds)
    size = 60
    for i, budget in enumerate(budgets):
        others = [j for j in range(len(budgets)) if j != i]
        total = 0.0
        for one in rounds:
            with_i = law_of_a_round(one, [*others, i], size)
            without = np.pad(law_of_a_round(one, others, size), (0, 1))
            # where neither law is cut off
            inside = slice(len(budgets), len(with_i) - len(budgets))
            total += float(np.abs(np.log(with_i[inside] / without[inside])).max())
        assert total <= budget * (1 + 1e-6)
        assert total >= budget * 0.7, "the budget is used"


def staircase_density(x: float, bound: float, epsilon: float) -> float:
    """Geng & Viswanath, equation 1."""
    step, b = _staircase_step(epsilon), math.exp(-epsilon)
    height = (1 - b) / (2 * bound * (step + b * (1 - step)))
    number, rest = divmod(abs(x) / bound, 1)
    return height * b ** (number + (rest >= step))


@pytest.mark.parametrize("epsilon", [0.2, 1.0, 3.0])
def test_the_staircase_is_private_and_its_variance_is_what_is_said(epsilon: float) -> None:
    step, variance = _staircase_step(epsilon), NOISES["staircase"][0](1.5, epsilon)
    edges = [1.5 * (k + part) for k in range(120) for part in (0.0, step)]
    moments = [
        sum(2 * quad(lambda x, p=p: x**p * staircase_density(x, 1.5, epsilon), a, b)[0] for a, b in itertools.pairwise(edges))
        for p in (0, 2)
    ]  # fmt: skip
    assert moments[0] == pytest.approx(1, abs=1e-6)
    assert moments[1] == pytest.approx(variance, rel=1e-3)
    assert variance <= NOISES["laplace"][0](1.5, epsilon)
    grid = np.linspace(-9, 9, 1801)
    for moved in (0.4, 1.5):
        ratio = [
            staircase_density(x, 1.5, epsilon) / staircase_density(x - moved, 1.5, epsilon) for x in grid
        ]
        assert max(ratio) <= math.exp(epsilon) * (1 + 1e-9)


@pytest.mark.parametrize("kind", list(NOISES))
def test_draws_have_the_variance_that_is_said(kind: str) -> None:
    rng = np.random.default_rng(4)
    drawn = [NOISES[kind][1](1.0, 0.8, rng) for _ in range(20_000)]
    assert np.var(drawn) == pytest.approx(NOISES[kind][0](1.0, 0.8), rel=0.06)
    assert np.mean(drawn) == pytest.approx(0, abs=0.05)


@pytest.mark.parametrize("kind", list(NOISES))
def test_answers_lie_on_a_grid_that_does_not_depend_on_the_data(kind: str) -> None:
    """Else the last bits of an answer would tell which sums are possible behind it."""
    rng, bound = np.random.default_rng(3), 3.0
    one = Round(0.7, np.ones(50), kind, 1.0)
    grid = 1.0 if kind == "geometric" else bound / 2**20
    for _ in range(50):
        values = rng.integers(0, 4, 50) if kind == "geometric" else rng.random(50) * bound
        answer = noisy_sum(values.astype(float), one, bound, rng) / grid
        assert answer == round(answer)


@pytest.mark.parametrize("kind", list(NOISES))
def test_a_value_that_is_no_number_adds_nothing(kind: str) -> None:
    """The answer would be none either, and say that this person is there."""
    one = Round(0.7, np.ones(2), kind, 1.0)
    answers = [
        noisy_sum(np.array(values), one, 1.0, np.random.default_rng(5))
        for values in ([1.0], [1.0, math.nan], [1.0, -math.inf])
    ]
    assert math.isfinite(answers[0])
    assert answers[0] == answers[1] == answers[2]


class Bytes:
    """A source of bytes and of nothing else."""

    def __init__(self, seed: int):
        self.bytes = np.random.default_rng(seed).bytes


@pytest.mark.parametrize("kind", list(NOISES))
def test_noise_is_made_of_whole_numbers_and_not_of_a_logarithm(kind: str) -> None:
    """Which jumps by whole scales far out, so that the sum behind an answer there is known whatever ε is."""
    rng, bound, epsilon = Bytes(2), 3.0, 0.5
    grid = 1.0 if kind == "geometric" else bound / 2**20
    drawn = np.array([NOISES[kind][1](bound, epsilon, rng) for _ in range(4000)]) / grid  # type: ignore[arg-type]
    assert (drawn == np.rint(drawn)).all()
    if kind != "staircase":
        rate = epsilon * grid / bound
        for k in (0.2, 1.0, 2.0):
            assert np.mean(np.abs(drawn) * rate > k) == pytest.approx(math.exp(-k), abs=0.04)
    assert np.mean(drawn > 0) == pytest.approx(np.mean(drawn < 0), abs=0.05)


def test_the_rounds_beat_the_smallest_budget_for_all() -> None:
    """Values that do not go with budgets: the error of the rounds is smaller than that of one answer at the smallest ε."""
    rng = np.random.default_rng(1)
    budgets = np.repeat([0.02, 1.0], [10, 490])
    values = np.tile([0.0, 1.0], 250)
    rounds = plan_rounds(budgets, 1.0, whole=True)
    errors = [personal_sum(values, rounds, 1.0, rng) - values.sum() for _ in range(300)]
    assert np.mean(np.square(errors)) < 0.2 * NOISES["geometric"][0](1.0, 0.02)
    assert abs(np.mean(errors)) < 6


@pytest.mark.parametrize("budgets", [[], [1.0, 0.0], [1.0, math.inf]])
def test_budgets_that_make_no_sense_are_refused(budgets: list[float]) -> None:
    with pytest.raises(UserError, match="must be positive numbers"):
        plan_rounds(np.array(budgets))


def test_a_bound_of_whole_numbers_is_one() -> None:
    """A value of 2 cut to 1.5 would be rounded to 2 again, and move the sum by more than the noise is for."""
    with pytest.raises(UserError, match=r"bound=1\.5 is no whole number"):
        plan_rounds(np.array([1.0, 2.0]), 1.5, whole=True)
    assert plan_rounds(np.array([1.0, 2.0]), 2.0, whole=True)
