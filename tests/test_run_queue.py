"""The queue runs what has no record, once, and goes on after an interruption or a failure."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from dpexp.errors import UserError
from scripts.run_queue import read, table
from tests.commands import called

SCRIPT = Path(__file__).parent.parent / "scripts" / "run_queue.py"
DEMO = (
    "python -m dpexp.train task=sst2 scale=demo clip=nonprivate privacy=none data.num_examples=1000 optim.batch_size=100 "
    "optim.epochs=null"
)


def _queue(
    folder: Path, lines: str, *more: str, before: Callable[[], object] = lambda: None
) -> subprocess.CompletedProcess[str]:
    """The queue in a fork of this process."""
    (folder / "list.txt").write_text(lines, encoding="utf-8")
    words = [str(folder / "list.txt"), "--results", str(folder / "results"), *more]
    words += ["--", f"runtime.runs_dir={folder / 'runs'}"]
    return called(SCRIPT, *words, cwd=folder, before=before)


def test_a_mistake_is_told_with_its_line_before_anything_runs():
    with pytest.raises(UserError, match=r"line 2: .*write python -m dpexp\.train"):
        read("# a comment\nrm -r results\n")
    with pytest.raises(UserError, match=r"line 1: .*optim\.stepz"):
        read(f"{DEMO} optim.stepz=3")


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table whose words stand in one line."""
    monkeypatch.setenv("COLUMNS", "160")


def test_each_seed_is_a_job():
    jobs = read(f"{DEMO} optim.steps=2 seed=3,5 -m # twice\n", ("runtime=cpu",))
    assert [job.run.seed for job in jobs] == [3, 5]
    assert all(job.overrides[-2:] == ("runtime=cpu", f"seed={job.run.seed}") for job in jobs)
    assert jobs[0].examples == 2 * jobs[0].run.optim.batch_size


def test_an_evaluation_without_training_is_a_job():
    (job,) = read(f"{DEMO} optim.steps=0")
    assert job.examples == 0
    assert "1 waiting; ? h left" in str(table([job], set(), None, Path("nowhere")).title)


def test_what_failed_is_named_the_rest_runs_and_nothing_runs_twice(tmp_path: Path):
    """Jobs that are copies of the queue; what they leave is what a process of their own leaves."""
    broken = f"{DEMO} optim.steps=1 data.source=files"  # names no files
    done = _queue(tmp_path, f"{broken}\n{DEMO} optim.steps=2 seed=0,1 -m\n", "--fork")
    assert done.returncode == 1, done.stderr
    assert "1 failed, 2 done" in done.stdout
    assert "error: " in done.stderr
    finished = [
        folder.parent / "summary.json" for folder in (tmp_path / "runs").glob("sst2/*/seed[01]/model")
    ]
    commands = {json.loads(path.read_text(encoding="utf-8"))["command"] for path in finished}
    assert commands == {
        f"{DEMO} optim.steps=2 runtime.runs_dir={tmp_path / 'runs'} seed={seed}" for seed in (0, 1)
    }
    times = [path.stat().st_mtime_ns for path in finished]
    again = _queue(tmp_path, f"{DEMO} optim.steps=2 seed=0,1 -m\n", "--fork")
    assert again.returncode == 0
    assert "2 done" in again.stdout
    assert times == [path.stat().st_mtime_ns for path in finished]


def test_a_kept_record_counts_as_done(tmp_path: Path):
    (job,) = read(f"{DEMO} optim.steps=2")
    # where it was computed is no matter, and its signature is another one there
    (elsewhere,) = read(f"{DEMO} optim.steps=2 runtime.threads=3")
    assert elsewhere.folder != job.folder
    summary = {**elsewhere.as_record.summary, "status": "finished", "metrics": {"accuracy": 0.5}}
    kept = tmp_path / "results" / "runs"
    kept.mkdir(parents=True)
    assert job.summary(tmp_path / "results") is None
    (kept / "cut_off.json").write_text(json.dumps({**summary, "status": "running"}), encoding="utf-8")
    assert job.summary(tmp_path / "results") is None
    (kept / "sst2.json").write_text(json.dumps(summary), encoding="utf-8")
    assert job.summary(tmp_path / "results") == summary
    for other in ("optim.steps=3", "optim.steps=2 seed=1"):
        (another,) = read(f"{DEMO} {other}")
        assert another.summary(tmp_path / "results") is None


def _stopped_while_it_trains(folder: Path) -> None:
    """Patch this process: it gets SIGTERM while it waits for its job, as soon as that has taken a step."""
    wait, told = subprocess.Popen.wait, []

    def stepped() -> bool:
        return any(log.read_text() for log in folder.glob("runs/sst2/*/seed0/metrics.jsonl"))

    def watched(job: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if not told:
            while job.poll() is None and not stepped():
                time.sleep(0.05)
            told.append(job)
            os.kill(os.getpid(), signal.SIGTERM)
        return wait(job, timeout)

    subprocess.Popen.wait = watched  # type: ignore[method-assign]


@pytest.mark.slow
def test_told_to_stop_it_stops_its_job_cleanly(tmp_path: Path):
    """The job is a process of its own."""
    stop = partial(_stopped_while_it_trains, tmp_path)
    done = _queue(tmp_path, f"{DEMO} optim.steps=100000\n", before=stop)
    assert done.returncode == 130, done.stderr
    assert "can be resumed" in done.stdout
    assert "1 begun" in done.stdout
