"""Is a network that is to generate text really causal? An encoder would look at what it should predict."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from dpexp.errors import UserError
from dpexp.models.trainable import evaluation_mode

LENGTH = 6


def check_causal(network: nn.Module) -> None:
    """Change the last of a few tokens and look whether the logits before it move.

    Transformers makes a "causal" language model of a BERT without complaint, and all its positions see each other. Right padding
    without a mask, and a loss on targets that are part of the input, rest on this check.

    Raises:
        UserError: an earlier position saw the last token.
    """
    with evaluation_mode(network), torch.no_grad():
        tokens = torch.arange(1, LENGTH + 1)[None]
        other = tokens.clone()
        other[0, -1] += 1
        one, two = (network(input_ids=ids).logits[0, :-1] for ids in (tokens, other))
    if not torch.equal(one, two) and not torch.allclose(one, two, rtol=1e-4, atol=1e-5):
        raise UserError(
            f"{type(network).__name__} is no causal language model: its earlier positions see later tokens, so it would be shown "
            "what it should predict. Take model=gpt2, smollm2, gpt2_tiny or another decoder"
        )


def check_types(network: nn.Module, types: Sequence[int]) -> None:
    """Give a few tokens one type and another, and look whether the logits move.

    GPT and GPT-2 look types up in the embedding of the tokens; others take no types, only 0 and 1, or leave them out silently, as
    PEFT does behind a learnt prompt.

    Args:
        network: a causal language model of transformers, plain or wrapped by peft.
        types: two or more, tokens.

    Raises:
        UserError: they don't.
    """
    with evaluation_mode(network), torch.no_grad():
        tokens = torch.arange(1, LENGTH + 1)[None]
        try:
            first, *others = (
                network(input_ids=tokens, token_type_ids=torch.full_like(tokens, number)).logits
                for number in types
            )
            read = not any(torch.equal(first, other) for other in others)
        except (TypeError, ValueError, IndexError):
            read = False
    if not read:
        raise UserError(
            f"task.generation.speakers gives every token the type of who speaks, and {type(network).__name__} does not read "
            "tokens as types: take model=gpt2, gpt2_medium, dialogpt_medium or gpt, or write speakers in words (without recipe=)"
        )
