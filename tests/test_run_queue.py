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
from scripts.run_queue import rate, read, table
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


def test_each_point_of_a_grid_is_a_job():
    jobs = read(f"{DEMO} optim.steps=2 'optim.lr=choice(0.1,0.2)' 'seed=range(0,2)' -m\n")
    assert [(job.run.optim.lr, job.run.seed) for job in jobs] == [(0.1, 0), (0.1, 1), (0.2, 0), (0.2, 1)]
    assert [job.run.seed for job in read(f"{DEMO} optim.steps=2 seed=3,5 -m", ("seed=7",))] == [7]
    with pytest.raises(UserError, match=r"line 1: .*interval"):
        read(f"{DEMO} 'optim.lr=interval(0,1)' -m")


def test_a_step_is_the_last_whole_line_of_a_log(tmp_path: Path):
    (job,) = read(f"{DEMO} optim.steps=9 runtime.runs_dir={tmp_path}")
    assert job.step() == 0
    job.folder.mkdir(parents=True)
    (job.folder / "metrics.jsonl").write_text('{"step": 3}\n{"step": 4, "lo', encoding="utf-8")
    assert job.step() == 3
    assert "1 begun" in str(table([job], set(), None, tmp_path).title)


def test_a_file_that_nobody_has_counted_takes_unknown_hours(tmp_path: Path):
    uncounted, known = read(
        "python -m dpexp.train task=text_classification scale=own clip=nonprivate privacy=none data.train=rows.csv "
        "data.text=words data.label=kind\n"
        f"{DEMO} optim.steps=2"
    )
    assert uncounted.examples is None
    assert "2 waiting; ? h left" in str(table([uncounted, known], set(), None, tmp_path).title)
    assert rate({uncounted: {"wall_s": 5.0}, known: {"wall_s": 2.0}}, known) == known.examples / 2


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
    job = read(f"{DEMO} optim.steps=2 runtime.runs_dir={tmp_path}")[0]
    job.folder.mkdir(parents=True)
    # what a disk or a copy has cut off is no finished run, and no end of the queue
    (job.folder / "summary.json").write_text('{"status": "fin', encoding="utf-8")
    assert job.summary(tmp_path) is None
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
