"""Collect the records of many machines into one results/runs.

Usage: python scripts/gather.py FOLDER [...]

Each folder holds runs (`runtime.runs_dir`), as a machine has left them or as they were copied from it. A finished run is kept as
`scripts/keep_record.py` keeps it; one that is not finished, or whose code is in no commit, is named and left. Two machines that
finished the same run (settings and seed) are told apart by their numbers: where these differ, or are not those of a record
that is kept already, nothing of that run is kept.
"""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import keep_record
from keep_record import read_json


def finished(folder: Path) -> dict[str, list[Path]]:
    """Runs below a folder that are finished and kept in a commit, by what they are; the others are named on standard output."""
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.rglob("summary.json")):
        summary = read_json(path)
        git = summary.get("git") or {}
        if summary.get("status", "finished") != "finished":
            print(f"left: {path} is {summary['status']}")
        elif "signature" not in summary.get("details", ()):
            print(f"left: {path} is damaged, or no record of a run")
        elif git.get("commit") is None or git.get("dirty"):
            print(f"left: {path}: its code is in no commit")
        else:
            found.setdefault(name_of(summary), []).append(path)
    return found


def name_of(summary: dict[str, Any]) -> str:
    """What makes two runs the same: task, settings and seed."""
    return f"{summary['task']} {summary['details']['signature']} seed {summary['seed']}"


def results_of(path: Path) -> Any:
    """What two machines must agree on before either is believed: metrics and epsilon."""
    summary = json.loads(path.read_text(encoding="utf-8"))
    return summary["metrics"], summary["privacy"]["epsilon"]


def gather(folders: list[Path]) -> tuple[list[Path], list[str]]:
    """Keep every run that is finished, once.

    Returns:
        the records; the names of the runs that have several results.
    """
    runs: dict[str, list[Path]] = {}
    for folder in folders:
        for name, paths in finished(folder).items():
            runs.setdefault(name, []).extend(paths)
    for path in (keep_record.RESULTS / "runs").glob("*.json"):
        if (name := name_of(json.loads(path.read_text(encoding="utf-8")))) in runs:
            runs[name].append(path)
    odd = [name for name, paths in runs.items() if any(results_of(p) != results_of(paths[0]) for p in paths)]
    return [keep_record.keep(paths[0]) for name, paths in runs.items() if name not in odd], odd


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    kept, odd = gather([Path(name) for name in sys.argv[1:]])
    for record in kept:
        print(record)
    for name in odd:
        print(f"error: {name} has several results; nothing of it was kept", file=sys.stderr)
    sys.exit(1 if odd else 0)
