"""Lower bounds on epsilon that use what an attack's scores are: Gaussian, in and out.

Three estimators beside Steinke's (`dpexp.auditing.one_run`), each a bound at the confidence asked for:

*f-DP in one run* (Mahloujifar, Melis & Chaudhuri, "Auditing f-Differential Privacy in One Run", arXiv 2410.22235): m canaries,
r guesses, v of them right. A μ-GDP training could hardly do so; the largest μ that is refuted becomes an ε.

*The Gaussian pair* (Agrawal et al., "Let's Ask Gauss", arXiv 2606.12733): scores of a white-box attack on noisy sums are
Gaussian, around 0 without the canary and around μ·s with it. The two samples then bound μ, and ε is the closed form of the
Gaussian mechanism. We take one standard deviation s for both and the exact interval of the noncentral t distribution.
It is a bound as far as the scores are independent and Gaussian: exact for full batches, an approximation for sampled ones.

*Two worlds* (Clopper & Pearson): each canary is a trial of its own, and the rates of true and false alarms at a threshold
fixed before give ε ≥ log((TPR - δ)/FPR) at once. It assumes
independence alone, and sees no more than log of the number of trials.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from dpexp.errors import UserError
from dpexp.privacy.gaussian import gaussian_epsilon

_LARGEST_MU = 64.0
_HALVINGS = 36


@lru_cache(maxsize=1024)
def fdp_lower_bound(
    canaries: int, guesses: int, correct: int, delta: float, confidence: float = 0.95
) -> float:
    """The largest ε whose Gaussian mechanism is refuted by so many right guesses (arXiv 2410.22235, audit_rh_with_cap).

    Args:
        canaries: m.
        guesses: r, at most m, fixed before.
        correct: v, at most r.
        delta: of the claim.
        confidence: of the bound.

    Raises:
        UserError: numbers that can't be.
    """
    from scipy.special import ndtr, ndtri

    if not 0 <= correct <= guesses <= canaries or guesses < 1:
        raise UserError(
            f"{correct} right of {guesses} guesses about {canaries} canaries: counts that can't be"
        )
    _check(delta, confidence)
    error = 1 - confidence

    def refuted(mu: float) -> bool:
        right, wrong = error * correct / canaries, error * (guesses - correct) / canaries
        for i in range(correct - 1, -1, -1):
            # f^-1 of the trade-off function of N(0, 1) and N(μ, 1): 1 - f(x) = Φ(Φ^-1(x) + μ), and its inverse
            least = float(ndtr(ndtri(right) - mu)) if 0 < right < 1 else float(right >= 1)
            if least <= wrong:
                break
            right, wrong = min(1.0, right + i / (guesses - i) * (least - wrong)), least
        return right + wrong > guesses / canaries

    return gaussian_epsilon(delta, _largest(refuted))


def pair_lower_bound(
    scores: npt.ArrayLike, included: npt.NDArray[np.bool_], delta: float, confidence: float = 0.95
) -> float:
    """The ε of the smallest μ that two Gaussian samples leave possible (arXiv 2606.12733, with one standard deviation).

    Args:
        scores: `[m]`, larger where a canary is in.
        included: `[m]`, the coins.
        delta: of the claim.
        confidence: of the bound.

    Raises:
        UserError: fewer than two canaries on a side, or scores that are no finite numbers.
    """
    from scipy import stats

    present, absent = _sides(scores, included)
    _check(delta, confidence)
    freedom = len(present) + len(absent) - 2
    squares = float(((present - present.mean()) ** 2).sum() + ((absent - absent.mean()) ** 2).sum())
    if squares <= 0:
        raise UserError("the audit's scores are all alike: there was no noise, or nothing was observed")
    per_unit = math.sqrt(1 / len(present) + 1 / len(absent))
    t = float(present.mean() - absent.mean()) / math.sqrt(squares / freedom) / per_unit

    def refuted(mu: float) -> bool:
        # beyond 2e3 degrees of freedom scipy's noncentral t is slow, and a normal one as good
        shift = mu / per_unit
        if freedom > 2_000:
            return bool(stats.norm.sf((t - shift) / math.sqrt(1 + t * t / (2 * freedom))) < 1 - confidence)
        return bool(stats.nct.sf(t, freedom, shift) < 1 - confidence)

    return gaussian_epsilon(delta, _largest(refuted))


def two_world_lower_bound(
    scores: npt.ArrayLike,
    included: npt.NDArray[np.bool_],
    threshold: float,
    delta: float,
    confidence: float = 0.95,
) -> float:
    """log((TPR - δ)/FPR), or the same with the worlds exchanged, from Clopper-Pearson bounds that share the error.

    Args:
        scores: `[m]`, independent of each other.
        included: `[m]`.
        threshold: fixed before; a score above it says "in".
        delta: of the claim.
        confidence: of the bound.

    Raises:
        UserError: as `pair_lower_bound`.
    """
    from scipy import stats

    present, absent = _sides(scores, included)
    _check(delta, confidence)
    # two directions, two rates in each
    error = (1 - confidence) / 4

    def least(hits: int, trials: int) -> float:
        return float(stats.beta.ppf(error, hits, trials - hits + 1)) if hits else 0.0

    def most(hits: int, trials: int) -> float:
        return float(stats.beta.ppf(1 - error, hits + 1, trials - hits)) if hits < trials else 1.0

    found = 0.0
    for true, false in (
        (present > threshold, absent > threshold),
        (absent <= threshold, present <= threshold),
    ):
        rate = least(int(true.sum()), len(true)) - delta
        if rate > 0:
            found = max(found, math.log(rate / most(int(false.sum()), len(false))))
    return found


def _largest(refuted: Callable[[float], bool]) -> float:
    """The largest μ that is refuted; 0 where none is."""
    if not refuted(1e-6):
        return 0.0
    low, high = 1e-6, _LARGEST_MU
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def _sides(
    scores: npt.ArrayLike, included: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    values = np.asarray(scores, np.float64)
    if values.shape != included.shape or not np.isfinite(values).all():
        raise UserError("the audit's scores must be one finite number per canary; was the noise finite?")
    present, absent = values[included], values[~included]
    if min(len(present), len(absent)) < 2:
        raise UserError(
            f"{len(present)} canaries are in and {len(absent)} out: take more canaries, so that each side has two or more"
        )
    return present, absent


def _check(delta: float, confidence: float) -> None:
    if not 0 < delta < 1 or not 0 < confidence < 1:
        raise UserError(f"delta={delta} and confidence={confidence} must be between 0 and 1")
