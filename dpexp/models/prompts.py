"""Prompt tuning (Lester et al. 2021) and P-tuning (Liu et al. 2021), through the peft library.

`prefix_length` vectors stand before the embedded tokens of every input, and only they train (and a new head). Under `prompt`
they are the rows of a table, which begins with the embeddings of tokens drawn at random (Lester et al., section 3.2); under
`p_tuning` they come from a table through a network of two hidden layers (ReLU) with `prefix_hidden` units, whose output alone is
exported. The table is looked up for each example anew, so that the gradient of one example is that example's alone.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from dpexp.errors import UserError
from dpexp.models.prefix import with_virtual_tokens

if TYPE_CHECKING:
    from dpexp.schemas import PeftConfig

UNPADDED = "generates_from_one_prompt_at_a_time"
"""An attribute: the library gives no positions to tokens behind a prompt, so that padding on the left would move them."""


def add_prompt(model: nn.Module, peft: PeftConfig, head: str, new_head: list[str]) -> nn.Module:
    """Wrap the model; only the prompt, what makes it and a new head train afterwards.

    Args:
        model: a Hugging Face network for text.
        peft: `name`, prompt or p_tuning; `prefix_length`, vectors; `prefix_hidden`, units.
        head: what the task asked for, a key of `dpexp.models.networks.HEADS`.
        new_head: names of the modules of a new head.

    Returns:
        The `peft.PeftModel`, whose logits are those of the tokens alone; the prompt is drawn from torch's global generator.

    Raises:
        UserError: no vectors, a network that takes no embedded tokens, or a classifier that reads the last token.
    """
    from peft import PromptEncoderConfig, PromptTuningConfig

    way, length = f"peft={peft.name}", peft.prefix_length
    if length < 1:
        raise UserError(
            f"peft.prefix_length={length}: a prompt needs at least 1 vector, as in peft.prefix_length=20"
        )
    if head == "classifier" and isinstance(getattr(model, "score", None), nn.Module):
        raise UserError(
            f"{way}: {type(model).__name__} reads its last token, which it cannot tell from padding once tokens are embedded: "
            "take an encoder, or peft=prefix or lora"
        )
    config = (
        PromptTuningConfig(prompt_tuning_init="SAMPLE_VOCAB", num_virtual_tokens=length)
        if peft.name == "prompt"
        else PromptEncoderConfig(encoder_hidden_size=peft.prefix_hidden or None, num_virtual_tokens=length)
    )
    refused = f"{way}: {type(model).__name__} takes no vectors before its tokens; take another peft (lora, adapters, bitfit)"
    adapted = with_virtual_tokens(model, config, head, new_head, refused)
    setattr(adapted, UNPADDED, True)
    adapted.register_forward_hook(partial(_without_prompt, length), with_kwargs=True)
    return adapted


def _without_prompt(
    length: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> Any:
    """Leave the logits of the prompt out, so that position t is that of token t, as it is without a prompt."""
    ids = kwargs.get("input_ids", args[0] if args else None)
    logits = getattr(output, "logits", None)
    if (
        ids is not None
        and logits is not None
        and logits.dim() == 3
        and logits.shape[1] == ids.shape[1] + length
    ):
        output.logits = logits[:, length:]
    return output
