"""What a run writes about itself: lines of metrics while it runs, and the summary with its fixed keys.

`dpexp.provenance` says where it ran, and on which code."""

import contextlib
import json
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpexp.durable import finite, read_json, write_atomic, write_json
from dpexp.errors import UserError
from dpexp.provenance import command_line, git_state, versions
from dpexp.statement import ACCOUNTANTS, COUNTED_WITHOUT_NOISE

if TYPE_CHECKING:
    from dpexp.schemas import RunConfig
    from dpexp.tasks.base import Task

SUMMARY_KEYS = (
    *("task", "model", "clip", "engine", "scale", "data", "privacy", "metrics", "performance"),
    *("seed", "versions", "git", "command", "wall_s", "status"),
)
# What depends on how many private rows were drawn, and how long they are: withheld by a strict release.
TIMES = ("time_s", "examples_per_s", "step_s", "peak_memory_mib")
# of a run's performance all but this, whatever a runtime adds: bytes sent, memory of each stage
KNOWN = ("device",)
TUNED_BY_DATA = ("physical_batch_size", "choices")


class Metrics:
    """`metrics.jsonl`, one line per event, and what of it may be shown to whom.

    Lines that hold anything computed from the private data without noise carry ``"not_private": true``. With a strict
    release they are not written at all, nor how long anything took.

    Args:
        path: the file.
        strict: see above.
        tracker: who else is told, or None.
        tell_all: hand the tracker what is not private too, under names that begin with ``not_private/``.
        writes: False for a process that another one writes for.
    """

    def __init__(
        self, path: Path, strict: bool, tracker: Any = None, tell_all: bool = False, writes: bool = True
    ):
        self.path, self.strict, self.tracker, self.tell_all = path, strict, tracker, tell_all
        self.writes = writes

    def resume_at(self, step: int) -> None:
        """Drop the lines of steps after `step`: they are run again."""
        if not self.writes or not self.path.exists():
            return
        kept = []
        for line in self.path.read_bytes().splitlines():
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line.decode())
            except (ValueError, KeyError, TypeError):
                # torn by a crash
                continue
        write_atomic(self.path, "".join(line + "\n" for line in kept))

    def write(self, step: int, values: dict[str, Any], *, released: bool = True) -> None:
        """Append one line.

        Args:
            step: steps done.
            values: JSON values.
            released: False where the values depend on the private data in a way that no noise covers.
        """
        if not self.writes:
            return
        if self.strict:
            if not released:
                return
            values = {name: value for name, value in values.items() if name not in TIMES}
        line = {"step": step} | ({} if released else {"not_private": True}) | values
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(finite(line), allow_nan=False) + "\n")
        if self.tracker is not None and (released or self.tell_all):
            self.tracker.log(
                values if released else {f"not_private/{name}": v for name, v in values.items()}, step
            )


def summarise(
    run: "RunConfig",
    task: "Task",
    *,
    privacy: dict[str, Any],
    metrics: dict[str, float],
    performance: dict[str, Any],
    wall_s: float,
    status: str,
    details: dict[str, Any],
) -> dict[str, Any]:
    """`summary.json`: the fixed keys first, in their order, then `details` (provenance and what else is of use).

    To what was measured it adds `epoch_s`, the seconds that N examples (of users, N users) take at the measured speed.
    """
    data = task.data
    if speed := performance.get("examples_per_s"):
        performance = performance | {"epoch_s": task.num_examples / speed}
    if withheld(run):
        performance = {name: value if name in KNOWN else None for name, value in performance.items()}
        details = details | dict.fromkeys(name for name in TUNED_BY_DATA if name in details)
    return _summary(
        run,
        data={
            "source": data.source,
            "name": data.name,
            "rows": data.rows,
            "sha256": data_hashes(run, task),
        },
        privacy=privacy,
        metrics=metrics,
        performance=performance,
        wall_s=None if withheld(run) else round(wall_s, 3),
        status=status,
        details=details | {"data_notes": data_notes(task, strict=run.privacy.release == "strict")},
    )


def _summary(
    run: "RunConfig", *, wall_s: float | None, status: str, details: Any, **found: Any
) -> dict[str, Any]:
    """`SUMMARY_KEYS` in their order, `details` behind them; ``found``: data, privacy, metrics, performance."""
    return {
        "task": run.task.name,
        "model": run.model.name,
        "clip": run.clip.name,
        "engine": run.engine.name if run.clip.private else "none",
        "scale": run.scale.name,
        **found,
        "seed": run.seed,
        "versions": versions(),
        "git": git_state(),
        "command": command_line(),
        "wall_s": wall_s,
        "status": status,
        "details": details,
    }


def withheld(run: "RunConfig") -> bool:
    """Whether what follows from private rows without noise stays out of the record, times and sizes included."""
    return run.privacy.release == "strict" and run.clip.private


def data_notes(task: "Task", *, strict: bool) -> list[str]:
    """What the task says about its data; with a strict release, without what it counted on private data."""
    return [note for note in task.data.notes if not (strict and COUNTED_WITHOUT_NOISE in note)]


def data_hashes(run: "RunConfig", task: "Task") -> dict[str, str | None]:
    """Split -> hash; with a strict release of a private run, None for the training file, of which dev may be a part, and for its
    users.

    Without noise: who knows all rows but one tests guesses at that one with it.
    """
    return private_hashes_withheld(task) if withheld(run) else dict(task.data.sha256)


def private_hashes_withheld(task: "Task") -> dict[str, str | None]:
    """Split -> hash; None for the training file, of which dev may be a part, and for its users."""
    hashes = task.data.sha256
    private = {hashes.get("train"), hashes.get("users")}
    return {split: None if value in private else value for split, value in hashes.items()}


def finished_summary(folder: Path) -> dict[str, Any] | None:
    """The summary of a finished run, or None where there is none, or that of a failed one.

    Raises:
        UserError: there is one, and it is damaged. It is not written anew: its key may be gone, and with it the run.
    """
    file = folder / "summary.json"
    summary = read_json(file)
    if not file.exists() or summary.get("status") == "failed":
        return None
    parts = ("data", "privacy", "metrics", "performance", "git", "details")
    if all(key in summary for key in SUMMARY_KEYS) and all(
        isinstance(summary.get(part), dict) for part in parts
    ):
        return summary
    raise UserError(
        f"{file} is damaged: this is no whole record. Put a copy back, or move it away to go on from the last checkpoint (a "
        "finished run has deleted its key and cannot: change the seed)"
    )


@contextlib.contextmanager
def failures(run: "RunConfig", folder: Path) -> Iterator[None]:
    """A run that fails leaves a `summary.json` too, with status "failed": the same command tries it again.

    Its ε is null although steps were taken: the notes say where the ledger is. The error goes on to the caller.
    """
    # of an earlier attempt
    (folder / "summary.json").unlink(missing_ok=True)
    try:
        yield
    except Exception as error:
        # a full disk is the error then
        with contextlib.suppress(OSError):
            write_json(folder / "summary.json", _failed(run, folder, error))
        raise


def _failed(run: "RunConfig", folder: Path, error: Exception) -> dict[str, Any]:
    ledger = folder / "ledger.jsonl"
    charged = len(ledger.read_bytes().splitlines()) if ledger.exists() else 0
    keys = ("delta", "accountant", "noise_multiplier", "sigma_new", "sigma_b", "sample_rate")
    note = f"the run failed; its {charged} steps are paid for, and the ledger in its folder holds them"
    return _summary(
        run,
        data=dict.fromkeys(("source", "name", "rows", "sha256")),
        privacy={
            "epsilon": dict.fromkeys(ACCOUNTANTS),
            **dict.fromkeys(keys),
            "steps": charged,
            "sampling": run.privacy.sampling,
            "released": ["gradients"] if charged else [],
            "notes": [note] if charged else [],
        },
        metrics={},
        performance=dict.fromkeys(("examples_per_s", "step_s", "peak_memory_mib", "device")),
        wall_s=None,
        status="failed",
        details={
            "error": f"{type(error).__name__}, and its words are withheld: privacy.release=strict"
            if withheld(run)
            else f"{type(error).__name__}: {error}",
            "traceback": [] if withheld(run) else traceback.format_exception(error),
            # words of an error may name a row
            "not_private": [] if withheld(run) else ["error", "traceback"],
        },
    )
