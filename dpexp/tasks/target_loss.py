"""The loss of a language model on targets alone, with only the positions that predict a target going through the output layer.

Of a prompt and its target, `input_ids` holds all tokens but the last, and `positions[i, j]` is where example i predicts its
j-th target token. With a vocabulary of 50,000 the logits are by far the largest tensor of a step: `[B, T, V]` would hold
those of every prompt token, only to mask them. Here the hidden states are picked before the output layer, `[B, L, d]`, so
the logits are `[B, L, V]`, and their gradient takes their place. The output layer still sees one row per example, in order,
and every engine clips it as it is. Where that layer is frozen, as with LoRA, the logits are made a few rows at a time.

No attention mask is given: the model is causal (`dpexp.models.causal` tests it), so no real token sees the padding on the
right.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from dpexp.errors import UserError
from dpexp.tasks.cross_entropy import cross_entropy_, frozen_head_cross_entropy

IGNORED = -100
"""In `targets`: no target here."""

_comes_last: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
"""Whether the output of an output layer is the model's logits as it is: not capped, scaled or cut afterwards."""


def target_logits(model: nn.Module, input_ids: Tensor, positions: Tensor, **inputs: Tensor) -> Tensor:
    """`[B, L, V]`: the logits at `positions`, in the precision that the model computes in.

    Args:
        model: a causal language model of Hugging Face, plain or wrapped by peft.
        input_ids: `[B, T]` int64, padded on the right with any token.
        positions: `[B, L]` int64, below T.
        inputs: what else the model is called with.
    """
    with _picking(_output_layer(model), positions, input_ids.shape[1]):
        logits: Tensor = model(input_ids=input_ids, **inputs).logits
    return logits


def token_losses(model: nn.Module, batch: dict[str, Tensor], weights: Tensor | None = None) -> Tensor:
    """`[B, L]` negative log-likelihoods in float32 or better; exactly 0, with a gradient of exactly 0, where there is no target.

    Args:
        model: see `target_logits`.
        batch: `input_ids`, `positions` and `targets` (`[B, L]` int64, `IGNORED` where there is none), and what else the model
            is called with.
        weights: `[B, L]` factors of the losses, constants; 1 where not given.
    """
    inputs = {name: tensor for name, tensor in batch.items() if name != "targets"}
    targets, layer = batch["targets"], _output_layer(model)
    flat = targets.flatten(), IGNORED, None if weights is None else weights.flatten()
    if _plain_and_frozen(layer) and _is_last(model, layer, inputs):
        hidden = _before_output_layer(model, layer, **inputs).flatten(0, 1)
        losses = frozen_head_cross_entropy(hidden, layer.weight, layer.bias, *flat)  # type: ignore[arg-type]
    else:
        losses = cross_entropy_(target_logits(model, **inputs).flatten(0, 1), *flat)
    return losses.view_as(targets)


def example_losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """`[B]`: the mean over the target tokens of each example, divided by its own number of them alone."""
    counted = batch["targets"] != IGNORED
    return token_losses(model, batch, counted / counted.sum(1, keepdim=True).double()).sum(1)


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


def _plain_and_frozen(layer: nn.Module) -> bool:
    hooked = layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks
    return type(layer) is nn.Linear and not hooked and not any(p.requires_grad for p in layer.parameters())


def _is_last(model: nn.Module, layer: nn.Module, inputs: dict[str, Tensor]) -> bool:
    """Asked once, of one example, before anything is computed for a step: a resumed run must take the same way."""
    if layer not in _comes_last:
        # with how often each had been written to
        outputs: list[tuple[Tensor, int]] = []
        handle = layer.register_forward_hook(
            lambda _, args, output: outputs.append((output, output._version))
        )
        devices = [layer.weight.device] if layer.weight.is_cuda else []
        try:
            with torch.inference_mode(False), torch.no_grad(), torch.random.fork_rng(devices):
                logits = target_logits(model, **{name: tensor[:1] for name, tensor in inputs.items()})
        finally:
            handle.remove()
        _comes_last[layer] = [out is logits and logits._version == version for out, version in outputs] == [
            True
        ]
    return _comes_last[layer]


def _before_output_layer(
    model: nn.Module, layer: nn.Module, input_ids: Tensor, positions: Tensor, **inputs: Tensor
) -> Tensor:
    """`[B, L, d]`: what the output layer would be applied to, without applying it."""
    with _picking(layer, positions, input_ids.shape[1], apply=False) as picked:
        model(input_ids=input_ids, **inputs)
    return picked[-1]


@contextmanager
def _picking(layer: nn.Module, positions: Tensor, length: int, apply: bool = True) -> Iterator[list[Tensor]]:
    """The layer is applied to the hidden states at `positions`, or to none of them; yields where these will be."""
    found: list[Tensor] = []

    def pick(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden = args[0]
        rows = torch.arange(len(positions), device=positions.device)[:, None]
        # Prompt tuning puts vectors of its own before the tokens, and all positions move on by as many.
        picked = hidden[rows, positions + (hidden.shape[1] - length)]
        found.append(picked)
        return (picked if apply else picked[:, :0], *args[1:])

    handle = layer.register_forward_pre_hook(pick)
    try:
        yield found
    finally:
        handle.remove()
