"""Every way to fine-tune on a tiny network of every kind, in a state in which every trainable parameter has a gradient."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import nn

from dpexp.models import ModelBundle, build_model
from dpexp.schemas import PeftConfig
from tests.clipping.zoo import Problem

from .test_build import config

WAYS: dict[str, dict[str, Any]] = {
    "full": {"name": "full"},
    "lora": {"name": "lora", "rank": 2, "alpha": 4.0},
    "prefix": {"name": "prefix", "prefix_length": 3, "prefix_hidden": 5},
    "prefix_direct": {"name": "prefix", "prefix_length": 3},
    "prompt": {"name": "prompt", "prefix_length": 3},
    "p_tuning": {"name": "p_tuning", "prefix_length": 2, "prefix_hidden": 4},
    "rgp": {"name": "rgp", "rank": 2},
    "rgp_history": {"name": "rgp", "rank": 1, "carriers": "history"},
    "top2": {"name": "top2", "blocks": 1},
    "bitfit": {"name": "bitfit"},
    "head": {"name": "head"},
    "adapters": {"name": "adapters", "rank": 3},
    "adapters_feed_forward": {"name": "adapters", "rank": 3, "placement": "feed_forward"},
}
LLAMA = {
    "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "tie_word_embeddings": True,
}  # fmt: skip
VIT = {
    "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip
NETWORKS: dict[str, tuple[str, str]] = {
    "bert": ("bert", "classifier"),
    "roberta": ("roberta", "classifier"),
    "gpt2": ("gpt2", "causal_lm"),
    "llama": ("llama", "causal_lm"),
    "bert_mlm": ("bert", "masked_lm"),
}


def peft_of(way: str) -> PeftConfig:
    return PeftConfig(**WAYS[way])


def bundle_of(network: str, way: str, seed: int = 1) -> ModelBundle:
    """Without dropout; as `build_model` makes it."""
    architecture, head = NETWORKS[network]
    values: dict[str, Any] = {"attention_dropout": 0.0}
    if architecture == "llama":
        values["config"] = LLAMA
    else:
        values["dropout"] = 0.0
    model = config(architecture, **values)
    return build_model(model, peft_of(way), head=head, num_labels=2, scale="demo", seed=seed)


def vit(way: str) -> tuple[nn.Module, list[str]]:
    """A tiny ViT with three classes, which has no tokenizer."""
    from transformers import ViTConfig, ViTForImageClassification

    from dpexp.models.finetuning import prepare
    from dpexp.schemas import ModelConfig

    torch.manual_seed(0)
    network = ViTForImageClassification(ViTConfig(num_labels=3, **VIT)).train()
    return prepare(network, ModelConfig(), peft_of(way), head="image_classifier", seed=1)


def losses(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """`[B]`: of a classifier on a made-up label, of a language model on every token that is no padding."""
    logits = model(**batch).logits
    if logits.dim() == 2:
        labels = batch.get("input_ids", torch.zeros(len(logits), 1))[:, 0].long() % logits.shape[1]
        return nn.functional.cross_entropy(logits, labels, reduction="none")
    targets = (batch["input_ids"] * 7 + 3) % logits.shape[-1]
    each = nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    return (each * batch["attention_mask"]).sum(1)


def batch_of(network: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    if network == "vit":
        return {"pixel_values": torch.randn(4, 3, 16, 16, generator=generator)}
    ids = torch.randint(5, 40, (4, 6), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def problem_of(network: str, way: str) -> Problem:
    """In float64, with what starts at zero moved away from it; fresh at every call."""
    return copy.deepcopy(_problem_of(network, way))


@functools.cache
def _problem_of(network: str, way: str) -> Problem:
    model = vit(way)[0] if network == "vit" else bundle_of(network, way).model
    batch = {k: v.double() if v.is_floating_point() else v for k, v in batch_of(network).items()}
    return Problem(stirred(model.double()), batch, losses)


def stirred(model: nn.Module) -> nn.Module:
    """Adds a little noise to every trainable parameter."""
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return model
