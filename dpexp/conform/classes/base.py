"""What the classes have in common: tiny configurations, padded batches, and one loss for all."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpexp.conform.case import Batch, Builder, Case

EXAMPLES, T, WORDS, WIDTH = 3, 7, 23, 8
LENGTHS = (5, 4, 7)
"""Without padding; the longest stands alone, so that leaving it out changes the padding of the others."""

TINY: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": WIDTH, "d_model": WIDTH, "n_embd": WIDTH, "dim": WIDTH, "num_labels": 3,
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "num_attention_heads": 2, "n_head": 2,
    "n_heads": 2, "num_heads": 2, "num_key_value_heads": 1, "intermediate_size": 12, "hidden_dim": 12, "ffn_dim": 12,
    "max_position_embeddings": 32, "n_positions": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "initializer_range": 0.3, "init_std": 0.3, "use_cache": False,
}  # fmt: skip


def configured(name: str, *, leave_out: Sequence[str] = (), **options: Any) -> nn.Module:
    """A tiny random model of a class of transformers, without randomness in its forward pass.

    Args:
        leave_out: settings of `TINY` that the class refuses.
        options: of its configuration.
    """
    import transformers

    kind = getattr(transformers, name)
    config = kind.config_class(**({k: v for k, v in TINY.items() if k not in leave_out} | options))
    silence(config)
    # grouped products exist in 32 bits alone
    config._experts_implementation = "eager"
    config._attn_implementation = options.get("attn_implementation", "eager")
    return without_dropout(kind(config))


def silence(config: Any) -> None:
    """Set every rate of dropout in a configuration to zero."""
    for key, value in vars(config).items():
        if "drop" in key and isinstance(value, float):
            setattr(config, key, 0.0)


def without_dropout(model: nn.Module) -> nn.Module:
    """Set every rate of dropout in the modules to zero."""
    for module in model.modules():
        if "drop" in type(module).__name__.lower():
            for name in ("p", "drop_prob"):
                if isinstance(getattr(module, name, None), float):
                    setattr(module, name, 0.0)
    return model


def scored(output: Any) -> Tensor:
    """The tensor of a model's output that a loss would be made of."""
    if isinstance(output, Tensor):
        return output
    for name in ("logits", "prediction_logits", "last_hidden_state", "image_embeds"):
        value = getattr(output, name, None)
        if value is not None:
            return value
    return output[0]


def squares(output: Any, mask: Tensor | None = None) -> Tensor:
    """``[B]``: how far the outputs are from 0.3, at the positions of the mask if there are as many."""
    found = (scored(output).to(torch.promote_types(scored(output).dtype, torch.float32)) - 0.3).square()
    if mask is not None and found.dim() == 3 and found.shape[1] >= mask.shape[1]:
        # what stands before the words, such as a learnt prompt, is never padding
        mask = F.pad(mask, (found.shape[1] - mask.shape[1], 0), value=1)
        found = found * mask[..., None]
    return found.flatten(1).sum(1)


def padded_words() -> Batch:
    """Tokens and their mask, padded on the right."""
    ids = torch.randint(4, WORDS, (EXAMPLES, T))
    mask = (torch.arange(T) < torch.tensor(LENGTHS)[:, None]).long()
    return {"ids": ids * mask, "mask": mask}


def trimmed(batch: Batch) -> Batch:
    """A batch padded to its own longest example."""
    longest = int(batch["mask"].sum(1).max()) if len(batch["mask"]) else 0
    return {name: value[:, :longest] for name, value in batch.items()}


def text_losses(model: nn.Module, batch: Batch) -> Tensor:
    """Of decoders and encoders."""
    return squares(model(input_ids=batch["ids"], attention_mask=batch["mask"]), batch["mask"])


def pair_losses(model: nn.Module, batch: Batch) -> Tensor:
    """Of encoders with decoders; the target is the source."""
    output = model(input_ids=batch["ids"], attention_mask=batch["mask"], decoder_input_ids=batch["ids"])
    return squares(output, batch["mask"])


def text(name: str, losses: Any = text_losses, **options: Any) -> Builder:
    """A class that reads tokens."""

    def build() -> Case:
        return Case(configured(name, **options), padded_words(), losses, trim=trimmed)

    return build


pair = partial(text, losses=pair_losses)
