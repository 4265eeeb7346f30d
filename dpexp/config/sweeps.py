"""The jobs of a multirun, one line each, the failed ones too.

Hydra runs every job of a grid whatever becomes of the others, in this process (its own launcher), in several (joblib) or on
other machines (submitit), and says nothing of how each one ended. So each process appends a line to ``jobs.jsonl`` in the
folder of the multirun when a job begins and another one when it has ended, and the process that started it all prints them as
a table when the last has ended. A job that was killed leaves its first line: it was tried, and may have spent.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from dpexp.durable import finite, json_lines
from dpexp.errors import UserError, first_line
from dpexp.privacy.shown import upwards

FILE = "jobs.jsonl"
BEGUN = "begun"
# what launchers raise when a process that ran jobs is gone: joblib, concurrent.futures, submitit
KILLED = ("TerminatedWorkerError", "BrokenProcessPool", "UncompletedJobError", "FailedJobError")

# the folder of the multirun that this process started
_started: list[Path] = []


class Result(dict[str, float]):
    """Metrics, as a number too: Optuna asks each job for ``float(result)``, which is the task's own metric."""

    def __init__(self, metrics: Mapping[str, float], metric: str, epsilon: float | None = None) -> None:
        super().__init__(metrics)
        self.metric, self.epsilon = metric, epsilon

    def __float__(self) -> float:
        return float(self[self.metric] if self.metric in self else next(iter(self.values())))


class Jobs(Callback):
    """Hydra's callback, named in ``conf/hydra/default.yaml``."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Remember where the jobs will leave their lines."""
        _started.append(Path(config.hydra.sweep.dir))

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Let the tasks of a job on a cluster know each other; called in each of them."""
        # not above: they take torch, which a question about settings need not wait for
        from dpexp.parallel import told_by_submitit
        from dpexp.provenance import name_job

        told_by_submitit()
        overrides = list(config.hydra.overrides.task)
        name_job(f"dpexp.{config.hydra.job.config_name}", overrides)
        if _tells(config):
            _append(config, overrides, {"status": BEGUN, "error": None, "metrics": None})

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """Append the line of a job of a multirun; called in the process that ran it."""
        if not _tells(config):
            return
        failed = job_return.status == JobStatus.FAILED
        # reading `return_value` of a failed job would raise
        value = job_return._return_value
        if failed and (left := _exit_behind(value)) is not None:
            raise left
        ended = {
            "status": "failed" if failed else "finished",
            "error": _words_of(value, withheld=_is_strict(config)) if failed else None,
            "metrics": dict(value) if isinstance(value, dict) else None,
            "epsilon": getattr(value, "epsilon", None),
        }
        _append(config, list(job_return.overrides or ()), ended)


def _tells(config: DictConfig) -> bool:
    """Tell whether this is a job of a multirun; of one of several processes, whether this is rank 0, whose the lines are."""
    return config.hydra.job.get("num") is not None and os.environ.get("RANK", "0") == "0"


def _append(config: DictConfig, overrides: list[str], line: dict[str, Any]) -> None:
    folder = Path(config.hydra.sweep.dir)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / FILE).open("a", encoding="utf-8") as file:
        # one write: lines of several processes don't mix
        text = json.dumps(
            finite({"job": config.hydra.job.num, "overrides": overrides} | line), allow_nan=False
        )
        file.write(text + "\n")


def _exit_behind(error: BaseException | None) -> SystemExit | None:
    """Find the exit that an error came of.

    At the end of its time submitit queues a job again and exits from within a signal's handler, wherever the program is. A
    library that was writing, or another process that waits, then fails, and only the exit keeps submitit from noting an end.
    """
    while error is not None and not isinstance(error, SystemExit):
        error = error.__cause__ or error.__context__
    return error


def in_multirun() -> bool:
    """Tell whether what runs here now is a job of a multirun."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def expanded(override: str) -> list[str]:
    """List the values that ``-m`` gives to a setting, as an override each: of ``a,b``, ``choice``, ``range``, ``glob``.

    What Hydra cannot read, or leaves to a search (``interval``), stays as it is: who composes it is told.
    """
    try:
        (parsed,) = OverridesParser.create().parse_overrides([override])
        if parsed.is_discrete_sweep():
            return [f"{parsed.get_key_element()}={value}" for value in parsed.sweep_string_iterator()]
    except HydraException:
        pass
    return [override]


def _is_strict(config: DictConfig) -> bool:
    """Tell whether nothing that an error may say of private rows is kept; see `dpexp.record.withheld`."""
    strict = OmegaConf.select(config, "privacy.release") == "strict"
    return bool(strict and OmegaConf.select(config, "clip.private", default=True))


def _words_of(error: object, *, withheld: bool) -> str:
    if withheld:
        kind = type(getattr(error, "__cause__", None) or error).__name__
        return f"{kind}, and its words are withheld: privacy.release=strict"
    return first_line(error)


def killed(error: Exception) -> UserError | None:
    """Say what it means for a person that a process with jobs is gone; None of any other error."""
    if type(error).__name__ not in KILLED:
        return None
    return UserError(
        f"a process that ran jobs was killed ({type(error).__name__}), by the system when memory ran out, say. What it had begun "
        "may have spent some of its budget: run the same command again, which goes on with it, begins what had not, and trains "
        "nothing twice"
    )


def jobs(folder: Path) -> list[dict[str, Any]]:
    """Read the last line of each job in ``folder``, in the order of the grid.

    A job is its settings: several grids may share a folder, each with numbers of its own.
    """
    last = {tuple(line["overrides"]): line for line in json_lines(folder / FILE)}
    return sorted(last.values(), key=lambda line: line["job"])


def report(program: str = "train", console: Console | None = None) -> None:
    """Print the table of the multirun that this process started; nothing after a single run.

    Args:
        program: which the jobs are of. Those of ``train`` and ``pate`` spend, and ``train`` can be told of trials.
        console: where to; standard output by default.
    """
    if not _started or not (rows := jobs(folder := _started.pop())):
        return
    varied = _varied(rows)
    names = list(dict.fromkeys(name for row in rows for name in row["metrics"] or ()))
    counts = [sum(row["status"] == status for row in rows) for status in ("failed", BEGUN)]
    title = f"{len(rows)} jobs, {counts[0]} failed"
    table = Table(title=f"{title}, {counts[1]} without an end" if counts[1] else title)
    spent = any(row.get("epsilon") is not None for row in rows)
    for column in ("job", *varied, "status", *(["ε"] if spent else []), *names):
        table.add_column(column, overflow="fold")
    for row in rows:
        given = dict(override.partition("=")[::2] for override in row["overrides"])
        metrics = row["metrics"] or {}
        table.add_row(
            str(row["job"]),
            *(given.get(key, "") for key in varied),
            f"failed: {row['error']}" if row["status"] == "failed" else row["status"],
            *(["" if row.get("epsilon") is None else upwards(row["epsilon"])] if spent else []),
            *(_number(name, metrics.get(name)) for name in names),
        )
    console = console or Console(highlight=False)
    console.print(table)
    console.print(f"jobs: {folder / FILE}", markup=False)
    # a dry run spends nothing
    rows = [row for row in rows if "runtime.dry_run=true" not in map(str.lower, row["overrides"])]
    if len(rows) < 2 or program not in ("train", "pate"):
        return
    chosen = (
        f" If you choose one of them by its result, you have tried {len(rows)}, and any before: repeat its command with "
        f"trials={len(rows)} or more, and its record says so."
    )
    together = " What they cost together: `dpexp report run` and their folders."
    said = (chosen if program == "train" else "") + together
    console.print(f"epsilon is that of each job alone.{said}", markup=False)


def _number(name: str, value: float | None) -> str:
    if value is None:
        return ""
    return upwards(value, ".4g") if name.startswith("ε ") else f"{value:.4g}"


def _varied(rows: list[dict[str, Any]]) -> list[str]:
    """List the settings that differ between jobs, in the order of the command."""
    keys = dict.fromkeys(override.partition("=")[0] for row in rows for override in row["overrides"])
    return [
        key
        for key in keys
        if len({next((o for o in row["overrides"] if o.partition("=")[0] == key), "") for row in rows}) > 1
    ]
