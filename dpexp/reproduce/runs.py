"""The table of committed training records: one row per run, scales never mixed."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

COLUMNS = (
    "task", "scale", "model", "trainable", "clip", "target ε", "ε rdp", "ε pld", "δ", "σ", "B", "steps", "lr",
    "accuracy", "seed", "trials", "sampling", "hardware", "data", "record",
)  # fmt: skip
REQUIRED = ("task", "scale", "data", "privacy", "metrics", "git", "versions", "command", "details")


def rows(folder: Path) -> list[dict[str, str]]:
    """One row per record in ``folder``, sorted; every value as it is printed.

    Raises:
        ValueError: a record without provenance, or whose code was in no commit.
    """
    found = []
    for path in sorted(folder.glob("*.json")):
        summary = json.loads(path.read_text(encoding="utf-8"))
        missing = [key for key in REQUIRED if key not in summary]
        if missing or summary["git"]["commit"] is None or summary["git"]["dirty"]:
            reason = f"lacks {', '.join(missing)}" if missing else "its code was in no commit"
            raise ValueError(f"{path.name} can't be shown: {reason}")
        found.append(_row(summary, path.name))
    keys = ("task", "scale", "model", "trainable", "target ε", "clip", "lr", "seed")
    return sorted(found, key=lambda row: tuple(row[key] for key in keys))


def _row(summary: dict[str, Any], name: str) -> dict[str, str]:
    config, privacy = summary["details"]["config"], summary["privacy"]
    epsilon = privacy["epsilon"]
    return {
        "task": summary["task"],
        "scale": summary["scale"],
        "model": summary["model"],
        "trainable": config["model"]["trainable"],
        "clip": summary["clip"],
        "target ε": _number(config["privacy"]["epsilon"], ".4g"),
        "ε rdp": _number(epsilon["rdp"], ".3f"),
        "ε pld": _number(epsilon["pld"], ".3f"),
        "δ": _number(privacy["delta"], ".3g"),
        "σ": _number(privacy["noise_multiplier"], ".4f"),
        "B": _number(config["optim"]["batch_size"], "g"),
        "steps": _number(privacy["steps"], "d") if privacy["steps"] else "",
        "lr": _number(config["optim"]["lr"], "g"),
        "accuracy": _number(100 * summary["metrics"]["accuracy"], ".2f"),
        "seed": str(summary["seed"]),
        "trials": str(privacy.get("trials", "")),
        "sampling": str(privacy["sampling"]),
        "hardware": summary["performance"]["device"],
        "data": f"{summary['data']['name']} ({summary['data']['rows']['train']} train)",
        "record": f"results/runs/{name}",
    }


def _number(value: float | int | None, form: str) -> str:
    return "" if value is None else format(value, form)


def as_markdown(table: list[dict[str, str]]) -> str:
    """A table per task and scale."""
    parts = [
        "# Training runs\n\nMade by `make tables` from the records in `results/runs`. Accuracy in percent on the public dev set "
        "after the last step; one row is one run with one seed. *trials*: configurations tried for this task and model before "
        "this one was chosen; ε excludes them.\n"
    ]
    for task, scale in dict.fromkeys((row["task"], row["scale"]) for row in table):
        shown = [c for c in COLUMNS if c not in ("task", "scale")]
        parts.append(f"## {task}, scale={scale}\n")
        lines = ["| " + " | ".join(shown) + " |", "|" + " --- |" * len(shown)]
        lines += [
            "| " + " | ".join(row[c] for c in shown) + " |"
            for row in table
            if (row["task"], row["scale"]) == (task, scale)
        ]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def as_csv(table: list[dict[str, str]]) -> str:
    """All rows."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return out.getvalue()


def main(folder: Path, records: Path) -> None:
    """Write ``runs.md`` and ``runs.csv`` into ``folder``."""
    table = rows(records)
    (folder / "runs.md").write_text(as_markdown(table), encoding="utf-8")
    (folder / "runs.csv").write_text(as_csv(table), encoding="utf-8")
