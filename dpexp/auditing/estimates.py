"""All estimators of a white-box audit together: each has its share of the error, so that the best of them is a bound."""

from __future__ import annotations

from typing import Any

import numpy as np

from dpexp.auditing import gaussian, one_run


def estimates(
    scores: np.ndarray, included: np.ndarray, guesses: list[float], delta: float, confidence: float
) -> list[dict[str, Any]]:
    """Every estimator's bound on ε, each at its share of the error, so that the best of them is one at `confidence`.

    Args:
        scores: `[m]`, larger where a canary looks in.
        included: `[m]`, the coins.
        guesses: shares of the canaries that the estimators by guesses guess.
        delta: of the claim.
        confidence: of the best bound.
    """
    level = 1 - (1 - confidence) / (2 * len(guesses) + 2)
    rows: list[dict[str, Any]] = []
    for share in guesses:
        # at this level already: attempts() would share the error among its own shares alone
        (found,) = one_run.attempts(scores, included, [share], delta, level)
        counts = {"guesses": found.guesses, "correct": found.correct}
        rows.append({"estimator": "Steinke"} | counts | {"epsilon_lower": found.epsilon_lower})
        bound = gaussian.fdp_lower_bound(len(included), found.guesses, found.correct, delta, level)
        rows.append({"estimator": "f-DP"} | counts | {"epsilon_lower": bound})
    middle = float(np.median(scores))
    right = int(((scores > middle) == included).sum())
    counts = {"guesses": len(included), "correct": right}
    bound = gaussian.pair_lower_bound(scores, included, delta, level)
    rows.append({"estimator": "Gaussian pair"} | counts | {"epsilon_lower": bound})
    bound = gaussian.two_world_lower_bound(scores, included, 0.0, delta, level)
    rows.append({"estimator": "two worlds"} | counts | {"epsilon_lower": bound})
    return rows
