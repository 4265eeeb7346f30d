"""The queue runs what has no record, once, and goes on after an interruption or a failure."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dpexp.errors import UserError
from scripts.run_queue import read

SCRIPT = Path(__file__).parent.parent / "scripts" / "run_queue.py"
DEMO = "python -m dpexp.train task=sst2 scale=demo clip=nonprivate privacy=none optim.epochs=null"


def _queue(folder: Path, lines: str, *more: str) -> subprocess.CompletedProcess[str]:
    (folder / "list.txt").write_text(lines, encoding="utf-8")
    words = [
        sys.executable,
        str(SCRIPT),
        str(folder / "list.txt"),
        "--results",
        str(folder / "results"),
        *more,
    ]
    words += ["--", f"runtime.runs_dir={folder / 'runs'}"]
    return subprocess.run(
        words, capture_output=True, text=True, check=False, env=os.environ | {"COLUMNS": "160"}
    )


def test_a_mistake_is_told_with_its_line_before_anything_runs():
    with pytest.raises(UserError, match=r"line 2: .*write python -m dpexp\.train"):
        read("# a comment\nrm -r results\n")
    with pytest.raises(UserError, match=r"line 1: .*optim\.stepz"):
        read(f"{DEMO} optim.stepz=3")


def test_each_seed_is_a_job():
    jobs = read(f"{DEMO} optim.steps=2 seed=3,5 -m # twice\n", ("runtime=cpu",))
    assert [job.run.seed for job in jobs] == [3, 5]
    assert all(job.overrides[-2:] == ("runtime=cpu", f"seed={job.run.seed}") for job in jobs)
    assert jobs[0].examples == 2 * jobs[0].run.optim.batch_size


def test_what_failed_is_named_the_rest_runs_and_nothing_runs_twice(tmp_path: Path):
    broken = f"{DEMO} optim.steps=1 data.source=files"  # names no files
    done = _queue(tmp_path, f"{broken}\n{DEMO} optim.steps=2 seed=0,1 -m\n")
    assert done.returncode == 1, done.stderr
    assert "1 failed, 2 done" in done.stdout
    finished = [
        folder.parent / "summary.json" for folder in (tmp_path / "runs").glob("sst2/*/seed[01]/model")
    ]
    times = [path.stat().st_mtime_ns for path in finished]
    assert len(times) == 2
    again = _queue(tmp_path, f"{DEMO} optim.steps=2 seed=0,1 -m\n")
    assert again.returncode == 0
    assert "2 done" in again.stdout
    assert times == [path.stat().st_mtime_ns for path in finished]


def test_a_job_in_a_copy_of_the_queue_leaves_what_one_of_its_own_leaves(tmp_path: Path):
    broken = f"{DEMO} optim.steps=1 data.source=files"
    done = _queue(tmp_path, f"{broken}\n{DEMO} optim.steps=2 seed=0,1 -m\n", "--fork")
    assert done.returncode == 1, done.stderr
    assert "1 failed, 2 done" in done.stdout
    assert "error: " in done.stderr
    files = (tmp_path / "runs").glob("sst2/*/seed[01]/summary.json")
    summaries = [json.loads(path.read_text(encoding="utf-8")) for path in files]
    commands = {summary["command"] for summary in summaries if summary["status"] == "finished"}
    assert commands == {
        f"{DEMO} optim.steps=2 runtime.runs_dir={tmp_path / 'runs'} seed={seed}" for seed in (0, 1)
    }


def test_a_kept_record_counts_as_done(tmp_path: Path):
    (job,) = read(f"{DEMO} optim.steps=2")
    summary = {"status": "finished", "metrics": {"accuracy": 0.5}, "wall_s": 1.0}
    kept = tmp_path / "results" / "runs"
    kept.mkdir(parents=True)
    assert job.summary(tmp_path / "results") is None
    (kept / f"sst2-x-{job.folder.parent.name}-seed0.json").write_text(json.dumps(summary), encoding="utf-8")
    assert job.summary(tmp_path / "results") == summary


def test_told_to_stop_it_stops_its_job_cleanly(tmp_path: Path):
    (tmp_path / "list.txt").write_text(f"{DEMO} optim.steps=100000\n", encoding="utf-8")
    words = [
        sys.executable,
        str(SCRIPT),
        str(tmp_path / "list.txt"),
        "--",
        f"runtime.runs_dir={tmp_path / 'runs'}",
    ]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        log: list[Path] = []
        for _ in range(600):
            if log := list(tmp_path.glob("runs/sst2/*/seed0/metrics.jsonl")):
                break
            time.sleep(0.2)
        assert log, "the job has not begun"
        process.send_signal(signal.SIGTERM)
        shown, _ = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "can be resumed" in shown
    assert "1 begun" in shown
