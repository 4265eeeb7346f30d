"""Verdicts over seeds: against scipy, and for what a few seeds cannot tell."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from dpexp.reproduce.statistics import compare, holm, mean_std, overall

HIGH, LOW = [90.1, 90.4, 90.2], [85.0, 85.6, 85.2]


def test_the_difference_is_welchs():
    ours = compare([3.0, 4.0, 6.0], [1.0, 2.5], "greater")
    theirs = stats.ttest_ind([3.0, 4.0, 6.0], [1.0, 2.5], equal_var=False, alternative="greater")
    interval = stats.ttest_ind([3.0, 4.0, 6.0], [1.0, 2.5], equal_var=False).confidence_interval()
    assert ours.p_for == pytest.approx(theirs.pvalue)
    assert ours.p_against == pytest.approx(1 - theirs.pvalue)
    assert (ours.low, ours.high) == pytest.approx((interval.low, interval.high))


@pytest.mark.parametrize(
    ("left", "right", "expect", "margin", "verdict"),
    [
        (HIGH, LOW, "greater", 0, "supports"), (LOW, HIGH, "greater", 0, "contradicts"),
        (HIGH, HIGH[::-1], "greater", 0, "cannot tell"),
        (HIGH, HIGH[::-1], "at_least", 1, "supports"), (LOW, HIGH, "at_least", 1, "contradicts"),
        (HIGH, HIGH[::-1], "close", 1, "supports"), (HIGH, LOW, "close", 1, "contradicts"),
        ([80, 95, 99], [81, 94, 99], "close", 1, "cannot tell"),
    ],
)  # fmt: skip
def test_verdicts(left: list[float], right: list[float], expect: str, margin: float, verdict: str):
    assert compare(left, right, expect, margin).verdict == verdict


def test_one_seed_cannot_tell():
    result = compare([99.0], [1.0, 1.1], "greater")
    assert (result.verdict, result.tested, result.difference) == ("cannot tell", False, pytest.approx(97.95))
    assert math.isinf(result.high)


def test_seeds_without_spread_cannot_tell():
    assert compare([2.0, 2.0], [1.0, 1.0], "greater").verdict == "cannot tell"


def test_an_unknown_expectation_is_refused():
    with pytest.raises(ValueError, match="expect=better"):
        compare([1, 2], [1, 2], "better")


def test_a_claim_needs_every_pair():
    good, bad = compare(HIGH, LOW, "greater"), compare(LOW, HIGH, "greater")
    unclear, single = compare(HIGH, HIGH[::-1], "greater"), compare([1], [2], "greater")
    assert overall([good, good, single]) == "supports"
    assert overall([good, unclear]) == "cannot tell"
    assert overall([good, bad]) == "contradicts"
    assert overall([single]) == overall([]) == "cannot tell"


def test_a_contradiction_among_many_pairs_needs_more():
    weak = compare([1.0, 1.4, 1.1], [1.5, 1.6, 1.9], "greater")
    assert weak.verdict == "contradicts"
    unclear = compare(HIGH, HIGH[::-1], "greater")
    assert overall([weak, *[unclear] * 9]) == "cannot tell"


def test_holm_is_that_of_the_textbook():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])


def test_error_rate_of_a_true_null():
    draws = np.random.default_rng(0).normal(size=(400, 2, 3))
    wrong = sum(compare(list(a), list(b), "greater").verdict == "supports" for a, b in draws)
    assert 5 <= wrong <= 36  # 5% of 400, Welch being a little conservative for n = 3


def test_spread_is_that_of_a_sample():
    assert mean_std([1.0, 3.0]) == (2.0, pytest.approx(math.sqrt(2)))
    assert mean_std([1.0]) == (1.0, None)


def test_pairs_of_one_run_are_compared_with_each_other():
    left, right = [1.0, 5.0, 9.0], [0.9, 4.8, 8.9]  # far apart, and each above its own partner
    paired = compare(left, right, "greater", paired=True)
    expected = stats.ttest_rel(left, right, alternative="greater")
    assert paired.p_for == pytest.approx(expected.pvalue)
    assert paired.verdict == "supports"
    assert compare(left, right, "greater").verdict == "cannot tell"
    assert compare([1.0], [0.5], "greater", paired=True).verdict == "cannot tell"
    with pytest.raises(ValueError, match="zip"):
        compare([1.0, 2.0], [0.5], "greater", paired=True)
