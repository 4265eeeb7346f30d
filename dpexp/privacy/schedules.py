"""Noise over time: σ_t = σ_0·f(t), with t the number of training epochs so far.

The pre-defined schedules of Monir et al. (2023), section 3.1.1, after Yu et al. (2019). They depend on public numbers
alone, so that the noise of every step is known before the first. k is ``decay_rate``:

===========  =====================================================  ====================================================
constant     1
time         1/(1 + k·t), k > 0
exponential  e^(-k·t), k > 0
step         k^⌊t/period⌋, 0 < k < 1                                the review's text has lost the floor, without which
                                                                    this is exponential decay again
polynomial   (1 - e)·(1 - t/period)^k + e, e = σ_end/σ_0, k > 0     from t = period on e; the review says t < period only
===========  =====================================================  ====================================================

"Epochs so far" are whole ones unless ``updates_per_epoch`` says otherwise: the noise is the same throughout an epoch, and
a run of E epochs has at most E different multipliers. An epoch is 1/q = N/B steps.

To add one, write a function of t and its parameters and put it into `SCHEDULES`; the plan, the calibration and the ledger
follow."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from dpexp.errors import UserError

# Less noise than this share of σ_0 is none to speak of, and soon underflows.
_SMALLEST_FACTOR = 1e-6


def constant(t: float) -> float:
    """The same noise in every step, as in Abadi et al. (2016) and all of He et al. and Li et al."""
    return 1.0


def time(t: float, decay_rate: float) -> float:
    """Time-based decay: halved at t = 1/k, the "search time", and like 1/t long after it."""
    return 1 / (1 + decay_rate * t)


def exponential(t: float, decay_rate: float) -> float:
    """The same share less in every epoch."""
    return math.exp(-decay_rate * t)


def step(t: float, decay_rate: float, period: float) -> float:
    """Multiplied by k every ``period`` epochs."""
    return float(decay_rate ** math.floor(t / period + _ROUNDING))


def polynomial(t: float, decay_rate: float, period: float, end_ratio: float) -> float:
    """From σ_0 to σ_end over ``period`` epochs, linearly where k = 1; σ_end afterwards."""
    left = max(0.0, 1 - t / period)
    return float((1 - end_ratio) * left**decay_rate + end_ratio)


SCHEDULES: MappingProxyType[str, tuple[Callable[..., float], tuple[str, ...]]] = MappingProxyType(
    {
        "constant": (constant, ()),
        "time": (time, ("decay_rate",)),
        "exponential": (exponential, ("decay_rate",)),
        "step": (step, ("decay_rate", "period")),
        "polynomial": (polynomial, ("decay_rate", "period", "end_ratio")),
    }
)
"""name -> (f, the parameters of `Schedule` that f takes after t)."""

_ROUNDING = 1e-9  # step·q may fall short of the whole epoch that it is by a few rounding errors


@dataclass(frozen=True)
class Schedule:
    """A schedule with its parameters; None where it has no such parameter.

    ``decay_rate`` is k; ``period`` counts epochs (polynomial: None for the length of the run); ``end_ratio`` is
    σ_end/σ_0; ``updates_per_epoch`` says how often the noise may change within an epoch. Raises `UserError` for a
    schedule or a parameter that does not exist, is missing, or lies outside its range."""

    name: str = "constant"
    decay_rate: float | None = None
    period: float | None = None
    end_ratio: float | None = None
    updates_per_epoch: int = 1

    @classmethod
    def of(cls, value: Schedule | str | Mapping[str, Any]) -> Schedule:
        """A schedule from its name, or from the values that `plain` gives."""
        if isinstance(value, Schedule):
            return value
        return cls(value) if isinstance(value, str) else cls(**value)

    def __post_init__(self) -> None:
        if self.name not in SCHEDULES:
            raise UserError(f"schedule={self.name} is not a choice; choices: {', '.join(SCHEDULES)}")
        takes = self._takes()
        for name, holds, words in (
            ("decay_rate", self._rate_holds(), "above 0 and below 1" if self.name == "step" else "above 0"),
            ("period", self.period is None or 0 < self.period < math.inf, "a number of epochs above 0"),
            ("end_ratio", self.end_ratio is None or 0 < self.end_ratio <= 1, "above 0 and at most 1"),
        ):
            value = getattr(self, name)
            if value is None and name in takes and (name, self.name) != ("period", "polynomial"):
                raise UserError(f"not given: schedule.{name}, which schedule={self.name} needs ({words})")
            if value is not None and name not in takes:
                raise UserError(f"schedule={self.name} has no {name}: leave schedule.{name} out")
            if not holds:
                raise UserError(f"schedule.{name}={value} must be {words} (schedule={self.name})")
        if self.updates_per_epoch < 1:
            raise UserError(f"schedule.updates_per_epoch={self.updates_per_epoch} must be 1 or more")

    def epochs(self, step: int, sample_rate: float) -> float:
        """t before ``step`` (from 0): whole epochs, or whole parts of them, so far."""
        return math.floor(step * sample_rate * self.updates_per_epoch + _ROUNDING) / self.updates_per_epoch

    def factor(self, step: int, steps: int, sample_rate: float) -> float:
        """f of ``step`` (from 0) of ``steps``; 1 in the first epoch.

        Raises `UserError` where next to no noise would be left."""
        function, takes = SCHEDULES[self.name]
        values = {name: getattr(self, name) for name in takes}
        if "period" in values and self.period is None:
            values["period"] = max(steps * sample_rate, _ROUNDING)
        value = function(self.epochs(step, sample_rate), **values)
        if not value >= _SMALLEST_FACTOR:
            raise UserError(
                f"schedule={self.name} leaves less than a millionth of the noise at step {step} of {steps}: decay more"
                " slowly, or take fewer epochs"
            )
        return value

    def plain(self) -> str | dict[str, Any]:
        """The name, and what differs from the defaults where anything does."""
        changed = {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if getattr(self, field.name) != field.default
        }
        return self.name if set(changed) <= {"name"} else changed

    def _takes(self) -> tuple[str, ...]:
        return SCHEDULES[self.name][1]

    def _rate_holds(self) -> bool:
        if self.decay_rate is None:
            return True
        return 0 < self.decay_rate < (1 if self.name == "step" else math.inf)


CONSTANT = Schedule()


@lru_cache(maxsize=32)
def factor_counts(
    schedule: Schedule, done: int, steps: int, sample_rate: float
) -> tuple[tuple[float, int], ...]:
    """(factor, number of steps that have it) over the first ``done`` of ``steps`` steps.

    A step of equal noise is an equal event, so this is the whole composition in as few parts as there are values."""
    if schedule.name == CONSTANT.name:
        return ((1.0, done),) if done else ()
    return tuple(Counter(schedule.factor(step, steps, sample_rate) for step in range(done)).items())
