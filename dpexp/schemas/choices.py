"""Settings whose value is one of a few words."""

from __future__ import annotations

# optimisers that filter what another one, optim.base, moves the weights by
FILTERS = ("disk", "doppler")
# of `model.family`: made by Hugging Face's transformers
HUGGING_FACE = ("hf", "minilm", "mpnet", "smollm2", "random_hf")
# of `model.pooling`: a head on what is pooled of the positions of a text
POOLINGS = ("cls", "mean", "layers")
CHOICES: dict[str, tuple[str, ...]] = {
    "task.malformed": ("error", "skip"),
    "task.overlong": ("cut", "error"),
    "task.augmentation": ("flip_crop", "crop", "flip"),
    "data.source": ("auto", "files", "hub", "demo"),
    "task.generation.cut": ("end", "start"),
    "task.generation.beam_length": ("target", "whole"),
    "task.generation.when": ("end", "always", "never"),
    "model.family": (
        *HUGGING_FACE, "cnn", "wide_resnet", "scattering", "timm", "random_timm", "custom",
    ),
    "model.pooling": ("own", *POOLINGS),
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
        "constant", "time", "exponential", "step", "polynomial", "convergence_rate", "influence", "given",
        "privacy_utility", "privacy_utility_convex", "validation", "privacy_utility_released",
    ),
    "unit.name": ("example", "user"),
    "individual.name": ("none", "sampling", "scaling"),
    "individual.partition": ("privacy_aware", "utility"),
    "search.name": ("none", "noisymax", "noisybtls", "hyfreedp"),
    "search.mechanism": ("laplace", "exponential", "above_threshold", "gaussian"),
    "optim.name": (
        "adadp", "adagrad", "adam", "adam_bc", "adamw", "adamw_bc", "custom", *FILTERS, "lamb", "sgd",
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
