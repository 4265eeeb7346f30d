"""The table of committed training records: one row per run, scales never mixed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dpexp.reproduce import records
from dpexp.reproduce.documents import Document, Section
from dpexp.reproduce.documents import as_csv as write_csv

COLUMNS = (
    "task", "scale", "model", "trainable", "clip", "target ε", "ε rdp", "ε pld", "δ", "σ", "B", "steps", "lr",
    "accuracy", "other metrics", "seed", "trials", "sampling", "hardware", "data", "record",
)  # fmt: skip
_INTRODUCTION = (
    "Made by `make tables` from the records in `results/runs`. Metrics on the public dev set, accuracy in percent, "
    "after the last step; one row is one run with one seed. *trials*: configurations tried for this task and model before "
    "this one was chosen; ε excludes them."
)


def rows(folder: Path, *, show_unclean: bool = False) -> list[dict[str, str]]:
    """One row per record in ``folder``, sorted; every value as it is printed.

    Raises:
        UserError: a record without provenance, or whose code was in no commit, unless ``show_unclean`` has it marked.
    """
    found = []
    for record in records.load(folder, show_unclean=show_unclean):
        row = _row(record.summary, record.name)
        if record.problems:
            row["record"] += f" (UNCLEAN: {'; '.join(record.problems)})"
        found.append(row)
    keys = ("task", "scale", "model", "trainable", "target ε", "clip", "lr", "seed")
    return sorted(found, key=lambda row: tuple(row[key] for key in keys))


def _row(summary: dict[str, Any], name: str) -> dict[str, str]:
    config, privacy, metrics = summary["details"]["config"], summary["privacy"], summary["metrics"]
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
        "accuracy": _number(
            100 * accuracy if (accuracy := metrics.get("accuracy")) is not None else None, ".2f"
        ),
        "other metrics": ", ".join(
            f"{name} {value:.4g}" for name, value in sorted(metrics.items()) if name != "accuracy"
        ),
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
    parts = [f"# Training runs\n\n{_INTRODUCTION}\n"]
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
    return write_csv(COLUMNS, table)


def document(folder: Path, *, show_unclean: bool = False) -> Document:
    """The page of all records."""
    table = rows(folder, show_unclean=show_unclean)
    shown = tuple(c for c in COLUMNS if c not in ("task", "scale"))
    sections = tuple(
        Section(
            f"{task}, scale={scale}",
            (),
            shown,
            [row for row in table if (row["task"], row["scale"]) == (task, scale)],
            scale,
        )
        for task, scale in dict.fromkeys((row["task"], row["scale"]) for row in table)
    )
    return Document(
        "runs",
        "Training runs",
        "",
        (_INTRODUCTION,),
        sections,
        COLUMNS,
        markdown=as_markdown(table),
        status="measured",
    )


def main(folder: Path, records_folder: Path) -> None:
    """Write ``runs.md`` and ``runs.csv`` into ``folder``."""
    page = document(records_folder)
    (folder / "runs.md").write_text(page.as_markdown(), encoding="utf-8")
    (folder / "runs.csv").write_text(page.as_csv(), encoding="utf-8")
