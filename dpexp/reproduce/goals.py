"""Speed and memory on the workloads that this project set itself goals for, before anything was measured."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from dpexp.benchmark.methods import LEAN
from dpexp.reproduce.benchmarks import Measurement
from dpexp.reproduce.documents import Document, Rows, Section, as_rows, number, page
from dpexp.reproduce.paper import paper_table, printed

NAME = "efficiency"
COLUMNS = (
    "workload", "method", "time / non-private", "goal for time", "memory / non-private", "goal for memory", "goals",
    "printed for the like", "scale", "hardware", "record", "note",
)  # fmt: skip
# Of the paper's network of the same kind: its row in Table 1 of Bu et al.
_TABLE_1 = {
    "gpt2": "E2E, GPT2-large (774M)", "roberta": "QQP, RoBERTa-large (355M)", "vit": "CIFAR, BEiT-large (304M)",
}  # fmt: skip
_BLOCKS = {True: "with the C++ kernels", False: "pure torch, no compiler on the machine"}


@cache
def _goals() -> Any:
    return yaml.safe_load((Path(__file__).parent / "goals.yaml").read_text(encoding="utf-8"))


def document(records: Sequence[Measurement]) -> Document:
    """The page: a block with the native kernels and one without, methods of other libraries as they were measured beside."""
    sections = []
    for native, kernels in _BLOCKS.items():
        rows = [row for record in records for row in _rows(record, native)]
        command = f"python -m dpexp.bench native={str(native).lower()} threads=2 out=results/bench/NAME"
        said = () if rows else (f"Not run: `{command}`",)
        sections.append(Section(f"scale=small, {kernels}", said, COLUMNS if rows else (), rows, "small"))
    every = [row["goals"] for section in sections for row in section.rows if row["goals"]]
    met = f"{every.count('met')} of {len(every)} cells meet both goals." if every else "Not run."
    return page(NAME, sections, COLUMNS, otherwise=f"small {len(every)}" if every else "not run", met=met)


def _rows(measured: Measurement, native: bool) -> Rows:
    settings = measured.content["settings"]
    wanted = {"size": "full", "device": "cpu", "precision": "fp32", "native": native}
    if any(settings.get(name) != value for name, value in wanted.items()):
        # records from before there was a choice don't say whether they are native
        return []
    goals, lines = _goals()["native" if native else "torch"], []
    for row in measured.content["rows"]:
        workload, method = row["workload"], row["method"]
        if workload not in goals["auto/flat"] or method == "nonprivate":
            continue
        time, memory = goals.get(method.removesuffix(LEAN), {}).get(workload, (None, None))
        lines.append((
            workload, method, number(row["time_ratio"]), number(time), number(row["memory_ratio"]), number(memory),
            _met(row, time, memory), for_the_like(workload, method), "small", measured.hardware, measured.path,
            measured.note(row),
        ))  # fmt: skip
    return as_rows(COLUMNS, lines)


def _met(row: dict[str, Any], time: float | None, memory: float | None) -> str:
    """As printed: two digits."""
    if time is None or memory is None:
        return ""
    if row["time_ratio"] is None or row["memory_ratio"] is None:
        return "not measured"
    both = (("time", row["time_ratio"], time), ("memory", row["memory_ratio"], memory))
    missed = [name for name, value, goal in both if round(value, 2) > goal]
    return f"{' and '.join(missed)} missed" if missed else "met"


def for_the_like(workload: str, method: str) -> str:
    """A paper's time relative to non-private training, of a network of the same kind; "" where none is printed."""
    if method == "auto/layer" and workload == "gpt2":
        (cell,) = paper_table("he2023", "figure1")
        return f"below {1 / (1 - float(cell.value) / 100):.2f} (GPT-2, He et al.)"
    if method == "auto/flat" and (row := _TABLE_1.get(workload)):
        speed = float(printed("bu2023", "1", row, "Relative Speed over non-DP"))
        return f"{1 / speed:.2f} ({row.split()[1]}, Bu et al.)"
    return ""
