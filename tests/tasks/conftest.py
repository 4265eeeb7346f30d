"""Small tokenizers, networks and files for the tests of tasks."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dpexp.models import ModelBundle, build_model
from dpexp.schemas import DataConfig, ModelConfig, PeftConfig, TaskConfig
from dpexp.tasks import sources

SIZES = {
    "bert": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24},
    "roberta": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24},
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2},
    "distilbert": {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24},
}


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of published files: DPEXP_DATA as the tests were started with it, or `shared/data` beside the repository."""
    named = os.environ.get("DPEXP_TEST_DATA")
    beside = Path(__file__).resolve().parents[2].parent / "shared" / "data"
    folder = Path(named).expanduser() if named else beside
    if not folder.is_dir():
        pytest.skip(
            f"REAL DATA NOT TESTED: set DPEXP_DATA to the folder of published files; {folder} is not there"
        )
    return folder


@pytest.fixture(scope="session")
def tiny() -> Callable[..., ModelBundle]:
    """Random networks of two layers with the demo's tokenizer and without dropout."""

    def build(
        architecture: str = "bert", num_labels: int = 2, head: str = "classifier", **overrides: Any
    ) -> ModelBundle:
        config = ModelConfig(
            family="random_hf",
            architecture=architecture,
            config={**SIZES[architecture], **overrides},
            tokenizer="demo",
            dropout=0.0,
            attention_dropout=0.0,
        )
        full = PeftConfig(name="full")
        return build_model(config, full, head=head, num_labels=num_labels, scale="demo", seed=1)

    return build


@pytest.fixture(scope="session")
def tokenizer(tiny: Callable[..., ModelBundle]) -> Any:
    return tiny().tokenizer


@pytest.fixture
def sst2() -> TaskConfig:
    return TaskConfig(
        name="sst2",
        labels=["0", "1"],
        text="sentence",
        label="label",
        hub_id="nyu-mll/glue",
        hub_config="sst2",
        files={"train": "sst2/train.tsv", "dev": "sst2/dev.tsv"},
        num_examples={"paper": 67349, "small": 67349, "demo": 2000},
    )


@pytest.fixture
def own() -> TaskConfig:
    return TaskConfig(name="text_classification", num_examples={"paper": None, "small": None, "demo": 2000})


@pytest.fixture
def data(tmp_path: Path) -> Callable[..., DataConfig]:
    """A `DataConfig` whose cache is the test's own."""

    def make(**values: Any) -> DataConfig:
        return DataConfig(**{"cache": str(tmp_path / "cache"), **values})

    return make


@pytest.fixture
def own_data(
    tmp_path: Path, data: Callable[..., DataConfig], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., DataConfig]:
    """A person's own CSV files of (text, label) rows; here a row may serve in train and in dev."""
    monkeypatch.setattr(sources, "MOST_SHARED", 1.0)

    def make(
        train: list[tuple[str, str]], dev: list[tuple[str, str]] | None = None, **values: Any
    ) -> DataConfig:
        for name, rows in (("train", train), ("dev", dev)):
            if rows is not None:
                lines = ["text,label", *(f'"{text}",{label}' for text, label in rows)]
                (tmp_path / f"{name}.csv").write_text("\n".join(lines) + "\n")
                values[name] = str(tmp_path / f"{name}.csv")
        return data(**{"num_examples": len(train), **values})

    return make
