"""Is a network that is to generate text really causal? An encoder would look at what it should predict."""

from __future__ import annotations

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
