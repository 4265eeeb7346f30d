"""Individual budgets: groups of examples with an ε of their own in one run.

Boenisch et al. (2023), as reviewed by Monir et al., sections 5 and 6.2. Who belongs to which group is public, as N is; what
is protected is whether an example is there, and what it says. Two methods, both for Poisson batches:

========  ===========================================================================================================
sampling  an example of group g is in a batch with probability q_g of its own; Σ_g N_g q_g is the expected batch B
scaling   the thresholds of group g are s_g·C_k under noise σ·S; the average of s_g over the examples is 1
========  ===========================================================================================================

Why a group's ε follows from its own numbers alone: neighbouring data sets differ in one example, of group g, say. Given the
draws of all others, the step is a Gaussian mechanism whose sum moves by at most s_g·S, with probability q_g. That is
PoissonSampled(q_g, Gaussian(σ/s_g)), whatever the others' rates and bounds are. With adaptive thresholds the counts are released
besides, with the same sensitivity for everybody; for group g the step is PoissonSampled(q_g, Composed(Gaussian(σ_new/s_g),
Gaussian(σ/√r))), that is one Gaussian of multiplier σ/√(s_g²(1 - r) + r).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from dp_accounting import DpEvent
from numpy.typing import NDArray
from scipy.optimize import brentq

from dpexp.errors import UserError
from dpexp.privacy.accountants import epsilon
from dpexp.privacy.calibration import calibrate
from dpexp.privacy.partition import read_lines
from dpexp.privacy.sampling import generator_from

METHODS = ("sampling", "scaling")

MakeEvent = Callable[[float, float, float], DpEvent]
"""(sampling rate q, noise multiplier σ of the first step, threshold scale s) -> what the run releases about such an example."""

# relative, of rates; far below what a learner notices
_TOLERANCE = 1e-5
# relative, by which scales stay below their solution, so that rounding cannot overspend
_MARGIN = 1e-9


@dataclass(frozen=True)
class Budgets:
    """The groups of a plan, each field with one entry per group; see `solve`.

    ``method``; ``epsilons``: the targets; ``sizes``: N_g, public; ``rates``: q_g; ``scales``: s_g; ``membership``: SHA-256 of who
    is in which group.
    """

    method: str
    epsilons: tuple[float, ...]
    sizes: tuple[int, ...]
    rates: tuple[float, ...]
    scales: tuple[float, ...]
    membership: str

    @classmethod
    def of(cls, value: Budgets | Mapping[str, Any] | None) -> Budgets | None:
        """Budgets from their plain values, as a JSON file has them."""
        if value is None or isinstance(value, Budgets):
            return value
        plain: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in value.items()}
        return cls(**plain)

    @property
    def least_protected(self) -> int:
        """The group whose ε is the largest: its rate and its scale are."""
        return max(range(len(self.sizes)), key=lambda g: (self.rates[g], self.scales[g]))


def draw_groups(num_examples: int, shares: Sequence[float], seed: int) -> NDArray[np.int64]:
    """``[N]`` group numbers from 0, a random partition with the given shares (Monir et al., Table 9), drawn from a public seed.

    Raises `UserError` for shares that are not positive or do not add up to 1, and for a group that would be empty.
    """
    if not shares or any(share <= 0 for share in shares) or abs(sum(shares) - 1) > 1e-6:
        raise UserError(f"individual.shares={list(shares)} must be positive numbers that add up to 1")
    borders = np.round(np.cumsum(shares) * num_examples).astype(np.int64)
    borders[-1] = num_examples
    sizes = np.diff(borders, prepend=0)
    if not sizes.all():
        raise UserError(f"individual.shares={list(shares)} leaves a group of {num_examples} examples empty")
    groups = np.repeat(np.arange(len(sizes)), sizes)
    words = hashlib.sha256(f"individual budgets {seed}".encode()).digest()
    return generator_from(words).permutation(groups)


def read_groups(file: str | Path, num_examples: int, number: int) -> NDArray[np.int64]:
    """``[N]`` group numbers from 0, from a text file that has a number from 1 to ``number`` in the line of each training example.

    Raises `UserError` with the line for what is no such number, and for a file of another length.
    """
    lines = read_lines("individual.groups", file, num_examples, "one group number")
    for line, word in enumerate(lines, start=1):
        if not word.isdecimal() or not 1 <= int(word) <= number:
            raise UserError(
                f"{file}, line {line}: {word!r} is not a group from 1 to {number} (individual.epsilons has {number} budgets)"
            )
    groups = np.asarray([int(word) - 1 for word in lines], dtype=np.int64)
    if missing := sorted(set(range(number)) - set(groups.tolist())):
        raise UserError(
            f"{file}: nobody is in group {missing[0] + 1}; leave its budget out of individual.epsilons"
        )
    return groups


def solve(
    method: str,
    epsilons: Sequence[float],
    groups: NDArray[np.int64],
    sample_rate: float,
    quantile_budget: float,
    make_event: MakeEvent,
    delta: float,
    accountant: str,
) -> tuple[float, Budgets]:
    """The noise multiplier σ, and rates and scales with which each group spends at most its ε, and hardly less.

    Args:
        method: "sampling" or "scaling".
        epsilons: of the groups, positive.
        groups: ``[N]``, which group each example is in.
        sample_rate: q = B/N, the average over all examples.
        quantile_budget: r.
        make_event: what the run releases about one example.
        delta, accountant: of every group.

    Raises:
        UserError: no such method, budgets that are no positive numbers, or that this method cannot meet together.
    """
    if method not in METHODS:
        raise UserError(f"individual.name={method} is not a choice; choices: none, {', '.join(METHODS)}")
    if not epsilons or not all(0 < value < math.inf for value in epsilons):
        raise UserError(f"individual.epsilons={list(epsilons)} must be positive numbers, one for each group")
    sizes = np.bincount(groups, minlength=len(epsilons))
    weights = sizes / len(groups)
    if method == "sampling":
        sigma, rates = _rates(epsilons, weights, sample_rate, make_event, delta, accountant)
        scales = [1.0] * len(epsilons)
    else:
        alone = [
            calibrate(lambda s: make_event(sample_rate, s, 1.0), value, delta, accountant)
            for value in epsilons
        ]
        sigma, scales = _scales(alone, weights, quantile_budget, epsilons)
        rates = [sample_rate] * len(epsilons)
    for value, rate, scale in zip(epsilons, rates, scales, strict=True):
        if (spent := epsilon(make_event(rate, sigma, scale), delta, accountant)) > value * (1 + 1e-6):
            raise RuntimeError(f"a group with a budget of {value} would spend {spent}")
    membership = hashlib.sha256(groups.astype("<i8").tobytes()).hexdigest()
    sizes_ = tuple(int(size) for size in sizes)
    return sigma, Budgets(method, tuple(epsilons), sizes_, tuple(rates), tuple(scales), membership)


def _rates(
    epsilons: Sequence[float],
    weights: NDArray[np.float64],
    average: float,
    make_event: MakeEvent,
    delta: float,
    accountant: str,
) -> tuple[float, list[float]]:
    """σ, and the rates q_g that spend each group's budget under it and average to q.

    More noise allows higher rates, so there is one such σ; it lies between those that the strictest and the most generous
    group would need for themselves at rate q.
    """

    # target -> log of the rate that was found before: the next one is near
    last: dict[float, float] = {}

    @cache
    def allowed(target: float, sigma: float) -> float:
        """The largest rate that keeps the target under σ."""

        def excess(log_rate: float) -> float:
            spent = epsilon(make_event(math.exp(log_rate), sigma, 1.0), delta, accountant)
            return math.log(max(spent, 1e-12) / target)

        near = last.get(target, math.log(average))
        low, high = near - 0.1, min(near + 0.1, 0.0)
        while excess(low) > 0:
            low, high = low - 4 * (high - low), low
            if low < math.log(average) - 20:
                return 0.0
        while excess(high) <= 0:
            if high == 0:
                return 1.0
            low, high = high, min(high + 4 * (high - low), 0.0)
        root = float(brentq(excess, low, high, xtol=_TOLERANCE))
        while excess(root) > 0:
            root -= _TOLERANCE
        last[target] = root
        return math.exp(root)

    def surplus(log_sigma: float) -> float:
        return float(weights @ [allowed(value, math.exp(log_sigma)) for value in epsilons]) / average - 1

    alone = [calibrate(lambda s: make_event(average, s, 1.0), value, delta, accountant) for value in epsilons]
    low, high = math.log(min(alone)) - 1e-3, math.log(max(alone)) + 1e-3
    log_sigma = float(brentq(surplus, low, high, xtol=1e-4)) if len(epsilons) > 1 else high
    # then the rates can be made smaller, which spends less
    while surplus(log_sigma) < 0:
        log_sigma += 1e-4
    sigma = math.exp(log_sigma)
    rates = np.asarray([allowed(value, sigma) for value in epsilons])
    return sigma, [float(rate) for rate in rates * (average / float(weights @ rates))]


def _scales(
    alone: Sequence[float], weights: NDArray[np.float64], quantile_budget: float, epsilons: Sequence[float]
) -> tuple[float, list[float]]:
    """σ, and the scales s_g that average to 1, from the σ_g that each group would need for itself.

    σ/√(s_g²(1 - r) + r) = σ_g gives s_g² = ((σ/σ_g)² - r)/(1 - r); without counts (r = 0) σ is the harmonic mean of the σ_g.
    """
    needed = np.asarray(alone)

    def scales(sigma: float) -> NDArray[np.float64]:
        squares = ((sigma / needed) ** 2 - quantile_budget) / (1 - quantile_budget)
        return np.sqrt(np.maximum(squares, 0.0))

    # below it the counts alone overspend
    smallest = math.sqrt(quantile_budget) * float(needed.max())
    if float(weights @ scales(smallest)) >= 1:
        raise UserError(
            f"individual.epsilons={list(epsilons)}: the counts of adaptive thresholds alone would spend more than the smallest "
            "budget. Lower clip.quantile_budget, take a clip without adaptive thresholds, or individual=sampling"
        )
    sigma = float(
        brentq(lambda s: float(weights @ scales(s)) - 1, smallest, 2 * float(needed.max()), xtol=1e-12)
    )
    return sigma, [float(scale) * (1 - _MARGIN) for scale in scales(sigma)]
