"""Which settings do the chosen methods read? One that nobody reads is refused where a command gives it, and is in no run's name.

A choice of a group (``clip=flat``) brings values for all of its settings, and a preset may hold some for another method than
the one that runs: that is no mistake. What a person types is meant to do something.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any

from dpexp.privacy.schedules import ADAPTIVE, SCHEDULES
from dpexp.schemas import CHOICES, RunConfig
from dpexp.schemas.choices import FILTERS, HUGGING_FACE

# any value but null, 0 and []
GIVEN = ("…",)

_TEXTS = ("text_classification", "text_infilling", "custom")
_ALL_TEXTS = (*_TEXTS, "generation")
_ONE = {name: takes for name, (_, takes) in SCHEDULES.items()}
_FIXED = tuple(name for name, takes in _ONE.items() if takes and name not in ADAPTIVE)

# a setting, those of its values under which others are read, and the others; "optim" is the optimiser that moves the weights
READ: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    # trials stay: the record says of a run without privacy, too, from how many it was chosen
    (
        "clip.private",
        (True,),
        "privacy.secure privacy.bands privacy.delta schedule.name accountant.name accountant.allow_clt trials_law clip.groups "
        "clip.rule clip.method clip.allocation",
    ),
    ("clip.groups", ("device",), "clip.devices"),
    (
        "clip.adaptive",
        (True,),
        "clip.init_threshold clip.target_quantile clip.quantile_lr clip.quantile_update clip.quantile_budget clip.rescale "
        "clip.follows clip.norm_factor clip.norm_bound clip.threshold_floor",
    ),
    ("clip.follows", ("quantile",), "clip.target_quantile clip.quantile_lr clip.quantile_update"),
    ("clip.follows", ("norm",), "clip.norm_factor clip.norm_bound"),
    ("clip.method", ("adaclip", "scaled"), "clip.memory"),
    ("clip.method", ("adaclip",), "clip.init_norm clip.variance_range"),
    ("clip.method", ("ellipsoid", "scaled"), "clip.scale_floor"),
    ("clip.method", ("ellipsoid", "embedding"), "clip.public_examples"),
    ("clip.method", ("embedding",), "clip.basis clip.residual_norm"),
    ("clip.method", ("microbatch",), "clip.microbatch"),
    ("clip.method", ("jl",), "clip.projections"),
    ("clip.method", ("fedavg",), "clip.local_epochs clip.local_batch clip.local_lr"),
    ("accountant.name", ("gdp",), "accountant.allow_clt"),
    *(
        ("schedule.name", tuple(name for name, takes in _ONE.items() if parameter in takes), f"schedule.{parameter}")
        for parameter in dict.fromkeys(parameter for takes in _ONE.values() for parameter in takes)
    ),
    ("schedule.name", _FIXED, "schedule.updates_per_epoch"),
    ("unit.name", ("user",), "unit.num_users unit.rows"),
    ("unit.size", (0,), "unit.num_users"),
    (
        "individual.name",
        ("sampling", "scaling"),
        "individual.epsilons individual.shares individual.groups individual.budgets individual.bins individual.partition",
    ),
    ("individual.groups", (None,), "individual.shares"),
    ("individual.budgets", (None,), "individual.epsilons individual.shares"),
    ("individual.budgets", GIVEN, "individual.bins individual.partition"),
    ("search.name", ("noisymax", "noisybtls", "hyfreedp"), "search.mechanism search.share search.objective_clip"),
    ("search.name", ("noisymax", "noisybtls"), "search.raise_by"),
    ("search.name", ("noisymax",), "search.candidates search.window search.growth"),
    (
        "search.name",
        ("noisybtls",),
        "search.tries search.backtrack search.armijo search.angle_memory search.angle_high search.angle_low search.shrink",
    ),
    ("optim", ("adam", "adamw", "adam_bc", "adamw_bc", "lamb"), "optim.betas"),
    ("optim", ("adam", "adamw", "lamb", "adagrad"), "optim.eps"),
    ("optim", ("sgd",), "optim.momentum"),
    ("optim", ("adagrad", "adam", "adam_bc", "adamw", "adamw_bc", "lamb", "sgd"), "optim.weight_decay"),
    ("optim", ("adam_bc", "adamw_bc"), "optim.floor"),
    ("optim", ("adadp",), "optim.tolerance optim.ratios"),
    ("optim", ("custom",), "optim.factory optim.config"),
    ("optim.name", FILTERS, "optim.base"),
    ("optim.name", ("doppler",), "optim.filter_a optim.filter_b"),
    ("optim.name", ("disk",), "optim.kappa"),
    ("peft.name", ("lora", "rgp", "adapters"), "peft.rank"),
    ("peft.name", ("lora",), "peft.alpha peft.dropout"),
    ("peft.name", ("lora", "rgp"), "peft.targets"),
    ("peft.name", ("rgp",), "peft.carriers"),
    ("peft.name", ("adapters",), "peft.placement"),
    ("peft.name", ("top2",), "peft.blocks"),
    ("peft.name", ("prefix", "prompt", "p_tuning"), "peft.prefix_length"),
    ("peft.name", ("prefix", "p_tuning"), "peft.prefix_hidden"),
    ("model.family", ("random_hf", "cnn"), "model.architecture"),
    ("model.family", ("hf", "timm", "random_timm"), "model.id"),
    ("model.family", ("custom",), "model.factory"),
    ("model.family", HUGGING_FACE, "model.retrain"),
    ("model.family", (*HUGGING_FACE, "custom"), "model.tokenizer"),
    ("model.family", (*HUGGING_FACE, "timm", "random_timm"), "model.dropout model.attention_dropout"),
    # the head that trains on them has dropout of its own, and no attention
    ("model.frozen_features", (False,), "model.attention_dropout"),
    # the definition, which chooses nothing
    ("engine.name", tuple(name for name in CHOICES["engine.name"] if name != "loop"), "engine.choice engine.memory_cap_mib"),
    ("task.kind", (*_TEXTS, "image_classification"), "task.labels"),
    ("task.kind", _TEXTS, "data.text_pair task.text_pair task.held_out"),
    (
        "task.kind",
        _ALL_TEXTS,
        "data.text data.label data.max_length task.text task.label task.max_length task.columns task.malformed task.overlong",
    ),
    ("task.format", ("",), "data.text data.label task.text task.label"),
    ("task.kind", ("text_infilling", "custom"), "task.template task.label_words"),
    (
        "task.kind",
        ("image_classification", "custom"),
        "task.channels task.image_size task.mean task.std task.title task.augmentations task.augmentation",
    ),
    ("task.augmentations", GIVEN, "task.augmentation"),
    ("task.kind", ("generation", "custom"), "task.generation"),
    ("task.generation.shots", GIVEN, "task.generation.prompt_set"),
    (
        "task.generation.top_p",
        (None,),
        "task.generation.num_beams task.generation.length_penalty task.generation.beam_length",
    ),
    ("task.kind", ("custom",), "task.factory"),
    ("data.text", (None,), "task.text"),
    ("data.text_pair", (None,), "task.text_pair"),
    ("data.label", (None,), "task.label"),
    ("data.max_length", (None,), "task.max_length"),
    (
        "runtime.parallel",
        ("pipeline",),
        "runtime.stages runtime.schedule runtime.microbatch runtime.flat runtime.rematerialise runtime.park",
    ),
    ("tracker.name", ("wandb",), "tracker.mode tracker.project"),
    ("tracker.name", ("wandb", "tensorboard"), "tracker.not_private"),
    ("analysis.output_specific_every", GIVEN, "analysis.rounding"),
)  # fmt: skip

# of whose settings a run's name holds those that are read
_IN_NAMES = ("clip.", "unit.", "individual.", "search.", "schedule.")


def unread(run: RunConfig) -> Iterator[tuple[str, str, tuple[Any, ...]]]:
    """Yield each setting that nobody reads, the choice that makes it so, and what that would have to be."""
    for chooser, wanted, settings in READ:
        value = _value(run, chooser)
        if not (bool(value) if wanted is GIVEN else value in wanted):
            for setting in settings.split():
                yield setting, chooser, wanted
    clip = run.clip
    # one group has all of the noise, however it is shared out; an embedding and the rest are two
    if clip.groups == "flat" and clip.method != "embedding":
        wanted = ("layer", "block", "device")
        yield "clip.allocation", "clip.groups", wanted
        # one threshold follows the norms; brought back to C it would not move
        if clip.rescale:
            yield "clip.rescale", "clip.groups", wanted


def neutralise(run: RunConfig) -> None:
    """Set what nobody reads to the neutral value, so that it makes no other run."""
    neutral = RunConfig()
    for setting, chooser, _ in list(unread(run)):
        if setting.startswith(_IN_NAMES) and chooser != "clip.private":
            group, _, name = setting.partition(".")
            setattr(getattr(run, group), name, getattr(getattr(neutral, group), name))


def given_for_nothing(run: RunConfig, given: Mapping[str, str]) -> Iterator[str]:
    """Name each setting of a command that would do nothing, once.

    Args:
        run: the settings that follow from the command.
        given: setting -> value, as they were typed; of a group its choice.
    """
    typed = {f"{key}.name" if hasattr(getattr(run, key, None), "name") else key: key for key in given}
    told = set()
    for setting, chooser, wanted in unread(run):
        for key, word in typed.items():
            if key not in told and (key == setting or key.startswith(f"{setting}.")):
                told.add(key)
                choices = " or ".join(_said(chooser, value) for value in wanted)
                yield f"{word}={given[word]} does nothing with {_present(run, chooser)}: it is for {choices}; leave it out"


def _value(run: RunConfig, chooser: str) -> Any:
    return moves_weights(run.optim) if chooser == "optim" else attrgetter(chooser)(run)


def moves_weights(optim: Any) -> str:
    """Name the optimiser that moves the weights: of a filter, the one behind it."""
    return str(optim.base if optim.name in FILTERS else optim.name)


def _present(run: RunConfig, chooser: str) -> str:
    """Name what stands in the way, by the choice that a person made."""
    group = chooser.partition(".")[0]
    name = getattr(getattr(run, group), "name", "")
    return (
        f"{group}={name}"
        if name and group in ("clip", "task", "model")
        else _said(chooser, _value(run, chooser))
    )


def _said(chooser: str, value: Any) -> str:
    word = "null" if value is None else str(value).lower() if isinstance(value, bool) else value
    return f"{chooser.removesuffix('.name')}={word}"
