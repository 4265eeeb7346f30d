"""Run a list of commands one after the other: what has a record is skipped, what was interrupted is resumed.

Usage: python scripts/run_queue.py LIST [--keep] [--to FOLDER] [--fork] [--list] [--only WORD] [-- SETTING=VALUE ...]

A line of LIST is a command as the tables print it, `python -m dpexp.train task=sst2 seed=0,1,2 -m` or `dpexp.audit`; each
point of a grid is a job of its own (a,b and choice(a,b) and range(0,3), as with Hydra's -m). `#` begins a comment. The
settings behind `--` go to every job (runtime=cpu). Ctrl-C, or SIGTERM, stops after the step in progress; the same command
goes on from there. A list is read once: what is added needs a new start. With --fork a job is a copy of this process, which
has imported its libraries already: for hundreds of jobs of a few seconds.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from dpexp.audit import AuditConfig, audit_folder  # noqa: E402
from dpexp.config import RunConfig, compose, run_folder, to_dict  # noqa: E402
from dpexp.config.sweeps import expanded  # noqa: E402
from dpexp.durable import json_lines, read_json  # noqa: E402
from dpexp.errors import UserError  # noqa: E402
from dpexp.provenance import git_state  # noqa: E402
from dpexp.reproduce.records import Record  # noqa: E402
from dpexp.schemas.declared import declared_units  # noqa: E402

PROGRAMS: dict[str, Any] = {"train": (RunConfig, run_folder), "audit": (AuditConfig, audit_folder)}
INTERRUPTED = 130


@dataclass(frozen=True)
class Job:
    """One command with one seed.

    Attributes:
        program: "train" or "audit".
        overrides: without the sweep.
    """

    program: str
    overrides: tuple[str, ...]

    @cached_property
    def run(self) -> Any:
        """The configuration that it names; `UserError` where it is none."""
        return compose(self.overrides, self.program, PROGRAMS[self.program][0])

    @cached_property
    def folder(self) -> Path:
        """Where it writes."""
        return Path(PROGRAMS[self.program][1](self.run))

    @property
    def examples(self) -> float | None:
        """How many it processes: what its time is estimated from. None where the file is counted when it runs."""
        optim = self.run.optim
        if optim.steps is not None:
            return float(optim.steps) * optim.batch_size
        total = declared_units(self.run)
        return None if total is None else float(optim.epochs) * total

    def summary(self, results: Path) -> dict[str, Any] | None:
        """Of the finished run: in its folder, or among the kept records, wherever it was computed."""
        # a damaged one is no finished run, and the job itself says what to do about it
        if (found := read_json(self.folder / "summary.json")).get("status") == "finished":
            return found
        folders = ("audits",) if self.program == "audit" else ("runs", "league", "methods")
        wanted = _science(self.as_record), self.run.seed
        records = (
            _finished(path) for folder in folders for path in sorted((results / folder).glob("*.json"))
        )
        return next((summary for said, summary in records if said == wanted), None)

    @cached_property
    def as_record(self) -> Record:
        """What a record of it says of its settings."""
        run = self.run
        names = {
            "task": run.task.name,
            "model": run.model.name,
            "clip": run.clip.name,
            "scale": run.scale.name,
        }
        return Record("", names | {"seed": run.seed, "details": {"config": to_dict(run)}})

    def step(self) -> int:
        """The last one that its log holds; 0 before it begins."""
        steps = [int(line["step"]) for line in json_lines(self.folder / "metrics.jsonl") if "step" in line]
        return steps[-1] if steps else 0


def _science(record: Record) -> str:
    """Equal for runs that differ in the seed, or in where they are computed, alone."""
    return record.without({"data.sha256"})


@cache
def _finished(path: Path) -> tuple[tuple[str, int] | None, dict[str, Any] | None]:
    """Settings and seed of a record, and what it holds; None of a run that did not finish."""
    record = Record(path.name, json.loads(path.read_text(encoding="utf-8")))
    if record.summary.get("status") != "finished":
        return None, None
    return (_science(record), record.facts["seed"]), record.summary


def read(text: str, more: tuple[str, ...] = ()) -> list[Job]:
    """The jobs of a list, every one composed, so that a mistake is told before the first one runs.

    Args:
        text: of the list.
        more: settings for every job.

    Raises:
        UserError: a line that is no command of `PROGRAMS`, or whose settings are not accepted; it names the line.
    """
    jobs = []
    for number, line in enumerate(text.splitlines(), 1):
        words = [word for word in shlex.split(line, comments=True) if word not in ("-m", "--multirun")]
        if not words:
            continue
        if words[0] != "python" or len(words) < 2 or words[1].removeprefix("dpexp.") not in PROGRAMS:
            raise UserError(f"line {number}: {line.strip()}: write python -m dpexp.train … or dpexp.audit …")
        overrides = [*words[2:], *more]
        # a seed behind -- wins
        seed = [word for word in ["seed=0", *overrides] if word.startswith("seed=")][-1]
        settings = [*(word for word in overrides if not word.startswith("seed=")), seed]
        for alone in product(*map(expanded, settings)):
            job = Job(words[1].removeprefix("dpexp."), alone)
            try:
                _ = job.run
            except UserError as error:
                raise UserError(f"line {number}: {error}") from None
            jobs.append(job)
    return jobs


def rate(done: Mapping[Job, dict[str, Any] | None], like: Job) -> float | None:
    """Examples per second of the finished jobs with this task and model, else of all; None before there is one."""
    timed = [
        (job, job.examples, summary["wall_s"])
        for job, summary in done.items()
        if summary and summary.get("wall_s") and job.examples is not None
    ]
    alike = [one for one in timed if _kind(one[0]) == _kind(like)] or timed
    return sum(count for _, count, _ in alike) / sum(s for *_, s in alike) if alike else None


def _kind(job: Job) -> tuple[str, str, str]:
    return job.run.task.name, job.run.model.name, job.run.model.trainable


def table(jobs: list[Job], failed: set[Job], running: Job | None, results: Path) -> Table:
    """One row a job: what it is, how far it is, what it found; and when all will be done."""
    shown = Table(show_lines=False)
    for name in ("job", "state", "metric", "hours"):
        shown.add_column(name, overflow="fold")
    left: float | None = 0.0
    states = []
    done = {job: job.summary(results) for job in jobs}
    for job, summary in done.items():
        step = job.step()
        if summary is not None:
            states.append("done")
            metric = job.run.task.metric
            found = summary["metrics"].get(metric)
            row = ["done", "" if found is None else f"{metric} {found:.4g}", _hours(summary.get("wall_s"))]
        else:
            speed, total = rate(done, job), job.examples
            rest = None if total is None else max(0.0, total - step * job.run.optim.batch_size)
            eta = rest / speed if speed and rest is not None else None
            left = None if left is None or eta is None else left + eta
            state = (
                "failed" if job in failed else "running" if job == running else "begun" if step else "waiting"
            )
            states.append(state)
            row = [f"{state}, step {step}" if step else state, "", f"{_hours(eta)} left"]
        shown.add_row(" ".join(job.overrides), *row)
    counted = ", ".join(f"{states.count(s)} {s}" for s in dict.fromkeys(states))
    shown.title = f"{len(jobs)} jobs: {counted}; {_hours(left)} h left"
    return shown


def _hours(seconds: float | None) -> str:
    return "?" if seconds is None else f"{seconds / 3600:.2f}"


def execute(job: Job, fork: bool = False) -> int:
    """Run one job to its end, or stop it cleanly when this process is told to stop. Returns the exit status."""
    if fork:
        return execute_in_copy(job)
    words = [sys.executable, "-m", f"dpexp.{job.program}", *job.overrides]
    # A session of its own: Ctrl-C at the terminal reaches this process alone, which then asks the job to stop, once.
    with subprocess.Popen(words, cwd=ROOT, start_new_session=True) as child:
        try:
            return child.wait()
        except KeyboardInterrupt:
            child.send_signal(signal.SIGTERM)
            child.wait()
            return INTERRUPTED


def execute_in_copy(job: Job) -> int:
    """The same in a fork of this process. It has a session of its own too."""
    sys.stdout.flush()
    sys.stderr.flush()
    if not (child := os.fork()):
        os._exit(_inside(job))
    try:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    except KeyboardInterrupt:
        os.kill(child, signal.SIGTERM)
        os.waitpid(child, 0)
        return INTERRUPTED


def _inside(job: Job) -> int:
    """What ``python -m dpexp.train …`` does, with the same command in its record. Returns its exit status."""
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    name = f"dpexp.{job.program}"
    spec = importlib.util.find_spec(name)
    assert spec is not None
    sys.modules["__main__"].__spec__ = spec
    sys.argv = [str(spec.origin), *job.overrides]
    try:
        # it is composed already
        importlib.import_module(name).main.__wrapped__(job.run)
        return 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def main(arguments: list[str] | None = None) -> int:
    """Run what has no record. Returns the exit status: 1 where a job failed, 130 where it was stopped."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, metavar="LIST")
    parser.add_argument("--list", action="store_true", help="show how far it is, and run nothing")
    parser.add_argument("--keep", action="store_true", help="copy finished runs to results (keep_record.py)")
    parser.add_argument(
        "--to", default="", help="with --keep: the folder of results, where it is not its own"
    )
    parser.add_argument("--fork", action="store_true", help="jobs are copies of this process")
    parser.add_argument("--only", default="", help="jobs whose command holds this word")
    parser.add_argument("--results", type=Path, default=ROOT / "results", help="where kept records lie")
    words = sys.argv[1:] if arguments is None else arguments
    split = words.index("--") if "--" in words else len(words)
    given = parser.parse_args(words[:split])
    console = Console(soft_wrap=False)
    try:
        jobs = read(given.file.read_text(encoding="utf-8"), tuple(words[split + 1 :]))
    except (OSError, UserError) as error:
        print(f"error: {given.file}: {error}", file=sys.stderr)
        return 2
    jobs = [job for job in jobs if given.only in " ".join(job.overrides)]
    failed: set[Job] = set()
    if given.keep and git_state()["dirty"] is not False:
        print("error: the code is in no commit, and its records can't be kept: commit first", file=sys.stderr)
        return 2
    if not given.list:
        # stops like Ctrl-C
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    if not given.list:
        console.print(table(jobs, failed, None, given.results))
    for number, job in enumerate([] if given.list else jobs, 1):
        if job.summary(given.results) is not None:
            continue
        console.print(f"{number} of {len(jobs)}: {' '.join(job.overrides)}", markup=False)
        status = execute(job, given.fork)
        if status == INTERRUPTED:
            console.print(table(jobs, failed, None, given.results))
            return INTERRUPTED
        if status:
            failed.add(job)
        elif given.keep:
            keep = [
                sys.executable,
                str(ROOT / "scripts" / "keep_record.py"),
                *(["--to", given.to] if given.to else []),
                str(job.folder / "summary.json"),
            ]
            subprocess.run(keep, cwd=ROOT, check=False)
    console.print(table(jobs, failed, None, given.results))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
