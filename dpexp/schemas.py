"""What a run is made of: one dataclass per configuration group.

These classes are the types; the values and their reasons stand in ``conf/*/*.yaml``. Nothing here knows Hydra.
A field's default is the neutral value that the signature of a run leaves out (``dpexp.config.signature``): adding
a field with a default keeps every old signature, changing the default of a field gives old runs a new meaning.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class GenerationConfig:
    """Prompts, and how text is generated from them (tasks of kind "generation")."""

    # before the source; {bos} is the tokenizer's own token for a beginning
    prefix: str = ""
    # between source and target
    suffix: str = "{bos}"
    # which end of an over-long source is lost: end | start
    cut: str = "end"
    # tokens: the longest target that is learnt, and the most that are generated
    max_target: int = 128
    # beam search: how many texts are kept at each token
    num_beams: int = 5
    # the power of the length by which a beam's log-probability is divided
    length_penalty: float = 1.0
    # tokens that a beam's log-probability is divided by: of the text that is written, or of prompt and text together, as
    # transformers did when the papers were written
    # target | whole
    beam_length: str = "target"
    # strings that are never written, such as "\n"
    banned: list[str] = field(default_factory=list)
    # nucleus sampling from the most likely words that hold this share, in the place of beam search; null = beam search
    top_p: float | None = None
    # in-context learning without training: pairs of the training file in front of every source
    shots: int = 0
    # which pairs: He et al. average over three sets
    prompt_set: int = 0
    # hits@1: replies that a right one is ranked among, itself included (ConvAI2: 20); 0 = not measured
    candidates: int = 0
    # end | always (at every evaluation) | never
    when: str = "end"
    # which of dev and test text is generated for
    splits: list[str] = field(default_factory=lambda: ["dev"])
    # sources of each of them, spread evenly; null = all
    examples: int | None = None
    # bertscore, bleurt -> folder, or id in the hub's cache, of the model; else the published one, where it is cached
    metric_models: dict[str, str] = field(default_factory=dict)


@dataclass
class TaskConfig:
    """A data set, how it is read and how the result is measured."""

    name: str = ""
    # text_classification | text_infilling | image_classification | generation | custom
    kind: str = "text_classification"
    # as they stand in the file; [] = the distinct values found there
    labels: list[str] = field(default_factory=list)
    # column names
    text: str = "text"
    # the column of a second text; null = one text
    text_pair: str | None = None
    label: str = "label"
    # what is reported on the dev set
    metric: str = "accuracy"
    # the data set on the hub
    hub_id: str | None = None
    # its configuration there
    hub_config: str | None = None
    # split -> path below data.root, without .gz or .xz
    files: dict[str, str] = field(default_factory=dict)
    # scale -> N; public; null = data.num_examples
    num_examples: dict[str, int | None] = field(default_factory=dict)
    # tokens
    max_length: int = 128
    # tokens that every text is padded to, at least max_length; null = the longest of its batch
    pad_to: int | None = None
    # layout of a published text-to-text or image data set; "" = columns, or folders of images
    format: str = ""
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    # of files without a header; [] = the first line names them
    columns: list[str] = field(default_factory=list)
    # rows with too few or too many cells: error | skip (and count)
    malformed: str = "error"
    # texts of more tokens than allowed: cut (and count) | error
    overlong: str = "cut"
    # generation: training rows of more tokens than this, prompt, target and end, are left out; N counts the others
    drop_over: int | None = None
    # the last rows of the training file that are dev, where there is no file for it
    held_out: int = 0
    # text infilling: <S1>, <S2> and one [MASK] among words
    template: str | None = None
    # text infilling: label -> word at the mask
    label_words: dict[str, str] = field(default_factory=dict)
    # images: what a record calls the data, where it is not what the task's name suggests
    title: str = ""
    # images: 1 = grey, 3 = colours
    channels: int = 3
    # images: make them squares of so many pixels; 0 = as they are
    image_size: int = 0
    # images: of each channel, pixels in [0, 1]; [] = 1/2; public
    mean: list[float] = field(default_factory=list)
    # see mean
    std: list[float] = field(default_factory=list)
    # images: M copies of each example, whose loss is their mean; 0 = the image as it is
    augmentations: int = 0
    # flip_crop | crop | flip
    augmentation: str = "flip_crop"
    # kind=custom: package.module:Class, a subclass of dpexp.tasks.Task
    factory: str | None = None


@dataclass
class DataConfig:
    """Where the examples come from; what is set here wins over the task's own."""

    # a folder in the published layout, with the files that conf/task/*.yaml names
    root: str | None = None
    # auto: own files, else those below root, else the hub (at scale=demo: embedded data)
    source: str = "auto"
    # a person's own files
    train: str | None = None
    # public; what is measured on it is written down without noise
    dev: str | None = None
    # the name of the column
    text: str | None = None
    # the column of a second text
    text_pair: str | None = None
    # the column of the label, or of the text to be written
    label: str | None = None
    # N of your own training file; public, so it is declared
    num_examples: int | None = None
    # tokens; wins over task.max_length
    max_length: int | None = None
    # where prepared data are kept
    cache: str | None = None


@dataclass
class ModelConfig:
    """A network, where its weights come from, and which of its parameters train."""

    name: str = ""
    # hub id, local path, or "minilm"
    id: str | None = None
    # who builds the network
    family: str = "hf"
    # for random_hf: "bert", "roberta", ...
    architecture: str | None = None
    # overrides of the Hugging Face config
    config: dict[str, Any] = field(default_factory=dict)
    # null: the model's own
    tokenizer: str | None = None
    # where published tokenizer files may lie: data.root
    root: str | None = None
    # the network of the checkpoint, its weights drawn at random ("retrain" of Li et al. Table 2)
    retrain: bool = False
    # language models: the output layer has a weight of its own, which begins as a copy of the embedding
    untied: bool = False
    # which parameters train, under peft=full
    trainable: str = "all"
    # null: as the checkpoint says
    dropout: float | None = None
    # null: as the checkpoint says
    attention_dropout: float | None = None
    # classifiers of text: the architecture's own head, or a linear one on the first position or on the mean of all
    # own | cls | mean
    pooling: str = "own"
    # on what is pooled: one linear layer, the same without its bias, or RoBERTa's two layers (dense, tanh, linear)
    # linear | unbiased | dense
    head: str = "linear"
    # with trainable=head: what the frozen encoder makes of each text is computed once
    frozen_features: bool = False
    # family=custom: package.module:function, which makes the network
    factory: str | None = None


@dataclass
class ClipConfig:
    """Which parameters share a norm, how thresholds move, how a norm becomes a factor, where the noise goes."""

    name: str = ""
    # false: neither clipped nor noised
    private: bool = True
    # parameters that share one norm: all, those of a layer, of a block, of a device
    groups: str = "flat"
    # K of groups=device
    devices: int = 0
    # C, the equivalent global threshold: the sensitivity of all groups together
    clip_norm: float = 1.0
    # first C_k of an adaptive rule; null = C/sqrt(K)
    init_threshold: float | None = None
    # thresholds follow the norms, by noisy counts
    adaptive: bool = False
    # p, the share of the norms that should lie below their threshold
    target_quantile: float = 0.5
    # eta, how fast thresholds follow
    quantile_lr: float = 0.3
    # how a threshold moves: C·exp(-eta·error) or C - eta·error
    quantile_update: str = "geometric"
    # what adaptive thresholds follow: a quantile of the norms, or their mean
    follows: str = "quantile"
    # alpha: C_k over the mean norm
    norm_factor: float = 1.0
    # beta: a norm counts at most so many C_k in the mean
    norm_bound: float = 2.0
    # r, the share of the privacy budget that the quantiles cost
    quantile_budget: float = 0.0
    # adaptive thresholds are rescaled so that all together stay C
    rescale: bool = True
    # of the noise to the groups
    allocation: str = "global"
    # how a norm becomes a factor; normalized and automatic scale small gradients up too
    rule: str = "abadi"
    # the smallest that an adaptive threshold becomes
    threshold_floor: float = 1e-6
    # what is clipped: gradients by their norms, or as dpexp.clipping.whole and .microbatches say
    method: str = "norm"
    # adaclip: of mean and variance; scaled: of v
    memory: list[float] = field(default_factory=lambda: [0.99, 0.9])
    # adaclip: what gradients are clipped to in the first step
    init_norm: float = 1.0
    # adaclip: of a coordinate
    variance_range: list[float] = field(default_factory=lambda: [1e-12, 10.0])
    # ellipsoid, scaled: of a coordinate, relative to the root mean square of all
    scale_floor: float = 0.01
    # ellipsoid, embedding: so many of the dev set
    public_examples: int = 64
    # embedding: dimensions of the public subspace
    basis: int = 16
    # embedding: the threshold outside of it
    residual_norm: float = 0.2
    # examples of one microbatch
    microbatch: float = 0.0
    # jl: r, random directions that a norm is estimated from
    projections: int = 30
    # fedavg: of a user's own training, over the rows that a step takes
    local_epochs: int = 1
    # fedavg: rows; 0 = all of them
    local_batch: int = 0
    # fedavg
    local_lr: float = 0.1


@dataclass
class PrivacyConfig:
    """The guarantee: exactly one of epsilon and noise_multiplier is given for a private run."""

    # the target; the noise follows from it
    epsilon: float | None = None
    # sigma, in the place of epsilon
    noise_multiplier: float | None = None
    # a number, or the name of a rule
    delta: str = "n_pow_-1.1"
    # poisson, or fixed: batches of one size; shuffle is what no accountant covers
    sampling: str = "poisson"
    # strict: the record holds nothing that follows from private rows without noise
    release: str = "normal"
    # for tests: the guarantee holds only while this number is secret
    noise_seed: int | None = None
    # do not delete the secret key when the run is finished
    keep_key: bool = False
    # noise by whole numbers alone: exact, some hundred times slower
    secure: bool = False


@dataclass
class AccountantConfig:
    """Which accountant decides; all of them are printed."""

    name: str = "rdp"
    # let gdp, an approximation that under-estimates, decide the noise
    allow_clt: bool = False


@dataclass
class ScheduleConfig:
    """How the noise moves over the epochs (`dpexp.privacy.schedules`)."""

    name: str = "constant"
    # k
    decay_rate: float | None = None
    # epochs
    period: float | None = None
    # sigma_end / sigma_0
    end_ratio: float | None = None
    # how often the noise changes within an epoch
    updates_per_epoch: int = 1
    # kappa = M/mu, of a loss that is M-smooth and mu-PL
    condition: float | None = None
    # dEER/dsigma² in equal parts of the run, measured on public data
    influences: list[float] | None = None
    # of the noise, in units of what the planned steps afford
    start: float | None = None
    # validation: the rise below which the noise falls
    threshold: float | None = None
    # scores or gradients that are averaged
    window: int | None = None
    # validation: steps
    every: int | None = None


@dataclass
class UnitConfig:
    """Whom the guarantee protects: one example, or one user with all examples of theirs (`dpexp.tasks.users`)."""

    # whom the guarantee protects
    name: str = "example"
    # who gave each training row: exactly one of a column of data.train, a file with a name in the line of each row, and a size
    # (made-up users of so many rows, for experiments on data without users)
    column: str | None = None
    file: str | None = None
    # rows of each made-up user
    size: int = 0
    # N, public; follows from size
    num_users: int | None = None
    # M, the most rows of a user that a step takes
    rows: int = 1


@dataclass
class IndividualConfig:
    """Groups of examples with an epsilon of their own (`dpexp.privacy.individual`)."""

    name: str = "none"
    # of each group; they decide the noise
    epsilons: list[float] = field(default_factory=list)
    # of the examples, drawn at random with the seed
    shares: list[float] = field(default_factory=list)
    # or a file that has in the line of each training example the number of its group, from 1 on; public
    groups: str | None = None
    # or a file that has in the line of each training example an epsilon of its own, which are put into bins; public
    budgets: str | None = None
    # of budgets: how many
    bins: int = 3
    # what the bins are chosen for: privacy_aware | utility
    partition: str = "privacy_aware"


@dataclass
class SearchConfig:
    """Step sizes found within the budget (`dpexp.training.search`); `optim.lr` is the largest one at first."""

    name: str = "none"
    # noisymax: laplace | exponential; noisybtls: above_threshold
    mechanism: str = "laplace"
    # s, of each step's budget
    share: float = 0.0
    # C_obj, of an example's loss
    objective_clip: float = 1.0
    # γ, by which a budget rises after a failure
    raise_by: float = 0.1
    # noisymax: step sizes above 0
    candidates: int = 10
    # noisymax: successes between two changes of the largest step size
    window: int = 10
    # noisymax: how far it reaches beyond the best of them
    growth: float = 0.1
    # noisybtls: step sizes at most
    tries: int = 10
    # noisybtls: β, from one step size to the next
    backtrack: float = 0.5
    # noisybtls: α, the share of the slope that a step must fall by
    armijo: float = 1e-4
    # noisybtls: ψ
    angle_memory: float = 0.9
    # noisybtls: φ_max
    angle_high: float = 1.1
    # noisybtls: φ_min
    angle_low: float = 0.9
    # noisybtls: ζ, of both thresholds
    shrink: float = 0.01


@dataclass
class OptimConfig:
    """The optimiser, its learning-rate schedule, and how long it runs."""

    name: str = "adam"
    # the learning rate, eta
    lr: float = 1e-3
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    # adadp: the error of a pair of steps above which it is discarded
    tolerance: float = 1.0
    # adadp: the least and the most by which a pair of steps changes the learning rate
    ratios: list[float] = field(default_factory=lambda: [0.9, 1.1])
    # how the learning rate falls, to 0 at the end
    lr_schedule: str = "constant"
    # the share of the steps in which the learning rate rises from 0
    warmup_ratio: float = 0.0
    # of the average of the weights that is evaluated and exported; 0 = the weights themselves
    ema_decay: float = 0.0
    # the mean of all steps' weights instead
    uniform_average: bool = False
    # steps between two evaluations on the public dev set, of whose weights the best are kept; 0 = the last weights
    keep_best_every: int = 0
    # adam_bc, adamw_bc: of the second moment without the noise
    floor: float = 1e-8
    # doppler, disk: the optimiser behind the filter
    base: str = "adam"
    # doppler: of the filtered past
    filter_a: list[float] = field(default_factory=lambda: [-0.9])
    # doppler: of the gradients
    filter_b: list[float] = field(default_factory=lambda: [0.1])
    # disk: the weight of the newest gradient
    kappa: float = 0.7
    # B, the expected size of a logical batch
    batch_size: float = 1024.0
    # of the batch: name and parameters of a schedule f of the noise; the expected size of a step is B/f. {} = the same in all
    batch_growth: dict[str, Any] = field(default_factory=dict)
    # exactly one of epochs and steps
    epochs: float | None = None
    steps: int | None = None


@dataclass
class PeftConfig:
    """The way to fine-tune: everything, or a small set of added parameters."""

    name: str = "full"
    # lora, rgp, adapters: of the added matrices, r
    rank: int = 0
    # lora: the update is scaled by alpha/r; 0 = r
    alpha: float = 0.0
    # lora: on the adapters' input
    dropout: float = 0.0
    # module names; [] = the library's choice for the architecture
    targets: list[str] = field(default_factory=list)
    # rgp: what is decomposed, weights | history
    carriers: str = "weights"
    # adapters: behind both sublayers, or behind the feed_forward one alone
    placement: str = "both"
    # top2: how many of the last blocks train
    blocks: int = 0
    # prefix, prompt, p_tuning: rows
    prefix_length: int = 0
    # prefix, p_tuning: units of the network that makes them; 0 = none, of p_tuning as many as the embedding is wide
    prefix_hidden: int = 0


@dataclass
class EngineConfig:
    """How the clipped sum is computed. Changes time and memory, never the result."""

    name: str = "auto"
    # how the way to compute a layer's norm is chosen: by measuring, or as named
    choice: str = "measured"
    # the most memory that one per-example gradient may take
    memory_cap_mib: int = 2048


@dataclass
class RuntimeConfig:
    """Where and in which pieces a run is computed."""

    # auto | cpu | cuda | cuda:1
    device: str = "auto"
    # of forward and backward; sums and noise are float32
    precision: str = "fp32"
    # examples that are computed at once; auto = what fits in memory
    physical_batch_size: str = "auto"
    # dev examples at once
    eval_batch_size: int = 256
    # of the processor; null = as torch chooses
    threads: int | None = None
    # steps; 0 = at the end alone
    eval_every: int = 0
    # steps; 0 = at the end alone
    checkpoint_every: int = 50
    # steps
    log_every: int = 1
    # a folder for each run is made below it
    runs_dir: str = "runs"
    # how several processes share the work (docs/many_processes.md)
    parallel: str = "none"
    # only check that the run would start, and what it would guarantee
    dry_run: bool = False
    # parallel=pipeline: processes that share one model; null = all of them
    stages: int | None = None
    # which microbatch runs when
    schedule: str = "1f1b"
    # examples that pass through a stage together
    microbatch: int = 4
    # when the stages join their norms, for one threshold over all (docs/pipeline.md)
    flat: str = "last"
    # compute the inside of each block again in the backward pass
    rematerialise: bool = False
    # hold activations on the host between forward and backward
    park: bool = False


@dataclass
class AnalysisConfig:
    """What is found out about a run for its owner; none of it is released."""

    # steps K between two looks at the norms of all examples, for output-specific privacy; 0 = none
    output_specific_every: int = 0
    # r, of an example's contribution relative to C, upwards
    rounding: float = 0.05


@dataclass
class TrackerConfig:
    """Who else hears of the metrics."""

    name: str = "none"
    # wandb: offline keeps everything on this machine
    mode: str = "offline"
    # its name there
    project: str = "dpexp"
    # tell it losses and gradient norms too, which no noise covers
    not_private: bool = False


@dataclass
class ScaleConfig:
    """Paper, small or demo: in every record, so that a table cannot mix them unseen."""

    # the size of model and data: conf/task_at_scale
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
    unit: UnitConfig = field(default_factory=UnitConfig)
    individual: IndividualConfig = field(default_factory=IndividualConfig)
    search: SearchConfig = field(default_factory=SearchConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    peft: PeftConfig = field(default_factory=PeftConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    analysis: AnalysisConfig = field(default_factory=AnalysisConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    scale: ScaleConfig = field(default_factory=ScaleConfig)
    seed: int = 0
    # how many configurations this one was chosen from
    trials: int = 1
    # that their number was drawn from
    trials_law: str | None = None


CHOICES: dict[str, tuple[str, ...]] = {
    "task.malformed": ("error", "skip"),
    "task.overlong": ("cut", "error"),
    "task.augmentation": ("flip_crop", "crop", "flip"),
    "data.source": ("auto", "files", "hub", "demo"),
    "task.generation.cut": ("end", "start"),
    "task.generation.beam_length": ("target", "whole"),
    "task.generation.when": ("end", "always", "never"),
    "model.family": (
        "hf", "minilm", "mpnet", "smollm2", "random_hf", "cnn", "wide_resnet", "scattering", "timm", "random_timm", "custom",
    ),
    "model.pooling": ("own", "cls", "mean"),
    "model.head": ("linear", "unbiased", "dense"),
    "model.trainable": ("all", "attention+head", "bias", "head"),
    "clip.groups": ("flat", "layer", "block", "device"),
    "clip.allocation": ("global", "equal_budget", "weighted"),
    "clip.rule": ("abadi", "automatic", "normalized", "none"),
    "clip.method": ("norm", "adaclip", "scaled", "ellipsoid", "embedding", "microbatch", "fedavg", "jl"),
    "clip.quantile_update": ("geometric", "arithmetic"),
    "clip.follows": ("quantile", "norm"),
    "privacy.sampling": ("poisson", "fixed", "shuffle"),
    "privacy.release": ("normal", "strict"),
    "accountant.name": ("rdp", "gdp", "prv", "pld"),
    "schedule.name": (
        "constant", "time", "exponential", "step", "polynomial", "convergence_rate", "influence", "privacy_utility",
        "privacy_utility_convex", "validation", "privacy_utility_released",
    ),
    "unit.name": ("example", "user"),
    "individual.name": ("none", "sampling", "scaling"),
    "individual.partition": ("privacy_aware", "utility"),
    "search.name": ("none", "noisymax", "noisybtls", "hyfreedp"),
    "search.mechanism": ("laplace", "exponential", "above_threshold", "gaussian"),
    "optim.name": (
        "adadp", "adagrad", "adam", "adam_bc", "adamw", "adamw_bc", "disk", "doppler", "lamb", "sgd",
    ),
    "optim.base": ("adagrad", "adam", "adamw", "lamb", "sgd"),
    "optim.lr_schedule": ("constant", "linear", "cosine"),
    "peft.name": ("full", "lora", "prefix", "prompt", "p_tuning", "rgp", "top2", "bitfit", "head", "adapters"),
    "peft.carriers": ("weights", "history"),
    "peft.placement": ("both", "feed_forward"),
    "engine.name": (
        "auto", "loop", "opacus", "opacus_improved", "fastgrad", "fastgrad_improved", "ghost", "mixghost",
        "bk", "bk_mixghost", "bk_mixopt", "onepass",
    ),
    "engine.choice": ("measured", "rule", "ghost", "instantiate", "loop"),
    "runtime.precision": ("fp32", "bf16", "fp16"),
    "runtime.parallel": ("none", "ddp", "fsdp", "pipeline"),
    "runtime.flat": ("microbatch", "offload", "second_backward", "last"),
    "tracker.name": ("none", "wandb", "tensorboard"),
    "tracker.mode": ("offline", "online"),
    "scale.name": ("paper", "small", "demo", "own"),
}  # fmt: skip
"""Settings whose value is one of a few words."""
