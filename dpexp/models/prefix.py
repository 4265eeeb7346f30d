"""Prefix-tuning through the peft library: Li & Liang 2021; default sizes as in Li et al. 2022, App. I (10 and 512).

Every layer's attention sees `prefix_length` further keys and values. They come from a table of that many rows, through a
network of one hidden layer (tanh) with `prefix_hidden` units during training; with 0 units the keys and values train
themselves. The table is looked up for each example anew, so that the gradient of one example is that example's alone.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from dpexp.errors import UserError
from dpexp.models.tokenizer import longest_input

if TYPE_CHECKING:
    from peft import PromptLearningConfig

    from dpexp.schemas import PeftConfig


def add_prefix(model: nn.Module, peft: PeftConfig, head: str, new_head: list[str]) -> nn.Module:
    """Wrap the model; only the prefix and a new head train afterwards.

    Args:
        model: a Hugging Face network for text.
        peft: `prefix_length`, rows; `prefix_hidden`, units.
        head: what the task asked for, a key of `dpexp.models.networks.HEADS`.
        new_head: names of the modules of a new head.

    Returns:
        The `peft.PeftModel`; its prefix is drawn from torch's global generator.

    Raises:
        UserError: no rows, or a network whose attention takes no further keys and values.
    """
    from peft import PrefixTuningConfig

    if peft.prefix_length < 1:
        raise UserError(
            f"peft.prefix_length={peft.prefix_length}: a prefix needs at least 1 row, as in peft.prefix_length=10"
        )
    config = PrefixTuningConfig(
        num_virtual_tokens=peft.prefix_length,
        prefix_projection=peft.prefix_hidden > 0,
        encoder_hidden_size=peft.prefix_hidden or None,
    )
    refused = (
        f"peft=prefix: the attention of {type(model).__name__} takes no further keys and values; take another peft "
        "(lora, adapters, bitfit)"
    )
    return with_virtual_tokens(model, config, head, new_head, refused)


def with_virtual_tokens(
    model: nn.Module, config: PromptLearningConfig, head: str, new_head: list[str], refused: str
) -> nn.Module:
    """Wrap the model with what stands before its tokens; only that and a new head train afterwards.

    Args:
        model: a Hugging Face network for text.
        config: what stands there; its task and the modules of the new head are written into it.
        head: what the task asked for, a key of `dpexp.models.networks.HEADS`.
        new_head: names of the modules of a new head.
        refused: what to say of a network that takes nothing before its tokens.

    Returns:
        The `peft.PeftModel`, which refuses inputs that leave no positions for what stands before them.

    Raises:
        UserError: such a network.
    """
    from peft import TaskType, get_peft_model

    if head == "image_classifier":
        raise UserError(refused)
    kinds = {"classifier": TaskType.SEQ_CLS, "causal_lm": TaskType.CAUSAL_LM}
    config.task_type = kinds.get(head, TaskType.FEATURE_EXTRACTION)
    config.modules_to_save = list(new_head) or None
    dtype = next(model.parameters()).dtype
    try:
        with warnings.catch_warnings():
            # between peft and transformers
            warnings.filterwarnings("ignore", category=FutureWarning)
            adapted = get_peft_model(model, config)
    except (ValueError, KeyError, AttributeError) as error:
        raise UserError(refused) from error
    adapted.prompt_encoder.to(dtype)
    longest = longest_input(model.config) - config.num_virtual_tokens
    adapted.register_forward_pre_hook(partial(_refuse_long_inputs, longest), with_kwargs=True)
    return adapted


def _refuse_long_inputs(
    longest: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Raise `UserError` for an input that leaves no positions for what stands before it."""
    ids = kwargs.get("input_ids", args[0] if args else None)
    if ids is not None and ids.dim() == 2 and ids.shape[1] > longest:
        raise UserError(
            f"an input of {ids.shape[1]} tokens and peft.prefix_length are more than the positions of the model: give "
            f"data.max_length={longest} or less, or a shorter peft.prefix_length"
        )
