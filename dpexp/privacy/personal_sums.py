"""Sums under personal budgets, in rounds: the idea of AdaPDP (Niu et al. 2021), as Monir et al., section 5, describe it.

One pass of the sampling mechanism (`partition.sampling_mechanism`) at a threshold t leaves what budgets above t have left
unspent. So there are several rounds: each takes the threshold that makes its answer the best, keeps people at random with what
they have left, and answers with the noise of least variance; the next one goes on with the rest. Rounds compose: a person spends

    Σ_k ln(1 + π_ik·(e^{t_k} - 1)) = Σ_k min(rest of i, t_k) = ε_i.

Budgets are public here, and who is in the data is not: neighbours differ in one person's being there.

What is released lies on a public grid: values are whole multiples of it, and so is the noise, drawn by whole numbers alone
(Canonne, Kamath & Steinke 2020, Algorithms 1 and 2). Whatever is possible for one data set is then possible for its
neighbour, and as likely to a factor of e^ε. It is not where floating-point noise is added as it is (Mironov 2012), nor where
it is rounded to a grid: the logarithm of a number of 53 bits leaves gaps in the tail, of 3e-10 in all, that tell one sum from
another.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from dpexp.errors import UserError
from dpexp.privacy.partition import sampling_mechanism

Floats = NDArray[np.float64]
_SPENT = 1e-12
# of C, the grid of values and of noise that are no whole numbers
_STEPS = 1 << 20
# ε below which a staircase is no better than Laplace noise, and its step is lost in rounding
_FLAT = 0.01


@dataclass(frozen=True)
class Round:
    """One answer.

    Attributes:
        threshold: t, the ε of the mechanism that sees who was kept.
        keep: `[N]`, the probability with which each person is kept.
        noise: its kind, a key of `NOISES`.
        variance: of its estimate of the whole sum, at most.
    """

    threshold: float
    keep: Floats
    noise: str
    variance: float

    def spent(self) -> Floats:
        """`[N]`, what each person pays for the answer."""
        return np.log1p(self.keep * math.expm1(self.threshold))


def plan_rounds(budgets: Floats, bound: float = 1.0, *, whole: bool = False) -> list[Round]:
    """Spend all budgets, in at most as many rounds as there are different ones.

    Args:
        budgets: `[N]`, ε of each person.
        bound: C; values are in [0, C].
        whole: values are whole numbers, so that geometric noise will do.

    Raises:
        UserError: budgets or a bound that are no positive numbers, or a bound of whole numbers that is none.
    """
    budgets = np.asarray(budgets, dtype=np.float64)
    if not len(budgets) or not (np.isfinite(budgets) & (budgets > 0)).all() or not 0 < bound < math.inf:
        raise UserError("personal budgets and the bound of the values must be positive numbers")
    if whole and bound != int(bound):
        raise UserError(
            f"bound={bound:g} is no whole number, and values of whole numbers cut to it would be rounded beyond it: give "
            f"{math.floor(bound):g}, or whole=False"
        )
    left, found = budgets.copy(), []
    while (left > _SPENT).any():
        rounds = [_round(left, float(t), bound, whole) for t in np.unique(left[left > _SPENT])]
        best = min(rounds, key=lambda one: one.variance)
        found.append(best)
        left = np.where(left > best.threshold, left - best.threshold, 0.0)
    return found


def personal_sum(values: Floats, rounds: list[Round], bound: float, rng: np.random.Generator) -> float:
    """Answer all rounds and average them by their variances, an estimate of Σ values.

    It is unbiased where values do not go with budgets.

    Args:
        values: `[N]`, cut to [0, C]; whole numbers where a round has geometric noise. One that is no number counts as 0.
        rounds: of `plan_rounds`, for the same people and bound.
        bound: C.
        rng: secret.
    """
    values, total = np.asarray(values, dtype=np.float64), 0.0
    weights = np.asarray([1 / one.variance for one in rounds])
    for one, weight in zip(rounds, weights / weights.sum(), strict=True):
        kept = rng.random(len(values)) < one.keep
        answer = noisy_sum(values[kept], one, bound, rng)
        total += weight * answer * len(values) / one.keep.sum()
    return float(total)


def noisy_sum(values: Floats, one: Round, bound: float, rng: np.random.Generator) -> float:
    """Answer one round: a whole multiple of 1 under geometric noise, of C/2^20 under any other.

    Args:
        values: `[n]`, of those who were kept; cut to [0, C], and 0 where they are no numbers.
        one: the round.
        bound: C.
        rng: secret.
    """
    values = np.clip(np.nan_to_num(values, nan=0.0), 0, bound)
    grid = _grid(one.noise, bound)
    noise = NOISES[one.noise][1](bound, one.threshold, rng)
    return float(grid * (np.rint(values / grid).sum() + np.rint(noise / grid)))


def _grid(noise: str, bound: float) -> float:
    return 1.0 if noise == "geometric" else bound / _STEPS


def _round(left: Floats, threshold: float, bound: float, whole: bool) -> Round:
    keep = np.zeros(len(left))
    some = left > _SPENT
    keep[some] = sampling_mechanism(left[some].tolist(), threshold)
    kinds = [kind for kind in NOISES if whole or kind != "geometric"]
    kind = min(kinds, key=lambda name: NOISES[name][0](bound, threshold))
    of_sampling = bound**2 * float((keep * (1 - keep)).sum())
    scale = len(left) / float(keep.sum())
    return Round(threshold, keep, kind, scale**2 * (of_sampling + NOISES[kind][0](bound, threshold)))


def _laplace_variance(bound: float, epsilon: float) -> float:
    return 2 * (bound / epsilon) ** 2


def _laplace(bound: float, epsilon: float, rng: np.random.Generator) -> float:
    return bound / _STEPS * _discrete_laplace(Fraction(epsilon) / _STEPS, rng)


def _geometric_variance(bound: float, epsilon: float) -> float:
    """Of the law P(n) ∝ e^(-ε|n|/C) (Ghosh, Roughgarden & Sundararajan 2009)."""
    return 2 * math.exp(-epsilon / bound) / math.expm1(-epsilon / bound) ** 2


def _geometric(bound: float, epsilon: float, rng: np.random.Generator) -> float:
    return float(_discrete_laplace(Fraction(epsilon) / Fraction(bound), rng))


def _staircase_step(epsilon: float) -> float:
    """γ that makes the variance least (Geng & Viswanath 2014, Theorem 8)."""
    b = math.exp(-epsilon)
    return -b / (1 - b) + (b - 2 * b**2 + 2 * b**4 - b**5) ** (1 / 3) / (2 ** (1 / 3) * (1 - b) ** 2)


def _staircase_variance(bound: float, epsilon: float) -> float:
    if epsilon < _FLAT:
        return math.inf
    b = math.exp(-epsilon)
    least = (2 ** (-2 / 3) * b ** (2 / 3) * (1 + b) ** (2 / 3) + b) / (1 - b) ** 2
    return bound**2 * least


def _staircase(bound: float, epsilon: float, rng: np.random.Generator) -> float:
    """Their Algorithm 1 on the grid: each step of a stair is e^-ε lower from γ on, and so is each stair."""
    exact, low = Fraction(epsilon), round(_staircase_step(epsilon) * _STEPS)
    while True:
        number = 0
        while _decays(exact, rng):
            number += 1
        place = _below(_STEPS, rng)
        while place >= low and not _decays(exact, rng):
            place = _below(_STEPS, rng)
        negative, far = _below(2, rng), number * _STEPS + place
        if far or not negative:
            return bound / _STEPS * (-far if negative else far)


def _discrete_laplace(rate: Fraction, rng: np.random.Generator) -> int:
    """A whole number n with P(n) ∝ e^(-rate·|n|), exactly."""
    while True:
        inner = _below(rate.denominator, rng)
        if not _decays(Fraction(inner, rate.denominator), rng):
            continue
        outer = 0
        while _decays(Fraction(1), rng):
            outer += 1
        far, negative = (inner + rate.denominator * outer) // rate.numerator, _below(2, rng)
        if far or not negative:
            return -far if negative else far


def _decays(gamma: Fraction, rng: np.random.Generator) -> bool:
    """True with probability e^-γ, exactly."""
    while gamma > 1:
        if not _decays(Fraction(1), rng):
            return False
        gamma -= 1
    k = 1
    while _below(gamma.denominator * k, rng) < gamma.numerator:
        k += 1
    return k % 2 == 1


def _below(limit: int, rng: np.random.Generator) -> int:
    """A whole number from 0 to limit - 1, all equally likely."""
    length = (limit.bit_length() + 7) // 8
    most = 256**length // limit * limit
    while (drawn := int.from_bytes(rng.bytes(length), "little")) >= most:
        pass
    return drawn % limit


Draw = Callable[[float, float, np.random.Generator], float]
NOISES: dict[str, tuple[Callable[[float, float], float], Draw]] = {
    "laplace": (_laplace_variance, _laplace),
    "geometric": (_geometric_variance, _geometric),
    "staircase": (_staircase_variance, _staircase),
}
"""Kind of noise -> its variance, and a draw of it; of (C, ε). All are ε-DP for sums that one person moves by C at most."""
