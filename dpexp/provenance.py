"""Where something ran and on which code: the commit, a hash of the sources, libraries, hardware, the command."""

import ast
import contextlib
import hashlib
import os
import platform
import resource
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from dpexp import native

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
_PACKAGE = Path(__file__).resolve().parent
# any file below may change what a run does
_CODE = ("dpexp/", "conf/", "scripts/")
# anywhere: from the top folder, modules are found first
_IMPORTABLE = (".py", ".pyc", ".so", ".pyd")


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
        # installed elsewhere: the repository around it is not ours
        return {"commit": None, "dirty": None}
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
            ["git", "--no-optional-locks", "-C", str(_PACKAGE), *arguments],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def code_hash(folder: Path = _PACKAGE) -> str:
    """16 hex digits of the sources below a folder, the package: changes with every edit, with and without git."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def own_code(files: Iterable[Path]) -> str:
    """16 hex digits of what a person has written: changes with every edit, but for comments and layout."""
    digests = []
    for file in files:
        source = file.read_bytes()
        # what is no Python, as it lies there
        with contextlib.suppress(SyntaxError, ValueError):
            source = ast.dump(ast.parse(source)).encode()
        digests.append(hashlib.sha256(source).digest())
    return hashlib.sha256(b"".join(sorted(digests))).hexdigest()[:16]


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


# the command of the job that a launcher runs in this process
_jobs: list[str] = []


def name_job(program: str, overrides: Sequence[str]) -> None:
    """Say what this process runs now, where its own command line may be that of a launcher."""
    _jobs[:] = [" ".join([f"python -m {program}", *map(shlex.quote, overrides)])]


def command_line() -> str:
    """The command to type for this run again."""
    module = getattr(sys.modules.get("__main__"), "__spec__", None)
    if _jobs and module is not None and not module.name.startswith("dpexp"):
        return _jobs[0]
    program = f"python -m {module.name}" if module is not None else f"python {sys.argv[0]}"
    return " ".join([program, *map(shlex.quote, sys.argv[1:])])


def peak_memory_mib(device: torch.device) -> float:
    """High-water mark of this process: allocated GPU memory, or resident memory on a CPU. In MiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # bytes there, KiB elsewhere
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def code_changes(summary: dict[str, Any]) -> str | None:
    """One sentence where the code is not what it was when this run finished, else None."""
    then, now = summary.get("git", {}), git_state()
    if summary.get("details", {}).get("code") == code_hash():
        return None
    if then.get("commit") != now["commit"]:
        return f"the code has changed since: it ran at commit {_short(then)}, this is {_short(now)}"
    if now["commit"] is None:
        # a wheel knows of none
        return "the code has changed since"
    return f"the code has changed since, at the same commit ({_short(now)})"


def _short(git: dict[str, Any]) -> str:
    commit = (git.get("commit") or "unknown")[:10]
    return f"{commit} with local changes" if git.get("dirty") else commit
