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

Those of section 3.1.3, which follow from how fast the loss falls; s = t·N/B is the number of steps so far, and κ the
condition number M/μ of a loss that is M-smooth and μ-PL (derived in ``docs/methods/convergence_rate.md``):

======================  ===========================  ====================================================================
convergence_rate        (1 - 1/κ)^(s/4)              Hong et al. 2022: the least upper bound of the excess risk
influence               (q_0/q_p)^(1/4)              the same for measured influences q_p = ∂EER/∂σ², of equal parts of
                                                     the run
privacy_utility         (1 - 1/(2κ))^(s/2)           Fay et al. 2023: σ ∝ a bound of the gradient's norm, under PL
privacy_utility_convex  (1 + k·t)^(-1/2)             the same for a loss that is convex only
======================  ===========================  ====================================================================

``given`` is any other: f_p/f_0 in part p of equal parts of the run, for numbers f of a person's own (`factors`).

"Epochs so far" are whole ones unless ``updates_per_epoch`` says otherwise: the noise is the same throughout an epoch, and
a run of E epochs has at most E different multipliers. An epoch is 1/q = N/B steps.

To add one, write a function of t and its parameters and put it into `SCHEDULES`; the plan, the calibration and the ledger
follow."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
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


def convergence_rate(t: float, condition: float, steps_per_epoch: float) -> float:
    """Hong et al. 2022, section 4: the step s weighs γ^(T-s) in the bound of the excess risk, γ = 1 - 1/κ, and the noise that
    makes the bound least under a budget Σ 1/σ_s² is σ_s² ∝ γ^(-(T-s)/2)."""
    return float((1 - 1 / condition) ** (t * steps_per_epoch / 4))


def given(t: float, factors: Sequence[float], epochs: float) -> float:
    """Any noise in any order: factors of equal parts of the run, relative to the first. They must not follow the private data."""
    return factors[_part(t, len(factors), epochs)] / factors[0]


def influence(t: float, influences: Sequence[float], epochs: float) -> float:
    """The same for any influences q of the noise on the excess risk: σ² ∝ q^(-1/2) (Hong et al. 2022, section 3).

    ``influences``: of equal parts of the run, in its order; measured on public data, for nothing pays for them here."""
    return float((influences[0] / influences[_part(t, len(influences), epochs)]) ** 0.25)


def _part(t: float, parts: int, epochs: float) -> int:
    """In which of equal parts of the run t lies, from 0."""
    return min(parts - 1, math.floor(t / epochs * parts + _ROUNDING))


def privacy_utility(t: float, condition: float, steps_per_epoch: float) -> float:
    """Fay et al. 2023, data-independent: with η = 1/(2M) and σ = ‖∇F‖/√d the excess loss shrinks by 1 - 1/(2κ) in every
    step, and its root bounds ‖∇F‖."""
    return float((1 - 1 / (2 * condition)) ** (t * steps_per_epoch / 2))


def privacy_utility_convex(t: float, decay_rate: float) -> float:
    """The same where the loss is convex: its excess falls like 1/(1 + t/τ), τ = 4M·R²/excess_0; k = 1/τ, in epochs."""
    return (1 + decay_rate * t) ** -0.5


def followed(t: float, **settings: float) -> float:
    """1: of a schedule that follows the training (`ADAPTIVE`), the plan and its budget are those of constant noise."""
    return 1.0


ADAPTIVE = ("validation", "privacy_utility_released")
"""Schedules whose noise depends on what the run has released: see `dpexp.training.feedback` and the filter that ends the run."""

# of the noise that it begins with, what a schedule by the norm of released gradients leaves at least
RELEASED_AT_LEAST = 0.1

SCHEDULES: MappingProxyType[str, tuple[Callable[..., float], tuple[str, ...]]] = MappingProxyType(
    {
        "constant": (constant, ()),
        "time": (time, ("decay_rate",)),
        "exponential": (exponential, ("decay_rate",)),
        "step": (step, ("decay_rate", "period")),
        "polynomial": (polynomial, ("decay_rate", "period", "end_ratio")),
        "convergence_rate": (convergence_rate, ("condition",)),
        "influence": (influence, ("influences",)),
        "given": (given, ("factors",)),
        "privacy_utility": (privacy_utility, ("condition",)),
        "privacy_utility_convex": (privacy_utility_convex, ("decay_rate",)),
        "validation": (followed, ("decay_rate", "start", "threshold", "window", "every")),
        "privacy_utility_released": (followed, ("start", "window")),
    }
)
"""name -> (f, the parameters of `Schedule` that f takes after t)."""

# whose k is what is left of the noise
_SHARES = ("step", "validation")
# step·q may fall short of the whole epoch that it is by a few rounding errors
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Schedule:
    """A schedule with its parameters; None where it has no such parameter.

    ``decay_rate`` is k; ``period`` counts epochs (polynomial: None for the length of the run); ``end_ratio`` is
    σ_end/σ_0; ``condition`` is κ; ``influences`` and ``factors`` are those of equal parts of the run; ``updates_per_epoch``
    says how often the noise may change within an epoch; the others belong to `ADAPTIVE` schedules. Raises `UserError` for a
    schedule or a parameter that does not exist, is missing, or lies outside its range."""

    name: str = "constant"
    decay_rate: float | None = None
    period: float | None = None
    end_ratio: float | None = None
    updates_per_epoch: int = 1
    condition: float | None = None
    influences: tuple[float, ...] | None = None
    factors: tuple[float, ...] | None = None
    start: float | None = None
    threshold: float | None = None
    window: int | None = None
    every: int | None = None

    @classmethod
    def of(cls, value: Schedule | str | Mapping[str, Any]) -> Schedule:
        """A schedule from its name, or from the values that `plain` gives."""
        if isinstance(value, Schedule):
            return value
        if isinstance(value, str):
            return cls(value)
        try:
            if isinstance(value, Mapping):
                return cls(**value)
        except UserError:
            raise
        except (TypeError, ValueError):
            # another setting, or a value of another kind
            pass
        raise UserError(
            f"schedule={value!r} is no schedule: it is of the noise, a name or its settings, such as "
            'schedule={"name": "exponential", "decay_rate": 0.02}; a learning-rate scheduler is given as scheduler='
        )

    def __post_init__(self) -> None:
        if self.name not in SCHEDULES:
            raise UserError(f"schedule={self.name} is not a choice; choices: {', '.join(SCHEDULES)}")
        for name in ("influences", "factors"):
            if (values := getattr(self, name)) is not None:
                object.__setattr__(self, name, tuple(float(value) for value in values) or None)
        takes = self._takes()
        for name, holds, words in (
            ("decay_rate", self._rate_holds(), "above 0 and below 1" if self.name in _SHARES else "above 0"),
            ("period", self.period is None or 0 < self.period < math.inf, "a number of epochs above 0"),
            ("end_ratio", self.end_ratio is None or 0 < self.end_ratio <= 1, "above 0 and at most 1"),
            ("condition", self.condition is None or 1 < self.condition < math.inf, "above 1"),
            ("start", self.start is None or 1 <= self.start < math.inf, "1 or more"),
            ("threshold", self.threshold is None or 0 <= self.threshold < math.inf, "0 or more"),
            ("window", self.window is None or self.window >= 1, "1 or more"),
            ("every", self.every is None or self.every >= 1, "a number of steps, 1 or more"),
            ("influences", all(0 < q < math.inf for q in self.influences or ()), "numbers above 0"),
            ("factors", all(0 < f < math.inf for f in self.factors or ()), "numbers above 0"),
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

    @property
    def adaptive(self) -> bool:
        """Whether the noise depends on what the run has released."""
        return self.name in ADAPTIVE

    def lowest_level(self, step: int) -> float:
        """What the noise of an adaptive schedule is multiplied by in ``step`` (from 0), where it has fallen whenever it may."""
        start = self.start or 1.0
        if self.name == "validation":
            return float(start * (self.decay_rate or 1.0) ** (step // (self.every or 1)))
        return start if step <= (self.window or 1) else start * RELEASED_AT_LEAST

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
        if "condition" in values:
            values["steps_per_epoch"] = 1 / sample_rate
        if "influences" in values or "factors" in values:
            values["epochs"] = max(steps * sample_rate, _ROUNDING)
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
            field.name: list(value) if isinstance(value, tuple) else value
            for field in fields(self)
            if (value := getattr(self, field.name)) != field.default
        }
        return self.name if set(changed) <= {"name"} else changed

    def _takes(self) -> tuple[str, ...]:
        return SCHEDULES[self.name][1]

    def _rate_holds(self) -> bool:
        if self.decay_rate is None:
            return True
        return 0 < self.decay_rate < (1 if self.name in _SHARES else math.inf)


CONSTANT = Schedule()


@lru_cache(maxsize=32)
def joint_counts(
    schedule: Schedule, batches: Schedule, done: int, steps: int, sample_rate: float
) -> tuple[tuple[float, float, int], ...]:
    """(factor of the noise, factor of the batch, number of steps that have both) over the first ``done`` of ``steps`` steps.

    Batches grow as the noise of such a schedule would fall: by 1/f. An epoch is counted in batches of the first size."""
    if batches.name == CONSTANT.name:
        return tuple(
            (factor, 1.0, count) for factor, count in factor_counts(schedule, done, steps, sample_rate)
        )
    pairs = Counter(
        (
            1.0 if schedule.adaptive else schedule.factor(step, steps, sample_rate),
            1 / batches.factor(step, steps, sample_rate),
        )
        for step in range(done)
    )
    return tuple((factor, growth, count) for (factor, growth), count in pairs.items())


@lru_cache(maxsize=32)
def factor_counts(
    schedule: Schedule, done: int, steps: int, sample_rate: float
) -> tuple[tuple[float, int], ...]:
    """(factor, number of steps that have it) over the first ``done`` of ``steps`` steps.

    A step of equal noise is an equal event, so this is the whole composition in as few parts as there are values."""
    if schedule.name == CONSTANT.name or schedule.adaptive:
        return ((1.0, done),) if done else ()
    return tuple(Counter(schedule.factor(step, steps, sample_rate) for step in range(done)).items())
