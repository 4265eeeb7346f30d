"""Presets: what their headers cite is what the papers print, and every command in them composes."""

import math
import re
import shlex

import pytest
import yaml

from dpexp.config import compose, conf_dir, to_dict
from dpexp.durable import flattened
from dpexp.reproduce.paper import paper_table, paper_tables

PRESETS, SWEEPS, RECIPES = (
    sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))
    for group in ("experiment", "sweep", "recipe")
)


def header(preset, group="experiment"):
    """The lines of the comment of a preset, without the first."""
    text = (conf_dir() / group / f"{preset}.yaml").read_text(encoding="utf-8")
    lines = [line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#")]
    return lines[1:]


def cited(preset):
    """(table, quoted rows or columns) for every table that the header names with a row."""
    text = " ".join(header(preset))
    found = []
    for match in re.finditer(r'Table (\w+), (?:rows?|column) ((?:"[^"]+"(?:, | and )?)+)', text):
        found.append((match[1], re.findall(r'"([^"]+)"', match[2])))
    return found


def cells_of(preset):
    paper = preset.partition("_")[0]
    for table, names in cited(preset):
        for cell in paper_table(paper, table):
            if any(name in (cell.row, cell.column) or cell.row.startswith(f"{name}, ") for name in names):
                yield cell


def commands(preset, group="experiment"):
    """The arguments of every command in the header, one list for each."""
    lines, found = header(preset, group), []
    for at, line in enumerate(lines):
        if line.startswith("python -m dpexp.train "):
            whole = f"{line[:-1]} {lines[at + 1]}" if line.endswith("\\") else line
            found.append(shlex.split(whole)[3:])
    return found


@pytest.mark.parametrize("preset", PRESETS)
def test_what_a_preset_cites_is_printed(preset):
    paper, place = preset.split("_")[:2]
    assert paper in {name for name, _ in paper_tables()}
    text = " ".join(header(preset))
    if place.startswith("table"):
        assert cited(preset)[0][0] == place.removeprefix("table")
        for table, names in cited(preset):
            for name in names:
                known = [
                    cell
                    for cell in paper_table(paper, table)
                    if name in (cell.row, cell.column) or cell.row.startswith(f"{name}, ")
                ]
                assert known, f"Table {table} has no row or column {name}"
    else:
        assert re.search(rf"Figures? {place.removeprefix('figure')}\b", text)


@pytest.mark.parametrize("preset", [preset for preset in PRESETS if "_table" in preset])
def test_what_a_preset_expects_is_printed_in_the_rows_that_it_cites(preset):
    printed = {(cell.value, cell.spread) for cell in cells_of(preset)}
    expected = [line for line in header(preset) if line.startswith("Expected")]
    assert expected
    for line in expected:
        values = line.rpartition(": ")[2].split(" | ")
        for value in values:
            number, _, spread = value.removesuffix(")").partition(" (")
            wanted = ("", "") if value == "not printed" else (number, spread)
            assert any(wanted == cell if spread else wanted[0] == cell[0] for cell in printed), value
        if "|" in line.rpartition(": ")[0]:
            assert line.rpartition(": ")[0].count("|") == len(values) - 1, "one value for each setting"


@pytest.mark.parametrize("preset", PRESETS)
def test_every_command_in_a_header_composes(preset):
    assert commands(preset)
    for arguments in commands(preset):
        assert arguments[0] == f"experiment={preset}"
        given = [argument.partition("=") for argument in arguments if argument != "-m"]
        several = {key for key, _, values in given if "," in values and not values.startswith("[")}
        assert ("-m" in arguments) == bool(several)
        run = compose([f"{k}={v.rpartition(',')[2] if k in several else v}" for k, _, v in given])
        assert run.scale.name == "paper"


@pytest.mark.parametrize("sweep", SWEEPS)
def test_every_command_of_a_sweep_composes_and_its_count_is_right(sweep):
    text = (conf_dir() / "sweep" / f"{sweep}.yaml").read_text(encoding="utf-8")
    assert commands(sweep, "sweep")
    for arguments in commands(sweep, "sweep"):
        assert arguments[0] == f"sweep={sweep}"
        compose(arguments)
    axes = yaml.safe_load(text)["hydra"]["sweeper"]["params"].values()
    jobs = math.prod(len(str(values).split(",")) for values in axes)
    assert re.search(rf"\b{jobs} runs\b", text), f"it says another number than {jobs}"


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_composes_and_says_what_the_text_has_instead(recipe):
    (arguments,) = commands(recipe, "recipe")
    given = [word.replace("=N", "=56000") for word in arguments]
    assert "On top of an experiment" in (conf_dir() / "recipe" / f"{recipe}.yaml").read_text(encoding="utf-8")
    assert any(word.startswith("experiment=") for word in given)
    ours, theirs = compose([w for w in given if "recipe=" not in w]), compose(given)
    said = {}
    path = []
    for line in (conf_dir() / "recipe" / f"{recipe}.yaml").read_text(encoding="utf-8").splitlines():
        if not (setting := re.match(r"( *)([\w]+):", line)):
            continue
        path = [*path[: len(setting[1]) // 2], setting[2]]
        if text := re.search(r"\btext: ([^(]+?)(?: \(.*)?$", line):
            said[".".join(path)] = yaml.safe_load(text[1])
    assert said
    for key, value in said.items():
        before, after = (dict(flattened(to_dict(run)))[key] for run in (ours, theirs))
        assert before == value, f"{key}: the text of the comment"
        assert after != before, f"{key}: a recipe holds what differs"


def test_every_preset_with_another_recipe_names_it():
    for preset in PRESETS:
        named = re.findall(r"recipe=(\w+)\.", " ".join(header(preset)))
        assert set(named) <= set(RECIPES)
        assert bool(named) == preset.startswith("li2022_")
        for recipe in named:
            counted = ["data.num_examples=56000"] if recipe == "li2022_dart" else []
            compose([f"experiment={preset}", f"recipe={recipe}", *counted])
