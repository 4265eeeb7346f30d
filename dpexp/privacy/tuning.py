"""The price of choosing the best of several trials, where the choice looked at private data or nobody can say that it did not.

Each trial is one training with a budget of its own, all with the same event. Two prices are known:

- *all trials are published*, or how many there would be (or at most) was fixed beforehand: they compose, for any way of choosing;
- *only the best is published, and the number of trials was drawn at random*, each with settings drawn afresh: the lower price of
  Papernot & Steinke (arXiv 2110.03620), Theorem 2 (geometric, logarithmic) and Theorem 6 (Poisson), by Rényi DP. It holds for
  the law that the number was drawn from, whatever came out; a grid that was searched to its end has no such law.
"""

from __future__ import annotations

import math

from dp_accounting import DpEvent
from dp_accounting.dp_event import RepeatAndSelectDpEvent

from dpexp.errors import UserError
from dpexp.privacy.accountants import ACCOUNTANTS, epsilon, epsilons
from dpexp.privacy.events import composed

# The shapes of the truncated negative binomial law, of which these are cases or the limit.
LAWS = {"geometric": 1.0, "logarithmic": 0.0, "poisson": math.inf}


def tuned_epsilons(
    event: DpEvent, delta: float, trials: float, law: str | None = None
) -> dict[str, float | None]:
    """ε of training and selection together under every accountant; None where one has no answer.

    Args:
        event: of one trial.
        delta: of the whole.
        trials: how many were run; with a law, its mean.
        law: that the number of trials was drawn from, one of `LAWS`; None composes all trials.

    Raises:
        UserError: fewer than one trial, a fraction of one without a law, or an unknown law.
    """
    if law is not None and law not in LAWS:
        raise UserError(f"trials_law={law} is not a choice; choices: {', '.join(LAWS)}")
    if not 1 <= trials < math.inf or (law is None and trials != int(trials)):
        raise UserError(
            f"trials={trials} must be a whole number, 1 or more (with trials_law, a mean of 1 or more)"
        )
    if law is None:
        return epsilons(composed([(event, int(trials))]), delta)
    found: dict[str, float | None] = dict.fromkeys(ACCOUNTANTS)
    found["rdp"] = epsilon(RepeatAndSelectDpEvent(event, float(trials), LAWS[law]), delta, "rdp")
    return found
