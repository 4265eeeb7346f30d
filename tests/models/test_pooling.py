"""A linear head reads the mean of the real positions or the first one, fits every way to fine-tune, and comes back from disk."""

from pathlib import Path

import pytest
import torch

from dpexp.config import compose
from dpexp.errors import UserError
from dpexp.models.pooling import PooledClassifier, load_pooled
from dpexp.schemas import PeftConfig

from .test_build import build, config

ARCHITECTURES = ("bert", "roberta", "distilbert")
TEXTS = ["the film is superb", "dull"]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("pooling", ["mean", "cls", "layers"])
def test_what_the_head_reads_is_the_hidden_states_pooled(architecture: str, pooling: str) -> None:
    bundle = build(config(architecture, pooling=pooling))
    model = bundle.model.eval()
    assert isinstance(model, PooledClassifier)
    together = bundle.tokenizer(TEXTS, padding=True, return_tensors="pt")
    for row, text in enumerate(TEXTS):
        alone = bundle.tokenizer([text], return_tensors="pt")  # without padding
        found = model.base_model(**alone, output_hidden_states=True)
        last = found.last_hidden_state[0]
        every = torch.cat([state[0].mean(0) for state in found.hidden_states])
        expected = {"mean": last.mean(0), "cls": last[0], "layers": every}[pooling]
        torch.testing.assert_close(model.pooled(**together)[row], expected)
        logits = torch.nn.functional.linear(expected, model.classifier.weight, model.classifier.bias)
        torch.testing.assert_close(model(**together).logits[row], logits)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_parameter_is_read_and_the_head_is_the_linear_layer(architecture: str) -> None:
    bundle = build(config(architecture, pooling="mean"))
    bundle.model(
        **bundle.tokenizer(TEXTS, padding=True, return_tensors="pt")
    ).logits.square().sum().backward()
    assert [name for name, p in bundle.model.named_parameters() if p.grad is None] == []
    head = build(config(architecture, pooling="mean", trainable="head"))
    assert head.trainable == ["classifier.weight", "classifier.bias"]


def test_the_two_layers_of_robertas_head_and_a_head_without_bias() -> None:
    dense = build(config("bert", pooling="mean", head="dense", trainable="head"))
    assert dense.trainable == [
        f"classifier.{a}.{b}" for a in ("dense", "out_proj") for b in ("weight", "bias")
    ]
    model = dense.model.eval()
    inputs = dense.tokenizer(TEXTS, padding=True, return_tensors="pt")
    pooled, last = model.pooled(**inputs), model.classifier.out_proj
    # it starts as the identity behind a tanh
    torch.testing.assert_close(model(**inputs).logits, torch.tanh(pooled) @ last.weight.T)
    assert build(config("bert", pooling="mean", head="unbiased", trainable="head")).trainable == [
        "classifier.weight"
    ]


@pytest.mark.parametrize(
    "peft",
    [
        PeftConfig(name="lora", rank=2),
        PeftConfig(name="prefix", prefix_length=3),
        PeftConfig(name="bitfit"),
        PeftConfig(name="top2", blocks=1),
        PeftConfig(name="adapters", rank=2),
        PeftConfig(name="rgp", rank=1),
    ],
    ids=lambda peft: peft.name,
)
def test_every_way_to_fine_tune_finds_the_encoder_and_trains_the_head(peft: PeftConfig) -> None:
    bundle = build(config("bert", pooling="mean"), peft)
    assert any("classifier" in name for name in bundle.trainable)
    assert any("classifier" not in name for name in bundle.trainable)
    logits = bundle.model(**bundle.tokenizer(TEXTS, padding=True, return_tensors="pt")).logits
    assert logits.shape == (2, 2)
    logits.square().sum().backward()


def test_an_export_is_read_back_and_says_what_it_is(tmp_path: Path) -> None:
    bundle = build(config("bert", pooling="mean"))
    bundle.model.save_pretrained(tmp_path / "pooled")
    batch = bundle.tokenizer(TEXTS, padding=True, return_tensors="pt")
    again = load_pooled(tmp_path / "pooled")
    assert torch.equal(again(**batch).logits, bundle.model.eval()(**batch).logits)
    build(config("bert")).model.save_pretrained(tmp_path / "plain")
    with pytest.raises(UserError, match="was not trained with"):
        load_pooled(tmp_path / "plain")


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(UserError, match=r"model\.pooling=mean: task=mnist is no classification of text"):
        compose(["task=mnist", "model.pooling=mean"])
    with pytest.raises(UserError, match=r"trains a head alone"):
        compose(["task=sst2", "scale=small", "model.pooling=mean", "model.frozen_features=true"])
    with pytest.raises(UserError, match=r"set model\.pooling=cls, mean or layers, and"):
        compose(["task=sst2", "scale=small", "model.trainable=head", "model.frozen_features=true"])
