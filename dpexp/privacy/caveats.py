"""What a reader of a plan's ε must know beyond the numbers, in sentences."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

from dp_accounting import DpEvent

from dpexp.privacy.correlated import column_norm, noise_added_up
from dpexp.privacy.events import composed
from dpexp.privacy.schedules import CONSTANT

if TYPE_CHECKING:
    from dpexp.privacy.plan import Plan

# fewer expected draws of an example than this, over a whole run, teach nothing
DRAWS = 0.01
# an ε above which the odds of any attacker may rise by more than 10⁸
MEANINGLESS = 20.0
# a δ above which the failure that it allows is not rare
LARGE_DELTA = 1e-3
CLT = "Epsilon is a central limit approximation (gdp), which may under-estimate: it is not a guarantee."


def next_to_nothing(delta: float, num_examples: int, target_epsilon: float | None) -> list[str]:
    """Say what a δ, or an ε that was asked for, leaves without protection; each a sentence."""
    found: list[str] = []
    if delta >= 1 / num_examples:
        found.append(f"delta = {delta:g} is not below 1/N: publishing a random example would satisfy it.")
    elif delta > LARGE_DELTA:
        found.append(
            f"delta = {delta:.2g} is large: the guarantee allows that an example is told whole, with this probability. "
            "Rules of N, such as the default, give so much where N is small; a number, such as delta=1e-5, takes a larger "
            "epsilon or more noise."
        )
    if (target_epsilon or 0.0) > MEANINGLESS:
        found.append(
            f"epsilon = {target_epsilon:g} bounds next to nothing: an attacker may be sure about nearly everybody."
        )
    return found


def pointless(plan: Plan) -> list[str]:
    """What was asked for and protects nobody, or lets nothing be learnt; each a sentence."""
    found: list[str] = []
    if plan.noise_multiplier == 0:
        found.append("noise_multiplier = 0 adds no noise: epsilon is infinite, and nobody is protected.")
    found += next_to_nothing(plan.delta, plan.num_examples, plan.target_epsilon)
    if 0 < _signal(plan) < 1:
        found.append(
            f"With a noise multiplier of {plan.noise_multiplier:.3g} nothing can be learnt: all steps together move the weights "
            "further by noise than they could by gradients. Choose a larger epsilon, larger batches or more data."
        )
    for setting, schedule in (
        (f"schedule={plan.schedule.name}", plan.schedule),
        ("optim.batch_growth", plan.batches),
    ):
        fixed = schedule.name == CONSTANT.name or schedule.adaptive
        if not fixed and schedule.epochs(plan.steps - 1, plan.sample_rate) == 0:
            found.append(
                f"{setting} changes nothing: it moves between epochs, and this run ends within the first one. Its "
                "updates_per_epoch=K lets it move K times in each."
            )
    for value, rate in zip(plan.budgets.epsilons, plan.budgets.rates, strict=True) if plan.budgets else ():
        if rate * plan.steps < DRAWS:
            found.append(
                f"The group with a budget of {value:g} is in effect left out: at the noise that the others need, the "
                f"{plan.accountant} accountant allows it a sampling rate of {rate:.2g}. Choose budgets that are nearer to each "
                "other, more steps, or individual=scaling."
            )
    return found


def noise_that_follows(plan: Plan) -> list[str]:
    """What a schedule that follows the training may do to the length of a run, in a sentence; nothing of another schedule."""
    if not plan.schedule.adaptive:
        return []
    return [
        f"noise: schedule={plan.schedule.name}; the run ends where its budget does not cover another step, after "
        f"{earliest_end(plan)} of {plan.steps} steps at the earliest (where the noise falls whenever it may), and what is left "
        "then is lost: a slower decay leaves less"
    ]


def earliest_end(plan: Plan) -> int:
    """How many steps the budget of an adaptive schedule covers where its noise falls whenever it may."""
    spent: list[tuple[DpEvent, int]] = []
    done = 0
    for level, steps in groupby(range(plan.steps), plan.schedule.lowest_level):
        moved, count = replace(plan, level=level), len(list(steps))

        def lacks(more: int, moved: Plan = moved) -> bool:
            # all steps of one level are alike
            before = composed([*spent, (moved.step_event(0), more - 1)])
            return not moved.affords(before, 0)

        if lacks(count):
            return done + bisect_left(range(1, count), True, key=lacks)
        spent.append((moved.step_event(0), count))
        done += count
    return done


def _signal(plan: Plan) -> float:
    """How many times further than noise the steps can move the weights, if all their clipped gradients were one vector."""
    if plan.noise_multiplier == 0:
        return math.inf
    batch = plan.sample_rate * plan.num_examples
    kinds = plan.kinds(plan.steps)
    if plan.bands > 1:
        # of independent steps, over that of correlated ones
        batch *= math.sqrt(plan.steps) / float(noise_added_up(plan.bands, plan.steps)[-1])
    return (
        batch
        / plan.noise_multiplier
        * math.sqrt(sum(n * (growth / factor) ** 2 for factor, growth, n in kinds))
    )


def caveats(plan: Plan) -> list[str]:
    """What a reader of ε must know beyond the numbers; each a sentence for the record."""
    found: list[str] = []
    if plan.sampling == "fixed":
        found.append(
            "Batches are drawn without replacement and have a fixed size. Neighbouring data sets differ by replacing an "
            "example, which moves a sum twice as far as removing one: this epsilon is not to be compared with one for adding "
            "or removing."
        )
    if plan.sampling == "shuffle":
        found.append(
            "Batches were drawn by shuffling, but epsilon assumes Poisson sampling: it is not a guarantee."
        )
    if plan.accountant == "gdp":
        found.append(CLT)
    found += pointless(plan)
    if plan.schedule.adaptive:
        found.append(
            f"The noise followed the training (schedule={plan.schedule.name}): the noise multiplier is that of the budget. "
            "Epsilon is the budget of the Rényi filter that ends the run, not that of the steps it took: no other accountant "
            "speaks of it."
        )
    elif any(factor != 1 for factor, _, _ in plan.kinds(plan.steps)):
        found.append(
            f"The noise multiplier is that of the first step; schedule={plan.schedule.name} takes it to "
            f"{plan.sigma(plan.steps - 1):.4g} in the last one, and epsilon counts every step with its own."
        )
    if any(growth != 1 for _, growth, _ in plan.kinds(plan.steps)):
        found.append(
            f"The sampling rate is that of the first step; batches grow to a rate of {plan.rate(plan.steps - 1):.4g} in "
            "the last one, and epsilon counts every step with its own."
        )
    if plan.bands > 1:
        found.append(
            f"Noise is correlated over {plan.bands} steps, and each of them draws from one of {plan.bands} parts of the "
            f"examples in turn, at {plan.bands} times the sampling rate: an example takes part once in so many steps, which "
            "are one release with the noise multiplier. In a single step the noise is "
            f"{column_norm(plan.bands, plan.steps):.3g} times as large or more."
        )
    if plan.projections:
        found.append(
            f"Norms were estimated from {plan.projections} random projections: an example may move a sum by more than the "
            "threshold, and epsilon counts how likely that is. The noise multiplier is in units of the threshold."
        )
    if plan.budgets is not None:
        found.append(
            f"Budgets are individual ({plan.budgets.method}): each group of examples has an epsilon of its own, and where one"
            " number stands for all it is that of the least protected group. Who is in which group is taken to be public."
        )
    if plan.search is not None and plan.search.moves:
        found.append(
            "The search chose the noise of later steps by what earlier ones released. Epsilon is the budget of the Rényi "
            "filter that ended the run, not that of the steps it took: no other accountant speaks of it."
        )
    return found
