"""Tiny causal language models, whole or in stages, a batch for them, and tasks of a person's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from dpexp.tasks import DataInfo, Task

VOCABULARY = 50


def language_model(kind: str, lora: bool, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Four blocks; embeddings are tied where they are frozen. The same numbers in every process."""
    torch.manual_seed(0)
    tied = {"tie_word_embeddings": lora, "bos_token_id": None, "eos_token_id": None}
    if kind == "gpt2":
        small = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 32}
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        model: nn.Module = GPT2LMHeadModel(GPT2Config(**small, **dropout, use_cache=False, **tied))
    else:
        small = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32}
        if kind == "qwen2":
            # blocks of two kinds: from the second on, they look back two tokens
            window = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}
            model = Qwen2ForCausalLM(Qwen2Config(**small, **heads, **window, use_cache=False, **tied))
        else:
            model = LlamaForCausalLM(LlamaConfig(**small, **heads, use_cache=False, **tied))
    if lora:
        from peft import LoraConfig, get_peft_model

        targets = ["c_attn"] if kind == "gpt2" else ["q_proj", "v_proj"]
        config = LoraConfig(r=2, target_modules=targets, task_type="CAUSAL_LM", fan_in_fan_out=kind == "gpt2")
        model = get_peft_model(model, config)
        for name, param in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(param, std=0.1)
    return model.to(dtype).train()


def batch_of(examples: int, length: int = 7, targets: int = 3, seed: int = 1) -> dict[str, Tensor]:
    """Tokens, where targets are predicted, and targets, as `dpexp.tasks.generation` collates them."""
    draw = torch.Generator().manual_seed(seed)
    return {
        "input_ids": torch.randint(1, VOCABULARY, (examples, length), generator=draw),
        "positions": torch.randint(0, length, (examples, targets), generator=draw).sort(1).values,
        "targets": torch.randint(0, VOCABULARY, (examples, targets), generator=draw),
    }


def pieces_of(batch: dict[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    """Microbatches of one size."""
    parts = {name: tensor.chunk(count) for name, tensor in batch.items()}
    return [{name: tensors[i] for name, tensors in parts.items()} for i in range(count)]


class Tokens(Task):
    """Rows of tokens of one length; the loss is that of the next ones."""

    head = "causal_lm"

    def __init__(self, task: Any, data: Any, scale: str, tokenizer: Any):
        rows = torch.randint(5, VOCABULARY, (32, 9), generator=torch.Generator().manual_seed(0))
        self.name, self.num_examples, self.labels = task.name, 24, []
        self.train, self.dev = list(rows[:24]), list(rows[24:])
        self.data = DataInfo("demo", "tokens", {"train": 24}, {"train": "0"}, [])

    def collate(self, examples: list[Any]) -> dict[str, Tensor]:
        rows = torch.stack(examples) if examples else torch.zeros(0, 9, dtype=torch.int64)
        return {"input_ids": rows[:, :-1], "targets": rows[:, 1:]}

    def losses(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if not len(batch["targets"]):
            return torch.zeros(0)
        logits = model(**{name: part for name, part in batch.items() if name != "targets"}).logits.float()
        return nn.functional.cross_entropy(logits.mT, batch["targets"], reduction="none").sum(1)

    def evaluate(
        self, model: nn.Module, device: Any, batch_size: int, progress: Any = None
    ) -> dict[str, float]:
        with torch.no_grad():
            return {"loss": float(self.losses(model, self.collate(list(self.dev))).mean())}

    def length(self, i: int) -> int:
        return 9


class Mixing(Tokens):
    """Divided by the mean of their batch, of which no gradient tells."""

    def losses(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        found = super().losses(model, batch)
        return found / found.detach().mean()


class Typed(Tokens):
    """With something else that the model reads."""

    def collate(self, examples: list[Any]) -> dict[str, Tensor]:
        batch = super().collate(examples)
        return {**batch, "token_type_ids": torch.full_like(batch["input_ids"], 3)}
