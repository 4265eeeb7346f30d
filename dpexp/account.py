"""``python -m dpexp.account``: of epsilon, the noise and the length of a run two are given and the third is computed, for
people who only want the numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from typing import Any, cast

import numpy as np
from dp_accounting import DpEvent

from dpexp.config import hydra_entry
from dpexp.config.usage import print_out
from dpexp.errors import UserError
from dpexp.privacy.accountants import epsilon, epsilons
from dpexp.privacy.calibration import calibrate, longest
from dpexp.privacy.correlated import column_norm, noise_added_up, noise_left
from dpexp.privacy.events import composed, fixed_size_event, neighbouring, step_event
from dpexp.privacy.individual import draw_groups, solve
from dpexp.privacy.plan_checks import bands_to_try, check_accountant, check_bands, resolve_delta, steps_of
from dpexp.privacy.schedules import CONSTANT, Schedule, factor_counts
from dpexp.privacy.shown import upwards
from dpexp.privacy.tradeoff import FPR, NO_BOUND, TPR, attack
from dpexp.privacy.tuning import tuned_epsilons
from dpexp.schemas import AccountantConfig, IndividualConfig, ScheduleConfig

_FORMATS = ("text", "json")
# accountants whose ε holds, whatever the others find
_BOUNDS = ("rdp", "prv", "pld")
_SAMPLINGS = ("poisson", "fixed")
TWO_OF_THREE = "two of noise_multiplier=…, target_epsilon=… and steps=… (or epochs=…)"


@dataclass
class AccountArguments:
    """The settings of ``conf/account.yaml``."""

    sample_rate: float | None = None
    steps: int | None = None
    delta: str | None = None
    noise_multiplier: float | None = None
    target_epsilon: float | None = None
    accountant: AccountantConfig = field(default_factory=AccountantConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    sampling: str = "poisson"
    bands: str = "1"
    trials: float = 1
    trials_law: str | None = None
    individual: IndividualConfig = field(default_factory=IndividualConfig)
    format: str = "text"
    # in the place of the rate and the steps
    num_examples: int | None = None
    batch_size: float | None = None
    epochs: float | None = None


def account(arguments: AccountArguments) -> dict[str, Any]:
    """What the command prints, as plain values; an epsilon that is infinite is None, as JSON has no infinity.

    Raises `UserError` for values that make no mechanism, or a target that no noise or no number of steps meets.
    """
    _check(arguments)

    rate = _sample_rate(arguments)
    steps = _steps(arguments, rate)
    delta = resolve_delta(cast("str", arguments.delta), arguments.num_examples)
    target, accountant = arguments.target_epsilon, arguments.accountant.name
    bands = check_bands(arguments.bands) or 1
    if arguments.bands == "auto" and (target is None or steps is None):
        raise UserError(
            "bands=auto looks for the least noise at an epsilon, in a number of steps: give target_epsilon=…, and steps=… "
            "or epochs=…"
        )
    schedule = Schedule.of(asdict(arguments.schedule))
    if schedule.adaptive:
        raise UserError(
            f"schedule={schedule.name} follows the training: its epsilon is the target that the run's filter keeps"
        )

    size = Fraction(rate)

    def step(noise_multiplier: float) -> DpEvent:
        if arguments.sampling == "fixed":
            return fixed_size_event(size.denominator, size.numerator, [noise_multiplier])
        return step_event(min(1.0, rate * bands), [noise_multiplier])

    sigma = arguments.noise_multiplier
    if steps is None:
        assert sigma is not None
        assert target is not None
        one = step(sigma)
        if schedule != CONSTANT:
            raise UserError(
                f"the number of steps is found for constant noise: give it, or drop schedule={schedule.name}"
            )
        steps = longest(lambda steps: composed([(one, -(-steps // bands))]), target, delta, accountant)
    others = schedule != CONSTANT or arguments.individual.name != "none"
    widths = bands_to_try(arguments.bands, steps, rate, arguments.sampling, others)
    counts = factor_counts(schedule, steps, steps, rate)

    def event(noise_multiplier: float) -> DpEvent:
        return composed((step(noise_multiplier * scale), -(-count // bands)) for scale, count in counts)

    groups: dict[str, Any] = {}
    if arguments.individual.name != "none":
        sigma, groups = _grouped(arguments, counts, rate, delta)
        whole = max((group.pop("event") for group in groups["groups"]), key=lambda e: epsilon(e, delta))
    elif sigma is None:
        assert target is not None
        options = []
        for bands in widths:
            sigma = calibrate(event, target, delta, accountant)
            # of several alone: it takes a number for each step
            added = float(np.linalg.norm(noise_added_up(bands, steps))) if len(widths) > 1 else 1.0
            options.append((sigma * added, sigma, bands))
        _, sigma, bands = min(options)
    if not groups:
        whole = event(sigma)
    found = attack(whole)
    asked = {"epsilon": target, "noise_multiplier": arguments.noise_multiplier, "steps": None}
    tuned = None
    if arguments.trials != 1 or arguments.trials_law is not None:
        tuned = tuned_epsilons(whole, delta, arguments.trials, arguments.trials_law)
    return {
        "noise_multiplier": sigma,
        "sample_rate": rate,
        "num_examples": arguments.num_examples,
        "batch_size": arguments.batch_size,
        "steps": steps,
        "epochs": steps * rate,
        "delta": delta,
        "target_epsilon": target,
        "computed": next(name for name, given in asked.items() if given is None),
        "accountant": accountant if target is not None else None,
        "schedule": schedule.plain(),
        "last_noise_multiplier": sigma * (schedule.factor(steps - 1, steps, rate) if steps else 1.0),
        "sampling": arguments.sampling,
        **(
            {"bands": bands} | _beside_independent(bands, steps, rate, sigma, whole, delta)
            if bands > 1
            else {}
        ),
        "neighbouring": neighbouring(step(sigma)),
        "epsilon": _finite(epsilons(whole, delta)),
        **(found.plain() if found is not None else dict.fromkeys(NO_BOUND.plain())),
        **({"individual": groups} if groups else {}),
        "trials": arguments.trials,
        "trials_law": arguments.trials_law,
        "epsilon_with_tuning": _finite(tuned) if tuned is not None else None,
    }


def _grouped(
    arguments: AccountArguments, counts: Sequence[tuple[float, int]], sample_rate: float, delta: float
) -> tuple[float, dict[str, Any]]:
    """The noise multiplier, and what each group of examples gets; shares are taken of ten thousand examples."""
    individual = arguments.individual

    def event(rate: float, sigma: float, scale: float) -> DpEvent:
        return composed((step_event(rate, [sigma * factor / scale]), count) for factor, count in counts)

    members = draw_groups(10_000, individual.shares, 0)
    sigma, budgets = solve(
        individual.name, individual.epsilons, members, sample_rate, 0.0, event, delta,
        arguments.accountant.name,
    )  # fmt: skip
    groups = []
    for target, rate, scale in zip(budgets.epsilons, budgets.rates, budgets.scales, strict=True):
        whole = event(rate, sigma, scale)
        spent = _finite(epsilons(whole, delta))
        groups.append(
            {"target": target, "sample_rate": rate, "clip_scale": scale, "epsilon": spent, "event": whole}
        )
    return sigma, {"method": individual.name, "groups": groups}


def _beside_independent(
    bands: int, steps: int, rate: float, sigma: float, whole: DpEvent, delta: float
) -> dict[str, float]:
    """Root mean square noise relative to independent noise of the same ε: in sums of the first 1, 2, … steps, and in a step."""
    alone = calibrate(
        lambda other: composed([(step_event(rate, [other]), steps)]), epsilon(whole, delta), delta
    )
    sums, independent = (noise_added_up(count, steps) for count in (bands, 1))
    one = column_norm(bands, steps) * np.sqrt(np.mean(noise_left(bands, steps) ** 2))
    return {
        "added_up": float(sigma * np.linalg.norm(sums) / (alone * np.linalg.norm(independent))),
        "in_one_step": float(sigma * one / alone),
    }


def _finite(found: dict[str, float | None]) -> dict[str, float | None]:
    return {
        name: value if value is not None and math.isfinite(value) else None for name, value in found.items()
    }


def as_text(result: dict[str, Any]) -> str:
    """The result as a few aligned lines."""
    notes = {
        "rdp": "Rényi, upper bound",
        "gdp": "central limit theorem: an approximation, not a guarantee",
        "prv": "privacy random variables, upper bound",
        "pld": "privacy loss distributions, upper bound",
    }
    chosen = " (calibrated to epsilon = {target_epsilon:g} under {accountant})"
    longest = ", the most that keep epsilon = {target_epsilon:g} under {accountant}"
    total = result["num_examples"]
    loose = total is not None and result["delta"] >= 1 / total
    size = " ({batch_size:g} of {num_examples})" if result["batch_size"] is not None else ""
    lines = [
        "noise multiplier  {noise_multiplier:.6g}"
        + (chosen if result["computed"] == "noise_multiplier" else ""),
        *(["  in the last step  {last_noise_multiplier:.6g}"] if result["schedule"] != "constant" else []),
        *(
            [
                "bands             {bands}: noise adds up to {added_up:.3g} of independent noise, and is {in_one_step:.3g} times "
                "as large in one step (for Adam: so many times the learning rate)"
            ]
            if "bands" in result
            else []
        ),
        "sample rate       {sample_rate:g}" + size,
        "steps             {steps} ({epochs:.4g} epochs)"
        + (longest if result["computed"] == "steps" else ""),
        f"delta             {upwards(result['delta'], '.6g')}"
        + (" (not below 1/N: publishing a random example would satisfy it)" if loose else ""),
    ]
    lines = [line.format(**result) for line in lines]
    # of fixed batches only rdp knows something
    names = ["rdp"] if result["sampling"] == "fixed" else list(notes)
    found = result["epsilon"]
    if any(found[name] is not None for name in _BOUNDS):
        lost = {name for name in _BOUNDS if found[name] is None}
        notes |= dict.fromkeys(
            lost, "none found, a limit of its arithmetic: each of the others bounds by itself"
        )
    lines += [f"epsilon {name}       {_number(found[name]):<10}  {notes[name]}" for name in names]
    if result[TPR] is not None:
        fit = (
            "no finite one"
            if result["mu"] is None
            else f"a fit from above, with regret {result['mu_regret']:.2g}"
        )
        lines += [
            f"mu                {_number(result['mu']):<10}  Gaussian DP: {fit}",
            f"TPR at FPR {FPR:g}  {_number(result[TPR]):<10}  at most, of any membership test",
        ]
    if (tuned := result["epsilon_with_tuning"]) is not None:
        how = (
            f"{result['trials']:g} trials composed"
            if result["trials_law"] is None
            else f"the best of a {result['trials_law']} number of trials, {result['trials']:g} on average"
        )
        names = ["rdp"] if result["trials_law"] is not None else names
        lines += [f"with tuning {name}   {_number(tuned[name]):<10}  {how}" for name in names]
    for number, group in enumerate(result.get("individual", {}).get("groups", []), start=1):
        lines.append(
            f"group {number}           epsilon {group['target']:g}: sampling rate {group['sample_rate']:.4g}, thresholds "
            f"x {group['clip_scale']:.4g}, spends rdp {_number(group['epsilon']['rdp'])}, pld {_number(group['epsilon']['pld'])}"
        )
    lines.append(f"neighbours        {result['neighbouring']}")
    return "\n".join(lines)


def _number(value: float | None) -> str:
    if value is None:
        return "inf"
    return upwards(value, ".4g" if value < 1e-3 or value >= 1e4 else ".4f")


def _check(arguments: AccountArguments) -> None:
    individual = arguments.individual
    for one, other, what in (("sample_rate", "batch_size", "sample rate"), ("steps", "epochs", "length")):
        if getattr(arguments, one) is not None and getattr(arguments, other) is not None:
            raise UserError(
                f"{one} and {other} are both given, and each of them decides the {what}: leave one out"
            )
    noise, target = arguments.noise_multiplier, arguments.target_epsilon
    length = arguments.steps if arguments.epochs is None else arguments.epochs
    known = sum(number is not None for number in (noise, target, length))
    missing = {
        "delta=…": arguments.delta is None,
        "sample_rate=…, or batch_size=… and num_examples=…": (arguments.sample_rate, arguments.batch_size)
        == (None, None),
        "steps=… or epochs=…": individual.name != "none" and length is None,
        TWO_OF_THREE: individual.name == "none" and known < 2,
    }
    if any(missing.values()):
        lacking = "; ".join(name for name, lacks in missing.items() if lacks)
        raise UserError(f"not given: {lacking} (dpexp account --help says what they are)")
    if individual.name != "none":
        _check_groups(arguments)
    elif given := [n for n in ("epsilons", "shares", "groups", "budgets") if getattr(individual, n)]:
        raise UserError(
            f"individual.{given[0]} is of groups with an epsilon of their own, and individual.name=none has none: give "
            "individual.name=sampling or scaling, or leave it out"
        )
    elif known > 2:
        raise UserError(f"give {TWO_OF_THREE}: the third is computed")
    if noise is not None and not 0 <= noise < math.inf:
        raise UserError(f"noise_multiplier={noise} must be a number, 0 or larger")
    accountant = arguments.accountant
    check_accountant(accountant.name, accountant.allow_clt or (target is None and individual.name == "none"))
    if arguments.sampling not in _SAMPLINGS:
        raise UserError(f"sampling={arguments.sampling} is not a choice; choices: {', '.join(_SAMPLINGS)}")
    if arguments.format not in _FORMATS:
        raise UserError(f"format={arguments.format} is not a choice; choices: {', '.join(_FORMATS)}")


def _sample_rate(arguments: AccountArguments) -> float:
    """q: as given, or B/N."""
    rate, batch, size = arguments.sample_rate, arguments.batch_size, arguments.num_examples
    if size is not None and size < 1:
        raise UserError(f"num_examples={size} must be 1 or larger")
    if rate is not None:
        if not 0 <= rate <= 1:
            raise UserError(f"sample_rate={rate} is not a probability: it is batch size / number of examples")
        return rate
    assert batch is not None
    if size is None:
        raise UserError(
            f"batch_size={batch:g} needs num_examples=… too: the sample rate is the one by the other"
        )
    if not 0 < batch <= size:
        raise UserError(f"batch_size={batch:g} must be above 0 and at most num_examples={size}")
    return batch / size


def _steps(arguments: AccountArguments, sample_rate: float) -> int | None:
    """T: as given, or the epochs in steps; None where it is what is asked for."""
    epochs, steps = arguments.epochs, arguments.steps
    if epochs is not None:
        if not (0 <= epochs < math.inf and sample_rate):
            raise UserError(f"epochs={epochs:g} must be 0 or larger, of a sample rate above 0")
        # with the numbers that training has: the rate is rounded
        size, batch = (arguments.num_examples, arguments.batch_size)
        steps = steps_of(epochs, size, batch) if size and batch else steps_of(epochs, 1, sample_rate)
        if epochs and not steps:
            raise UserError(f"epochs={epochs:g} is less than one step: give {sample_rate:.3g} epochs or more")
    if steps is not None and steps < 0:
        raise UserError(f"steps={steps} must be 0 or larger")
    return steps


def _check_groups(arguments: AccountArguments) -> None:
    individual = arguments.individual
    for name in ("groups", "budgets"):
        if (file := getattr(individual, name)) is not None:
            raise UserError(
                f"individual.{name}={file} is of the examples of a run, and account knows of none: give individual.epsilons and "
                "individual.shares, or ask `dpexp train ... runtime.dry_run=true`"
            )
    if arguments.noise_multiplier is not None or arguments.target_epsilon is not None:
        raise UserError(
            "individual.epsilons decide the noise: give neither noise_multiplier nor target_epsilon"
        )
    if len(individual.epsilons) < 2 or len(individual.shares) != len(individual.epsilons):
        raise UserError(
            f"individual.epsilons={list(individual.epsilons)} and individual.shares={list(individual.shares)} must be two or "
            "more numbers each, one for each group of examples"
        )
    if arguments.sampling != "poisson" or 0 in (arguments.steps, arguments.epochs, arguments.sample_rate):
        raise UserError("individual budgets need Poisson batches, a sample rate above 0 and one step or more")


@hydra_entry("account", AccountArguments)
def main(arguments: AccountArguments) -> dict[str, Any]:
    """Compute one of ε, noise multiplier and number of steps from the other two, and print ε of every accountant.

    Returns:
        What the table of a multirun shows.
    """
    result = account(arguments)
    print_out(json.dumps(result) if arguments.format == "json" else as_text(result))
    bounds = {f"ε {name}": result["epsilon"][name] for name in _BOUNDS}
    return {"σ": result["noise_multiplier"], "steps": result["steps"], **bounds}


if __name__ == "__main__":
    main()
