"""How a run goes: the optimiser, the machine, and what is noted on the way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


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
    # custom: package.module:Class, or file.py:function, of an optimiser
    factory: str | None = None
    # custom: further keywords for it
    config: dict[str, Any] = field(default_factory=dict)
    # B, the expected size of a logical batch
    batch_size: float = 1024.0
    # of the batch: name and parameters of a schedule f of the noise; the expected size of a step is B/f. {} = the same in all
    batch_growth: dict[str, Any] = field(default_factory=dict)
    # exactly one of epochs and steps
    epochs: float | None = None
    steps: int | None = None


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
    # of the processor, in each process; null = as torch chooses
    threads: int | None = None
    # steps between two evaluations; 0 = at the end alone
    eval_every: int = 0
    # steps between two checkpoints; 0 = at the end alone
    checkpoint_every: int = 50
    # steps between two lines of metrics.jsonl
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
