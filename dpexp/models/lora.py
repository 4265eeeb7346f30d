"""LoRA through the peft library, with a new head kept trainable."""

from __future__ import annotations

import re
import warnings
from typing import TYPE_CHECKING

from torch import nn

from dpexp.errors import UserError, first_line
from dpexp.models.trainable import projections

if TYPE_CHECKING:
    from dpexp.schemas import PeftConfig

_QUERY_VALUE = re.compile(r"(q|query|v|value)(_.+)?|c_attn|qkv|qkv_proj|Wqkv|query_key_value|in_proj")


def add_lora(model: nn.Module, peft: PeftConfig, head: str, new_head: list[str]) -> nn.Module:
    """Wrap the model for LoRA (Hu et al. 2021); only the adapters and a new head train afterwards.

    Args:
        model: a network with attention.
        peft: `rank` r; `alpha` (the update is scaled by alpha/r; 0 means alpha = r); `dropout` on the adapters' input;
            `targets`, last names of the adapted modules (empty: query and value of every attention, as in the paper).
        head: what the task asked for, a key of `dpexp.models.networks.HEADS`.
        new_head: names of the modules of a new head.

    Returns:
        The `peft.PeftModel`. A is drawn from torch's global generator, B is zero.

    Raises:
        UserError: a rank below one, targets that name no layer of the model, or none could be derived.
    """
    from peft import LoraConfig, TaskType, get_peft_model

    if peft.rank < 1:
        raise UserError(f"peft.rank={peft.rank}: LoRA needs a rank of at least 1, as in peft.rank=8")
    targets = list(peft.targets) or query_value_names(model)
    if not targets:
        raise UserError(
            f"peft=lora: no query or value projection was found in {type(model).__name__}; name the layers to adapt "
            f"with peft.targets=[...]"
        )
    kinds = {"classifier": TaskType.SEQ_CLS, "causal_lm": TaskType.CAUSAL_LM}
    config = LoraConfig(
        task_type=kinds.get(head),
        r=peft.rank,
        lora_alpha=peft.alpha or peft.rank,
        lora_dropout=peft.dropout,
        target_modules=targets,
        modules_to_save=list(new_head) or None,
    )
    try:
        with warnings.catch_warnings():
            # peft sets it right by itself
            warnings.filterwarnings("ignore", message=".*fan_in_fan_out.*")
            # between peft and transformers
            warnings.filterwarnings("ignore", category=FutureWarning)
            return get_peft_model(model, config)
    except ValueError as error:
        there = sorted({name.rsplit(".", 1)[-1] for name, _ in projections(model)})
        raise UserError(
            f"peft.targets={targets}: {first_line(error)} Attention projections of this model: "
            f"{', '.join(there)}"
        ) from error


def query_value_names(model: nn.Module) -> list[str]:
    """The last names of the query and value projections (or of the one layer that holds both)."""
    leaves = (name.rsplit(".", 1)[-1] for name, _ in projections(model))
    return sorted({leaf for leaf in leaves if _QUERY_VALUE.fullmatch(leaf)})
