"""The frozen facts that fix a run's guarantee, and the event that they make.

Training takes its noise from the plan and accounting takes its event from the plan: neither reads a number
that the other does not."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from dp_accounting import DpEvent, NoOpDpEvent
from numpy.typing import NDArray

from dpexp.errors import UserError
from dpexp.privacy import accountants
from dpexp.privacy.calibration import calibrate
from dpexp.privacy.correlated import noise_added_up
from dpexp.privacy.events import (
    GroupEvents,
    composed,
    fixed_size_event,
    neighbouring,
    releases,
    step_event,
)
from dpexp.privacy.individual import Budgets, solve
from dpexp.privacy.mechanisms import ProjectedGaussianDpEvent
from dpexp.privacy.plan_checks import (
    UNITS,
    bands_to_try,
    check_accountant,
    check_batches,
    check_budget,
    check_feedback,
    check_numbers,
    check_projections,
    check_search,
    resolve_delta,
)
from dpexp.privacy.schedules import CONSTANT, Schedule, joint_counts
from dpexp.privacy.searches import ORDERS, SearchBudget, filter_admits


@dataclass(frozen=True)
class Plan:
    """N examples, each in the sample of a step with probability q, for T steps; see `make_plan`.

    ``noise_multiplier`` is σ, the multiplier of the whole step's budget. With adaptive thresholds a share r
    of it, ``quantile_budget``, is spent on the counts (He et al., Proposition 3.1): the gradient gets σ_new
    = σ/√(1-r) and each of the K counts σ_b = σ√(K/(4r)). Steps count from 0. Where the
    ``schedule`` lets the noise change over time, ``noise_multiplier`` is σ_0, that of the first epoch."""

    num_examples: int
    sample_rate: float
    steps: int
    noise_multiplier: float
    quantile_budget: float
    delta: float
    accountant: str
    sampling: str = "poisson"
    target_epsilon: float | None = None
    schedule: Schedule = CONSTANT
    # of groups of examples, where not all have the same
    budgets: Budgets | None = None
    # of the step size, and how far the budgets were raised for it
    search: SearchBudget | None = None
    # the expected batch of a step is that of the first one over its factor
    batches: Schedule = CONSTANT
    # of the noise, where the schedule follows the training; the budget is that of level 1
    level: float = 1.0
    # what N counts, see `UNITS`
    unit: str = "example"
    # r, where norms are estimated (`dpexp.privacy.projected`); 0: they are exact
    projections: int = 0
    # b, over so many steps noise is correlated (`dpexp.privacy.correlated`); 1: it is not
    bands: int = 1

    def __post_init__(self) -> None:
        # `to_dict` gives it as plain values
        object.__setattr__(self, "schedule", Schedule.of(self.schedule))
        object.__setattr__(self, "batches", Schedule.of(self.batches))
        object.__setattr__(self, "budgets", Budgets.of(self.budgets))
        object.__setattr__(self, "search", SearchBudget.of(self.search))

    @property
    def num_budgets(self) -> int:
        """Groups of examples with an ε of their own; 1 where all have the same."""
        return 1 if self.budgets is None else len(self.budgets.sizes)

    @property
    def max_clip_scale(self) -> float:
        """The largest factor of the thresholds of any example."""
        return 1.0 if self.budgets is None else max(self.budgets.scales)

    @property
    def expected_batch_size(self) -> float:
        """q·N: what sums are divided by, whatever was drawn; in the first step, where batches grow."""
        return self.sample_rate * self.num_examples

    @property
    def grows(self) -> bool:
        """Whether the sampling rate changes over the run."""
        return self.batches.name != CONSTANT.name

    def rate(self, step: int) -> float:
        """q of the step."""
        return self.sample_rate / self.batches.factor(step, self.steps, self.sample_rate)

    @property
    def _delta(self) -> float:
        """δ of a statement about fixed steps; the filter of a search divides the whole δ among its orders."""
        return self.delta / ORDERS if self.moves else self.delta

    @property
    def moves(self) -> bool:
        """Whether the noise of later steps depends on what earlier ones release, so that a filter must end the run."""
        return (self.search is not None and self.search.moves) or self.schedule.adaptive

    @property
    def neighbouring(self) -> str:
        """Which data sets ε speaks of, in words."""
        said = neighbouring(self.step_event(0))
        if self.unit == "example":
            return said
        return said.replace("one example", f"one {UNITS[self.unit]}", 1).replace(
            "the example", f"the {self.unit}"
        )

    def sigma(self, step: int) -> float:
        """σ of the step, before the budget is split."""
        return self.level * self.noise_multiplier * self.schedule.factor(step, self.steps, self.sample_rate)

    def sigma_new(self, step: int) -> float:
        """Noise multiplier of the gradient sum: the noise has standard deviation σ_new·S·γ_k (He et al.,
        eq. 3.1)."""
        if self.search is not None:
            return self.search.gradient_sigma(self.sigma(step))
        return self.sigma(step) / math.sqrt(1 - self.quantile_budget)

    def sigma_b(self, step: int, num_groups: int) -> float:
        """Standard deviation of the noise on each of the K centred counts Σ(b_i - 1/2) (He et al., Remark
        3.1).

        Raises `UserError` where the thresholds are fixed: nothing is then released about the norms.
        """
        if self.quantile_budget == 0:
            raise UserError("the plan has no budget for counts: set quantile_budget for adaptive thresholds")
        return self.sigma(step) * math.sqrt(num_groups / (4 * self.quantile_budget))

    def step_event(self, step: int, budget: int | None = None) -> DpEvent:
        """What the step releases about an example: PoissonSampled(q, Composed([gradient, counts])).

        Where noise is correlated over b steps, what they release together stands in the first of them, with the rate b·q.
        ``budget``: of this group of examples (see `individual`); of the least protected one by default.
        """
        if step % self.bands:
            return NoOpDpEvent()
        rate, scale = self._of_group(budget)
        return self._released(self.sigma(step), self.rate(step) if rate is None else rate, scale)

    def charge(self, step: int, attempt: int = 0) -> DpEvent | GroupEvents:
        """What the ledger writes of the step: its event, or that of each group of examples.

        Where noise is correlated, another attempt releases once more what all examples of the last b steps have left behind,
        from the samples that these steps had: with a attempts more in each of them, such an example has moved what is released
        √(1 + a) times as far as accounted for (docs/methods/correlated.md)."""
        if attempt and self.bands > 1:
            return self._released(self.sigma(step) / math.sqrt(1 + attempt), self.rate(step), 1.0)
        if self.budgets is None:
            return self.step_event(step)
        events = tuple(self.step_event(step, budget) for budget in range(self.num_budgets))
        return GroupEvents(events, self.budgets.membership)

    def event(self, steps: int | None = None, budget: int | None = None) -> DpEvent:
        """Everything that the first ``steps`` steps (all of them by default) release about an example."""
        done = self.steps if steps is None else steps
        if not 0 <= done <= self.steps:
            raise UserError(f"the plan has {self.steps} steps, not {done}")
        rate, scale = self._of_group(budget)
        return self._composed(self.sample_rate if rate is None else rate, self.noise_multiplier, scale, done)

    def rest(self, begun: int, budget: int | None = None) -> DpEvent:
        """Everything that the steps from ``begun`` on release about an example."""
        rate, scale = self._of_group(budget)
        left: Counter[tuple[float, float]] = Counter()
        for steps, sign in ((self.steps, 1), (min(begun, self.steps), -1)):
            for factor, growth, count in self.kinds(steps):
                left[factor, growth] += sign * self._windows(count)
        first = self.sample_rate if rate is None else rate
        return composed(
            (self._released(self.noise_multiplier * factor, first * growth, scale), count)
            for (factor, growth), count in left.items()
        )

    def epsilon(self, steps: int | None = None, accountant: str | None = None) -> float:
        """ε after ``steps`` steps at the plan's δ, under the plan's accountant unless another one is
        named."""
        return accountants.epsilon(self.event(steps), self._delta, accountant or self.accountant)

    def epsilons(self, steps: int | None = None) -> dict[str, float | None]:
        """The same under every accountant."""
        return accountants.epsilons(self.event(steps), self._delta)

    def raised(self, gradient_level: float, search_level: float) -> Plan:
        """The plan as it stands after a search has raised its budgets (`dpexp.privacy.searches`)."""
        assert self.search is not None
        return replace(self, search=self.search.at(gradient_level, search_level))

    def affords(self, spent: DpEvent, step: int) -> bool:
        """Whether the step fits into the budget beside what the ledger holds; always, where nothing moves it.

        The filter of `dpexp.privacy.searches`."""
        if not self.moves:
            return True
        planned = releases(self._begun.event())
        then = releases(composed([(spent, 1), (self.step_event(step), 1)]))
        assert planned is not None
        assert then is not None
        return filter_admits(then, planned, self.delta)

    def guaranteed(self, spent: dict[str, float | None]) -> dict[str, float | None]:
        """ε that may be claimed, from what the ledger says.

        Where a search chose the noise of later steps, the course that it took is no composition that was fixed beforehand. The
        filter guarantees the budget as a whole, under Rényi DP alone."""
        if not self.moves:
            return spent
        whole: dict[str, float | None] = dict.fromkeys(spent)
        found = spent.get("rdp")
        whole["rdp"] = None if found is None else max(found, self._begun.epsilon(accountant="rdp"))
        return whole

    @property
    def _begun(self) -> Plan:
        """The plan as it began: what the filter's budget is."""
        return self if self.search is None else self.raised(1.0, 1.0)

    def fingerprint(self) -> str:
        """SHA-256 of the plan, in hex."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values."""
        plain = asdict(self) | {"schedule": self.schedule.plain(), "batches": self.batches.plain()}
        if not self.grows:
            del plain["batches"]
        for name in ("budgets", "search"):
            if getattr(self, name) is None:
                del plain[name]
        if self.level == 1.0:
            del plain["level"]
        if self.unit == "example":
            del plain["unit"]
        if not self.projections:
            del plain["projections"]
        if self.bands == 1:
            del plain["bands"]
        return plain

    def _of_group(self, budget: int | None) -> tuple[float | None, float]:
        """Sampling rate, where the group has its own, and factor of the thresholds; of the least protected group by default."""
        if self.budgets is None:
            return None, 1.0
        group = self.budgets.least_protected if budget is None else budget
        return self.budgets.rates[group], self.budgets.scales[group]

    def _composed(self, rate: float, sigma: float, scale: float, steps: int) -> DpEvent:
        """What so many steps release about an example; ``rate`` and ``sigma`` are those of the first one."""
        return composed(
            (self._released(sigma * factor, rate * growth, scale), self._windows(count))
            for factor, growth, count in self.kinds(steps)
        )

    def _windows(self, steps: int) -> int:
        """How often so many steps may have drawn an example: once in b steps."""
        return -(-steps // self.bands)

    def _calibrated(self, epsilon: float) -> Plan:
        """The plan with the noise that spends this ε."""
        noise = calibrate(
            lambda sigma: self._composed(self.sample_rate, sigma, 1.0, self.steps),
            epsilon,
            self._delta,
            self.accountant,
        )
        return replace(self, noise_multiplier=float(noise))

    def noise_in_weights(self) -> float:
        """Noise in the sums of the first 1, 2, … releases as a root mean square, in thresholds; for constant noise."""
        added_up = noise_added_up(self.bands, self.steps)
        return self.noise_multiplier * math.sqrt(float(np.mean(added_up**2)))

    def kinds(self, steps: int) -> tuple[tuple[float, float, int], ...]:
        """Factor of the noise, factor of the batch and number of the first so many steps; see `joint_counts`."""
        return joint_counts(self.schedule, self.batches, steps, self.steps, self.sample_rate)

    def _released(self, sigma: float, rate: float, scale: float) -> DpEvent:
        """What one step releases about an example whose thresholds are multiplied by ``scale``."""
        if self.search is not None:
            return step_event(rate, [self.search.gradient_sigma(sigma)], [self.search.event(sigma)])
        if self.projections:
            return step_event(rate, (), [ProjectedGaussianDpEvent(sigma, self.projections)])
        multipliers = _multipliers(sigma, self.quantile_budget, scale)
        if self.sampling == "fixed":
            return fixed_size_event(self.num_examples, round(rate * self.num_examples), multipliers)
        return step_event(min(1.0, rate * self.bands), multipliers)


def _multipliers(sigma: float, quantile_budget: float, scale: float = 1.0) -> list[float]:
    """Noise multipliers of what one step releases about an example whose thresholds are multiplied by ``scale``.

    The K centred counts together have sensitivity √K/2 and noise σ_b = σ√(K/(4r)) each: multiplier 2σ_b/√K
    = σ/√r, so that 1/σ_new² + r/σ² = 1/σ² for any K and scale 1."""
    if quantile_budget == 0:
        return [sigma / scale]
    return [sigma / math.sqrt(1 - quantile_budget) / scale, sigma / math.sqrt(quantile_budget)]


def make_plan(
    *,
    num_examples: int,
    expected_batch_size: float,
    steps: int,
    delta: str | float,
    accountant: str = "rdp",
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    quantile_budget: float = 0.0,
    sampling: str = "poisson",
    allow_clt: bool = False,
    schedule: Schedule | str | Mapping[str, Any] = CONSTANT,
    batches: Schedule | str | Mapping[str, Any] = CONSTANT,
    individual: tuple[str, Sequence[float], NDArray[np.int64]] | None = None,
    search: SearchBudget | None = None,
    unit: str = "example",
    projections: int = 0,
    bands: int | str = 1,
) -> Plan:
    """A checked plan, with σ calibrated to ``epsilon`` unless ``noise_multiplier`` is given.

    ``num_examples`` N is public; ``expected_batch_size`` B gives q = B/N; ``delta`` is a number or a rule
    (see `resolve_delta`); ``quantile_budget`` r is the share of each step's budget for adaptive thresholds;
    ``schedule`` (its name, if it has no parameters) lets the noise change over time, ``batches``
    the expected batch; ``individual``: method, ε of each
    group and the group of each example (see `dpexp.privacy.individual`), in the place of ``epsilon``; ``search``: of the step
    size (see `dpexp.privacy.searches`), whose raises shorten the run; ``unit``: what N counts, see `UNITS`;
    ``projections``: r, where norms are estimated; ``bands``: b, the steps over which noise is correlated, or
    ``auto``: the b with the least noise in the weights (`dpexp.privacy.correlated`).
    Raises `UserError` for values that make no plan, and for the gdp accountant without ``allow_clt``: its ε
    is not a guarantee."""
    check_numbers(
        num_examples,
        expected_batch_size,
        steps,
        quantile_budget,
        noise_multiplier,
        unit=unit,
        sampling=sampling,
    )
    check_accountant(accountant, allow_clt)
    check_budget(epsilon, noise_multiplier, individual is not None, sampling)
    if search is not None:
        check_search(accountant if search.moves else "rdp", sampling, quantile_budget, individual is not None)
        if noise_multiplier == 0:
            raise UserError("noise_multiplier=0 leaves a step-size search without a budget: give some noise")
    if projections:
        check_projections(projections, accountant, sampling, quantile_budget, individual, search)
    delta = resolve_delta(delta, num_examples)
    sample_rate = expected_batch_size / num_examples
    schedule = Schedule.of(schedule)
    if schedule.adaptive:
        check_feedback(
            schedule, accountant, sampling, individual is not None or search is not None, noise_multiplier
        )
    batches = Schedule.of(batches)
    others = individual is not None or search is not None or projections > 0
    others |= {schedule.name, batches.name} != {CONSTANT.name}
    widths = bands_to_try(bands, steps, sample_rate, sampling, others)
    if epsilon is None and len(widths) > 1:
        raise UserError(
            "bands=auto looks for the least noise at an epsilon, and none is given: give a number of bands"
        )
    if batches.name != CONSTANT.name:
        check_batches(batches, steps, sample_rate, sampling, individual is not None or search is not None)
    # refuses noise that decays to nothing, also where epsilon is not asked for
    joint_counts(schedule, batches, steps, steps, sample_rate)
    plan = Plan(
        num_examples=num_examples,
        sample_rate=sample_rate,
        steps=steps,
        # none yet, unless it is given
        noise_multiplier=float(noise_multiplier or 0.0),
        quantile_budget=quantile_budget,
        delta=delta,
        accountant=accountant,
        sampling=sampling,
        target_epsilon=epsilon,
        schedule=schedule,
        search=search,
        batches=batches,
        unit=unit,
        projections=projections,
    )
    if individual is not None:
        method, epsilons, groups = individual
        if len(groups) != num_examples:
            raise UserError(f"{len(groups)} examples have a group, of {num_examples}")
        noise, budgets = solve(
            method,
            epsilons,
            groups,
            sample_rate,
            quantile_budget,
            partial(plan._composed, steps=steps),
            delta,
            accountant,
        )
        return replace(plan, noise_multiplier=float(noise), budgets=budgets)
    if epsilon is not None:
        plans = [replace(plan, bands=width)._calibrated(epsilon) for width in widths]
        # of several alone: it takes a number for each step
        return min(plans, key=Plan.noise_in_weights) if len(plans) > 1 else plans[0]
    return replace(plan, bands=widths[0])
