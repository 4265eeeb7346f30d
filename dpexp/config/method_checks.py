"""Do the settings of a method make sense together: clipping, schedules, searches, budgets of groups? `checks` asks it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict

from dpexp.errors import UserError, either
from dpexp.privacy.plan_checks import check_bands
from dpexp.privacy.schedules import ADAPTIVE, SCHEDULES, Schedule
from dpexp.schemas import CHOICES, RunConfig
from dpexp.schemas.choices import FILTERS

# what of a model falls as it gets better
LOSSES = ("loss", "nll", "perplexity")
# by the last word of a method's name
GROUPS = {"flat": "flat", "perlayer": "layer", "perblock": "block", "perdevice": "device"}


def method_problems(run: RunConfig) -> Iterator[str]:
    """Name every problem of the methods that a run combines, each in one sentence that ends with the way out."""
    for check in (_schedule, _scores, _individual, _bands, _growth, _search, _clipping, _analysis):
        yield from check(run)


def _schedule(run: RunConfig) -> Iterator[str]:
    if run.schedule.name in SCHEDULES:
        try:
            schedule = Schedule.of(asdict(run.schedule))
        except UserError as error:
            yield str(error)
            return
        if not schedule.adaptive or not run.clip.private:
            return
        name = f"schedule={schedule.name}"
        if run.accountant.name != "rdp":
            yield f"{name} moves its noise under a Rényi filter, and accountant={run.accountant.name} knows none: use rdp"
        if run.search.name != "none" or run.individual.name != "none":
            yield f"{name} moves one budget by itself: set search=none and individual=none"
        if name.endswith("released") and (run.clip.method != "norm" or run.optim.name in FILTERS):
            yield f"{name} reads the noisy gradients as they are released: use clip=flat or the like, and no filter as optim="
        if name.endswith("released") and run.peft.name == "rgp":
            yield f"{name} reads the noisy gradients after a step, which peft=rgp drops: choose another peft"


def _scores(run: RunConfig) -> Iterator[str]:
    """Ask it of what goes by the score on dev."""
    task, validates = run.task, run.schedule.name == "validation"
    if validates and task.kind == "generation":
        yield (
            f"schedule=validation goes by the score on dev, and task={task.name} measures its texts at the end alone: choose a "
            "schedule that is fixed beforehand"
        )
    for what, used in (
        ("optim.keep_best_every", run.optim.keep_best_every),
        ("schedule=validation", validates),
    ):
        if used and task.metric in LOSSES:
            yield f"{what} takes more of task.metric={task.metric} for better: name a metric that rises as a model gets better"


def _individual(run: RunConfig) -> Iterator[str]:
    individual, privacy = run.individual, run.privacy
    if individual.name == "none":
        return
    if not run.clip.private:
        yield f"individual={individual.name} divides a privacy budget, and clip={run.clip.name} has none: use a private clip"
    given = [key for key in ("epsilon", "noise_multiplier") if getattr(privacy, key) is not None]
    if given:
        yield (
            f"individual.epsilons decide the noise, but privacy.{given[0]}={getattr(privacy, given[0]):g} is given: drop it, or "
            "set individual=none"
        )
    if privacy.sampling != "poisson":
        yield f"individual={individual.name} needs Poisson batches: drop privacy.sampling={privacy.sampling}"
    if individual.budgets is not None:
        if individual.bins < 2:
            yield f"individual.bins={individual.bins} must be 2 or more: with one everybody has the smallest budget"
        if individual.groups is not None:
            yield "individual.budgets and individual.groups both say who is in which group: give one of them"
        return
    budgets = individual.epsilons
    if len(budgets) < 2 or not all(math.isfinite(value) and value > 0 for value in budgets):
        yield f"individual.epsilons={budgets} must be two or more positive numbers, one for each group of examples"
        return
    shares = individual.shares
    if individual.groups is None and not (
        len(shares) == len(budgets) and all(share > 0 for share in shares) and abs(sum(shares) - 1) <= 1e-6
    ):
        yield (
            f"individual.shares={shares} must be {len(budgets)} positive numbers that add up to 1, one for each of "
            "individual.epsilons (or give individual.groups, a file with the group of each example)"
        )


def _bands(run: RunConfig) -> Iterator[str]:
    bands = run.privacy.bands
    try:
        number = check_bands(bands)
    except UserError as error:
        yield f"privacy.{error}"
        return
    if number == 1 or not run.clip.private:
        return
    if number is None and run.privacy.epsilon is None:
        yield "privacy.bands=auto looks for the least noise at an epsilon, and none is given: give a number of bands"
    others = run.individual.name, run.search.name
    if (
        run.privacy.sampling != "poisson"
        or run.schedule.name != "constant"
        or run.optim.batch_growth
        or set(others) != {"none"}
    ):
        yield (
            f"privacy.bands={bands} needs Poisson batches, constant noise and one budget: drop privacy.sampling, schedule=, "
            "optim.batch_growth, individual= and search="
        )
    if run.clip.method not in ("norm", "microbatch", "fedavg"):
        yield f"privacy.bands={bands} and clip={run.clip.name}, whose coordinates are others in each step: choose clip=flat"
    if run.peft.name == "rgp":
        yield f"privacy.bands={bands} and peft=rgp, whose tensors are others in each step: choose another peft"
    if run.analysis.output_specific_every:
        yield "analysis.output_specific_every looks at steps one by one, and privacy.bands ties them together: drop one of them"


def _growth(run: RunConfig) -> Iterator[str]:
    growth = run.optim.batch_growth
    if not growth:
        return
    try:
        schedule = Schedule.of(growth)
    except (UserError, TypeError) as error:
        yield f"optim.batch_growth={growth} is no schedule, such as {{name: step, decay_rate: 0.5, period: 2}}: {error}"
        return
    if schedule.adaptive or not run.clip.private or run.schedule.name in ADAPTIVE:
        yield "optim.batch_growth needs a private run, and a schedule= that is fixed beforehand: drop it, or change these"
    if run.privacy.sampling != "poisson" or run.individual.name != "none" or run.search.name != "none":
        yield "optim.batch_growth needs Poisson batches and one budget: drop privacy.sampling, individual= and search="
    if run.clip.method in ("adaclip", "microbatch"):
        yield f"clip={run.clip.name} counts on batches of one size: drop optim.batch_growth"


def _search(run: RunConfig) -> Iterator[str]:
    search, name = run.search, f"search={run.search.name}"
    if search.name == "none":
        return
    if not run.clip.private:
        yield f"{name} spends privacy budget, and clip={run.clip.name} has none: use a private clip"
    if not 0 < search.share < 1:
        yield f"search.share={search.share} must be in (0, 1): it is the share of each step's budget that pays for the search"
    kinds = {"noisymax": ("laplace", "exponential"), "hyfreedp": ("gaussian",)}
    wanted = kinds.get(search.name, ("above_threshold",))
    if search.mechanism not in wanted:
        yield f"search.mechanism={search.mechanism} is not how {name} works: choose {either(wanted)}"
    if run.clip.adaptive or run.clip.method != "norm" or run.individual.name != "none":
        yield f"{name} shares a step's budget with the gradient alone: take clip=flat or perlayer, and individual=none"
    if run.clip.allocation != "global":
        yield f"{name} weighs gradients by noise that is the same on every coordinate: leave clip.allocation=global"
    if run.accountant.name != "rdp" and search.name != "hyfreedp":
        yield f"{name} moves its budget under a Rényi filter: use accountant=rdp"
    if search.name == "noisybtls" and not (search.backtrack > 0 and search.angle_low <= search.angle_high):
        yield (
            f"search.backtrack={search.backtrack} must be above 0, and search.angle_low={search.angle_low} at most "
            f"search.angle_high={search.angle_high}"
        )
    optim = run.optim
    if (
        optim.name != "sgd"
        or optim.momentum
        or optim.weight_decay
        or optim.lr_schedule != "constant"
        or optim.warmup_ratio
    ):
        yield (
            f"{name} finds the step size along the gradient itself: set optim=sgd optim.momentum=0 optim.weight_decay=0 "
            "optim.lr_schedule=constant optim.warmup_ratio=0 (optim.lr is the largest step size at first)"
        )
    if run.peft.name == "rgp":
        yield f"{name} moves the parameters that were measured, and peft=rgp moves others: choose another peft"


def _clipping(run: RunConfig) -> Iterator[str]:
    clip = run.clip
    if clip.private and clip.rule == "none":
        ways = either([*(rule for rule in CHOICES["clip.rule"] if rule != "none"), "clip=nonprivate"])
        yield f"clip.rule=none bounds nothing, so no noise can hide an example: use {ways}"
    said = GROUPS.get(clip.name.rpartition("_")[2], clip.groups)
    if said != clip.groups:
        yield (
            f"clip={clip.name} has clip.groups={said}, and with clip.groups={clip.groups} its record would name another method: "
            "choose the clip that is named like its groups (clip=perlayer), or give yours a name (clip.name=mine)"
        )
    fixed = clip.name.removeprefix("adaptive_")
    if fixed in GROUPS and clip.adaptive != (fixed != clip.name):
        yield (
            f"clip={clip.name} and clip.adaptive={str(clip.adaptive).lower()}: its record would name another method; choose "
            f"clip={'adaptive_' * clip.adaptive}{fixed}, or give yours a name (clip.name=mine)"
        )
    if not clip.private and clip.adaptive:
        yield "clip.adaptive=true spends privacy budget on quantiles, and this run has none: use a private clip"
    yield from _whole_gradients(run)
    if clip.adaptive and clip.follows == "norm" and 0 < clip.norm_factor * clip.norm_bound <= 1:
        yield (
            f"clip.norm_factor={clip.norm_factor:g} times clip.norm_bound={clip.norm_bound:g} must be above 1: thresholds could "
            "only fall otherwise"
        )
    if clip.adaptive:
        if not 0 < clip.target_quantile < 1:
            yield f"clip.target_quantile={clip.target_quantile} must be in (0, 1)"
        if clip.private and not 0 < clip.quantile_budget < 1:
            yield (
                f"clip.quantile_budget={clip.quantile_budget} must be in (0, 1): it is the share r of the budget that "
                "pays for adaptive thresholds (0.01 to 0.1 is usual)"
            )


def _whole_gradients(run: RunConfig) -> Iterator[str]:
    """Ask it of the methods that clip something else than the gradients of groups."""
    clip, name = run.clip, f"clip={run.clip.name}"
    if clip.method == "norm":
        return
    updates = clip.method == "fedavg"
    if not updates and (
        clip.groups != "flat" or (clip.adaptive and clip.method in ("embedding", "microbatch", "jl"))
    ):
        yield f"{name} says itself what is clipped: leave clip.groups=flat, and thresholds fixed (clip.adaptive=false)"
    if run.engine.name != "auto":
        yield f"{name} has a way of its own to compute the sum: leave engine=auto"
    if clip.method == "jl":
        if run.runtime.precision != "fp32":
            yield f"{name} adds examples up in the precision of the forward: leave runtime.precision=fp32, or use clip=flat"
        if run.task.kind == "generation":
            yield f"{name} differentiates losses twice, and those of texts that are written save memory instead: use clip=flat"
        if run.accountant.name != "pld":
            yield (
                f"{name} may under-estimate a norm, so that an example moves the sum by more than C, which accountant="
                f"{run.accountant.name} would not see: use accountant=pld, or clip=flat, whose norms are exact"
            )
        if run.trials_law is not None or run.individual.name == "sampling" or run.schedule.name in ADAPTIVE:
            yield f"{name} is accounted by pld alone: drop trials_law, individual= and a schedule= that follows the training"
    if run.search.name != "none":
        yield f"{name} and search={run.search.name} do not go together: use clip=flat, or search=none"
    if run.individual.name == "scaling":
        yield f"{name} knows no thresholds of single examples: use individual=sampling or clip=flat"
    if updates and run.peft.name == "rgp":
        yield f"{name} clips how far weights have moved, and peft=rgp moves others than it trains: choose another peft"
    if (
        not updates
        and clip.method != "jl"
        and (run.peft.name == "rgp" or run.optim.name in ("adam_bc", "adamw_bc"))
    ):
        yield f"{name} puts other noise into each coordinate: choose another peft than rgp, another optim than adam_bc"
    if len(clip.memory) != 2 or not all(0 <= beta < 1 for beta in clip.memory):
        yield f"clip.memory={clip.memory} must be two numbers in [0, 1)"
    if len(clip.variance_range) != 2 or not 0 < clip.variance_range[0] < clip.variance_range[1]:
        yield f"clip.variance_range={clip.variance_range} must be two numbers above 0, the smaller one first"
    # numbers that are not above 0 have a sentence of their own, here and for the norm's
    if (
        clip.method == "embedding"
        and clip.public_examples > 0
        and not 1 <= clip.basis <= clip.public_examples
    ):
        yield f"clip.basis={clip.basis} directions need public examples: give 1 to {clip.public_examples} (clip.public_examples)"
    if clip.method == "microbatch" and not 1 <= clip.microbatch <= run.optim.batch_size:
        yield f"clip.microbatch={clip.microbatch:g} must be between 1 and optim.batch_size={run.optim.batch_size:g} examples"
    if clip.method == "microbatch" and run.task.augmentations > 1:
        yield f"{name} and task.augmentations are two ways to average gradients before clipping: set task.augmentations=0"


def _analysis(run: RunConfig) -> Iterator[str]:
    if not run.analysis.output_specific_every:
        return
    what = "analysis.output_specific_every"
    if not 1e-4 <= run.analysis.rounding <= 1:
        yield f"analysis.rounding={run.analysis.rounding} must be between 0.0001 and 1"
    if run.privacy.release == "strict":
        yield f"{what} looks at the norms of all examples, which privacy.release=strict withholds: leave it at 0"
    if (
        not run.clip.private
        or run.clip.adaptive
        or run.clip.method != "norm"
        or run.clip.rule != "abadi"
        or run.privacy.sampling != "poisson"
    ):
        yield f"{what} is for fixed thresholds, rule=abadi and Poisson batches: take clip=flat or perlayer"
    if run.individual.name != "none" or run.search.name != "none":
        yield f"{what} speaks of gradients alone: set individual=none search=none"
    if run.optim.name == "disk":
        yield f"{what} looks at gradients where the weights are, and optim=disk takes them at a point ahead: choose another optim"
