"""Noise over time: a schedule says by which factor the noise multiplier of each step differs from the
plan's σ.

To add one, write a function of (step, steps) and put it into `SCHEDULES`; the plan, the calibration and the
ledger follow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from types import MappingProxyType

from dpexp.errors import UserError


def constant(step: int, steps: int) -> float:
    """The same noise in every step, as in Abadi et al. (2016) and all of He et al. and Li et al."""
    return 1.0


SCHEDULES: MappingProxyType[str, Callable[[int, int], float]] = MappingProxyType({"constant": constant})


def factor(schedule: str, step: int, steps: int) -> float:
    """The factor on σ in step ``step`` (from 0) of ``steps``. Raises `UserError` for an unknown schedule."""
    if schedule not in SCHEDULES:
        raise UserError(f"schedule={schedule} is not a choice; choices: {', '.join(SCHEDULES)}")
    return SCHEDULES[schedule](step, steps)


@lru_cache(maxsize=32)
def factor_counts(schedule: str, done: int, steps: int) -> tuple[tuple[float, int], ...]:
    """(factor, number of steps that have it) over the first ``done`` of ``steps`` steps."""
    return tuple(Counter(factor(schedule, step, steps) for step in range(done)).items())
