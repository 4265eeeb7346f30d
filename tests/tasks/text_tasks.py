"""A tiny GPT-2 and a generation task on demo data, for the tests of both."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dpexp.models import ModelBundle, build_model
from dpexp.schemas import DataConfig, GenerationConfig, ModelConfig, PeftConfig, TaskConfig
from dpexp.tasks import build_task
from dpexp.tasks.generation import Generation


def network(seed: int = 0, tied: bool = True) -> ModelBundle:
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 128, "tie_word_embeddings": tied}
    config = ModelConfig(
        family="random_hf",
        architecture="gpt2",
        config=sizes,
        tokenizer="demo_text",
        dropout=0.0,
        attention_dropout=0.0,
    )
    bundle = build_model(
        config, PeftConfig(name="full"), head="causal_lm", num_labels=0, scale="demo", seed=seed
    )
    with torch.no_grad():  # the usual 0.02 makes every distribution nearly uniform
        for parameter in bundle.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7)) * 0.2)
    return bundle


@pytest.fixture
def bundle() -> ModelBundle:
    return network()


@pytest.fixture
def make(bundle: ModelBundle, data: Callable[..., DataConfig]) -> Callable[..., Generation]:
    """A task on demo data in the layout of E2E."""

    def task(rows: int = 40, max_length: int = 100, layout: str = "e2e", **generation: Any) -> Generation:
        files = {"train": "train.csv", "dev": "dev.csv", "test": "test.csv"}
        settings = GenerationConfig(**{"max_target": 40, "num_beams": 2, "when": "never", **generation})
        config = TaskConfig(
            name="e2e", kind="generation", format=layout, metric="e2e", files=files, num_examples={"demo": rows},
            max_length=max_length, generation=settings,
        )  # fmt: skip
        made = build_task(config, data(), "demo", bundle.tokenizer, 0)
        assert isinstance(made, Generation)
        return made

    return task
