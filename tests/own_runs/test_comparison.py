"""Runs of one's own are compared by configuration, over their seeds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from scipy import stats

from dpexp.own_runs.comparison import HEAD, by_configuration, comparison
from dpexp.report import main as report

FLAT, LAYER = [0.81, 0.83, 0.82], [0.84, 0.86, 0.88]


def _settings(clip: str, seed: int, lr: float = 0.1) -> dict[str, Any]:
    # a choice of clipping brings settings of its own
    own = {"name": clip, "groups": clip, "adaptive": clip != "flat"}
    return {"seed": seed, "clip": own, "optim": {"lr": lr}, "runtime": {"threads": seed}, "trials": seed + 1}


def _summary(accuracy: float, task: str = "sst2") -> dict[str, Any]:
    privacy = {"accountant": "rdp", "epsilon": {"rdp": 2.9876, "pld": 2.5}}
    return {"task": task, "status": "finished", "metrics": {"accuracy": accuracy}, "privacy": privacy}


def test_runs_that_differ_by_seed_and_machine_alone_are_one_configuration() -> None:
    made = [_settings(clip, seed) for seed in range(3) for clip in ("flat", "layer")]
    assert by_configuration(made) == {"clip.name=flat": [0, 2, 4], "clip.name=layer": [1, 3, 5]}
    assert by_configuration(made[::2]) == {"all": [0, 1, 2]}
    finer = [_settings("flat", 0), _settings("layer", 0), _settings("layer", 0, lr=0.2)]
    assert list(by_configuration(finer)) == [
        "clip.name=flat, optim.lr=0.1", "clip.name=layer, optim.lr=0.1", "clip.name=layer, optim.lr=0.2",
    ]  # fmt: skip


def test_differences_are_those_of_welch() -> None:
    settings = [_settings(clip, seed) for clip in ("flat", "layer") for seed in range(3)]
    rows = [
        dict(zip(HEAD, row, strict=True)) for row in comparison([_summary(a) for a in FLAT + LAYER], settings)
    ]
    assert [row["mean ± std"] for row in rows] == ["0.82 ± 0.01", "0.86 ± 0.02"]
    assert {row["ε"] for row in rows} == {"2.99"}
    assert rows[0]["minus the first"] == rows[0]["p"] == ""
    expected = stats.ttest_ind(LAYER, FLAT, equal_var=False)
    low, high = expected.confidence_interval()
    assert rows[1]["minus the first"] == "+0.04"
    assert rows[1]["95% of it"] == f"[{low:.4g}, {high:.4g}]"
    assert float(rows[1]["p"]) == float(rows[1]["p (Holm)"]) == pytest.approx(expected.pvalue, rel=0.05)


def test_of_one_seed_each_there_is_a_difference_and_no_test() -> None:
    rows = comparison([_summary(0.8), _summary(0.9)], [_settings("flat", 0), _settings("layer", 0)])
    assert dict(zip(HEAD, rows[1], strict=True)) | {"ε": ""} == dict(
        zip(HEAD, ("accuracy", "clip.name=layer", "1", "", "0.9", "", "+0.1", "", "", ""), strict=True)
    )


def test_runs_of_different_tasks_are_not_compared() -> None:
    both = [_summary(0.8), _summary(0.9, task="mnist")]
    assert comparison(both, [_settings("flat", 0), _settings("layer", 0)]) == []


def test_the_page_has_them(tmp_path: Path) -> None:
    folders = []
    for number, accuracy in enumerate(FLAT + LAYER):
        folders.append(folder := tmp_path / "sst2" / f"run{number}")
        folder.mkdir(parents=True)
        settings = _settings("flat" if number < 3 else "layer", number % 3)
        (folder / "config.yaml").write_text(yaml.safe_dump(settings))
        (folder / "summary.json").write_text(json.dumps(_summary(accuracy)))
    assert report(["run", *map(str, folders), "--out", str(tmp_path / "page")]) == 0
    page = (tmp_path / "page" / "index.html").read_text()
    assert "<h2>By configuration</h2>" in page
    assert "<td>clip.name=layer</td><td>3</td><td>2.99</td><td>0.86 ± 0.02</td>" in page


def _folder(parent: Path, name: str, accuracy: float, **settings: Any) -> Path:
    folder = parent / "sst2" / name
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    (folder / "summary.json").write_text(json.dumps(_summary(accuracy)))
    return folder


def test_one_run_is_counted_once(tmp_path: Path) -> None:
    first, second = (_folder(tmp_path, f"run{seed}", 0.8 + seed / 50, seed=seed) for seed in (0, 1))
    (link := tmp_path / "link").symlink_to(first)
    again = _folder(tmp_path, "again", 0.8, seed=0, runtime={"threads": 2})
    out = tmp_path / "page"
    assert report(["run", *map(str, (first, first, link, second, again)), "--out", str(out)]) == 0
    page = (out / "index.html").read_text()
    assert page.count("<th>status</th><td>finished</td><td>finished</td><td>finished</td></tr>") == 1
    assert "<td>all</td><td>2</td><td>2.99</td><td>0.81 ± 0.014</td>" in page
    assert "a run before it has the same configuration and seed: " in page
    assert "sst2/again." in page


def test_another_precision_is_another_configuration() -> None:
    made = [{"seed": 0, "runtime": {"precision": name, "device": name}} for name in ("fp32", "bf16")]
    assert list(by_configuration(made)) == ["runtime.precision=fp32", "runtime.precision=bf16"]
