"""Tokenizers: a model's own, that of the MiniLM package, or the demo's embedded one; each is fitted to the network."""

from __future__ import annotations

import string
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dpexp.errors import UserError
from dpexp.models.demo_words import DEMO_PHRASES, DEMO_TEXT_WORDS
from dpexp.models.networks import random_network
from dpexp.models.sources import Source, hub, minilm_folder, not_found, smollm2_file

if TYPE_CHECKING:
    from dpexp.schemas import ModelConfig

DEMO_VOCABULARIES = {"demo": DEMO_PHRASES, "demo_text": DEMO_TEXT_WORDS}
GPT2_FOLDER, GPT2_ID = "tokenizers/gpt2", "openai-community/gpt2"
ROLES = ("bos", "eos", "pad")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def load_tokenizer(model: ModelConfig, config: Any, source: Source | None) -> Any:
    """The tokenizer that `model.tokenizer` names, or the model's own, with `model.new_tokens`.

    Args:
        model: `tokenizer` is null, "demo", "demo_text", "minilm", "smollm2", "gpt2" (`GPT2_FOLDER` below `root`, or else the
            hub's), a folder or a hub id.
        config: the Hugging Face config of the network.
        source: where the network comes from; None for a random one.

    Raises:
        UserError: it can't be found or read, a random network names none, or a new token is a word of it already.
    """
    tokenizer = _plain_tokenizer(model, config, source)
    add_tokens(tokenizer, model.new_tokens)
    return tokenizer


def _plain_tokenizer(model: ModelConfig, config: Any, source: Source | None) -> Any:
    name = model.tokenizer or (source.location if source else None)
    if name is None:
        raise UserError(
            "a randomly initialised model needs a tokenizer: model.tokenizer=demo, demo_text, gpt2, minilm, a folder or a hub id"
        )
    if name in DEMO_VOCABULARIES:
        return demo_tokenizer(name)
    gguf = source.gguf if source and not model.tokenizer else None
    if name == "smollm2":
        file = smollm2_file()
        name, gguf = str(file.parent), file.name
    elif name == "minilm":
        name = str(minilm_folder())
    elif name == "gpt2":
        name = _gpt2(model.root)
    return _from_pretrained(name, config, "model.tokenizer" if model.tokenizer else "model.id", gguf)


def _gpt2(root: str | None) -> str:
    """The published vocabulary below `data.root`, where it lies there; the hub's copy, which is the same, elsewhere."""
    folder = Path(root or "").expanduser() / GPT2_FOLDER
    return str(folder) if root and folder.is_dir() else GPT2_ID


def demo_tokenizer(name: str = "demo") -> Any:
    """A WordPiece tokenizer over the demo's words; any other text falls apart into letters. Needs no file.

    Args:
        name: "demo" (sentences, for classifiers) or "demo_text" (for text generation, where [CLS] begins and [SEP] ends).
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = sorted({word for phrase in DEMO_VOCABULARIES[name] for word in phrase.split()})
    characters = string.ascii_lowercase + string.digits
    pieces = [*SPECIAL, *string.punctuation, *characters, *(f"##{c}" for c in characters), *words]
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
    )
    backend.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        **({"bos_token": "[CLS]", "eos_token": "[SEP]"} if name == "demo_text" else {}),
    )


def new_token(name: str) -> str:
    """How a token of `model.new_tokens` is spelt."""
    return f"<{name}>"


def add_tokens(tokenizer: Any, names: Sequence[str]) -> None:
    """Add special tokens; adding them twice changes nothing more.

    Args:
        tokenizer: changed in place.
        names: of `model.new_tokens`. bos, eos and pad become the tokenizer's tokens for a beginning, an end and padding.

    Raises:
        UserError: one of them is in the vocabulary as something else.
    """
    if not names:
        return
    roles = {f"{name}_token": new_token(name) for name in names if name in ROLES}
    others = [new_token(name) for name in names if name not in ROLES]
    known = {role: getattr(tokenizer, role) for role in roles} | {
        token: token for token in tokenizer.extra_special_tokens
    }
    vocabulary = tokenizer.get_vocab()
    for role, token in [*roles.items(), *zip(others, others, strict=True)]:
        if token in vocabulary and known.get(role) != token:
            raise UserError(
                f"model.new_tokens: {type(tokenizer).__name__} has {token} already, as another token than {role}, and it would "
                "keep what it has learnt as that: take another name, or leave it out of model.new_tokens"
            )
    tokenizer.add_special_tokens(
        {**roles, "extra_special_tokens": others}, replace_extra_special_tokens=False
    )


def _from_pretrained(location: str, config: Any, setting: str, gguf: str | None = None) -> Any:
    from transformers import AutoTokenizer

    folder = Path(location).expanduser()
    location = str(folder) if folder.is_dir() else location
    with hub() as reason:
        try:
            try:
                tokenizer = AutoTokenizer.from_pretrained(location, **({"gguf_file": gguf} if gguf else {}))
            except (OSError, ValueError):
                if not folder.is_dir():
                    raise
                # A bare vocabulary does not say of which kind it is: the network's config does.
                tokenizer = AutoTokenizer.from_pretrained(location, config=config)
        except Exception as error:
            # the libraries for files, formats and the hub each raise their own
            raise not_found(setting, location, reason, error) from error
    if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
        # The library makes an empty tokenizer of a folder in which it does not find the files it looks for.
        raise UserError(
            f"{setting}={location}: no vocabulary for a {config.model_type} model was found there: put the tokenizer's files "
            "there, or name another place with model.tokenizer"
        )
    return tokenizer


def fit_together(tokenizer: Any, config: Any, *, resize: bool, new_tokens: Sequence[str] = ()) -> None:
    """Make a tokenizer and a network's config agree about padding, segments, the vocabulary and the longest input.

    Args:
        tokenizer: changed in place; fitting it twice changes nothing more.
        config: changed in place.
        resize: give the network the tokenizer's vocabulary (a random one has none to lose).
        new_tokens: `model.new_tokens`, for which the network gets rows of its own; see `dpexp.models.networks.add_rows`.

    Raises:
        UserError: nothing to pad with, or a vocabulary larger than the network's.
    """
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise UserError(
                f"{type(tokenizer).__name__} has neither a padding nor an end token, so batches can't be padded; "
                "give another model.tokenizer"
            )
        # masked, so that any token will do
        tokenizer.pad_token = tokenizer.eos_token
    if resize:
        config.vocab_size = len(tokenizer)
        config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    if tokenizer.pad_token_id < config.vocab_size:
        # a new token has no row yet
        config.pad_token_id = tokenizer.pad_token_id
    ids = tokenizer.convert_tokens_to_ids([new_token(name) for name in new_tokens])
    if config.vocab_size < len(tokenizer) - sum(number >= config.vocab_size for number in ids):
        raise UserError(
            f"the tokenizer has {len(tokenizer)} tokens and the model only {config.vocab_size}: they don't belong "
            "together (for a random network leave model.config.vocab_size out)"
        )
    if getattr(config, "type_vocab_size", 0) < 2:
        tokenizer.model_input_names = [
            name for name in tokenizer.model_input_names if name != "token_type_ids"
        ]
    tokenizer.model_max_length = min(tokenizer.model_max_length, longest_input(config))


def longest_input(config: Any) -> int:
    """How many tokens the position table holds; `sys.maxsize` without one.

    Read off the modules (on torch's meta device, without memory): in RoBERTa the rows up to the padding index are lost.
    """
    rows = getattr(config, "max_position_embeddings", None)
    if rows is None:
        return sys.maxsize
    with torch.device("meta"):
        model = random_network(config)
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and "position" in name and module.num_embeddings == rows:
            return rows if module.padding_idx is None else rows - module.padding_idx - 1
    return rows
