"""Every row of docs/recipes.md names an example that runs, and every example has a row."""

import importlib.util
import inspect
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
NAMED = re.findall(r"\| `(\w+)` \|$", (DOCS / "recipes.md").read_text(encoding="utf-8"), re.M)
specification = importlib.util.spec_from_file_location("recipes", DOCS / "examples/recipes.py")
recipes = importlib.util.module_from_spec(specification)
specification.loader.exec_module(recipes)


def test_the_table_and_the_recipes_name_each_other():
    functions = inspect.getmembers(recipes, inspect.isfunction)
    there = [name for name, made in functions if list(inspect.signature(made).parameters) == ["folder"]]
    assert sorted(NAMED) == sorted(there)


@pytest.mark.parametrize("name", NAMED)
def test_the_recipe_runs(tmp_path, name):
    engine = getattr(recipes, name)(tmp_path)
    assert engine.ledger.steps_charged == engine.steps_taken
    assert engine.finished or name == "stop_early"
    assert 0 < engine.epsilon() <= (3.0 if engine.finished else engine.plan.epsilon())
    if name == "save_and_load":
        assert "differential privacy" in (tmp_path / "PRIVACY.md").read_text(encoding="utf-8")
