"""From a budget to the noise, or the number of steps, that keeps it."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable

from dp_accounting import DpEvent

from dpexp.errors import UserError
from dpexp.privacy.accountants import LARGEST_EPSILON, epsilon

# relative, of σ
_TOLERANCE = 1e-4
_SMALLEST, _LARGEST = 1e-4, 1e8
_MOST_STEPS = 1 << 40


def calibrate(
    make_event: Callable[[float], DpEvent], target_epsilon: float, delta: float, accountant: str = "rdp"
) -> float:
    """The smallest noise multiplier σ (to 1e-4, relative) with ε(make_event(σ)) <= target_epsilon.

    Never overspends: the σ that is returned has itself been evaluated. 0 where nothing is released. Raises
    `UserError` for a target that is not a positive number, or that no noise can meet."""
    check_target(target_epsilon)

    def spent(sigma: float) -> float:
        return epsilon(make_event(sigma), delta, accountant)

    if spent(0.0) <= target_epsilon:
        return 0.0
    start, factor = 1.0, 2.0
    if accountant in ("prv", "pld"):
        # They take seconds for many steps: start at the answer of rdp, which is cheap and a little above theirs.
        with contextlib.suppress(UserError):
            start, factor = calibrate(make_event, target_epsilon, delta), 1.15
        if target_epsilon > LARGEST_EPSILON and math.isinf(spent(start)):
            raise UserError(
                f"epsilon={target_epsilon:g} is beyond what accountant={accountant} can tell ({LARGEST_EPSILON:g}), and no "
                "protection at all: ask for a smaller one, or take accountant=rdp"
            )
    short, spent_short = 0.0, math.inf
    enough, spent_enough = start, spent(start)
    if math.isinf(spent_enough) and accountant in ("prv", "pld"):
        # where rdp keeps the target: no search would end elsewhere than at the edge
        _refuse_edge(make_event(start), target_epsilon, delta, accountant)
    while spent_enough > target_epsilon:
        short, spent_short = enough, spent_enough
        enough *= factor
        factor = min(factor * factor, 64.0)
        if enough > _LARGEST:
            raise UserError(
                f"epsilon={target_epsilon} at delta={delta} cannot be met by any noise multiplier up to {_LARGEST:g}"
                f" under the {accountant} accountant: raise epsilon or delta, or take fewer steps or a smaller batch"
            )
        spent_enough = spent(enough)
    while short == 0.0:
        candidate = enough / factor
        if candidate < _SMALLEST:
            return enough
        if (value := spent(candidate)) > target_epsilon:
            short, spent_short = candidate, value
        else:
            enough, spent_enough = candidate, value
            factor = min(factor * factor, 2.0)
    sigma, (short, spent_short) = _narrow(spent, target_epsilon, (short, spent_short), (enough, spent_enough))
    if math.isinf(spent_short) and accountant in ("prv", "pld"):
        _refuse_edge(make_event(short), target_epsilon, delta, accountant)
    return sigma


def _refuse_edge(event: DpEvent, target: float, delta: float, accountant: str) -> None:
    """Raise `UserError` where a noise that would do has no finite ε: what was found is the edge of an accountant's arithmetic."""
    try:
        beyond = epsilon(event, delta) > LARGEST_EPSILON
    except UserError:
        # rdp, which holds any rates, knows nothing of these events
        return
    if beyond:
        return
    other = "pld" if accountant == "prv" else "rdp"
    raise UserError(
        f"accountant={accountant} finds no finite epsilon near {target:g} (its grid does not hold rates or noises so far apart), "
        f"and would ask for far more noise than is needed: take accountant={other}"
    )


def longest(
    make_event: Callable[[int], DpEvent], target_epsilon: float, delta: float, accountant: str = "rdp"
) -> int:
    """The largest number of steps T with ε(make_event(T)) <= target_epsilon, which has itself been evaluated; 0 where one
    step spends more.

    Raises `UserError` for a target that is not a positive number, or that no number of steps spends."""
    check_target(target_epsilon)

    def kept(steps: int) -> bool:
        return epsilon(make_event(steps), delta, accountant) <= target_epsilon

    enough, beyond, factor = 0, 1, 2.0
    if accountant in ("prv", "pld"):
        # as in `calibrate`
        beyond, factor = max(1, longest(make_event, target_epsilon, delta)), 1.15
    while kept(beyond):
        enough, beyond = beyond, math.ceil(beyond * factor)
        if beyond > _MOST_STEPS:
            raise UserError(f"epsilon={target_epsilon:g} is never spent: {enough} steps keep it")
    while beyond - enough > 1:
        middle = (enough + beyond) // 2
        enough, beyond = (middle, beyond) if kept(middle) else (enough, middle)
    return enough


def check_target(epsilon: float) -> None:
    """Raises `UserError` unless ε is a positive number."""
    if not 0 < epsilon < math.inf:
        raise UserError(
            f"epsilon={epsilon} is not a positive number; for no guarantee set noise_multiplier=0"
        )


def _narrow(
    spent: Callable[[float], float],
    target: float,
    too_small: tuple[float, float],
    large_enough: tuple[float, float],
) -> tuple[float, tuple[float, float]]:
    """Shrink the bracket of pairs (σ, ε) to the tolerance: the upper end, which keeps the target, and the pair below it."""
    (short, spent_short), (enough, spent_enough) = too_small, large_enough
    for trial in itertools.count(1):
        if enough <= short * (1 + _TOLERANCE):
            break
        sigma = math.sqrt(short * enough)
        if trial % 4 and spent_enough > 0 and math.isfinite(spent_short):
            # every fourth halves the bracket for certain
            # log ε is nearly linear in log σ. Aim a quarter of the tolerance above the crossing: if that
            # keeps the target, the next candidate, as far below the upper end as the tolerance allows, ends
            # the search.
            slope = math.log(enough / short) / math.log(spent_short / spent_enough)
            guess = short * math.exp(slope * math.log(spent_short / target)) * (1 + _TOLERANCE / 4)
            sigma = min(max(guess, short * (1 + _TOLERANCE / 2)), enough / (1 + 0.9 * _TOLERANCE))
        if (value := spent(sigma)) <= target:
            enough, spent_enough = sigma, value
        else:
            short, spent_short = sigma, value
    return enough, (short, spent_short)
