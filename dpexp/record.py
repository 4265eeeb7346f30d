"""What a run writes about itself: where it ran, on which code, what it released; the summary with its fixed keys."""

import contextlib
import hashlib
import json
import os
import platform
import resource
import shlex
import subprocess
import sys
import traceback
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dpexp import native
from dpexp.durable import finite, read_json, write_atomic, write_json
from dpexp.errors import UserError
from dpexp.statement import ACCOUNTANTS, COUNTED_WITHOUT_NOISE

if TYPE_CHECKING:
    from dpexp.config import RunConfig
    from dpexp.tasks.base import Task

LIBRARIES = (
    "torch",
    "transformers",
    "peft",
    "dp-accounting",
    "prv-accountant",
    "opacus",
    "numpy",
    "hydra-core",
)
SUMMARY_KEYS = (
    *("task", "model", "clip", "engine", "scale", "data", "privacy", "metrics", "performance"),
    *("seed", "versions", "git", "command", "wall_s", "status"),
)
# What depends on how many private rows were drawn, and how long they are: withheld by a strict release.
TIMES = ("time_s", "examples_per_s", "step_s", "peak_memory_mib")
TUNED_BY_DATA = ("physical_batch_size", "choices")

_PACKAGE = Path(__file__).resolve().parent
_CODE = ("dpexp/", "conf/", "scripts/")  # any file below may change what a run does
_IMPORTABLE = (".py", ".pyc", ".so", ".pyd")  # anywhere: from the top folder, modules are found first


def git_state() -> dict[str, Any]:
    """`{"commit": str | None, "dirty": bool | None}` of the code that runs.

    Dirty: a tracked file differs, or there is an untracked one that could change what the code does. Nothing below `results/`
    can: it is what runs leave, so that the second run of a tree is as clean as the first, whose record was kept. Ignored files
    don't count.

    A copy without `.git` is told by its caller through the environment: DPEXP_COMMIT, and DPEXP_DIRTY=1 where files
    differ from it.
    """
    if commit := os.environ.get("DPEXP_COMMIT"):
        return {
            "commit": commit,
            "dirty": os.environ.get("DPEXP_DIRTY", "0").lower() not in {"", "0", "false", "no"},
        }
    commit = _git("rev-parse", "HEAD")
    top = _git("rev-parse", "--show-toplevel")
    if not commit or not top or _PACKAGE.parent != Path(top).resolve():
        return {"commit": None, "dirty": None}  # installed elsewhere: the repository around it is not ours
    code = ("--", ":(top)", ":(top,exclude)results")
    changed = _git("status", "--porcelain", "--untracked-files=no", *code)
    others = _git("ls-files", "--others", "--exclude-standard", "--full-name", "-z", *code)
    if changed is None or others is None:
        return {"commit": commit, "dirty": None}
    return {"commit": commit, "dirty": bool(changed) or any(map(_is_code, others.split("\0")))}


def _is_code(path: str) -> bool:
    """Could an untracked file with this path from the top of the repository change what the code does?"""
    return path.startswith(_CODE) or path.endswith(_IMPORTABLE)


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(_PACKAGE), *arguments], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def code_hash() -> str:
    """16 hex digits of the sources of the package: changes with every edit, with and without git."""
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        digest.update(f"{path.relative_to(_PACKAGE)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def versions() -> dict[str, str]:
    """Python and the libraries that a result can depend on."""
    found = {"python": platform.python_version()}
    for name in ("dpexp", *LIBRARIES):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def hardware(device: torch.device) -> dict[str, Any]:
    """The machine, in the words of a record."""
    facts: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.system(),
        "kernels": native.backend(),
    }
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
    return facts


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def device_name(device: torch.device) -> str:
    """One string for the performance block: the GPU's name, or the processor's and the number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}: {_cpu_name()}, {torch.get_num_threads()} threads"


def command_line() -> str:
    """The command to type for this run again."""
    module = getattr(sys.modules.get("__main__"), "__spec__", None)
    program = f"python -m {module.name}" if module is not None else f"python {sys.argv[0]}"
    return " ".join([program, *map(shlex.quote, sys.argv[1:])])


def peak_memory_mib(device: torch.device) -> float:
    """High-water mark of this process: allocated GPU memory, or resident memory on a CPU. In MiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10  # bytes there, KiB elsewhere


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
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line)
            except (ValueError, KeyError, TypeError):
                continue  # torn by a crash
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
    """`summary.json`: the fixed keys first, in their order, then `details` (provenance and what else is of use)."""
    data = task.data
    if withheld(run):
        performance = performance | dict.fromkeys(name for name in TIMES if name in performance)
        details = details | dict.fromkeys(name for name in TUNED_BY_DATA if name in details)
    return {
        "task": run.task.name,
        "model": run.model.name,
        "clip": run.clip.name,
        "engine": run.engine.name if run.clip.private else "none",
        "scale": run.scale.name,
        "data": {
            "source": data.source,
            "name": data.name,
            "rows": data.rows,
            "sha256": data_hashes(run, task),
        },
        "privacy": privacy,
        "metrics": metrics,
        "performance": performance,
        "seed": run.seed,
        "versions": versions(),
        "git": git_state(),
        "command": command_line(),
        "wall_s": None if withheld(run) else round(wall_s, 3),
        "status": status,
        "details": details | {"data_notes": data_notes(run, task)},
    }


def withheld(run: "RunConfig") -> bool:
    """Whether what follows from private rows without noise stays out of the record, times and sizes included."""
    return run.privacy.release == "strict" and run.clip.private


def data_notes(run: "RunConfig", task: "Task") -> list[str]:
    """What the task says about its data; with a strict release, without what it counted on private data."""
    strict = run.privacy.release == "strict"
    return [note for note in task.data.notes if not (strict and COUNTED_WITHOUT_NOISE in note)]


def data_hashes(run: "RunConfig", task: "Task") -> dict[str, str | None]:
    """Split -> hash; with a strict release of a private run, None for the training file, of which dev may be a part.

    Without noise: who knows all rows but one tests guesses at that one with it.
    """
    hashes = task.data.sha256
    if not withheld(run):
        return dict(hashes)
    return {split: None if value == hashes.get("train") else value for split, value in hashes.items()}


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
    (folder / "summary.json").unlink(missing_ok=True)  # of an earlier attempt
    try:
        yield
    except Exception as error:
        with contextlib.suppress(OSError):  # a full disk is the error then
            write_json(folder / "summary.json", _failed(run, folder, error))
        raise


def _failed(run: "RunConfig", folder: Path, error: Exception) -> dict[str, Any]:
    ledger = folder / "ledger.jsonl"
    charged = len(ledger.read_text(encoding="utf-8").splitlines()) if ledger.exists() else 0
    keys = ("delta", "accountant", "noise_multiplier", "sigma_new", "sigma_b", "sample_rate")
    note = f"the run failed; its {charged} steps are paid for, and the ledger in its folder holds them"
    return {
        "task": run.task.name,
        "model": run.model.name,
        "clip": run.clip.name,
        "engine": run.engine.name if run.clip.private else "none",
        "scale": run.scale.name,
        "data": dict.fromkeys(("source", "name", "rows", "sha256")),
        "privacy": {
            "epsilon": dict.fromkeys(ACCOUNTANTS),
            **dict.fromkeys(keys),
            "steps": charged,
            "sampling": run.privacy.sampling,
            "released": ["gradients"] if charged else [],
            "notes": [note] if charged else [],
        },
        "metrics": {},
        "performance": dict.fromkeys(("examples_per_s", "step_s", "peak_memory_mib", "device")),
        "seed": run.seed,
        "versions": versions(),
        "git": git_state(),
        "command": command_line(),
        "wall_s": None,
        "status": "failed",
        "details": {
            "error": f"{type(error).__name__}, and its words are withheld: privacy.release=strict"
            if withheld(run)
            else f"{type(error).__name__}: {error}",
            "traceback": [] if withheld(run) else traceback.format_exception(error),
        },
    }


def code_changes(summary: dict[str, Any]) -> str | None:
    """One sentence where the code is not what it was when this run finished, else None."""
    then, now = summary.get("git", {}), git_state()
    if summary.get("details", {}).get("code") == code_hash():
        return None
    if then.get("commit") != now["commit"]:
        return f"the code has changed since: it ran at commit {_short(then)}, this is {_short(now)}"
    return f"the code has changed since, at the same commit ({_short(now)})"


def _short(git: dict[str, Any]) -> str:
    commit = (git.get("commit") or "unknown")[:10]
    return f"{commit} with local changes" if git.get("dirty") else commit
