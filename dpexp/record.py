"""What a run writes about itself: where it ran, on which code, what it released; the summary with its fixed keys."""

import contextlib
import hashlib
import json
import math
import os
import platform
import resource
import shlex
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dpexp import native
from dpexp.durable import write_atomic, write_json

if TYPE_CHECKING:
    from dpexp.config import RunConfig
    from dpexp.privacy.individual import Budgets
    from dpexp.privacy.plan import Plan
    from dpexp.tasks.base import Task

ACCOUNTANTS = ("rdp", "gdp", "prv", "pld")
NEIGHBOURS = "add or remove one example"
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

    Lines that hold anything computed from the private data without noise carry ``"not_private": true``; with a strict
    release they are not written at all, nor handed to the tracker.
    """

    def __init__(self, path: Path, strict: bool, tracker: Any = None):
        self.path, self.strict, self.tracker = path, strict, tracker

    def resume_at(self, step: int) -> None:
        """Drop the lines of steps after `step`: they are run again."""
        if not self.path.exists():
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
        if self.strict and not released:
            return
        line = {"step": step} | ({} if released else {"not_private": True}) | values
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if self.tracker is not None:
            self.tracker.log(
                values if released else {f"not_private/{name}": v for name, v in values.items()}, step
            )


def privacy_block(
    run: "RunConfig",
    plan: "Plan | None",
    spent: dict[str, float | None],
    num_groups: int,
    charged: int,
    by_budget: Sequence[dict[str, float | None]] = (),
) -> dict[str, Any]:
    """The summary's privacy block.

    Args:
        run: the configuration.
        plan: None for a non-private run.
        spent: ε under every accountant, computed from the ledger; empty for a non-private run.
        num_groups: K.
        charged: steps in the ledger, those paid twice after a change of the runtime included.
        by_budget: ε of each group of examples, where they have budgets of their own.
    """
    if plan is None:
        return {
            "epsilon": dict.fromkeys(ACCOUNTANTS),
            **dict.fromkeys(
                ("delta", "accountant", "noise_multiplier", "sigma_new", "sigma_b", "sample_rate")
            ),
            "steps": 0,
            "sampling": run.privacy.sampling,
            "released": ["model without any guarantee"],
            "neighbouring": None,
            "notes": ["trained without privacy: nothing is guaranteed about the training data"],
            "trials": run.trials,
        }
    adaptive = plan.quantile_budget > 0
    return {
        "epsilon": {name: _finite(spent.get(name)) for name in ACCOUNTANTS},
        "delta": plan.delta,
        "accountant": plan.accountant,
        "noise_multiplier": plan.noise_multiplier,
        "sigma_new": plan.sigma_new(0),
        "sigma_b": plan.sigma_b(0, num_groups) if adaptive else None,
        "sample_rate": plan.sample_rate,
        "steps": charged,
        "sampling": plan.sampling,
        "released": ["gradients", "counts"] if adaptive else ["gradients"],
        "neighbouring": NEIGHBOURS,
        "notes": privacy_notes(run, plan, spent, charged),
        "trials": run.trials,
        **({"individual": individual_block(plan.budgets, by_budget)} if plan.budgets is not None else {}),
    }


def individual_block(budgets: "Budgets", by_budget: Sequence[dict[str, float | None]]) -> dict[str, Any]:
    """What each group of examples was promised and has spent."""
    rows = zip(budgets.epsilons, budgets.sizes, budgets.rates, budgets.scales, by_budget, strict=True)
    return {
        "method": budgets.method,
        "membership": budgets.membership,
        "groups": [
            {
                "target": target,
                "examples": size,
                "sample_rate": rate,
                "clip_scale": scale,
                "epsilon": {name: _finite(spent.get(name)) for name in ACCOUNTANTS},
            }
            for target, size, rate, scale, spent in rows
        ],
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None  # JSON has no infinity


def privacy_notes(run: "RunConfig", plan: "Plan", spent: dict[str, float | None], charged: int) -> list[str]:
    """What a reader of ε must know, in sentences."""
    notes = [f"the unit of privacy is one example: neighbouring data sets differ in one ({NEIGHBOURS})"]
    if plan.sampling == "poisson":
        notes.append("batches are drawn by Poisson sampling, as the accountants assume")
    notes += plan.caveats()
    if unbounded := [name for name, value in spent.items() if value is not None and not math.isfinite(value)]:
        notes.append(
            f"epsilon has no finite value under {', '.join(unbounded)}: there is no guarantee to speak of"
        )
    if run.privacy.noise_seed is not None:
        notes.append(
            "sampling and noise were drawn from a fixed seed: the guarantee holds only while that seed is secret, and it "
            "stands in this record"
        )
    if charged > plan.steps:
        notes.append(
            f"{charged - plan.steps} steps were charged twice: they were run again after an interruption with another "
            "runtime, and with fresh noise"
        )
    notes.append(_tuned(run.trials))
    notes.append("the dev set, on which the metrics are computed, is taken to be public, and so is N")
    if run.privacy.release != "strict":
        notes.append(
            'the lines marked "not_private" in metrics.jsonl and the SHA-256 of the training data are outside the guarantee: '
            "keep them to yourself"
        )
    return notes


def _tuned(trials: int) -> str:
    tuned = "no other trial was declared" if trials == 1 else f"chosen from {trials} configurations"
    return f"{tuned}; epsilon excludes the tuning"


def declare_trials(summary: dict[str, Any], trials: int) -> bool:
    """Let a finished run say that it was chosen from more configurations than it knew of. Returns whether it is news.

    How many were tried is known when the last one has ended, and the best of them is finished then. Fewer is no news: what
    was tried stays tried.
    """
    privacy = summary["privacy"]
    before = int(privacy.get("trials") or 1)
    if trials <= before:
        return False
    privacy["trials"] = trials
    privacy["notes"] = [
        _tuned(trials) if note.endswith("epsilon excludes the tuning") else note for note in privacy["notes"]
    ]
    return True


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
        "wall_s": round(wall_s, 3),
        "status": status,
        "details": details | {"data_notes": data_notes(run, task)},
    }


def data_notes(run: "RunConfig", task: "Task") -> list[str]:
    """What the task says about its data; with a strict release, without what it counted on private data.

    Tasks say "without noise on private data" in such a note.
    """
    strict = run.privacy.release == "strict"
    return [note for note in task.data.notes if not (strict and "without noise on private data" in note)]


def data_hashes(run: "RunConfig", task: "Task") -> dict[str, str | None]:
    """Split -> hash; with a strict release of a private run, None for the training file, of which dev may be a part.

    Without noise: who knows all rows but one tests guesses at that one with it.
    """
    hashes = task.data.sha256
    if run.privacy.release != "strict" or not run.clip.private:
        return dict(hashes)
    return {split: None if value == hashes.get("train") else value for split, value in hashes.items()}


def finished_summary(folder: Path) -> dict[str, Any] | None:
    """The summary of a finished run, or None."""
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return summary if summary.get("status") == "finished" else None


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
            "error": f"{type(error).__name__}: {error}",
            "traceback": traceback.format_exception(error),
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
