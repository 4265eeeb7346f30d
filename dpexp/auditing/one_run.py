"""A lower bound on epsilon from one training run (Steinke, Nasr & Jagielski 2023, "Privacy Auditing with One (1) Training Run").

m canaries are each put into the training data or left out by a fair secret coin S_i in {-1, 1}. One who sees the output alone
guesses T_i in {-1, 0, 1} for each, 0 for no guess, r guesses at most, and V of them are right. No algorithm of a given
(ε, δ) can make V large, so a large V refutes that (ε, δ).

*Pure ε.* Given the output, and all coins but the i-th, Bayes' rule moves the even odds of coin i by a factor of e^ε at the
most: a guess is right with probability at most q = e^ε / (1 + e^ε), whatever is known of the other coins. Coin after coin, V is
thus stochastically dominated by W ~ Binomial(r, q), and P[V ≥ v] ≤ f(v) := P[W ≥ v]. Randomized response attains it.

*Approximate (ε, δ).* Where coin i has output densities P (in) and Q (out), a right guess can be more likely than q on the outputs
with P > e^ε Q or Q > e^ε P alone, and the excess (p - q)/(1 - q) has mean 1/2·∫max(P - e^ε Q, 0) + 1/2·∫max(Q - e^ε P, 0) ≤ δ.
The excess of a coin may depend on the coins before it. Steinke et al. (section 5, the theorem for approximate privacy) show
that given the output t, V is dominated by W + F(t) with W as above and a number F(t) in {0, …, m} whose mean over outputs is
at most 2mδ. From there

    P[V ≥ v] ≤ E f(v - F) = f(v) + Σ_i P[F = i]·(f(v - i) - f(v)) ≤ f(v) + E[F]·max_{i ≥ 1} (f(v - i) - f(v))/i
             ≤ f(v) + 2mδ·max_{1 ≤ i ≤ m} (f(v - i) - f(v))/i,

which is `p_value`. The bound on ε is where it reaches 1 minus the confidence. It holds for one (ε, δ) at a time and for every
larger ε as well: for each of them a p-value of at most α means v ≥ some critical value, and the smallest critical value of
those has probability at most α. So a bound above the true ε has probability at most α.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from dpexp.errors import UserError

_HALVINGS = 60


@dataclass(frozen=True)
class Attempt:
    """What came of one number of guesses.

    guesses: r.
    correct: v, how many of them were right.
    epsilon_lower: at this attempt's share of the error.
    """

    guesses: int
    correct: int
    epsilon_lower: float


def p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """A bound on the probability of so many right guesses, or more, if the training is (ε, δ)-private; at most 1.

    Args:
        canaries: m.
        guesses: r, at most m, fixed before anything was seen.
        correct: v, at most r.
        epsilon, delta: of the claim to be tested, per canary.

    Raises:
        UserError: numbers that can't be.
    """
    from scipy import stats

    if not 0 <= correct <= guesses <= canaries or not 0 <= epsilon < math.inf or not 0 <= delta <= 1:
        raise UserError(
            f"an audit with {canaries} canaries, {guesses} guesses and {correct} right ones at epsilon={epsilon}, "
            f"delta={delta} makes no sense: 0 <= right <= guesses <= canaries, epsilon >= 0, 0 <= delta <= 1"
        )
    q = 1 / (1 + math.exp(-epsilon))
    tail = float(stats.binom.sf(correct - 1, guesses, q))
    if not correct or not delta:
        return min(1.0, tail)
    # f(v - i) - f(v) = P[v - i <= W < v] for i = 1, …, v; beyond v it grows no more.
    gains = np.cumsum(stats.binom.pmf(np.arange(correct - 1, -1, -1), guesses, q))
    steepest = float(np.max(gains / np.arange(1, correct + 1)))
    return min(1.0, tail + 2 * canaries * delta * steepest)


@lru_cache(maxsize=1024)
def epsilon_lower_bound(
    canaries: int, guesses: int, correct: int, delta: float, confidence: float = 0.95
) -> float:
    """The largest ε that so many right guesses refute at this confidence; 0 where they refute none.

    Args:
        canaries, guesses, correct, delta: as in `p_value`.
        confidence: of the bound, in (0, 1): it exceeds the true ε with probability 1 - confidence at most.

    Raises:
        UserError: numbers that can't be.
    """
    if not 0 < confidence < 1:
        raise UserError(f"confidence={confidence} must be between 0 and 1")
    error = 1 - confidence

    def refuted(epsilon: float) -> bool:
        return p_value(canaries, guesses, correct, epsilon, delta) <= error

    if not refuted(0.0):
        return 0.0
    low, high = 0.0, 1.0
    # ends, because f(v) tends to 1 as epsilon grows
    while refuted(high):
        low, high = high, 2 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def guess(scores: npt.ArrayLike, number: int) -> npt.NDArray[np.int8]:
    """ "In" for the highest scores, "out" for the lowest, half of the guesses each, and none for what lies between.

    Args:
        scores: `[m]`, larger where a canary looks more like one that was trained on; no coin may have been looked at.
        number: of guesses, at most m. Of an odd number the additional one is "in".

    Returns:
        `[m]`: 1 in, -1 out, 0 no guess.

    Raises:
        UserError: a score that is no number, or more guesses than canaries.
    """
    values = np.asarray(scores, np.float64)
    if values.ndim != 1 or np.isnan(values).any():
        raise UserError(
            "the audit's scores must be one number per canary, and none NaN; was the model trained to a finite loss?"
        )
    if not 0 <= number <= len(values):
        raise UserError(f"{number} guesses about {len(values)} canaries: at most one each")
    order = np.argsort(-values, kind="stable")
    guesses = np.zeros(len(values), np.int8)
    guesses[order[: number - number // 2]] = 1
    guesses[order[len(values) - number // 2 :]] = -1
    return guesses


def attempts(
    scores: npt.ArrayLike,
    included: npt.NDArray[np.bool_],
    shares: Sequence[float],
    delta: float,
    confidence: float = 0.95,
) -> list[Attempt]:
    """One attempt for each number of guesses. The best of them is a bound at this confidence, all of them together.

    Many guesses average out luck, few are surer; which is better depends on the run, and to choose afterwards would be
    cheating. So the error is shared out: each attempt has 1/len(shares) of it.

    Args:
        scores: `[m]`, see `guess`.
        included: `[m]`, the coins.
        shares: numbers of guesses as shares of m, in (0, 1], fixed before.
        delta: of the claim.
        confidence: of the best bound.

    Raises:
        UserError: no shares, one outside (0, 1], or as the functions above.
    """
    if not shares or not all(0 < share <= 1 for share in shares):
        raise UserError(f"guesses={list(shares)}: give shares of the canaries, above 0 and at most 1")
    canaries, level = len(included), 1 - (1 - confidence) / len(shares)
    coins = np.where(included, 1, -1)
    found = []
    for share in shares:
        number = max(1, round(share * canaries))
        correct = int(np.sum(guess(scores, number) == coins))
        bound = epsilon_lower_bound(canaries, number, correct, delta, level)
        found.append(Attempt(number, correct, bound))
    return found
