"""What makes no plan: one sentence for each, before anything is calibrated."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from dpexp.errors import UserError
from dpexp.privacy.accountants import ACCOUNTANTS, check_delta
from dpexp.privacy.schedules import Schedule, factor_counts

SAMPLINGS = ("poisson", "fixed", "shuffle")
MOST_BANDS = 64
# more of them save little, and each takes the memory of all that is released
BANDS_OF_AUTO = (1, 2, 4, 8, 16)
UNITS = {"example": "example", "user": "user with all examples of theirs"}
"""Whom N counts and the guarantee protects, and how the neighbouring relation calls them."""


def check_numbers(
    num_examples: int,
    expected_batch_size: float,
    steps: int,
    quantile_budget: float,
    noise_multiplier: float | None,
    *,
    unit: str,
    sampling: str,
) -> None:
    """Refuse with a `UserError` numbers outside of their ranges, and names that are no choice."""
    if unit not in UNITS:
        raise UserError(f"unit={unit} is not a choice; choices: {', '.join(UNITS)}")
    if num_examples < 1:
        raise UserError(f"the data set has {num_examples} {unit}s; at least one is needed")
    if not 0 < expected_batch_size <= num_examples:
        raise UserError(
            f"batch_size={expected_batch_size:g} must be above 0 and at most N = {num_examples} {unit}s"
        )
    if steps < 1:
        raise UserError(f"steps={steps}: at least one is needed")
    if not 0 <= quantile_budget < 1:
        raise UserError(f"quantile_budget={quantile_budget} is a share of the budget: 0 <= r < 1")
    if sampling not in SAMPLINGS:
        raise UserError(f"sampling={sampling} is not a choice; choices: {', '.join(SAMPLINGS)}")
    if sampling == "fixed" and expected_batch_size != int(expected_batch_size):
        raise UserError(
            f"sampling=fixed needs a whole number of examples, not batch_size={expected_batch_size}"
        )
    if noise_multiplier is not None and not 0 <= noise_multiplier < math.inf:
        raise UserError(f"noise_multiplier={noise_multiplier} must be a number, 0 or larger")


def check_accountant(accountant: str, allow_clt: bool) -> None:
    """Refuse with a `UserError` what is no accountant, and gdp, whose epsilon is not a guarantee, unless it is allowed."""
    if accountant not in ACCOUNTANTS:
        raise UserError(f"accountant={accountant} is not a choice; choices: {', '.join(ACCOUNTANTS)}")
    if accountant == "gdp" and not allow_clt:
        raise UserError(
            "accountant=gdp is an approximation that may under-estimate epsilon: choose rdp, prv or pld (the commands accept it "
            "with accountant.allow_clt=true)"
        )


def check_budget(
    epsilon: float | None, noise_multiplier: float | None, individual: bool, sampling: str
) -> None:
    """Refuse with a `UserError` a noise that is decided twice, or not at all."""
    if individual:
        if epsilon is not None or noise_multiplier is not None:
            raise UserError("individual budgets decide the noise: give neither epsilon nor noise_multiplier")
        if sampling != "poisson":
            raise UserError(f"individual budgets need Poisson batches, not sampling={sampling}")
    elif (epsilon is None) == (noise_multiplier is None):
        raise UserError("give exactly one of epsilon and noise_multiplier")


def check_projections(
    projections: int, accountant: str, sampling: str, quantile_budget: float, individual: Any, search: Any
) -> None:
    """Refuse with a `UserError` where no accountant speaks of norms that are estimated."""
    if accountant != "pld":
        raise UserError(
            f"clip=jl estimates norms, and one that is too small lets an example move the sum by more than C: "
            f"accountant={accountant} would not see that; use accountant=pld, or clip=flat, whose norms are exact"
        )
    if projections < 1:
        raise UserError(f"clip.projections={projections}: at least one is needed")
    if sampling != "poisson" or quantile_budget or individual is not None or search is not None:
        raise UserError(
            "clip=jl needs Poisson batches, a fixed threshold and one budget: drop privacy.sampling, clip.adaptive, individual= "
            "and search="
        )


def check_batches(batches: Schedule, steps: int, sample_rate: float, sampling: str, others: bool) -> None:
    """Refuse with a `UserError` batches that cannot grow as they should."""
    if sampling != "poisson" or others or batches.adaptive:
        raise UserError(
            "optim.batch_growth needs Poisson batches, one budget and a schedule that is fixed beforehand: drop "
            "privacy.sampling, individual= and search="
        )
    try:
        factors = [factor for factor, _ in factor_counts(batches, steps, steps, sample_rate)]
    except UserError:
        # it speaks of noise that is lost
        raise UserError(
            "optim.batch_growth makes a batch more than a million times the first one: let it grow more slowly, or take fewer "
            "epochs"
        ) from None
    largest = sample_rate / min(factors)
    if largest > 1:
        raise UserError(
            f"optim.batch_growth makes a batch {largest:.3g} times the data: let it grow more slowly, or begin "
            "with a smaller optim.batch_size"
        )


def bands_to_try(
    bands: int | str, steps: int, sample_rate: float, sampling: str, others: bool
) -> Sequence[int]:
    """Return over how many steps noise may be correlated: ``bands``, or some of which the best is taken where it is ``auto``.

    Refuses with a `UserError` noise that cannot be correlated over so many steps."""
    number = check_bands(bands)
    if number == 1:
        return [1]
    if sampling != "poisson" or others:
        raise UserError(
            f"bands={bands} needs Poisson batches, constant noise, exact norms and one budget: drop sampling, schedule, batch "
            "growth, individual budgets, searches and clip=jl"
        )
    if number is None:
        return [
            width for width in BANDS_OF_AUTO if width == 1 or (width <= steps and width * sample_rate <= 1)
        ]
    if number > steps or number * sample_rate > 1:
        raise UserError(
            f"bands={bands}: an example takes part once in so many steps, and there are {steps} of them, each of a share of "
            f"{sample_rate:.4g} of the data; take at most {max(1, min(steps, int(1 / sample_rate)))}"
        )
    return [number]


def check_bands(bands: int | str) -> int | None:
    """Return over how many steps noise is to be correlated, None for ``auto``; refuse with a `UserError` anything else."""
    if bands == "auto":
        return None
    try:
        number = int(bands)
        whole = number == float(bands) and not isinstance(bands, bool)
    except (TypeError, ValueError):
        number, whole = 0, False
    if not whole or not 1 <= number <= MOST_BANDS:
        raise UserError(f"bands={bands} is neither auto nor a whole number of steps from 1 to {MOST_BANDS}")
    return number


def check_feedback(
    schedule: Schedule, accountant: str, sampling: str, others: bool, noise_multiplier: float | None
) -> None:
    """Refuse with a `UserError` where the filter of an adaptive schedule does not speak of the plan."""
    name = f"schedule={schedule.name}"
    if accountant != "rdp":
        raise UserError(
            f"{name} chooses its noise under a Rényi filter, of which accountant={accountant} knows nothing: use rdp, or a "
            "schedule that is fixed beforehand"
        )
    if sampling != "poisson" or others:
        raise UserError(
            f"{name} needs Poisson batches and one budget: drop privacy.sampling, individual= and search="
        )
    if noise_multiplier == 0:
        raise UserError(f"{name} has no noise to move with noise_multiplier=0: give some")


def check_search(accountant: str, sampling: str, quantile_budget: float, individual: bool) -> None:
    """Refuse with a `UserError` where the filter of a search does not speak of the plan."""
    if accountant != "rdp":
        raise UserError(
            f"a step-size search moves its budget under a Rényi filter, of which accountant={accountant} knows nothing: use rdp"
        )
    if sampling != "poisson":
        raise UserError(f"a step-size search needs Poisson batches: drop sampling={sampling}")
    if quantile_budget or individual:
        raise UserError(
            "a step-size search shares a step's budget with the gradient alone: take clip=flat or perlayer without adaptive "
            "thresholds, and individual=none"
        )


def steps_of(epochs: float, num_examples: int, batch_size: float) -> int:
    """T of so many epochs: one is N/B steps."""
    return round(epochs * num_examples / batch_size)


def resolve_delta(rule: str | float, num_examples: int | None) -> float:
    """δ from a number or a rule: ``half_over_n`` is 1/(2N) (Li et al.), ``n_pow_-1.1`` is N^-1.1 (He et al.
    section 5.2).

    Raises `UserError` for what is neither, for a rule without N, and for a δ outside (0, 1).
    """
    if match := re.fullmatch(r"half_over_n|n_pow_(-\d+(?:\.\d+)?)", str(rule)):
        if num_examples is None:
            raise UserError(f"delta={rule} is a rule of N: give num_examples=… too, or a number")
        delta = num_examples ** float(match[1]) if match[1] else 1 / (2 * num_examples)
    else:
        try:
            delta = float(rule)
        except (TypeError, ValueError):
            raise UserError(f"delta={rule} is neither a number nor a rule: half_over_n, n_pow_-1.1") from None
    check_delta(delta)
    if delta == 0:
        raise UserError("delta=0 leaves no room for Gaussian noise; a usual choice is half_over_n")
    return delta
