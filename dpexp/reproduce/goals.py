"""Speed and memory on the workloads that this project set itself goals for, before anything was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dpexp.benchmark.methods import LEAN
from dpexp.benchmark.render import note
from dpexp.reproduce.documents import Document, Rows, Section
from dpexp.reproduce.paper import Cell, paper_table

NAME = "efficiency"
WORKLOADS = ("gpt2", "gpt2_tied", "gpt2_lora", "roberta", "wrn", "mlp", "vit")
# (method, with the C++ kernels) -> (time, memory) at most, relative to training without privacy, noise and optimiser included;
# two CPU cores, fp32. In the order of WORKLOADS.
GOALS: dict[tuple[str, bool], tuple[tuple[float, float], ...]] = {
    ("auto/layer", True): (
        (1.05, 1.08), (1.05, 1.08), (1.02, 1.02), (1.06, 1.15), (1.12, 1.20), (1.10, 1.15), (1.08, 1.15),
    ),
    ("auto/flat", True): (
        (1.12, 1.50), (1.12, 1.40), (1.02, 1.02), (1.10, 1.50), (1.18, 1.40), (1.13, 1.20), (1.20, 1.30),
    ),
    ("auto/layer", False): (
        (1.05, 1.08), (1.05, 1.08), (1.02, 1.02), (1.10, 1.15), (1.60, 1.20), (1.45, 1.15), (1.15, 1.15),
    ),
    ("auto/flat", False): (
        (1.18, 1.50), (1.18, 1.40), (1.02, 1.02), (1.18, 1.50), (1.70, 1.40), (1.50, 1.20), (1.35, 1.30),
    ),
}  # fmt: skip
COLUMNS = (
    "workload", "method", "time / non-private", "goal for time", "memory / non-private", "goal for memory", "goals",
    "printed for the like", "scale", "hardware", "record", "note",
)  # fmt: skip
# the paper's network of the same kind
_TABLE_1 = {"gpt2": "GPT2-large", "roberta": "RoBERTa-large", "vit": "BEiT-large"}

Loaded = Sequence[tuple[str, dict[str, Any], str]]


def document(records: Loaded) -> Document:
    """The page: a block with the native kernels and one without, methods of other libraries as they were measured beside."""
    sections = []
    for native, words in ((True, "with the C++ kernels"), (False, "pure torch, no compiler on the machine")):
        rows = [row for file, record, problems in records for row in _rows(file, record, problems, native)]
        command = f"python -m dpexp.bench native={str(native).lower()} threads=2 out=results/bench/NAME"
        said = () if rows else (f"Not run: `{command}`",)
        sections.append(Section(f"scale=small, {words}", said, COLUMNS if rows else (), rows, "small"))
    every = [row for section in sections for row in section.rows if row["goals"]]
    met = sum(row["goals"] == "met" for row in every)
    return Document(
        NAME, "Speed and memory beside this project's goals", "",
        (
            "Time and peak memory relative to training without privacy, noise and optimiser included: the fastest steps of one"
            " interleaved run, and what is added to the memory of a process at rest. The goals are for two CPU cores and fp32.",
            f"**Our runs.** {met} of {len(every)} cells meet both goals." if every else "**Our runs.** Not run.",
            "*Printed for the like*: the paper's own ratio for a larger network of the same kind on its GPU (He et al. Figure 1;"
            " Bu et al. Table 1, a speed turned into a time). It says what was to be expected, not what is to be compared.",
            f"Regenerate: `python -m dpexp.report {NAME}`.",
        ),
        tuple(sections), COLUMNS, status=f"small {len(every)}" if every else "not run",
    )  # fmt: skip


def unfinished(record: dict[str, Any]) -> str:
    """What a benchmark lacks that was stopped, "" for one that ended."""
    if record.get("status") == "finished":
        return ""
    asked = record["settings"].get("workloads", [])
    done = {row["workload"] for row in record["rows"]}
    return f"the measurement did not finish: {len(done & set(asked))} of {len(asked)} workloads"


def _rows(file: str, record: dict[str, Any], problems: str, native: bool) -> Rows:
    settings, hardware = record["settings"], record["hardware"]
    if (
        settings.get("size") != "full"
        or settings.get("device") != "cpu"
        or settings.get("precision") != "fp32"
    ):
        return []
    if settings.get("native") is not native:  # records from before there was a choice don't say
        return []
    rows: Rows = []
    for row in record["rows"]:
        if row["workload"] not in WORKLOADS or row["method"] == "nonprivate":
            continue
        goal = GOALS.get((row["method"].removesuffix(LEAN), native))
        time, memory = goal[WORKLOADS.index(row["workload"])] if goal else (None, None)
        rows.append({
            "workload": row["workload"], "method": row["method"],
            "time / non-private": _number(row["time_ratio"]), "goal for time": _number(time),
            "memory / non-private": _number(row["memory_ratio"]), "goal for memory": _number(memory),
            "goals": _met(row, time, memory), "printed for the like": printed(row["workload"], row["method"]), "scale": "small",
            "hardware": f"{hardware.get('cpu')}, {hardware.get('threads')} threads", "record": f"results/bench/{file}",
            "note": "; ".join(filter(None, (
                note(row, "fp32"), unfinished(record), f"UNCLEAN: {problems}" if problems else "",
            ))),
        })  # fmt: skip
    return rows


def _met(row: dict[str, Any], time: float | None, memory: float | None) -> str:
    """As printed: two digits."""
    if time is None or memory is None:
        return ""
    if row["time_ratio"] is None or row["memory_ratio"] is None:
        return "not measured"
    missed = [
        name
        for name, value, goal in (("time", row["time_ratio"], time), ("memory", row["memory_ratio"], memory))
        if round(value, 2) > goal
    ]
    return f"{' and '.join(missed)} missed" if missed else "met"


def printed(workload: str, method: str) -> str:
    """A paper's time relative to non-private training, of a network of the same kind; "" where none is printed."""
    if method == "auto/layer" and workload == "gpt2":
        (cell,) = paper_table("he2023", "figure1")
        return f"below {1 / (1 - float(cell.value) / 100):.2f} (GPT-2, He et al.)"
    if method == "auto/flat" and workload in _TABLE_1:
        network = _TABLE_1[workload]
        return f"{1 / _speed(paper_table('bu2023', '1'), network):.2f} ({network}, Bu et al.)"
    return ""


def _speed(cells: Sequence[Cell], network: str) -> float:
    (value,) = [
        cell.number for cell in cells if network in cell.row and cell.column == "Relative Speed over non-DP"
    ]
    if value is None:
        raise ValueError(f"results/paper/bu2023_table1.csv has no speed of {network}")
    return value


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
