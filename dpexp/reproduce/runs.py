"""The table of committed training records: one row per run, scales never mixed."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

from dpexp.reproduce.documents import Document, Section, grouped, number, page
from dpexp.reproduce.records import Record

COLUMNS = (
    "task", "scale", "model", "trainable", "clip", "target ε", "ε rdp", "ε pld", "δ", "σ", "B", "steps", "lr",
    "accuracy", "other metrics", "seed", "trials", "sampling", "hardware", "data", "record",
)  # fmt: skip
_SORTED = ("task", "scale", "model", "trainable", "target ε", "clip", "lr", "seed")


def document(records: Sequence[Record]) -> Document:
    """The page of all records, with a block for each task and scale."""
    every = sorted(map(_row, records), key=itemgetter(*_SORTED))
    blocks = grouped(every, itemgetter("task", "scale"))
    sections = (
        Section(f"{task}, scale={scale}", (), COLUMNS[2:], rows, scale)
        for (task, scale), rows in blocks.items()
    )
    return page("runs", sections, COLUMNS, otherwise="measured")


def _row(record: Record) -> dict[str, str]:
    summary, config = record.summary, record.summary["details"]["config"]
    privacy, metrics, epsilon = summary["privacy"], summary["metrics"], summary["privacy"]["epsilon"]
    accuracy = metrics.get("accuracy")
    others = (f"{name} {value:.4g}" for name, value in sorted(metrics.items()) if name != "accuracy")
    values = (
        summary["task"], summary["scale"], summary["model"], config["model"]["trainable"], summary["clip"],
        number(config["privacy"]["epsilon"], ".4g"), number(epsilon["rdp"], ".3f"), number(epsilon["pld"], ".3f"),
        number(privacy["delta"], ".3g"), number(privacy["noise_multiplier"], ".4f"),
        number(config["optim"]["batch_size"], "g"), number(privacy["steps"] or None, "d"), number(config["optim"]["lr"], "g"),
        number(None if accuracy is None else 100 * accuracy, ".2f"), ", ".join(others), str(summary["seed"]),
        str(privacy.get("trials", "")), str(privacy["sampling"]), summary["performance"]["device"],
        f"{summary['data']['name']} ({summary['data']['rows']['train']} train)", f"results/runs/{record.name}",
    )  # fmt: skip
    return dict(zip(COLUMNS, values, strict=True))
