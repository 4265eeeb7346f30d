"""Do the settings of a run make sense together? Each problem is one sentence that ends with the way out."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

from dpexp.config.method_checks import method_problems
from dpexp.config.unread import given_for_nothing
from dpexp.durable import flattened
from dpexp.errors import UserError, did_you_mean
from dpexp.privacy.schedules import ADAPTIVE
from dpexp.schemas import CHOICES, RunConfig
from dpexp.schemas.declared import declared_units
from dpexp.training.low_pass import check_low_pass

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
        (
            "clip.projections",
            "clip.local_epochs",
            "search.candidates",
            "search.tries",
            "task.augmentations",
            "task.image_size",
            "unit.rows",
        ),
        10_000,
    ),
}


def check(run: RunConfig, given: Mapping[str, str] = MappingProxyType({})) -> None:
    """Raise one `UserError` that lists every problem of a run's settings; return when there is none.

    Args:
        run: the settings.
        given: those that a command typed, which have to do something.
    """
    # what the other checks compute with
    problems = list(value_problems(run)) or [
        *_missing(run),
        *task_problems(run),
        *_unit(run),
        *method_problems(run),
        *_length(run),
        *_in_prompts(run),
        *_parallel(run),
        *given_for_nothing(run, given),
    ]
    if len(problems) == 1:
        raise UserError(problems[0])
    if problems:
        raise UserError("\n  - ".join([f"{len(problems)} settings are wrong:", *problems]))


def task_problems(run: RunConfig) -> Iterator[str]:
    """Name every problem of data, model and privacy, whatever they are used for: a training, or teachers."""
    for part in (_words, _numbers, _privacy, _model, _data, _dev, _generation, _images):
        yield from part(run)


def _get(run: RunConfig, key: str) -> Any:
    value: Any = run
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _parallel(run: RunConfig) -> Iterator[str]:
    """What several processes cannot share, or what would have to see a whole tensor where each has a part."""
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
    if run.optim.name not in ("sgd", "adam", "adamw"):
        yield f"runtime=fsdp and optim.name={run.optim.name}: it knows whole tensors; choose sgd, adam or adamw, or runtime=ddp"
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
        if (value := _get(run, key)) not in choices and not own:
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
            if isinstance(part, list | dict) and not key.startswith("model.config."):
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
            value = _get(run, key)
            if value is not None and not holds(value):
                yield f"{key}={value} must be {words}"
    for key in ("clip.clip_norm", "clip.init_threshold", "clip.threshold_floor"):
        value = _get(run, key)
        if value is not None and value > 0 and not _LEAST <= value <= _MOST:
            yield f"{key}={value:g} must be between {_LEAST:g} and {_MOST:g}: it is squared in 32-bit numbers"
    if 0 < run.optim.batch_size < 1:
        yield f"optim.batch_size={run.optim.batch_size:g} must be 1 or more: it is a number of {run.unit.name}s"
    for key, most in _AT_MOST.items():
        if (value := _get(run, key)) is not None and value > most:
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


def _unit(run: RunConfig) -> Iterator[str]:
    """Users as the unit of privacy."""
    unit, data = run.unit, run.data
    sources = [f"unit.{name}" for name in ("column", "file", "size") if getattr(unit, name)]
    if unit.name == "example":
        if sources:
            yield f"{sources[0]} says who the users are, and unit=example protects single examples: choose unit=user"
        return
    if len(sources) != 1:
        given = f"{' and '.join(sources)} are given" if sources else "nothing says who they are"
        yield (
            f"unit=user, and {given}: give one of unit.column=NAME (a column of data.train), unit.file=FILE (a name in the line "
            "of each training row) and unit.size=K (made-up users of K rows each)"
        )
    if unit.column and data.train is None:
        yield f"unit.column={unit.column} is a column of data.train, which is not given: give it, or unit.file=FILE"
    if unit.column and run.task.kind == "image_classification":
        yield f"unit.column={unit.column}: images have no columns; give unit.file=FILE, a name in the line of each image"
    if unit.file and run.task.held_out:
        yield (
            f"unit.file says nothing of the {run.task.held_out} rows that task.held_out measures on: they may be of users who "
            "are trained on, too, and nothing protects them. Use unit.column, or give a file of other users as data.dev"
        )
    if run.clip.private and sources and not unit.size and unit.num_users is None:
        yield (
            "unit.num_users is not given: the number of users is public and fixes the guarantee, so declare it as you know it "
            "without looking at the rows (clip=nonprivate counts it)"
        )
    if run.task.augmentations:
        yield f"unit=user and task.augmentations={run.task.augmentations} both say what rows one loss is the mean of: set it to 0"
    if run.runtime.parallel == "pipeline":
        yield "unit=user needs all rows of a user in one place: choose another runtime than pipeline"
    if run.clip.method == "microbatch":
        yield f"clip={run.clip.name} clips means of several users together: use clip=flat, perlayer or fedavg"


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
        run.task.kind not in ("generation", "text_infilling", "custom")
        or model.family not in ("hf", "minilm", "mpnet", "smollm2", "random_hf")
    ):
        yield (
            f"model.untied=true is about the head of a language model of Hugging Face, and task={run.task.name} "
            f"model={model.name} has none: leave it out"
        )
    if model.head != "linear" and model.pooling == "own":
        yield f"model.head={model.head} is a head on what is pooled: set model.pooling=mean (or cls)"
    # its coefficients never train
    fixed = model.family == "scattering"
    if (model.frozen_features and not fixed) and (
        model.pooling == "own" or (model.trainable != "head" and peft.name != "head")
    ):
        yield "model.frozen_features=true trains a head alone: set model.pooling=mean (or cls) and model.trainable=head"
    if peft.name in ("prompt", "p_tuning") and run.engine.name == "opacus":
        yield f"peft={peft.name} and engine=opacus: Opacus cannot follow a prompt that is looked up inside; use engine=auto"
    sizes = {"lora": "rank", "rgp": "rank", "adapters": "rank", "top2": "blocks", "prefix": "prefix_length"}
    sizes |= dict.fromkeys(("prompt", "p_tuning"), "prefix_length")
    if (size := sizes.get(peft.name)) is not None and getattr(peft, size) < 1:
        yield f"peft.{size}={getattr(peft, size)} must be 1 or more: nothing would train"


def _generation(run: RunConfig) -> Iterator[str]:
    settings = run.task.generation
    if settings.top_p is not None and not 0 < settings.top_p <= 1:
        yield f"task.generation.top_p={settings.top_p} must be above 0 and at most 1"
    if unknown := [split for split in settings.splits if split not in ("dev", "test")]:
        yield f"task.generation.splits={list(settings.splits)} has {unknown[0]}: text is generated for dev and test alone"
    if not -100 <= settings.length_penalty <= 100:
        yield f"task.generation.length_penalty={settings.length_penalty:g} must be a power between -100 and 100"
    if settings.candidates == 1:
        yield "task.generation.candidates=1 leaves nothing to choose from: give 2 or more (ConvAI2 has 20), or 0"


def _in_prompts(run: RunConfig) -> Iterator[str]:
    """Pairs of the private training data that stand in every prompt."""
    shots = run.task.generation.shots
    if shots and run.optim.steps != 0:
        yield (
            f"task.generation.shots={shots} puts training pairs into the prompt as they are, which is not private "
            "and no training: set optim.epochs=null optim.steps=0"
        )
    if shots and run.privacy.release == "strict":
        yield (
            f"task.generation.shots={shots} makes texts and metrics of private pairs, without noise, and privacy.release=strict "
            "is for what may be shown to anybody: leave one of them out"
        )


def _images(run: RunConfig) -> Iterator[str]:
    for name in ("mean", "std"):
        values = list(getattr(run.task, name))
        if run.task.kind == "image_classification" and len(values) not in (0, 1, run.task.channels):
            yield f"task.{name}={values} must be {run.task.channels} numbers, one for each of task.channels, or one for all"


def _undeclared(run: RunConfig) -> Iterator[str]:
    """What the task would have to read from the private training file: settings that declare it."""
    if run.data.num_examples is None:
        yield "data.num_examples=N (the number of rows)"
    if run.task.kind not in ("generation", "custom") and not run.task.labels and not run.task.label_words:
        yield "task.labels=[a,b] (the classes, as they stand in the file)"


def _dev(run: RunConfig) -> Iterator[str]:
    """Whether there is a dev set where something goes by it, and not two of them."""
    data, held_out = run.data, run.task.held_out
    there = data.dev or run.task.files.get("dev")
    if held_out and there:
        yield f"task.held_out={held_out} makes rows of the training file the dev set, and there is one ({there}): set it to 0"
    if data.train is None or there or held_out or run.task.kind == "custom":
        return
    uses = {
        "optim.keep_best_every": run.optim.keep_best_every > 0,
        f"schedule={run.schedule.name}": run.schedule.name == "validation",
        f"clip={run.clip.name}": run.clip.method in ("ellipsoid", "embedding"),
    }
    for what in [name for name, used in uses.items() if used]:
        yield f"{what} goes by the dev set, which is public, and none is given: give data.dev, or leave it out"


def _data(run: RunConfig) -> Iterator[str]:
    own = run.data.train is not None
    published = bool(run.task.files or run.task.hub_id)
    if own and not published and run.clip.private and (undeclared := list(_undeclared(run))):
        yield (
            f"data.train is private, so what is public about it is declared and not read from it: give "
            f"{' and '.join(undeclared)} as you know them without looking at the rows (clip=nonprivate reads them from the file)"
        )
    for name in ("train", "dev", "root"):
        if getattr(run.data, name) == "":
            yield f"data.{name}= is empty: give a file or a folder, or leave it out"
    own_rows = own and run.task.kind not in ("image_classification", "custom")
    columns = [
        run.data.text or run.task.text,
        run.data.text_pair or run.task.text_pair,
        run.data.label or run.task.label,
    ]
    if own_rows and len(set(columns)) < len(columns):
        named = ", ".join(filter(None, columns))
        yield f"data.text, data.text_pair and data.label name one column twice ({named}): give each its own"
    if blank := [label for label in run.task.labels if not label.strip()]:
        yield f"task.labels={list(run.task.labels)} has {len(blank)} empty names: every class needs one"
    if len(set(run.task.labels)) < len(run.task.labels):
        yield f"task.labels={list(run.task.labels)} names a class twice: name each once"
    if own and run.data.source in ("hub", "demo"):
        yield f"data.train is given, and data.source={run.data.source} would not read it: drop one of the two"
    for name, place in (("train", run.data.train), ("dev", run.data.dev)):
        if place is not None and "://" in place:
            yield (
                f"data.{name}={place} is an address, and files are read from this machine: download it first. Of a data set of "
                f'the hub datasets.load_dataset(NAME, split="...").save_to_disk("rows") makes a folder for data.{name}=rows'
            )
    if own and published:
        yield (
            f"data.train is given, but task={run.task.name} reads its own files: use task=text_classification (or "
            "another task that has no files), or point data.root at a folder in the published layout"
        )
    if run.scale.name not in run.task.num_examples:
        scales = ", ".join(sorted(run.task.num_examples))
        yield f"task={run.task.name} declares no number of examples for scale={run.scale.name} (it does for: {scales})"
