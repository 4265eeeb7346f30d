"""What a handful of seeds can say about a claim: a difference of means with its confidence interval, and a verdict.

Student's t for unequal variances (Welch 1947) over the seeds of two configurations. The spread over seeds is all that it
knows of; the error of a finite dev set comes on top.
"""

from __future__ import annotations

import math
import statistics as stats
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats as distributions

LEVEL = 0.05
EXPECTATIONS = ("greater", "at_least", "close")
SUPPORTS, CONTRADICTS, CANNOT_TELL = "supports", "contradicts", "cannot tell"


def mean_std(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and sample standard deviation (n - 1), None for a single value; NaN where one of them is."""
    mean = stats.fmean(values)
    return mean, None if len(values) < 2 else mean if math.isnan(mean) else stats.stdev(values)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95% confidence interval of a mean, Student's t; infinite for a single value."""
    mean, std = mean_std(values)
    if not std:
        return (-math.inf, math.inf) if std is None else (mean, mean)
    low, high = distributions.t(len(values) - 1, mean, std / math.sqrt(len(values))).interval(1 - LEVEL)
    return low, high


@dataclass(frozen=True)
class Comparison:
    """Left minus right, in the unit of the values.

    Attributes:
        difference: of the means.
        low, high: 95% confidence interval; infinite where a side has fewer than two seeds, or none has a spread.
        p_for: p-value of "the claim is false", small where the seeds support it; no number where there is no test.
        p_against: p-value of "the claim is true", small where they contradict it.
    """

    difference: float
    low: float = -math.inf
    high: float = math.inf
    p_for: float = math.nan
    p_against: float = math.nan

    @property
    def tested(self) -> bool:
        """Was there a test? Without one both p-values are no numbers, which are below no level."""
        return not math.isnan(self.p_for)

    @property
    def interval(self) -> str:
        """In words."""
        return f"[{self.low:+.2f}, {self.high:+.2f}]"

    @property
    def p_two_sided(self) -> float | None:
        """p-value of "both are alike", of a comparison that expects "greater"; None where there is no test."""
        return 2 * min(self.p_for, self.p_against) if self.tested else None

    @property
    def verdict(self) -> str:
        """Of this pair alone, at level 0.05."""
        return SUPPORTS if self.p_for < LEVEL else CONTRADICTS if self.p_against < LEVEL else CANNOT_TELL


def compare(
    left: Sequence[float], right: Sequence[float], expect: str, margin: float = 0.0, *, paired: bool = False
) -> Comparison:
    """Test a claim about left minus right, d.

    Args:
        left, right: one value per seed.
        expect: "greater" (d > 0), "at_least" (d > -margin: not worse by the margin) or "close" (|d| < margin, two
            one-sided tests).
        margin: in the unit of the values; 0 for "greater".
        paired: ``left[i]`` and ``right[i]`` come from one run: Student's t on their differences.

    Raises:
        ValueError: no values on a side, not as many on both of pairs, or an unknown expectation.
    """
    if expect not in EXPECTATIONS:
        raise ValueError(f"expect={expect} is none of {', '.join(EXPECTATIONS)}")
    samples = [[a - b for a, b in zip(left, right, strict=True)]] if paired else [left, right]
    means, stds = zip(*map(mean_std, samples), strict=True)
    difference = means[0] - sum(means[1:])
    parts = [(std or 0.0) ** 2 / len(own) for std, own in zip(stds, samples, strict=True)]
    error = math.sqrt(sum(parts))
    if None in stds or error == 0.0:
        # one value, or values that all agree: there is no spread to compare with
        return Comparison(difference)
    freedom = sum(parts) ** 2 / sum(p**2 / (len(own) - 1) for p, own in zip(parts, samples, strict=True))
    # what lies below a bound is the p-value against d <= bound, what lies above it that against d >= bound
    t = distributions.t(freedom, difference, error)
    if expect == "close":
        p_for = max(t.cdf(-margin), t.sf(margin))
        p_against = min(1.0, 2 * min(t.sf(-margin), t.cdf(margin)))
    else:
        bound = -margin if expect == "at_least" else 0.0
        p_for, p_against = t.cdf(bound), t.sf(bound)
    low, high = t.interval(1 - LEVEL)
    return Comparison(difference, low, high, p_for, p_against)


def against(
    first: Sequence[float], others: Sequence[Sequence[float]]
) -> list[tuple[Comparison, float | None]]:
    """Compare each of the others with the first: other minus first, and its two-sided p-value after Holm's correction, None where
    there is no test."""
    results = [compare(other, first, "greater") for other in others]
    corrected = iter(holm([p for result in results if (p := result.p_two_sided) is not None]))
    return [(result, None if result.p_two_sided is None else next(corrected)) for result in results]


def overall(comparisons: Sequence[Comparison]) -> str:
    """The verdict on a claim that every comparison is an instance of.

    It is supported if each instance that can be tested supports it (an intersection-union test: no correction is due),
    and contradicted if one of them does so after Holm's correction for having looked at all.
    """
    tested = [c for c in comparisons if c.tested]
    if any(p < LEVEL for p in holm([c.p_against for c in tested])):
        return CONTRADICTS
    return SUPPORTS if tested and all(c.verdict == SUPPORTS for c in tested) else CANNOT_TELL


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for several tests (Holm 1979), in the order given."""
    order = np.argsort(p_values)
    larger = np.maximum.accumulate(np.sort(p_values) * np.arange(len(p_values), 0, -1))
    corrected = np.empty(len(p_values))
    corrected[order] = np.minimum(larger, 1.0)
    return [float(p) for p in corrected]
