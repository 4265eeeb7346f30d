"""Whoever changes the runtime on resuming begins a new run, and is told of the one that is left behind."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from dpexp import siblings
from dpexp.config import compose, run_folder, to_dict
from dpexp.privacy.shown import upwards
from dpexp.statement import trials_of
from dpexp.training.planning import build_plan
from tests.commands import called

ROOT = Path(__file__).parent.parent
COMMAND = ["task=mnist", "scale=demo", "clip=flat", "optim.epochs=null", "optim.steps=10"]


def _begun(runs_dir: Path, *changes: str, charges: int = 4) -> Path:
    run = compose([*COMMAND, f"runtime.runs_dir={runs_dir}", *changes])
    folder = run_folder(run)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(to_dict(run)))
    (folder / "ledger.jsonl").write_text("{}\n" * charges)
    return folder


def test_the_run_that_is_left_behind_is_named_with_its_epsilon(tmp_path: Path) -> None:
    other = _begun(tmp_path, "runtime.physical_batch_size=16")
    run = compose([*COMMAND, f"runtime.runs_dir={tmp_path}"])
    plan = build_plan(run, 1000, 10)
    assert plan is not None
    said = siblings.sentence(run, to_dict(run), run_folder(run), plan)
    assert said is not None
    assert str(other) in said
    assert f"ε = {upwards(plan.epsilon(4, 'rdp'))}" in said
    assert "runtime.physical_batch_size=16" in said


@pytest.mark.parametrize("change", ["privacy.epsilon=2", "optim.lr=0.123"])
def test_a_run_of_other_settings_is_another_run(tmp_path: Path, change: str) -> None:
    _begun(tmp_path, change)
    run = compose([*COMMAND, f"runtime.runs_dir={tmp_path}"])
    assert siblings.unfinished(to_dict(run), run_folder(run)) is None


def test_a_finished_run_is_not_left_behind(tmp_path: Path) -> None:
    folder = _begun(tmp_path, "runtime.physical_batch_size=16")
    (folder / "summary.json").write_text('{"status": "finished"}')
    run = compose([*COMMAND, f"runtime.runs_dir={tmp_path}"])
    assert siblings.unfinished(to_dict(run), run_folder(run)) is None


@pytest.mark.parametrize("settings", [b"", b"[1]", b"seed: {0", b"\xff\xfe"])
def test_settings_that_are_damaged_are_those_of_no_run(tmp_path: Path, settings: bytes) -> None:
    folder = _begun(tmp_path, "runtime.physical_batch_size=16")
    (folder / "config.yaml").write_bytes(settings)
    run = compose([*COMMAND, f"runtime.runs_dir={tmp_path}", "trials=3"])
    assert siblings.unfinished(to_dict(run), run_folder(run)) is None
    assert trials_of(run, folder / "config.yaml") == (3, None)


def test_presets_of_one_s_own(tmp_path: Path) -> None:
    """The example of docs/own_data.md, as a person would write it."""
    text = (ROOT / "docs" / "own_data.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```yaml\n(# @package _global_\n.*?)```", text, re.S)
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(example)
    words = ["--config-dir", str(tmp_path), "experiment=mine", "--cfg", "job"]
    done = called("dpexp.train", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    shown = yaml.safe_load(done.stdout)
    assert (shown["task"]["name"], shown["data"]["num_examples"]) == ("text_classification", 12000)
    assert shown["clip"]["name"] == "flat"


def test_other_runs_on_the_same_file_are_counted_where_no_trials_are_declared(tmp_path: Path) -> None:
    """A search by hand, one command after the other: nothing else would ask for trials."""
    own = [
        "task=text_classification",
        "scale=own",
        "data.text=t",
        "data.label=l",
        "data.num_examples=100",
        "task.labels=[a,b]",
    ]
    begun = [
        _begun(tmp_path, *own, f"data.train={file}", f"optim.lr={lr}")
        for file, lr in (("r.csv", 0.1), ("r.csv", 0.2), ("r.csv", 0.3), ("s.csv", 0.1))
    ]
    folder = begun[0]
    (begun[3].parent / "empty").mkdir()
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    (begun[1] / "summary.json").write_text(json.dumps({"details": {"config": settings}}))

    def told(**privacy: object) -> str | None:
        record = {"privacy": {"delta": 1e-3, "trials": 1} | privacy, "details": {"config": settings}}
        return siblings.also_tried(record, folder)

    said = told()
    assert said is not None
    assert "learnt from r.csv: 2." in said
    assert "trials=3" in said
    assert told(trials=3) is told(trials=2, trials_law="geometric") is told(delta=None) is None
    assert "trials=3" in str(told(trials=2))
    assert siblings.also_tried({"privacy": {"delta": 1e-3}, "details": {}}, folder) is None
