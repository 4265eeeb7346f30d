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

    prefix: str = ""  # before the source; {bos} is the tokenizer's own token for a beginning
    suffix: str = "{bos}"  # between source and target
    cut: str = "end"  # which end of an over-long source is lost: end | start
    max_target: int = 128  # tokens: the longest target that is learnt, and the most that are generated
    # beam search: how many texts are kept at each token
    num_beams: int = 5
    # the power of the length by which a beam's log-probability is divided
    length_penalty: float = 1.0
    # tokens that a beam's log-probability is divided by: of the text that is written, or of prompt and text together, as
    # transformers did when the papers were written
    beam_length: str = "target"  # target | whole
    banned: list[str] = field(default_factory=list)  # strings that are never written, such as "\n"
    # nucleus sampling from the most likely words that hold this share, in the place of beam search; null = beam search
    top_p: float | None = None
    # in-context learning without training: pairs of the training file in front of every source
    shots: int = 0
    prompt_set: int = 0  # which pairs: He et al. average over three sets
    # hits@1: replies that a right one is ranked among, itself included (ConvAI2: 20); 0 = not measured
    candidates: int = 0
    when: str = "end"  # end | always (at every evaluation) | never
    splits: list[str] = field(default_factory=lambda: ["dev"])  # which of dev and test text is generated for
    examples: int | None = None  # sources of each of them, spread evenly; null = all
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
    text: str = "text"  # column names
    # the column of a second text; null = one text
    text_pair: str | None = None
    label: str = "label"
    # what is reported on the dev set
    metric: str = "accuracy"
    # the data set on the hub
    hub_id: str | None = None
    # its configuration there
    hub_config: str | None = None
    files: dict[str, str] = field(default_factory=dict)  # split -> path below data.root, without .gz or .xz
    # scale -> N; public; null = data.num_examples
    num_examples: dict[str, int | None] = field(default_factory=dict)
    max_length: int = 128  # tokens
    # tokens that every text is padded to, at least max_length; null = the longest of its batch
    pad_to: int | None = None
    # layout of a published text-to-text or image data set; "" = columns, or folders of images
    format: str = ""
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    # of files without a header; [] = the first line names them
    columns: list[str] = field(default_factory=list)
    malformed: str = "error"  # rows with too few or too many cells: error | skip (and count)
    overlong: str = "cut"  # texts of more tokens than allowed: cut (and count) | error
    # generation: training rows of more tokens than this, prompt, target and end, are left out; N counts the others
    drop_over: int | None = None
    held_out: int = 0  # the last rows of the training file that are dev, where there is no file for it
    template: str | None = None  # text infilling: <S1>, <S2> and one [MASK] among words
    label_words: dict[str, str] = field(default_factory=dict)  # text infilling: label -> word at the mask
    title: str = ""  # images: what a record calls the data, where it is not what the task's name suggests
    channels: int = 3  # images: 1 = grey, 3 = colours
    image_size: int = 0  # images: make them squares of so many pixels; 0 = as they are
    # images: of each channel, pixels in [0, 1]; [] = 1/2; public
    mean: list[float] = field(default_factory=list)
    # see mean
    std: list[float] = field(default_factory=list)
    # images: M copies of each example, whose loss is their mean; 0 = the image as it is
    augmentations: int = 0
    augmentation: str = "flip_crop"  # flip_crop | crop | flip
    factory: str | None = None  # kind=custom: package.module:Class, a subclass of dpexp.tasks.Task


@dataclass
class DataConfig:
    """Where the examples come from; what is set here wins over the task's own."""

    # a folder in the published layout, with the files that conf/task/*.yaml names
    root: str | None = None
    # auto: own files, else those below root, else the hub (at scale=demo: embedded data)
    source: str = "auto"
    train: str | None = None  # a person's own files
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
    id: str | None = None  # hub id, local path, or "minilm"
    # who builds the network
    family: str = "hf"
    architecture: str | None = None  # for random_hf: "bert", "roberta", ...
    config: dict[str, Any] = field(default_factory=dict)  # overrides of the Hugging Face config
    tokenizer: str | None = None  # null: the model's own
    root: str | None = None  # where published tokenizer files may lie: data.root
    # the network of the checkpoint, its weights drawn at random ("retrain" of Li et al. Table 2)
    retrain: bool = False
    # language models: the output layer has a weight of its own, which begins as a copy of the embedding
    untied: bool = False
    # which parameters train, under peft=full
    trainable: str = "all"
    dropout: float | None = None  # null: as the checkpoint says
    # null: as the checkpoint says
    attention_dropout: float | None = None
    # classifiers of text: the architecture's own head, or a linear one on the first position or on the mean of all
    pooling: str = "own"  # own | cls | mean
    # on what is pooled: one linear layer, the same without its bias, or RoBERTa's two layers (dense, tanh, linear)
    head: str = "linear"  # linear | unbiased | dense
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
    devices: int = 0  # K of groups=device
    clip_norm: float = 1.0  # C, the equivalent global threshold: the sensitivity of all groups together
    init_threshold: float | None = None  # first C_k of an adaptive rule; null = C/sqrt(K)
    # thresholds follow the norms, by noisy counts
    adaptive: bool = False
    # p, the share of the norms that should lie below their threshold
    target_quantile: float = 0.5
    # eta, how fast thresholds follow
    quantile_lr: float = 0.3
    # how a threshold moves: C·exp(-eta·error) or C - eta·error
    quantile_update: str = "geometric"
    follows: str = "quantile"  # what adaptive thresholds follow: a quantile of the norms, or their mean
    norm_factor: float = 1.0  # alpha: C_k over the mean norm
    norm_bound: float = 2.0  # beta: a norm counts at most so many C_k in the mean
    quantile_budget: float = 0.0  # r, the share of the privacy budget that the quantiles cost
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
    init_norm: float = 1.0  # adaclip: what gradients are clipped to in the first step
    variance_range: list[float] = field(default_factory=lambda: [1e-12, 10.0])  # adaclip: of a coordinate
    scale_floor: float = 0.01  # ellipsoid, scaled: of a coordinate, relative to the root mean square of all
    public_examples: int = 64  # ellipsoid, embedding: so many of the dev set
    basis: int = 16  # embedding: dimensions of the public subspace
    residual_norm: float = 0.2  # embedding: the threshold outside of it
    microbatch: float = 0.0  # examples of one microbatch
    projections: int = 30  # jl: r, random directions that a norm is estimated from
    local_epochs: int = 1  # fedavg: of a user's own training, over the rows that a step takes
    local_batch: int = 0  # fedavg: rows; 0 = all of them
    local_lr: float = 0.1  # fedavg


@dataclass
class PrivacyConfig:
    """The guarantee: exactly one of epsilon and noise_multiplier is given for a private run."""

    # the target; the noise follows from it
    epsilon: float | None = None
    # sigma, in the place of epsilon
    noise_multiplier: float | None = None
    delta: str = "n_pow_-1.1"  # a number, or the name of a rule
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
    decay_rate: float | None = None  # k
    period: float | None = None  # epochs
    end_ratio: float | None = None  # sigma_end / sigma_0
    # how often the noise changes within an epoch
    updates_per_epoch: int = 1
    condition: float | None = None  # kappa = M/mu, of a loss that is M-smooth and mu-PL
    # dEER/dsigma² in equal parts of the run, measured on public data
    influences: list[float] | None = None
    start: float | None = None  # of the noise, in units of what the planned steps afford
    threshold: float | None = None  # validation: the rise below which the noise falls
    window: int | None = None  # scores or gradients that are averaged
    every: int | None = None  # validation: steps


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
    num_users: int | None = None  # N, public; follows from size
    rows: int = 1  # M, the most rows of a user that a step takes


@dataclass
class IndividualConfig:
    """Groups of examples with an epsilon of their own (`dpexp.privacy.individual`)."""

    name: str = "none"
    epsilons: list[float] = field(default_factory=list)  # of each group; they decide the noise
    shares: list[float] = field(default_factory=list)  # of the examples, drawn at random with the seed
    # or a file that has in the line of each training example the number of its group, from 1 on; public
    groups: str | None = None
    # or a file that has in the line of each training example an epsilon of its own, which are put into bins; public
    budgets: str | None = None
    # of budgets: how many
    bins: int = 3
    partition: str = "privacy_aware"  # what the bins are chosen for: privacy_aware | utility


@dataclass
class SearchConfig:
    """Step sizes found within the budget (`dpexp.training.search`); `optim.lr` is the largest one at first."""

    name: str = "none"
    mechanism: str = "laplace"  # noisymax: laplace | exponential; noisybtls: above_threshold
    share: float = 0.0  # s, of each step's budget
    objective_clip: float = 1.0  # C_obj, of an example's loss
    raise_by: float = 0.1  # γ, by which a budget rises after a failure
    candidates: int = 10  # noisymax: step sizes above 0
    window: int = 10  # noisymax: successes between two changes of the largest step size
    growth: float = 0.1  # noisymax: how far it reaches beyond the best of them
    tries: int = 10  # noisybtls: step sizes at most
    backtrack: float = 0.5  # noisybtls: β, from one step size to the next
    armijo: float = 1e-4  # noisybtls: α, the share of the slope that a step must fall by
    angle_memory: float = 0.9  # noisybtls: ψ
    angle_high: float = 1.1  # noisybtls: φ_max
    angle_low: float = 0.9  # noisybtls: φ_min
    shrink: float = 0.01  # noisybtls: ζ, of both thresholds


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
    tolerance: float = 1.0  # adadp: the error of a pair of steps above which it is discarded
    # adadp: the least and the most by which a pair of steps changes the learning rate
    ratios: list[float] = field(default_factory=lambda: [0.9, 1.1])
    # how the learning rate falls, to 0 at the end
    lr_schedule: str = "constant"
    # the share of the steps in which the learning rate rises from 0
    warmup_ratio: float = 0.0
    # of the average of the weights that is evaluated and exported; 0 = the weights themselves
    ema_decay: float = 0.0
    uniform_average: bool = False  # the mean of all steps' weights instead
    # steps between two evaluations on the public dev set, of whose weights the best are kept; 0 = the last weights
    keep_best_every: int = 0
    floor: float = 1e-8  # adam_bc, adamw_bc: of the second moment without the noise
    base: str = "adam"  # doppler, disk: the optimiser behind the filter
    filter_a: list[float] = field(default_factory=lambda: [-0.9])  # doppler: of the filtered past
    filter_b: list[float] = field(default_factory=lambda: [0.1])  # doppler: of the gradients
    kappa: float = 0.7  # disk: the weight of the newest gradient
    batch_size: float = 1024.0  # B, the expected size of a logical batch
    # of the batch: name and parameters of a schedule f of the noise; the expected size of a step is B/f. {} = the same in all
    batch_growth: dict[str, Any] = field(default_factory=dict)
    epochs: float | None = None  # exactly one of epochs and steps
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
    carriers: str = "weights"  # rgp: what is decomposed, weights | history
    placement: str = "both"  # adapters: behind both sublayers, or behind the feed_forward one alone
    blocks: int = 0  # top2: how many of the last blocks train
    prefix_length: int = 0  # prefix, prompt, p_tuning: rows
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
    eval_every: int = 0  # steps; 0 = at the end alone
    checkpoint_every: int = 50  # steps; 0 = at the end alone
    log_every: int = 1  # steps
    # a folder for each run is made below it
    runs_dir: str = "runs"
    # how several processes share the work (docs/many_processes.md)
    parallel: str = "none"
    # only check that the run would start, and what it would guarantee
    dry_run: bool = False
    stages: int | None = None  # parallel=pipeline: processes that share one model; null = all of them
    schedule: str = "1f1b"  # which microbatch runs when
    microbatch: int = 4  # examples that pass through a stage together
    flat: str = "last"  # when the stages join their norms, for one threshold over all (docs/pipeline.md)
    rematerialise: bool = False  # compute the inside of each block again in the backward pass
    park: bool = False  # hold activations on the host between forward and backward


@dataclass
class AnalysisConfig:
    """What is found out about a run for its owner; none of it is released."""

    # steps K between two looks at the norms of all examples, for output-specific privacy; 0 = none
    output_specific_every: int = 0
    rounding: float = 0.05  # r, of an example's contribution relative to C, upwards


@dataclass
class TrackerConfig:
    """Who else hears of the metrics."""

    name: str = "none"
    # wandb: offline keeps everything on this machine
    mode: str = "offline"
    # its name there
    project: str = "dpexp"
    not_private: bool = False  # tell it losses and gradient norms too, which no noise covers


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
    trials: int = 1  # how many configurations this one was chosen from
    trials_law: str | None = None  # that their number was drawn from


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
