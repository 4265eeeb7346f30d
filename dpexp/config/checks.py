"""Do the settings of a run make sense together? Each problem is one sentence that ends with the way out."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from dpexp.config.data_checks import data_problems, prompt_problems, unit_problems
from dpexp.config.method_checks import method_problems
from dpexp.config.unread import given_for_nothing
from dpexp.durable import flattened
from dpexp.errors import UserError, did_you_mean, either
from dpexp.privacy.schedules import ADAPTIVE
from dpexp.schemas import CHOICES, RunConfig
from dpexp.schemas.choices import HUGGING_FACE, POOLINGS
from dpexp.schemas.declared import declared_units
from dpexp.training.optimizers.low_pass import check_low_pass

TRIALS_LAWS = ("geometric", "logarithmic", "poisson")
DELTA_RULES = ("half_over_n", "n_pow_-1.1")

_POSITIVE = (
    "optim.lr", "optim.eps", "optim.floor", "optim.tolerance", "optim.batch_size", "optim.epochs",
    "clip.clip_norm", "clip.init_threshold",
    "clip.norm_factor", "clip.norm_bound", "clip.scale_floor", "clip.init_norm", "clip.public_examples", "clip.residual_norm",
    "clip.local_epochs", "clip.local_lr", "clip.projections",
    "clip.quantile_lr", "clip.threshold_floor", "privacy.epsilon", "task.max_length", "task.pad_to", "task.drop_over",
    "task.generation.max_target", "task.generation.num_beams", "task.generation.examples",
    "task.generation.loss_examples", "data.max_length",
    "search.objective_clip", "search.raise_by", "search.candidates", "search.window", "search.tries", "search.angle_high",
    "search.angle_low",
    "data.num_examples", "unit.num_users", "unit.rows", "runtime.eval_batch_size", "runtime.threads",
    "runtime.microbatch", "runtime.stages",
    "engine.memory_cap_mib", "trials",
)  # fmt: skip
_NOT_NEGATIVE = (
    "optim.weight_decay", "task.held_out", "task.augmentations", "task.image_size", "privacy.noise_multiplier", "peft.alpha",
    "peft.prefix_hidden", "search.growth", "optim.steps", "optim.keep_best_every", "task.generation.shots",
    "analysis.output_specific_every", "task.generation.candidates", "unit.size", "clip.local_batch",
    "task.generation.prompt_set", "search.armijo", "seed",
    "runtime.eval_every", "runtime.checkpoint_every", "runtime.log_every",
)  # fmt: skip
# in [0, 1)
_FRACTION = (
    "search.backtrack", "search.angle_memory", "search.shrink",
    "optim.momentum", "optim.warmup_ratio", "optim.ema_decay", "peft.dropout", "model.dropout", "model.attention_dropout",
)  # fmt: skip

# optimisers that take a part of each tensor
_IN_SHARDS = ("sgd", "adam", "adamw")
# generators and tensors count no further
_WHOLE = 2**63
# of any number, with some room below and above
_LEAST_FLOAT, _MOST_FLOAT = 1e-30, 1e30
# of thresholds, which are squared in float32; the first is dpexp.clipping.rules.SMALLEST
_LEAST, _MOST = 1e-12, 1e18
# some runtimes crash with many more threads; of what a step does for each of its examples, it would not end
_AT_MOST = {
    "runtime.threads": 1024,
    **dict.fromkeys(
        ("clip.projections", "clip.local_epochs", "search.candidates", "search.tries", "task.augmentations", "task.image_size",
         "unit.rows"),
        10_000,
    ),
}  # fmt: skip


def check(run: RunConfig, given: Mapping[str, str] = MappingProxyType({}), *, of_grid: bool = False) -> None:
    """Raise one `UserError` that lists every problem of a run's settings; return when there is none.

    Args:
        run: the settings.
        given: those that a command typed, which have to do something, and must not contradict each other.
        of_grid: whether it is one job of several, which share what is typed: what does nothing here is meant for others.
    """
    # what the other checks compute with
    problems = list(value_problems(run)) or [
        *_missing(run),
        *task_problems(run),
        *unit_problems(run),
        *method_problems(run),
        *_length(run),
        *prompt_problems(run),
        *_parallel(run),
        *_budget_twice(run, given),
        *([] if of_grid else given_for_nothing(run, given)),
    ]
    if len(problems) == 1:
        raise UserError(problems[0])
    if problems:
        raise UserError("\n  - ".join([f"{len(problems)} settings are wrong:", *problems]))


def task_problems(run: RunConfig) -> Iterator[str]:
    """Name every problem of data, model and privacy, whatever they are used for: a training, or teachers."""
    for part in (_words, _numbers, _privacy, _model, data_problems):
        yield from part(run)


def _parallel(run: RunConfig) -> Iterator[str]:
    """Name what several processes cannot share, or what would have to see a whole tensor where each has a part."""
    kind = run.runtime.parallel
    if kind == "none":
        return
    # whole microbatches go to the processes
    shared = run.clip.method == "norm" or (kind == "ddp" and run.clip.method == "microbatch")
    if run.clip.private and not shared:
        yield (
            f"runtime.parallel={kind} and clip.method={run.clip.method}: it looks at all gradients of a batch together, and each "
            "process has a share: choose runtime=auto"
        )
    if kind != "ddp" and run.schedule.name in ADAPTIVE:
        yield (
            f"runtime.parallel={kind} and schedule={run.schedule.name}: its noise follows whole gradients, and each process has "
            "a part: choose runtime=ddp"
        )
    if kind != "fsdp":
        return
    if run.optim.name not in _IN_SHARDS:
        ways = f"choose {either(_IN_SHARDS)}, or runtime=ddp"
        yield f"runtime=fsdp and optim.name={run.optim.name}: it knows whole tensors; {ways}"
    if run.optim.ema_decay != 0 or run.optim.uniform_average:
        yield "runtime=fsdp and optim.ema_decay: averages are of whole tensors; leave it out, or choose runtime=ddp"
    if run.optim.keep_best_every:
        yield "runtime=fsdp and optim.keep_best_every: the kept weights are whole tensors; set it to 0, or choose runtime=ddp"
    if run.peft.name == "rgp" or run.model.frozen_features:
        yield "runtime=fsdp and peft=rgp or model.frozen_features: there is nothing to shard; choose runtime=ddp"
    if run.privacy.secure:
        yield "runtime=fsdp and privacy.secure: the exact noise is drawn for whole tensors; choose runtime=ddp"


def _missing(run: RunConfig) -> Iterator[str]:
    task, data = run.task, run.data
    needed = []
    embedded = data.source == "demo" or (
        data.source == "auto" and run.scale.name == "demo" and not data.train
    )
    if task.kind == "custom":
        if not task.factory:
            needed.append("task.factory (package.module:Class)")
    elif not task.files and not task.hub_id and not embedded:
        # a person's own data
        settings = ("train",) if task.kind == "image_classification" else ("train", "text", "label")
        needed += [f"data.{name}" for name in settings if getattr(data, name) is None]
    if run.model.family == "hf" and not run.model.id:
        needed.append("model.id (a name on the hub or a local folder)")
    if run.model.family == "custom" and not run.model.factory:
        needed.append("model.factory (package.module:function)")
    if run.model.family in ("timm", "random_timm") and not run.model.id:
        needed.append("model.id (a name of timm)")
    if run.model.family == "random_hf" and not run.model.architecture:
        needed.append("model.architecture (bert, roberta, …)")
    if run.optim.name == "custom" and not run.optim.factory:
        needed.append("optim.factory (package.module:Class)")
    if run.optim.epochs is None and run.optim.steps is None:
        needed.append("optim.epochs or optim.steps")
    told = run.individual.name != "none" or (
        run.privacy.epsilon is not None or run.privacy.noise_multiplier is not None
    )
    if run.clip.private and not told:
        needed.append("privacy.epsilon or privacy.noise_multiplier")
    if needed:
        yield f"not given: {', '.join(needed)}"


def _words(run: RunConfig) -> Iterator[str]:
    for key, choices in CHOICES.items():
        # a rule of one's own is named by where it stands
        own = key == "clip.rule" and ":" in run.clip.rule
        if (value := attrgetter(key)(run)) not in choices and not own:
            yield f"{key}={value} is not a choice{did_you_mean(str(value), choices)}"
    if not re.fullmatch(r"\w[\w.-]*", run.task.name):
        yield f"task.name={run.task.name} is a folder of the runs: give one word of letters, digits, _, - and dots"
    size = run.runtime.physical_batch_size
    if size != "auto" and not (size.isdecimal() and int(size) > 0):
        yield f"runtime.physical_batch_size={size}: give auto or a number of examples"


def value_problems(settings: Any) -> Iterator[str]:
    """Name every problem of values, whatever the setting: numbers that 32 bits hold, and no lists within lists."""
    for key, value in flattened(asdict(settings)):
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, list | dict) and not key.startswith(("model.config.", "optim.config.")):
                yield f"{key}={value} holds another list: give words or numbers"
            elif isinstance(part, float) and not math.isfinite(part):
                yield f"{key}={value} is not a finite number"
            elif isinstance(part, float) and part and not _LEAST_FLOAT <= abs(part) <= _MOST_FLOAT:
                yield f"{key}={value} must be 0 or between {_LEAST_FLOAT:g} and {_MOST_FLOAT:g} in size, as 32-bit numbers are"
            # which is hashed
            elif isinstance(part, int) and abs(part) >= _WHOLE and key != "privacy.noise_seed":
                yield f"{key}={value} is too large: give a whole number below 2^63"


def _numbers(run: RunConfig) -> Iterator[str]:
    ranges = (
        (_POSITIVE, "above 0", lambda x: x > 0),
        (_NOT_NEGATIVE, "0 or more", lambda x: x >= 0),
        (_FRACTION, "in [0, 1)", lambda x: 0 <= x < 1),
    )
    for keys, words, holds in ranges:
        for key in keys:
            value = attrgetter(key)(run)
            if value is not None and not holds(value):
                yield f"{key}={value} must be {words}"
    for key in ("clip.clip_norm", "clip.init_threshold", "clip.threshold_floor"):
        value = attrgetter(key)(run)
        if value is not None and value > 0 and not _LEAST <= value <= _MOST:
            yield f"{key}={value:g} must be between {_LEAST:g} and {_MOST:g}: it is squared in 32-bit numbers"
    if 0 < run.optim.batch_size < 1:
        yield f"optim.batch_size={run.optim.batch_size:g} must be 1 or more: it is a number of {run.unit.name}s"
    for key, most in _AT_MOST.items():
        if (value := attrgetter(key)(run)) is not None and value > most:
            yield f"{key}={value} must be at most {most}"
    if len(run.optim.betas) != 2 or not all(0 <= beta < 1 for beta in run.optim.betas):
        yield f"optim.betas={run.optim.betas} must be two numbers in [0, 1)"
    if not 0 < run.optim.kappa <= 1:
        yield f"optim.kappa={run.optim.kappa} must be above 0 and at most 1"
    if run.optim.name == "doppler":
        try:
            check_low_pass(run.optim.filter_a, run.optim.filter_b)
        except UserError as error:
            yield str(error)
    if run.optim.uniform_average and run.optim.ema_decay:
        yield "optim.uniform_average and optim.ema_decay are two averages of the weights: set one of them to false or 0"
    if run.optim.name in ("adam_bc", "adamw_bc", "disk") and run.peft.name == "rgp":
        yield f"optim={run.optim.name} needs the gradients of what it moves, and peft=rgp moves other tensors: choose another"
    if len(run.optim.ratios) != 2 or not 0 < run.optim.ratios[0] < 1 < run.optim.ratios[1] < math.inf:
        yield f"optim.ratios={run.optim.ratios} must be two numbers, one below 1 (above 0) and one above"


def _privacy(run: RunConfig) -> Iterator[str]:
    given = [key for key in ("epsilon", "noise_multiplier") if getattr(run.privacy, key) is not None]
    if run.clip.private and len(given) == 2:
        yield (
            "privacy.epsilon and privacy.noise_multiplier are both given, and either decides the other: "
            "set one of them to null (or choose privacy=noise)"
        )
    if not run.clip.private and given:
        yield (
            f"clip={run.clip.name} adds no noise and has no epsilon, but privacy.{given[0]}="
            f"{getattr(run.privacy, given[0]):g} is given: use privacy=none, or a private clip"
        )
    if run.privacy.delta not in DELTA_RULES:
        try:
            valid = 0 < float(run.privacy.delta) < 1
        except ValueError:
            valid = False
        if not valid:
            yield (
                f"privacy.delta={run.privacy.delta} is neither a number in (0, 1) nor a rule"
                f"{did_you_mean(run.privacy.delta, DELTA_RULES)}"
            )
    if run.clip.private and run.accountant.name == "gdp" and not run.accountant.allow_clt:
        yield (
            "accountant=gdp is an approximation by the central limit theorem and no guarantee: choose rdp, prv or pld, "
            "or let it decide all the same with accountant.allow_clt=true"
        )
    if run.privacy.secure and run.privacy.noise_seed is not None:
        yield "privacy.secure=true draws noise that nobody can repeat: drop privacy.noise_seed"
    if run.privacy.sampling == "fixed" and run.accountant.name != "rdp":
        yield f"accountant={run.accountant.name} knows nothing of batches of a fixed size: use accountant=rdp, or Poisson batches"
    if run.trials_law is not None and run.trials_law not in TRIALS_LAWS:
        yield f"trials_law={run.trials_law} is not a choice{did_you_mean(run.trials_law, TRIALS_LAWS)}"


def _budget_twice(run: RunConfig, given: Mapping[str, str]) -> Iterator[str]:
    """Name a number for the noise that is typed beside a choice of privacy= without it: privacy=eps3 has one to be overridden."""
    choice = given.get("privacy", "")
    others = {"none": ("epsilon", "noise_multiplier"), "noise": ("epsilon",)}
    for name in others.get(choice, ()) if run.clip.private else ():
        key = f"privacy.{name}"
        if key in given and getattr(run.privacy, name) is not None:
            yield f"privacy={choice} and {key}={given[key]} say two things of the noise: leave one of them out"


def _length(run: RunConfig) -> Iterator[str]:
    optim = run.optim
    if optim.epochs is not None and optim.steps is not None:
        yield (
            f"optim.epochs={optim.epochs:g} and optim.steps={optim.steps} are both given: set one of them to null "
            "(for example optim.epochs=null)"
        )
    total = declared_units(run)
    if total is not None and optim.batch_size > total:
        yield (
            f"optim.batch_size={optim.batch_size:g} is more than the {total} {run.unit.name}s of {run.task.name} at "
            f"scale={run.scale.name}: give at most {total}"
            # the settings of the papers, where a person's own data ask for theirs
            + (
                ", or scale=own, whose settings follow from N"
                if run.data.train and run.scale.name != "own"
                else ""
            )
        )

    if run.task.drop_over is not None and run.task.kind != "generation":
        yield f"task.drop_over={run.task.drop_over} is for pairs of source and target, and {run.task.name} has none: leave it out"
    task, longest = run.task, run.data.max_length or run.task.max_length
    if task.pad_to is not None and task.kind == "image_classification":
        yield f"task.pad_to={task.pad_to} is for texts, and {task.name} has images: leave it out"
    elif task.pad_to is not None and task.pad_to < longest:
        yield (
            f"task.pad_to={task.pad_to} is shorter than the {longest} tokens that a text may have: give at least {longest}, "
            f"or task.max_length={task.pad_to}"
        )


def _model(run: RunConfig) -> Iterator[str]:
    model, peft = run.model, run.peft
    if peft.name != "full" and model.trainable != "all":
        yield (
            f"model.trainable={model.trainable} and peft={peft.name} both say which parameters train: keep one of them "
            "(model.trainable=all, or peft=full)"
        )
    if model.pooling != "own" and run.task.kind != "text_classification":
        yield f"model.pooling={model.pooling}: task={run.task.name} is no classification of text; leave it at own"
    if model.untied and (
        run.task.kind not in ("generation", "text_infilling", "custom") or model.family not in HUGGING_FACE
    ):
        yield (
            f"model.untied=true is about the head of a language model of Hugging Face, and task={run.task.name} "
            f"model={model.name} has none: leave it out"
        )
    names = list(model.new_tokens)
    if wrong := [
        name for name in names if not re.fullmatch(r"[A-Za-z]\w*", name, re.ASCII) or names.count(name) > 1
    ]:
        yield (
            f"model.new_tokens={names}: {wrong[0]!r} must be one word of letters, digits and _, given once; the token is <NAME>"
        )
    if names and (run.task.kind not in ("generation", "custom") or model.family not in HUGGING_FACE):
        yield (
            f"model.new_tokens={names} are for language models of Hugging Face that write text, and task={run.task.name} "
            f"model={model.name} has none: leave it out"
        )
    if model.head != "linear" and model.pooling == "own":
        yield f"model.head={model.head} is a head on what is pooled: set model.pooling={either(POOLINGS)}"
    # its coefficients never train
    fixed = model.family == "scattering"
    if (model.frozen_features and not fixed) and (
        model.pooling == "own" or (model.trainable != "head" and peft.name != "head")
    ):
        yield f"model.frozen_features=true trains a head alone: set model.pooling={either(POOLINGS)}, and model.trainable=head"
    if peft.name in ("prompt", "p_tuning") and run.engine.name == "opacus":
        yield f"peft={peft.name} and engine=opacus: Opacus cannot follow a prompt that is looked up inside; use engine=auto"
    sizes = {"lora": "rank", "rgp": "rank", "adapters": "rank", "top2": "blocks", "prefix": "prefix_length"}
    sizes |= dict.fromkeys(("prompt", "p_tuning"), "prefix_length")
    if (size := sizes.get(peft.name)) is not None and getattr(peft, size) < 1:
        yield f"peft.{size}={getattr(peft, size)} must be 1 or more: nothing would train"
