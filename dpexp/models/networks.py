"""Hugging Face sequence classifiers: the config with its overrides, then pretrained or random weights."""

from __future__ import annotations

import difflib
import io
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dpexp.errors import UserError, either, first_line
from dpexp.models.sources import Source, hub, not_found
from dpexp.models.trainable import head_parameters

if TYPE_CHECKING:
    from dpexp.schemas import ModelConfig


HEADS = {
    "classifier": "AutoModelForSequenceClassification",
    "image_classifier": "AutoModelForImageClassification",
    "masked_lm": "AutoModelForMaskedLM",
    "causal_lm": "AutoModelForCausalLM",
    "encoder": "AutoModel",
}
"""What a task asks for (`Task.head`), or "encoder" for a head of our own -> the transformers class that makes it."""


def load_config(model: ModelConfig, source: Source | None) -> Any:
    """The Hugging Face config with `model.config` applied.

    Args:
        model: `architecture` counts without a source.
        source: of a pretrained network; None for a random one.

    Raises:
        UserError: an unknown architecture or field, or files that can't be found.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    overrides = dict(model.config)
    if source is None:
        if model.architecture not in CONFIG_MAPPING:
            close = _close_matches(str(model.architecture), CONFIG_MAPPING)
            raise UserError(f"model.architecture={model.architecture} is no Hugging Face architecture{close}")
        _check_fields(AutoConfig.for_model(model.architecture), overrides)
        try:
            # made anew, so that derived fields follow the overrides
            return AutoConfig.for_model(model.architecture, **overrides)
        except (ValueError, TypeError) as error:
            raise UserError(
                f"model.config does not make a {model.architecture}: {first_line(error)}"
            ) from error
    with hub() as reason:
        try:
            config = AutoConfig.from_pretrained(source.location, **source.file_arguments)
        except (OSError, ValueError, KeyError) as error:
            raise not_found("model.id", source.location, reason, error) from error
    _check_fields(config, overrides)
    for key, value in overrides.items():
        setattr(config, key, value)
    return config


def check_config(model: ModelConfig, source: Source | None) -> None:
    """Make a network without weights of `model.config`, where that is given.

    Raises:
        UserError: an unknown field, a value of another type, or values that make no network.
    """
    if model.config:
        config = load_config(model, source)
        with torch.device("meta"):
            random_network(config, "encoder")


def set_dropout(config: Any, model: ModelConfig) -> None:
    """Overwrite every dropout probability that the config has, those of the attention weights and the rest apart.

    Raises:
        UserError: not a probability, or the config has none to set.
    """
    for name, value, on_attention in (
        ("dropout", model.dropout, False),
        ("attention_dropout", model.attention_dropout, True),
    ):
        if value is None:
            continue
        if not 0 <= value < 1:
            raise UserError(f"model.{name}={value}: must be a probability below 1")
        keys = [key for key in _dropout_fields(config) if ("att" in key) == on_attention]
        if not keys:
            raise UserError(
                f"model.{name}={value}: a {config.model_type} config has no such probability to set"
            )
        for key in keys:
            setattr(config, key, value)


def random_network(config: Any, head: str = "classifier", **arguments: Any) -> nn.Module:
    """A network drawn from torch's global generator, float32.

    Raises:
        UserError: the library can't make a classifier of this config.
    """
    try:
        return auto_class(head).from_config(config, dtype=torch.float32, **arguments)
    except (ValueError, TypeError, KeyError, AssertionError, ZeroDivisionError, RuntimeError) as error:
        raise UserError(
            f"no {head.replace('_', ' ')} can be made of this {config.model_type} config: {first_line(error)}"
        ) from error


def pretrained_network(config: Any, source: Source, head: str = "classifier", **arguments: Any) -> nn.Module:
    """A network with the source's weights, float32; the head is drawn from torch's global generator where it is new.

    Its attribute `drawn_parameters` names what is new; see `described_head`.

    Raises:
        UserError: files that can't be found or read, or weights below the head that would stay random.
    """
    with hub() as reason, _no_bar_of_gguf(source):
        try:
            network, loaded = auto_class(head).from_pretrained(
                source.location,
                config=config,
                dtype=torch.float32,
                # a head for other classes; anything else is refused below
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **source.loading_arguments(),
                **arguments,
            )
        except Exception as error:
            # the libraries for files, formats and the hub each raise their own
            raise not_found("model.id", source.location, reason, error) from error
    if source.gguf:
        forget_quantization(network)
    mismatched = [key if isinstance(key, str) else key[0] for key in loaded["mismatched_keys"]]
    body = {name for name, _ in network.named_parameters()} - set(head_parameters(network))
    random = sorted(body.intersection([*loaded["missing_keys"], *mismatched]))
    if random:
        raise UserError(
            f"{source.location}: {len(random)} tensors below the head are not in the checkpoint or have another shape "
            f"there, {random[0]} for one, and would stay random; correct model.config, or ask for a random network"
        )
    if broken := [name for name, value in network.named_parameters() if not value.isfinite().all()]:
        raise UserError(
            f"{source.location}: {len(broken)} tensors hold NaN or infinity, {broken[0]} for one: the checkpoint is damaged, or "
            "of a run that diverged; take another one"
        )
    drawn = {*loaded["missing_keys"], *mismatched}
    network.drawn_parameters = [name for name, _ in network.named_parameters() if name in drawn]
    return network


def add_rows(network: Any, tokenizer: Any, seed: int) -> str:
    """Give a network's embedding and output layer a row for each token that the tokenizer has more, and its config their numbers.

    The new rows are drawn as the network's embedding once was, as transformers did when the papers were written; today its
    `resize_token_embeddings` draws them around the mean of the old ones. A tied head stays tied.

    Args:
        network: of transformers; changed in place, its config too, so that a saved copy loads as it is.
        tokenizer: with its new tokens.
        seed: what torch's global generator was seeded with.

    Returns:
        What a record must say about it; "" where there was a row for every token.
    """
    missing = len(tokenizer) - network.get_input_embeddings().num_embeddings
    if missing > 0:
        network.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    for settings in filter(None, (network.config, getattr(network, "generation_config", None))):
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(settings, name, getattr(tokenizer, name))
    return f"; {missing} rows of the embedding new, drawn with seed {seed}" if missing > 0 else ""


def untie_head(network: Any) -> None:
    """Give the output layer of a language model a weight of its own, which begins as a copy of the embedding.

    Both train then, and the norm of an example's gradient is that of two matrices. In the code of Li et al. heads are so (for
    GPT-2 private-transformers, table2text/run_language_modeling.py:104-121, for RoBERTa classification/src/models.py:203).

    Args:
        network: of transformers; changed in place, its config too, so that a saved copy loads as it is.

    Raises:
        UserError: its head is not tied to the embedding.
    """
    output, embedding = network.get_output_embeddings(), network.get_input_embeddings()
    if output is None or output.weight is not embedding.weight:
        raise UserError(
            f"model.untied=true: the output layer of {type(network).__name__} is not tied to its embedding; leave it out"
        )
    output.weight = nn.Parameter(embedding.weight.detach().clone())
    # BERT and RoBERTa register the bias of the output layer a second time
    for module in network.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if module is not output and parameter is getattr(output, "bias", None):
                delattr(module, name)
    network.config.tie_word_embeddings = False
    network.all_tied_weights_keys = {}


def described_head(network: nn.Module, head: str, seed: int) -> str:
    """What a record must say about the head of a pretrained network; "" where it says nothing unusual.

    A classifier's head is new by intention. A language model's is expected to be pretrained with the rest.
    """
    drawn = getattr(network, "drawn_parameters", [])
    if not drawn or not head.endswith("lm"):
        return ""
    kind = "MLM" if head == "masked_lm" else "LM"
    return f"; {kind} head new: {len(drawn)} tensors drawn with seed {seed}, {drawn[0]} for one"


@contextmanager
def read_once(source: Source | None) -> Iterator[None]:
    """Inside, a GGUF file is read once, which takes seconds: transformers asks for it with config, tokenizer and weights."""
    if source is None or not source.gguf:
        yield
        return
    gguf: Any = import_module("gguf")
    reader = gguf.GGUFReader
    gguf.GGUFReader = cache(reader)
    try:
        yield
    finally:
        gguf.GGUFReader = reader


def _no_bar_of_gguf(source: Source) -> AbstractContextManager[Any]:
    """The reader of GGUF files shows a progress bar that the library's own switch does not reach."""
    return redirect_stderr(io.StringIO()) if source.gguf else nullcontext()


def forget_quantization(network: Any) -> None:
    """Make an ordinary network of one that was read from a GGUF file, whose weights are float32 by then.

    What is saved later is an ordinary checkpoint, and Hugging Face's Trainer takes it.

    Args:
        network: of transformers; changed in place.
    """
    network.hf_quantizer, network.is_quantized = None, False
    if hasattr(network.config, "quantization_config"):
        del network.config.quantization_config


def auto_class(head: str) -> Any:
    """Return the class of transformers that makes and reads networks with this head, a key of `HEADS`."""
    import transformers

    return getattr(transformers, HEADS[head])


def _check_fields(config: Any, overrides: dict[str, Any]) -> None:
    for key, value in overrides.items():
        if not hasattr(config, key):
            close = _close_matches(key, config.to_dict())
            raise UserError(f"model.config.{key}: a {config.model_type} config has no such field{close}")
        present = getattr(config, key)
        if _is_number(present) and value is not None and not _is_number(value):
            raise UserError(
                f"model.config.{key}={value} is not a number, and a {config.model_type} config has one there ({present})"
            )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _dropout_fields(config: Any) -> list[str]:
    # `layerdrop` and `drop_path` skip whole layers, another thing, and are left alone.
    return [
        key
        for key, value in config.to_dict().items()
        if "drop" in key and "layerdrop" not in key and "path" not in key
        if _is_number(value)
    ]


def _close_matches(word: str, choices: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(choices), n=3)
    return f"; did you mean {either(close)}?" if close else ""
