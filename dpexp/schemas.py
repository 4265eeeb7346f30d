"""What a run is made of: one dataclass per configuration group.

These classes are the types; the values and their reasons stand in ``conf/*/*.yaml``. Nothing here knows Hydra.
A field's default is the neutral value that the signature of a run leaves out (``dpexp.config.signature``): adding
a field with a default keeps every old signature, changing the default of a field gives old runs a new meaning.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class TaskConfig:
    """A data set, how it is read and how the result is measured."""

    name: str = ""
    kind: str = "text_classification"
    labels: list[str] = field(
        default_factory=list
    )  # as they stand in the file; [] = the distinct values found there
    text: str = "text"  # column names
    text_pair: str | None = None
    label: str = "label"
    metric: str = "accuracy"
    hub_id: str | None = None
    hub_config: str | None = None
    files: dict[str, str] = field(default_factory=dict)  # split -> path below data.root, without .gz or .xz
    num_examples: dict[str, int | None] = field(
        default_factory=dict
    )  # scale -> N; public; null = data.num_examples
    max_length: int = 128  # tokens


@dataclass
class DataConfig:
    """Where the examples come from; what is set here wins over the task's own."""

    root: str | None = None
    source: str = "auto"
    train: str | None = None  # a person's own files
    dev: str | None = None
    text: str | None = None
    text_pair: str | None = None
    label: str | None = None
    num_examples: int | None = None
    max_length: int | None = None
    cache: str | None = None


@dataclass
class ModelConfig:
    """A network, where its weights come from, and which of its parameters train."""

    name: str = ""
    id: str | None = None  # hub id, local path, or "minilm"
    family: str = "hf"
    architecture: str | None = None  # for random_hf: "bert", "roberta", ...
    config: dict[str, Any] = field(default_factory=dict)  # overrides of the Hugging Face config
    tokenizer: str | None = None  # null: the model's own
    trainable: str = "all"
    dropout: float | None = None  # null: as the checkpoint says
    attention_dropout: float | None = None


@dataclass
class ClipConfig:
    """Which parameters share a norm, how thresholds move, how a norm becomes a factor, where the noise goes."""

    name: str = ""
    private: bool = True
    groups: str = "flat"
    clip_norm: float = 1.0  # C, the equivalent global threshold: the sensitivity of all groups together
    init_threshold: float | None = None  # first C_k of an adaptive rule; null = C/sqrt(K)
    adaptive: bool = False
    target_quantile: float = 0.5
    quantile_lr: float = 0.3
    quantile_budget: float = 0.0  # r, the share of the privacy budget that the quantiles cost
    rescale: bool = True
    allocation: str = "global"
    rule: str = "abadi"
    threshold_floor: float = 1e-6


@dataclass
class PrivacyConfig:
    """The guarantee: exactly one of epsilon and noise_multiplier is given for a private run."""

    epsilon: float | None = None
    noise_multiplier: float | None = None
    delta: str = "n_pow_-1.1"  # a number, or the name of a rule
    sampling: str = "poisson"
    release: str = "normal"
    noise_seed: int | None = None
    secure: bool = False


@dataclass
class AccountantConfig:
    """Which accountant decides; all of them are printed."""

    name: str = "rdp"
    allow_clt: bool = False


@dataclass
class ScheduleConfig:
    """How the noise moves over the steps."""

    name: str = "constant"


@dataclass
class OptimConfig:
    """The optimiser, its learning-rate schedule, and how long it runs."""

    name: str = "adam"
    lr: float = 1e-3
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    lr_schedule: str = "constant"
    warmup_ratio: float = 0.0
    batch_size: float = 1024.0  # B, the expected size of a logical batch
    epochs: float | None = None  # exactly one of epochs and steps
    steps: int | None = None


@dataclass
class PeftConfig:
    """The way to fine-tune: everything, or a small set of added parameters."""

    name: str = "full"
    rank: int = 0
    alpha: float = 0.0
    dropout: float = 0.0
    targets: list[str] = field(
        default_factory=list
    )  # module names; [] = the library's choice for the architecture


@dataclass
class EngineConfig:
    """How the clipped sum is computed. Changes time and memory, never the result."""

    name: str = "auto"
    choice: str = "measured"
    memory_cap_mib: int = 2048


@dataclass
class RuntimeConfig:
    """Where and in which pieces a run is computed."""

    device: str = "auto"
    precision: str = "fp32"
    physical_batch_size: str = "auto"
    eval_batch_size: int = 256
    threads: int | None = None
    eval_every: int = 0  # steps; 0 = at the end alone
    checkpoint_every: int = 50  # steps; 0 = at the end alone
    log_every: int = 1  # steps
    runs_dir: str = "runs"


@dataclass
class TrackerConfig:
    """Who else hears of the metrics."""

    name: str = "none"
    mode: str = "offline"
    project: str = "dpexp"


@dataclass
class ScaleConfig:
    """Paper, small or demo: in every record, so that a table cannot mix them unseen."""

    name: str = "paper"


@dataclass
class RunConfig:
    """Everything that ``python -m dpexp.train`` needs to know, resolved and checked."""

    task: TaskConfig = field(default_factory=TaskConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    clip: ClipConfig = field(default_factory=ClipConfig)
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig)
    accountant: AccountantConfig = field(default_factory=AccountantConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    peft: PeftConfig = field(default_factory=PeftConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    scale: ScaleConfig = field(default_factory=ScaleConfig)
    seed: int = 0
    trials: int = 1  # how many configurations this one was chosen from


CHOICES: dict[str, tuple[str, ...]] = {
    "data.source": ("auto", "files", "hub", "demo"),
    "model.family": ("hf", "minilm", "random_hf"),
    "model.trainable": ("all", "attention+head", "bias", "head"),
    "clip.groups": ("flat", "layer", "block"),
    "clip.allocation": ("global", "equal_budget", "weighted"),
    "clip.rule": ("abadi", "automatic", "none"),
    "privacy.sampling": ("poisson", "shuffle"),
    "privacy.release": ("normal", "strict"),
    "accountant.name": ("rdp", "gdp", "prv", "pld"),
    "schedule.name": ("constant",),
    "optim.name": ("adam", "adamw", "sgd"),
    "optim.lr_schedule": ("constant", "linear"),
    "peft.name": ("full", "lora"),
    "engine.name": (
        "auto", "loop", "opacus", "opacus_improved", "fastgrad", "fastgrad_improved", "ghost", "mixghost",
        "bk", "bk_mixghost", "bk_mixopt", "onepass",
    ),
    "engine.choice": ("measured", "rule", "ghost", "instantiate", "loop"),
    "runtime.precision": ("fp32", "bf16", "fp16"),
    "tracker.name": ("none", "wandb", "tensorboard"),
    "tracker.mode": ("offline", "online"),
    "scale.name": ("paper", "small", "demo"),
}  # fmt: skip
"""Settings whose value is one of a few words."""
