"""Every row of docs/from_opacus.md names an example that runs; nothing there is an example without a row."""

import importlib.util
import inspect
import re
from pathlib import Path

import pytest

from dpexp import PrivacyEngine

DOCS = Path(__file__).parents[2] / "docs"
TABLE = [row for row in (DOCS / "from_opacus.md").read_text().splitlines() if re.search(r"\| `\w+` \|$", row)]
NAMED = [re.findall(r"`(\w+)` \|$", row)[0] for row in TABLE]
specification = importlib.util.spec_from_file_location("from_opacus", DOCS / "examples/from_opacus.py")
examples = importlib.util.module_from_spec(specification)
specification.loader.exec_module(examples)


def test_the_table_and_the_examples_name_each_other():
    there = [
        name
        for name, function in inspect.getmembers(examples, inspect.isfunction)
        if list(inspect.signature(function).parameters) == ["folder"]
    ]
    assert sorted(NAMED) == sorted(there)
    assert len(NAMED) == 20


@pytest.mark.parametrize("name", NAMED)
def test_the_example_runs(tmp_path, name):
    result = getattr(examples, name)(tmp_path)
    if isinstance(result, PrivacyEngine):
        assert result.finished
        assert result.ledger.steps_charged == result.steps
    if name == "module_validator":
        assert "BatchNorm" in result
    if name == "save":
        assert "differential privacy" in (tmp_path / "PRIVACY.md").read_text()
    if name == "ghost_clipping":
        assert result.clipper.engine.name == "ghost"


def test_what_the_table_says_of_arguments_is_true():
    arguments = inspect.signature(PrivacyEngine).parameters
    table = "\n".join(row.split("|")[3] for row in TABLE)
    keywords = set(re.findall(r"\b(\w+)=", table)) - {"physical_batch_size"}
    assert (
        {"noise_multiplier", "clip_norm", "epsilon", "groups", "rule", "schedule"}
        <= keywords
        <= set(arguments)
    )


def test_no_word_is_lost_on_privacy_engine_arguments():
    documented = PrivacyEngine.__doc__
    for name in inspect.signature(PrivacyEngine).parameters:
        assert re.search(rf"\b{name}\b", documented), name
