"""The loss of a language model on targets alone, with only the positions that predict a target going through the output layer.

Of a prompt and its target, `input_ids` holds all tokens but the last, and `positions[i, j]` is where example i predicts its
j-th target token. With a vocabulary of 50,000 the logits are by far the largest tensor of a step: `[B, T, V]` would hold
those of every prompt token, only to mask them. Here the hidden states are picked before the output layer, `[B, L, d]`, so
the logits are `[B, L, V]`. The output layer still sees one row per example, in order, and every engine clips it as it is.

No attention mask is given: the model is causal (`dpexp.models.causal` tests it), so no real token sees the padding on the
right.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dpexp.errors import UserError
from dpexp.tasks.cross_entropy import cross_entropy

IGNORED = -100
"""In `targets`: no target here."""


def target_logits(model: nn.Module, input_ids: Tensor, positions: Tensor) -> Tensor:
    """`[B, L, V]`: the logits at `positions`, in the precision that the model computes in.

    Args:
        model: a causal language model of Hugging Face, plain or wrapped by peft.
        input_ids: `[B, T]` int64, padded on the right with any token.
        positions: `[B, L]` int64, below T.
    """
    with _picking(_output_layer(model), positions, input_ids.shape[1]):
        return model(input_ids=input_ids).logits


def token_losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """`[B, L]` negative log-likelihoods in float32 or better; exactly 0, with a gradient of exactly 0, where there is no target.

    Args:
        model: see `target_logits`.
        batch: `input_ids`, `positions` and `targets` (`[B, L]` int64, `IGNORED` where there is none).
    """
    logits = target_logits(model, batch["input_ids"], batch["positions"])
    targets = batch["targets"]
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), IGNORED).view_as(targets)


def example_losses(losses: Tensor, targets: Tensor) -> Tensor:
    """`[B]`: the mean over the target tokens of each example, divided by its own number of them alone."""
    return losses.sum(1) / (targets != IGNORED).sum(1)


def vocabulary(model: nn.Module) -> int:
    """V, the width of the logits."""
    weight = _output_layer(model).weight
    assert isinstance(weight, Tensor)
    return weight.shape[0]


def _output_layer(model: nn.Module) -> nn.Module:
    find: Any = getattr(model, "get_output_embeddings", None)
    layer = find() if callable(find) else None
    if not isinstance(layer, nn.Module):
        raise UserError(
            f"{type(model).__name__} does not say which layer makes its logits (get_output_embeddings), so it can't be "
            "trained to generate: take a causal language model of Hugging Face"
        )
    return layer


@contextmanager
def _picking(layer: nn.Module, positions: Tensor, length: int) -> Iterator[None]:
    def pick(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden = args[0]
        rows = torch.arange(len(positions), device=positions.device)[:, None]
        # Prompt tuning puts vectors of its own before the tokens, and all positions move on by as many.
        return (hidden[rows, positions + (hidden.shape[1] - length)], *args[1:])

    handle = layer.register_forward_pre_hook(pick)
    try:
        yield
    finally:
        handle.remove()
