"""The ways to fine-tune: what `peft=` names, and which parameters train under it.

| peft | trains | source |
|---|---|---|
| full | what `model.trainable` says | |
| lora | low-rank factors beside query and value | Hu et al. 2021 |
| prefix | further keys and values of every attention | Li & Liang 2021 |
| prompt, p_tuning | vectors before the tokens, from a table or a network | Lester et al. 2021, Liu et al. 2021 |
| rgp | carriers of the weight matrices, from which their update is assembled | Yu et al. 2021, see `rgp` |
| top2 | the last blocks and what follows | Li et al. 2022, section 5.2 |
| bitfit | all biases | Ben Zaken et al. 2021 |
| head | the head alone (linear probing) | |
| adapters | a bottleneck behind every sublayer | Houlsby et al. 2019 |

A new head, which a classifier has and a language model only where its checkpoint lacks one, trains under all of them.
The pretrained head of a language model is part of the network: it trains under full, top2, bitfit and head, but for
what is tied to the embedding, which only full trains.

A way that is not there yet is one function and one line in `WAYS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import nn

from dpexp.errors import UserError
from dpexp.models.adapters import add_adapters
from dpexp.models.lora import add_lora
from dpexp.models.prefix import add_prefix
from dpexp.models.prompts import add_prompt
from dpexp.models.rgp import add_carriers
from dpexp.models.trainable import (
    head_modules,
    head_parameters,
    set_top_blocks,
    set_trainable,
    trainable_names,
)

if TYPE_CHECKING:
    from dpexp.schemas import ModelConfig, PeftConfig

Prepared = tuple[nn.Module, list[str]]
Way = Callable[[nn.Module, "PeftConfig", str, int], Prepared]


def prepare(model: nn.Module, config: ModelConfig, peft: PeftConfig, *, head: str, seed: int) -> Prepared:
    """Make a network ready for the way to fine-tune that `peft` names.

    Args:
        model: with its weights; changed in place, or wrapped. New parameters are drawn from torch's global generator.
        config: its `trainable` counts under peft=full alone.
        peft: the way, with its sizes.
        head: what the task asked for, a key of `dpexp.models.networks.HEADS`.
        seed: public; of the carriers of RGP.

    Returns:
        The network, and the names of the parameters that train, in the order of its `named_parameters()`.

    Raises:
        UserError: an unknown way, one that contradicts `model.trainable` or does not fit this network, or nothing
            would train.
    """
    if peft.name == "full":
        if config.family == "custom" and config.trainable == "all":
            # what a person's own function has frozen stays frozen
            if names := trainable_names(model):
                return model, names
            raise UserError(
                f"model.factory={config.factory} freezes all parameters of its network: nothing would train"
            )
        return model, set_trainable(model, config.trainable)
    if peft.name not in WAYS:
        raise UserError(f"peft={peft.name} is unknown: choose one of full, {', '.join(WAYS)}")
    if config.trainable != "all":
        raise UserError(
            f"model.trainable={config.trainable} and peft={peft.name} contradict each other: both say what trains; leave "
            "model.trainable=all, or take peft=full"
        )
    adapted, names = WAYS[peft.name](model, peft, head, seed)
    if not names:
        raise UserError(f"peft={peft.name}: nothing would train in {type(model).__name__}")
    return adapted, names


def new_head(model: nn.Module, head: str) -> list[str]:
    """The names of the parameters of the head, if it is new: a classifier's, or one that the checkpoint lacks."""
    names = head_parameters(model)
    drawn = getattr(model, "drawn_parameters", ())
    return names if head.endswith("classifier") or any(name in drawn for name in names) else []


def _by_peft(add: Callable[[nn.Module, PeftConfig, str, list[str]], nn.Module]) -> Way:
    """A way that wraps the network by the peft library."""

    def prepared(model: nn.Module, peft: PeftConfig, head: str, seed: int) -> Prepared:
        adapted = add(model, peft, head, head_modules(model) if new_head(model, head) else [])
        return adapted, trainable_names(adapted)

    return prepared


WAYS: dict[str, Way] = {
    "lora": _by_peft(add_lora),
    "prefix": _by_peft(add_prefix),
    "prompt": _by_peft(add_prompt),
    "p_tuning": _by_peft(add_prompt),
    "rgp": lambda model, peft, head, seed: add_carriers(model, peft, new_head(model, head), seed),
    "top2": lambda model, peft, head, seed: (model, set_top_blocks(model, peft.blocks)),
    "bitfit": lambda model, peft, head, seed: (model, set_trainable(model, "bias", "peft=bitfit")),
    "head": lambda model, peft, head, seed: (model, set_trainable(model, "head", "peft=head")),
    "adapters": lambda model, peft, head, seed: add_adapters(model, peft, new_head(model, head)),
}
