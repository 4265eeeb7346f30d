"""A causal language model of transformers cut into stages, in place: names, classes and forward stay the library's own.

A stage is the model itself with the blocks of the others taken out and what stands before or behind them replaced by identities:
the first stage is called with tokens and returns hidden states, the last is called with hidden states and returns logits. So
tasks, PEFT, state dicts and `attach` see an ordinary model, and a parameter has the name that it has in one process.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from dpexp.clipping.devices import bounds, device_of
from dpexp.clipping.groups import repeated_blocks
from dpexp.errors import UserError

# attributes of the model below the head: embeddings, what follows them, the norm behind the blocks
_SHAPES: dict[str, tuple[tuple[str, ...], tuple[str, ...], str]] = {
    "gpt2": (("wte", "wpe"), ("drop",), "ln_f"),
    "llama": (("embed_tokens",), (), "norm"),
    "mistral": (("embed_tokens",), (), "norm"),
    "qwen2": (("embed_tokens",), (), "norm"),
    "qwen3": (("embed_tokens",), (), "norm"),
}
# of hidden states, relative: the same operations in the same order
TOLERANCE = 1e-5


def base_of(model: nn.Module) -> Any:
    """The causal language model of transformers inside of what PEFT has wrapped around it."""
    whole: Any = model
    return whole.get_base_model() if hasattr(whole, "get_base_model") else whole


def check_splittable(model: nn.Module) -> None:
    """Refuse what has no stages.

    Raises:
        UserError: names the architecture, and the way out.
    """
    base = base_of(model)
    kind = getattr(getattr(base, "config", None), "model_type", type(base).__name__)
    if kind not in _SHAPES or not hasattr(base, "lm_head"):
        raise UserError(
            f"runtime=pipeline cuts causal language models of transformers ({', '.join(_SHAPES)}), not {kind}: use runtime=ddp "
            "or fsdp; clip=perdevice works there and in one process, too"
        )


def keep_stage(model: nn.Module, stage: int, stages: int) -> nn.Module:
    """Leave in ``model`` what belongs to one stage, in place, and prove it against the whole on a few made-up tokens.

    Args:
        model: plain, or wrapped by peft.
        stage, stages: which, of how many.

    Returns:
        The model. A last stage takes hidden states ``[B, T, d]`` in place of ``input_ids``; one that is not the last
        returns them as its ``logits``.

    Raises:
        UserError: the model can't be cut, a parameter that trains is used in two stages, or the stage is not a part of the whole.
    """
    check_splittable(model)
    device_of(model, stages)
    base = base_of(model)
    inner = base.base_model
    embeddings, behind, norm = _SHAPES[base.config.model_type]
    name, count = repeated_blocks(inner)
    cuts = bounds(count, stages)
    first, last = cuts[stage], cuts[stage + 1]
    training = model.training
    model.eval()
    entered, left = _passed(base, inner, name, first, last, stage == 0, stage == stages - 1)
    blocks = inner.get_submodule(name)
    for i in range(count):
        if not first <= i < last:
            del blocks._modules[str(i)]
    if kinds := getattr(inner.config, "layer_types", None):
        # which attention a block has is looked up by its place among those that are there
        inner.config = copy.deepcopy(inner.config)
        inner.config.layer_types = kinds[first:last]
    if stage > 0:
        for part in embeddings[:1] + behind:
            setattr(inner, part, nn.Identity())
        for part in embeddings[1:]:
            setattr(inner, part, _Nothing())
        base.register_forward_pre_hook(_hidden_for_tokens, with_kwargs=True)
    if stage < stages - 1:
        setattr(inner, norm, nn.Identity())
        base.lm_head = nn.Identity()
    with torch.no_grad():
        found = base(input_ids=entered).logits
    model.train(training)
    if not torch.allclose(found, left, rtol=TOLERANCE, atol=TOLERANCE * float(left.abs().max())):
        raise UserError(
            f"stage {stage} of {type(base).__name__} computes something else than this part of the whole model: it can't be cut "
            "into stages. Use runtime=ddp or fsdp"
        )
    return model


@torch.no_grad()
def _passed(
    base: Any, inner: Any, name: str, first: int, last: int, begins: bool, ends: bool
) -> tuple[Tensor, Tensor]:
    """What enters a stage and what leaves it, in the whole model."""
    seen: dict[str, Tensor] = {}
    blocks = inner.get_submodule(name)
    device = next(base.parameters()).device
    tokens = torch.arange(1, 7, device=device).view(2, 3) % base.config.vocab_size

    def enter(module: nn.Module, args: tuple, kwargs: dict) -> None:
        seen["in"] = args[0] if args else kwargs["hidden_states"]

    def leave(module: nn.Module, args: tuple, output: Any) -> None:
        seen["out"] = output[0] if isinstance(output, tuple) else output

    handles = [
        blocks[first].register_forward_pre_hook(enter, with_kwargs=True),
        blocks[last - 1].register_forward_hook(leave),
    ]
    try:
        logits = base(input_ids=tokens).logits
    finally:
        for handle in handles:
            handle.remove()
    return tokens if begins else seen["in"], logits if ends else seen["out"]


class _Nothing(nn.Module):
    """Adds nothing: positions are added in the first stage."""

    def forward(self, *args: Any) -> Tensor:
        return torch.zeros(())


def _hidden_for_tokens(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Hidden states come where a caller passes tokens."""
    given = dict(kwargs)
    if args:
        given["input_ids"], args = args[0], args[1:]
    hidden = given.pop("input_ids", None)
    if hidden is not None:
        given["inputs_embeds"] = hidden
    return args, given
