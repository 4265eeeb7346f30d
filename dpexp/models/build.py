"""From a configuration to a network: its weights, its tokenizer, and which of its parameters train."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dpexp.errors import UserError
from dpexp.models.lora import add_lora
from dpexp.models.networks import load_config, pretrained_network, random_network, set_dropout
from dpexp.models.sources import Source, locate
from dpexp.models.tokenizer import fit_together, load_tokenizer
from dpexp.models.trainable import set_trainable

if TYPE_CHECKING:
    from dpexp.schemas import ModelConfig, PeftConfig


@dataclass
class ModelBundle:
    """A network ready to train.

    model: float32, on the CPU, in training mode.
    tokenizer: fitted to the network: padding token, segments, longest input.
    source: hub id with its commit, folder, package with the hash of its weights, or "random (architecture, seed)".
    trainable: names of the parameters that train, in the order of `named_parameters()`.
    weights_sha256: of the weights' file where there is a local one; hexadecimal.
    """

    model: nn.Module
    tokenizer: Any | None
    source: str
    trainable: list[str] = field(default_factory=list)
    weights_sha256: str | None = None


def build_tokenizer(model: ModelConfig, *, scale: str) -> Any:
    """The tokenizer alone, for a task that must read its data before it knows how many classes there are.

    Raises:
        UserError: as `build_model`.
    """
    source = _locate(model, scale)
    with _quiet():
        config = load_config(model, source)
        tokenizer = load_tokenizer(model, config, source)
        fit_together(tokenizer, config, resize="vocab_size" not in model.config and source is None)
    return tokenizer


def build_model(
    model: ModelConfig,
    peft: PeftConfig,
    *,
    head: str = "classifier",
    num_labels: int,
    scale: str,
    seed: int,
    tokenizer: Any | None = None,
) -> ModelBundle:
    """The network with the head that a task asks for (`Task.head`).

    Everything that is not in the checkpoint (the head; all of a random network; LoRA's A) is drawn from `seed` alone,
    and torch's global generator is left as it was.

    Args:
        model: family, id, architecture, overrides; see `conf/model/`.
        peft: "full" or "lora".
        head: a key of `dpexp.models.networks.HEADS`.
        num_labels: number of classes, of a classifier.
        scale: at "demo" nothing but installed packages and local folders is read.
        seed: public; it is in the record.
        tokenizer: what `build_tokenizer` gave for the same configuration; None: it is loaded here.

    Raises:
        UserError: unknown names, files that can't be found, a checkpoint that does not fit, or nothing to train.
    """
    if head.endswith("classifier") and num_labels < 2:
        raise UserError(f"a classifier needs at least two classes, and the task has {num_labels}")
    source = _locate(model, scale)
    with _quiet(), _drawn_from(seed):
        config = load_config(model, source)
        tokenizer = load_tokenizer(model, config, source) if tokenizer is None else tokenizer
        fit_together(tokenizer, config, resize="vocab_size" not in model.config and source is None)
        set_dropout(config, model)
        if head.endswith("classifier"):
            config.num_labels = num_labels
        if hasattr(config, "use_cache"):
            config.use_cache = False  # a decoder's cache of keys and values serves generation only
        network = random_network(config, head) if source is None else pretrained_network(config, source, head)
        network.train()
        network, trainable = _choose_trainable(network, model, peft)
    return ModelBundle(
        network,
        tokenizer,
        f"random ({config.model_type}, seed {seed})" if source is None else source.described(config),
        trainable,
        source.sha256 if source else None,
    )


def _choose_trainable(
    network: nn.Module, model: ModelConfig, peft: PeftConfig
) -> tuple[nn.Module, list[str]]:
    if peft.name == "full":
        return network, set_trainable(network, model.trainable)
    if peft.name != "lora":
        raise UserError(f"peft={peft.name} is unknown: choose full or lora")
    if model.trainable != "all":
        raise UserError(
            f"model.trainable={model.trainable} and peft=lora contradict each other: LoRA trains its adapters and the "
            "head; leave model.trainable=all"
        )
    adapted = add_lora(network, peft)
    return adapted, [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]


def _locate(model: ModelConfig, scale: str) -> Source | None:
    """Where the weights are; None for a random network."""
    if model.family == "random_hf":
        return None
    if model.family not in ("hf", "minilm"):
        raise UserError(f"model.family={model.family} is unknown: choose hf, minilm or random_hf")
    source = locate(model)
    if scale == "demo" and source.is_remote:
        raise UserError(
            f"scale=demo needs no network, but model.id={model.id} would come from the hub: give a local folder, "
            "model=minilm, or another scale"
        )
    return source


@contextmanager
def _drawn_from(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bar and no report about the head, which is new by intention."""
    from transformers.utils import logging

    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()
