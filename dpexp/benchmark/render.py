"""What a benchmark writes: CSV and JSON for machines, tables for the terminal, a plot. All of it from the record alone."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from dpexp.benchmark.methods import NONPRIVATE
from dpexp.durable import write_atomic, write_json
from dpexp.reproduce.documents import number

# a relative error above this is no rounding
WRONG = {"fp32": 1e-3, "bf16": 1e-1}
_NOT_IN_CSV = ("choices",)
# Okabe and Ito's colours, told apart by readers with any colour vision; then again with hatching
_COLOURS = ("#0072B2", "#56B4E9", "#009E73", "#D55E00", "#E69F00", "#CC79A7", "#F0E442", "#000000")

# heading, field of a row, and form
_SHOWN = (
    ("fastest s", "fastest_s", ".4g"), ("median s", "median_s", ".4g"), ("examples/s", "examples_per_s", ".4g"),
    ("× time", "time_ratio", ".2f"), ("median ×", "median_ratio", ".2f"), ("MiB", "peak_mib", ".0f"),
    ("× memory", "memory_ratio", ".2f"), ("× steady", "steady_ratio", ".2f"), ("× tensors", "tensors_ratio", ".2f"),
)  # fmt: skip
_SEARCHED = (
    ("max batch", "max_batch", "d"), ("examples/s at it", "max_batch_examples_per_s", ".4g"),
    ("× at it", "max_batch_throughput_ratio", ".2f"),
)  # fmt: skip

Rows = Sequence[dict[str, Any]]


def write(record: dict[str, Any], out: Path) -> list[Path]:
    """`out`.csv, `out`.json and `out`.svg. Returns what was written."""
    paths = [out.with_name(out.name + ending) for ending in (".csv", ".json", ".svg")]
    write_atomic(paths[0], as_csv(record["rows"]))
    write_json(paths[1], record)
    write_atomic(paths[2], plot(record))
    return paths


def as_csv(rows: Rows) -> str:
    """One line per method and workload; numbers with six digits."""
    columns = [key for key in rows[0] if key not in _NOT_IN_CSV] if rows else []
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow([_plain(row[column]) for column in columns])
    return text.getvalue()


def _plain(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else "" if value is None else value


def workload_table(rows: Rows, precision: str) -> Table:
    """All methods of one workload."""
    searched = any(row["max_batch"] is not None for row in rows)
    shown = (*_SHOWN, *(_SEARCHED if searched else ()), ("error", "error", ".1e"))
    title = f"{rows[0]['workload']}, batch {rows[0]['batch_size']}"
    table = Table("method", *(heading for heading, _, _ in shown), "note", title=title)
    for row in rows:
        # a record from before there was a column has none
        numbers = (number(row.get(name), form) for _, name, form in shown)
        table.add_row(row["method"], *numbers, note(row, precision))
    return table


def overview(record: dict[str, Any]) -> Table:
    """Methods × workloads: time / memory relative to non-private."""
    rows = {(row["workload"], row["method"]): row for row in record["rows"]}
    workloads = list(dict.fromkeys(workload for workload, _ in rows))
    table = Table(
        "time / memory",
        *workloads,
        title="relative to training without privacy (fastest steps, added memory)",
    )
    for method in dict.fromkeys(method for _, method in rows):
        cells = [_cell(rows.get((w, method)), method, record["settings"]["precision"]) for w in workloads]
        table.add_row(method, *cells)
    return table


def note(row: dict[str, Any], precision: str) -> str:
    """Why there is no number, or why not to believe it."""
    if row["status"] != "ok":
        return row["reason"]
    said = [row["max_batch_reason"]] if row["max_batch_reason"] else []
    if wrong(row, precision):
        said.insert(0, "wrong gradient")
    return "; ".join(said)


def wrong(row: dict[str, Any], precision: str) -> bool:
    """Is the clipped sum off by more than rounding? (NaN is.)"""
    return row["error"] is not None and not row["error"] <= WRONG[precision]


def _cell(row: dict[str, Any] | None, method: str, precision: str) -> str:
    if row is None:
        return ""
    if row["status"] != "ok":
        return "not installed" if row["reason"] == "not installed" else "fails"
    if method == NONPRIVATE:
        return f"{row['fastest_s']:.3g} s / {row['peak_mib']:.0f} MiB"
    if row["time_ratio"] is None:
        return f"{row['fastest_s']:.3g} s"
    text = f"{row['time_ratio']:.2f} / {number(row['memory_ratio'], '.2f')}"
    return f"{text} wrong" if wrong(row, precision) else text


def plot(record: dict[str, Any]) -> str:
    """SVG text: throughput and memory relative to non-private, a bar for each method.

    The same record gives the same bytes (with the same matplotlib). A bar that is missing failed; a hollow one is wrong.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows = {(row["workload"], row["method"]): row for row in record["rows"]}
    workloads = list(dict.fromkeys(workload for workload, _ in rows))
    methods = [
        m for m in dict.fromkeys(m for _, m in rows) if any(rows[w, m]["time_ratio"] for w in workloads)
    ]
    methods = [m for m in methods if m != NONPRIVATE]
    panels = (
        ("throughput / non-private", lambda row: 1 / row["time_ratio"]),
        ("added memory / non-private", lambda row: row["memory_ratio"]),
    )
    settings = record["settings"]
    hatches = (None, "//")
    looks = [(_COLOURS[i % len(_COLOURS)], hatches[i >= len(_COLOURS)]) for i in range(len(methods))]
    with matplotlib.rc_context({"svg.hashsalt": "dpexp", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(max(6.0, 1.2 + 1.3 * len(workloads)), 6.5), layout="constrained")
        axes = figure.subplots(2, 1, sharex=True)
        width = 0.85 / max(1, len(methods))
        for axis, (label, height) in zip(axes, panels, strict=True):
            for i, (method, (colour, hatch)) in enumerate(zip(methods, looks, strict=True)):
                for place, workload in enumerate(workloads):
                    row = rows[workload, method]
                    if row["time_ratio"] is None or row["memory_ratio"] is None:
                        continue
                    value = height(row)
                    if not (math.isfinite(value) and value > 0):
                        continue
                    hollow = wrong(row, settings["precision"])
                    axis.bar(
                        place + (i - (len(methods) - 1) / 2) * width, value, width,
                        facecolor="none" if hollow else colour, edgecolor=colour,
                        hatch=hatch,
                    )  # fmt: skip
            axis.axhline(1.0, color="0.4", linewidth=0.8)
            axis.set_ylabel(label)
            axis.spines[["top", "right"]].set_visible(False)
        axes[1].set_yscale("log", base=2)
        axes[1].yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes[1].set_xticks(range(len(workloads)), workloads)
        handles = [Patch(color=colour, hatch=hatch) for colour, hatch in looks]
        if handles:
            axes[0].legend(
                handles, methods, ncols=3, fontsize=8, frameon=False, loc="lower left", bbox_to_anchor=(0, 1)
            )
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return "".join(line.rstrip() + "\n" for line in text.getvalue().splitlines())
