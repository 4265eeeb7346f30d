"""Tokens that join a vocabulary (`model.new_tokens`): their rows, tied and untied heads, saved and loaded; mistakes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from dpexp.config import compose
from dpexp.errors import UserError
from dpexp.models import ModelBundle, build_model
from dpexp.models.tokenizer import add_tokens, demo_tokenizer
from dpexp.schemas import ModelConfig, PeftConfig

from .test_causal_lm import SIZES, tiny

NAMES = ["bos", "eos", "speaker1", "speaker2", "pad"]
TOKENS = [f"<{name}>" for name in NAMES]


def build(model: ModelConfig, seed: int = 0, **peft: Any) -> ModelBundle:
    ways = PeftConfig(**{"name": "full", **peft})
    return build_model(model, ways, head="causal_lm", num_labels=0, scale="small", seed=seed)


@pytest.fixture(params=["gpt2", "llama"])
def published(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A folder as `save_pretrained` leaves it, whose tokenizer has none of the tokens. Llama's config names a row of padding."""
    bundle = build(tiny(request.param, config=SIZES[request.param] | {"tie_word_embeddings": True}), seed=3)
    bundle.model.save_pretrained(tmp_path / "published")  # type: ignore[operator]
    bundle.tokenizer.save_pretrained(tmp_path / "published")  # type: ignore[union-attr]
    return tmp_path / "published"


def described(folder: Path, **values: Any) -> ModelConfig:
    return ModelConfig(**{"family": "hf", "id": str(folder), "new_tokens": NAMES, **values})


@pytest.mark.parametrize("untied", [False, True])
def test_old_rows_stay_and_new_ones_are_drawn(untied: bool, published: Path) -> None:
    before = build(described(published, new_tokens=[])).model.get_input_embeddings().weight  # type: ignore[operator]
    one, same, other = (build(described(published, untied=untied), seed) for seed in (0, 0, 1))
    model: Any = one.model
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert len(table) == len(one.tokenizer) == len(before) + 5  # type: ignore[arg-type]
    assert model.config.vocab_size == len(table)
    assert torch.equal(table[:-5], before)
    assert 0.01 < table[-5:].std() < 0.03, "as GPT-2 draws its embedding"
    assert torch.equal(table, same.model.get_input_embeddings().weight)  # type: ignore[operator]
    assert not torch.equal(table, other.model.get_input_embeddings().weight)  # type: ignore[operator]
    assert (head is table) == (not untied)
    assert torch.equal(head, table)
    assert sorted(one.tokenizer.convert_tokens_to_ids(TOKENS)) == list(range(len(before), len(table)))  # type: ignore[union-attr]
    assert one.source.endswith("; 5 rows of the embedding new, drawn with seed 0")
    ends = model.config.eos_token_id, model.generation_config.eos_token_id, one.tokenizer.eos_token_id  # type: ignore[union-attr]
    assert len(set(ends)) == 1, "what is saved ends its texts where it learnt to"


def test_a_saved_model_has_them_and_is_given_none_again(published: Path, tmp_path: Path) -> None:
    bundle = build(described(published, untied=True))
    bundle.model.save_pretrained(tmp_path / "saved")  # type: ignore[operator]
    bundle.tokenizer.save_pretrained(tmp_path / "saved")  # type: ignore[union-attr]
    for names in ([], NAMES):
        again = build(described(tmp_path / "saved", new_tokens=names), seed=9)
        ids = [tokenizer.convert_tokens_to_ids(TOKENS) for tokenizer in (bundle.tokenizer, again.tokenizer)]  # type: ignore[union-attr]
        assert ids[0] == ids[1]
        assert again.tokenizer.eos_token == "<eos>"  # type: ignore[union-attr]
        assert "new" not in again.source
        for one, two in zip(bundle.model.parameters(), again.model.parameters(), strict=True):
            assert torch.equal(one, two)


def test_a_vocabulary_that_did_not_fit_before_does_not_fit_with_new_tokens(published: Path) -> None:
    with pytest.raises(UserError, match="they don't belong together"):
        build(tiny(config={"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 200}, new_tokens=NAMES))


def test_a_name_that_is_a_word_already_is_refused() -> None:
    tokenizer = demo_tokenizer("demo_text")
    tokenizer.add_tokens(["<speaker1>"])
    with pytest.raises(UserError, match="has <speaker1> already, as another token than <speaker1>"):
        add_tokens(tokenizer, NAMES)
    tokenizer = demo_tokenizer("demo_text")
    tokenizer.add_special_tokens({"mask_token": "<eos>"})
    with pytest.raises(UserError, match="has <eos> already, as another token than eos_token"):
        add_tokens(tokenizer, NAMES)


@pytest.mark.parametrize("peft", [{"name": "lora", "rank": 2}, {"name": "prefix", "prefix_length": 2}])
def test_tokens_that_would_never_learn_are_refused(peft: dict[str, Any], published: Path) -> None:
    with pytest.raises(UserError, match="the embedding does not train, and these tokens would mean nothing"):
        build(described(published), **peft)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["task=e2e", "model.new_tokens=[a b]"], "'a b' must be one word"),
        (["task=e2e", "model.new_tokens=[a,b,a]"], "'a' must be one word .* given once"),
        (
            ["task=sst2", "model.new_tokens=[a]"],
            "for language models of Hugging Face that write text, and task=sst2",
        ),
    ],
)
def test_names_are_checked(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        compose([*overrides, "scale=demo", "clip=flat"])
