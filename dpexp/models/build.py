"""From a configuration to a network: its weights, its tokenizer, and which of its parameters train."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dpexp.errors import UserError
from dpexp.models.causal import check_causal
from dpexp.models.custom import custom_network
from dpexp.models.finetuning import prepare
from dpexp.models.images import (
    FAMILIES,
    ImageInputs,
    build_image_network,
    image_inputs,
    inputs_of_config,
    sees_images,
)
from dpexp.models.networks import (
    add_rows,
    described_head,
    load_config,
    pretrained_network,
    random_network,
    read_once,
    set_dropout,
    untie_head,
)
from dpexp.models.sources import Source, locate
from dpexp.models.tokenizer import fit_together, load_tokenizer
from dpexp.schemas.choices import HUGGING_FACE

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

    For a network that sees images: its `ImageInputs`.

    Raises:
        UserError: as `build_model`.
    """
    if model.family in FAMILIES:
        return image_inputs(model)
    if model.family == "custom":
        if not model.tokenizer:
            return ImageInputs()
        with _quiet():
            tokenizer = load_tokenizer(model, None, None)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        return tokenizer
    source = _locate(model, scale)
    with _quiet():
        config = load_config(model, source)
        if sees_images(config):
            return inputs_of_config(config, source)
        tokenizer = load_tokenizer(model, config, source)
        _fit(tokenizer, config, model, source)
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
    image_shape: tuple[int, int, int] | None = None,
) -> ModelBundle:
    """The network with the head that a task asks for (`Task.head`).

    Everything that is not in the checkpoint (the head; all of a random network; LoRA's A) is drawn from `seed` alone,
    and torch's global generator is left as it was.

    Args:
        model: family, id, architecture, overrides; see `conf/model/`.
        peft: the way to fine-tune; see `dpexp.models.finetuning`.
        head: a key of `dpexp.models.networks.HEADS`.
        num_labels: number of classes, of a classifier.
        scale: at "demo" nothing but installed packages and local folders is read.
        seed: public; it is in the record.
        tokenizer: what `build_tokenizer` gave for the same configuration; None: it is loaded here.
        image_shape: channels, height and width that a classifier of images will see; None: what it was published for.

    Raises:
        UserError: unknown names, files that can't be found, a checkpoint that does not fit, or nothing to train.
    """
    if head.endswith("classifier") and num_labels < 2:
        raise UserError(f"a classifier needs at least two classes, and the task has {num_labels}")
    if model.family in FAMILIES:
        with _quiet(), _drawn_from(seed):
            network, described = build_image_network(model, image_shape, num_labels, scale, seed)
            network, trainable = prepare(network, model, peft, head=head, seed=seed)
        return ModelBundle(network, None, described, trainable)
    if model.family == "custom":
        with _drawn_from(seed):
            network = custom_network(
                model, head=head, num_labels=num_labels, image_shape=image_shape, tokenizer=tokenizer
            )
            network, trainable = prepare(network, model, peft, head=head, seed=seed)
        described = f"{model.factory} (seed {seed})"
        return ModelBundle(network, None if image_shape else tokenizer, described, trainable)
    source = _locate(model, scale)
    with _quiet(), _drawn_from(seed), read_once(source):
        config = load_config(model, source)
        if head == "image_classifier":
            # its place is taken by `ImageInputs`, which the task has
            tokenizer = None
        else:
            tokenizer = load_tokenizer(model, config, source) if tokenizer is None else tokenizer
            _fit(tokenizer, config, model, source)
        set_dropout(config, model)
        if head.endswith("classifier"):
            config.num_labels = num_labels
        if hasattr(config, "use_cache"):
            # a decoder's cache of keys and values serves generation only
            config.use_cache = False
        weights = None if model.retrain else source
        network = _network(config, weights, head, model)
        new_rows = add_rows(network, tokenizer, seed) if model.new_tokens else ""
        if model.untied:
            untie_head(network)
        network.train()
        if head == "causal_lm":
            check_causal(network)
        new_head = described_head(network, head, seed)
        embedding = network.get_input_embeddings() if model.new_tokens else None  # type: ignore[operator]
        network, trainable = prepare(network, model, peft, head=head, seed=seed)
    if embedding is not None and not any(p.requires_grad for p in embedding.parameters()):
        raise UserError(
            f"model.new_tokens={list(model.new_tokens)}: under peft={peft.name} and model.trainable={model.trainable} the "
            "embedding does not train, and these tokens would mean nothing: take peft=full and model.trainable=all"
        )
    return ModelBundle(
        network,
        tokenizer,
        f"random ({config.model_type}, seed {seed})"
        if weights is None
        else weights.described(config) + new_head + new_rows,
        trainable,
        weights.sha256 if weights else None,
    )


def _fit(tokenizer: Any, config: Any, model: ModelConfig, source: Source | None) -> None:
    resize = "vocab_size" not in model.config and source is None
    fit_together(tokenizer, config, resize=resize, new_tokens=model.new_tokens)


def _network(config: Any, weights: Source | None, head: str, model: ModelConfig) -> nn.Module:
    """With the head that the architecture has, or, for a classifier of text, on what is pooled of the encoder."""
    if model.pooling == "own":
        return random_network(config, head) if weights is None else pretrained_network(config, weights, head)
    if head != "classifier":
        raise UserError(f"model.pooling={model.pooling} is for classifiers of text: leave it at own")
    from dpexp.models.pooling import PooledClassifier, encoder_arguments

    arguments = encoder_arguments(config)
    encoder: Any = (
        random_network(config, "encoder", **arguments)
        if weights is None
        else pretrained_network(config, weights, "encoder", **arguments)
    )
    return PooledClassifier(encoder, model.pooling, model.head)


def _locate(model: ModelConfig, scale: str) -> Source | None:
    """Where the weights are; None for a random network."""
    if model.family == "random_hf":
        return None
    if model.family not in HUGGING_FACE:
        raise UserError(f"model.family={model.family} is unknown: choose one of {', '.join(HUGGING_FACE)}")
    source = locate(model)
    if scale == "demo" and source.is_remote:
        raise UserError(
            f"scale=demo needs no network, but model.id={model.id} would come from the hub: give a local folder, "
            "model=minilm or smollm2, or another scale"
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
