"""Li et al., Figure 9: the whole grid of learning rate and batch size."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from dpexp.errors import UserError
from dpexp.reproduce import catalogue, tables
from dpexp.reproduce.catalogue import Context
from dpexp.reproduce.documents import Document
from tests.reproduce.samples import run_of, summary, write

SAID = {"epsilon": 3.0, "delta": "half_over_n", "clip_norm": 0.1, "epochs": 2.0}


def _runs(sign: float = 1.0, seeds: tuple[int, ...] = (0, 1, 2), **settings: object) -> list[dict]:
    said = {**SAID, **settings}
    runs = [
        summary("flat", seed, 0.6 + sign * 0.02 * math.log2(size / 16) + gain + 1e-3 * seed, lr=lr, batch_size=size, **said)
        for lr, gain in ((1.25e-4, 0.0), (5e-4, 0.04), (1e-3, 0.03)) for size in (16, 128, 2048) for seed in seeds
    ]  # fmt: skip
    for one in runs:
        one["details"]["config"]["peft"]["name"] = "head"
        one["details"]["config"]["model"]["frozen_features"] = True
    return runs


def _figure(results: Path, *runs: dict) -> Document:
    write(results / "runs", *runs)
    return Context(results).document("figure-li-9")


@pytest.mark.parametrize(("sign", "word"), [(1.0, "supports"), (-1.0, "contradicts")])
def test_a_grid_is_a_heat_map_and_a_verdict(sign: float, word: str, tmp_path: Path):
    document = _figure(tmp_path, *_runs(sign))
    assert document.status == "small 9 cells in miniature on sst2"
    assert f"scale=small, in miniature on sst2: {word}" in document.paragraphs[1]
    (block,) = [section for section in document.sections if section.rows]
    assert (block.heading, len(block.rows)) == ("scale=small, in miniature on sst2", 9)
    assert "ours, scale=small, in miniature on sst2" in document.svg
    assert document.svg.count("B = 128") == 1
    for row in block.rows:  # each number is in the picture
        assert f"{float(row['ours'].split()[0]):.4g}" in document.svg
    assert any("selection on the test data" in words for words in block.paragraphs)


@pytest.mark.parametrize("other", [{"epochs": 4.0}, {"epsilon": 8.0}, {"clip_norm": 1.0}, {"scale": "demo"}])
def test_runs_of_other_settings_are_no_part_of_it(other: dict, tmp_path: Path):
    """A claim about a fixed number of epochs takes no run of another length."""
    assert _figure(tmp_path, *_runs(**other)).status == "not run"


def test_without_runs_every_block_has_a_command_that_makes_what_it_looks_for(tmp_path: Path):
    document = _figure(tmp_path)
    assert (document.status, document.svg) == ("not run", "")
    assert len(document.sections) == 4
    for section in document.sections:
        (asked,) = [
            a for a in tables.claims()["li2022", "figure9"].miniature if a["heading"] == section.heading
        ]
        run = run_of(section.paragraphs[-1].split("`")[1])
        for name, wanted in asked["where"].items():
            group, _, field = name.partition(".")
            made = getattr(getattr(run, group), field) if field else run.clip.name
            assert made == wanted, (section.heading, name)
        assert (run.task.name, run.scale.name, run.optim.steps) == (asked["task"], section.scale, None)


def test_it_is_a_target_of_its_own():
    assert catalogue.resolve(["figure-li-9"]) == ["figure-li-9"]
    with pytest.raises(UserError, match=r"no report is called runn; did you mean run\b"):
        catalogue.resolve(["runn"])
