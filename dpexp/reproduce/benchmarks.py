"""Efficiency figures and tables from the records of ``python -m dpexp.bench`` in ``results/bench``, and what they say about a
bound that a paper prints. A record of an earlier engine (`dpexp.benchmark.methods.ENGINE`) is shown, named, and decides nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.ticker import LogLocator

from dpexp.benchmark.methods import ENGINE, LEAN
from dpexp.benchmark.render import note
from dpexp.reproduce import complexity_tables
from dpexp.reproduce.documents import PART, Document, Rows, Section, Verdict, as_rows, grouped, number, page
from dpexp.reproduce.drawing import COLOURS, draw
from dpexp.reproduce.paper import Entry, listed, paper_table, selected, targets
from dpexp.reproduce.records import believed, code_problems
from dpexp.reproduce.statistics import CONTRADICTS, SUPPORTS

EARLIER = "of an earlier engine: decides nothing"
_QUANTITIES = {
    "examples/s": "speed", "added memory / non-private": "added memory", "largest batch": "largest batch",
    "speed / non-private": "speed",
}  # fmt: skip
PURE = "pure torch"


class Measurement(NamedTuple):
    """One committed benchmark: the name of its file, and what it holds."""

    file: str
    content: dict[str, Any]

    @property
    def path(self) -> str:
        """From the top of the repository."""
        return f"results/bench/{self.file}"

    @property
    def hardware(self) -> str:
        """What it ran on."""
        found = self.content["hardware"]
        return str(found.get("gpu") or f"{found.get('cpu')}, {found.get('threads')} threads")

    def note(self, row: dict[str, Any]) -> str:
        """Why there is no number in a row, or why not to believe it, or that it decides nothing."""
        asked = self.content["settings"].get("workloads", [])
        done = {one["workload"] for one in self.content["rows"]} & set(asked)
        said = [note(row, self.content["settings"]["precision"])]
        if self.content.get("status") != "finished":
            said.append(f"the measurement did not finish: {len(done)} of {len(asked)} workloads")
        said += [] if self.content.get("engine") == ENGINE else [EARLIER]
        return "; ".join(filter(None, said))


class Ratio(NamedTuple):
    """Of two methods, which are named in words, on a network and a machine."""

    words: str
    value: float
    network: str
    machine: str


@dataclass(frozen=True)
class Bound:
    """A printed bound on the ratio of two methods: at least ``low``, at most ``high``, on one ``network`` or any; see
    ``claims.yaml``."""

    left: Sequence[str]
    right: Sequence[str]
    low: float | None = None
    high: float | None = None
    column: str = "examples/s"
    network: str = ""

    def ratio(self, rows: Rows) -> Ratio | None:
        """In rows of one workload and one record; None where a side was not measured."""
        values = {row["method"]: float(row[self.column]) for row in rows if row[self.column]}
        left, right = (next(filter(values.__contains__, side), "") for side in (self.left, self.right))
        if not left or not values.get(right) or self.network not in ("", rows[0]["workload"]):
            return None
        network = rows[0]["workload"] + (" in pure torch" if PURE in rows[0]["note"] else "")
        # "Intel Xeon" of "Intel(R) Xeon(R) Processor, 2 threads"
        machine = re.sub(r"\(R\)| Processor| CPU|, \d+ threads?$| @.*", "", rows[0]["hardware"])
        words = f"{_method(left)} ÷ {_method(right)}, {_QUANTITIES[self.column]}"
        return Ratio(words, values[left] / values[right], network, machine)

    def holds(self, value: float) -> bool:
        """Is it within what the paper prints? As shown: two digits."""
        shown = round(value, 2)
        return (self.low is None or shown >= self.low) and (self.high is None or shown <= self.high)

    def __str__(self) -> str:
        ends = (("≥", self.low), ("≤", self.high))
        return " and ".join(f"{sign} {value:g}" for sign, value in ends if value is not None)


def load(folder: Path) -> list[Measurement]:
    """Every benchmark, sorted.

    Raises:
        UserError: a record lacks something.
    """

    def problems(record: dict[str, Any]) -> list[str]:
        needed = ("settings", "hardware", "versions", "command", "rows")
        return [f"lacks {name}" for name in needed if not record.get(name)] + code_problems(record)

    return [Measurement(*each) for each in believed(folder, problems)]


def build(name: str, records: Sequence[Measurement]) -> Document:
    """The document of one target, its figure drawn where something was measured."""
    target = targets("bench")[name]
    blocks = [_block(target, scale, records) for scale in ("small", "paper")]
    rows = [row for block in blocks for row in block.rows]
    printed = [
        {"row": cell.row, "column": cell.column, "paper": f"{cell.value} {cell.unit}".strip() or "-", "note": cell.conditions}
        for cell in paper_table(*target.key)
    ]  # fmt: skip
    verdicts = _verdicts(target, rows)
    if target.arithmetic:
        verdicts.append(getattr(complexity_tables, target.arithmetic)())
    bounds = Section("As printed", rows=printed, verdicts=tuple(verdicts))
    count = sum(EARLIER in row["note"] for row in rows)
    earlier = f" {count} rows are of an earlier engine and decide nothing." if rows else ""
    drawn = _newest(rows)
    svg = draw(lambda axes: _bars(axes, drawn), 2, (4.6, 1 + 0.24 * len(drawn))) if drawn else ""
    columns = tuple(dict.fromkeys(key for row in (*rows, *printed) for key in row))
    untold = "by the present engine, the two methods of no bound were measured beside each other"
    if count == len(rows):
        untold = "measured with an earlier engine alone" if rows else "not run"
    words = listed("pages")["benchmarks"] | vars(target)
    return page(
        name, (bounds, *blocks), columns, otherwise="not run", svg=svg, untold=untold, words=words, earlier=earlier
    )  # fmt: skip


def _block(target: Entry, scale: str, records: Sequence[Measurement]) -> Section:
    wanted = [workload for workload, own in target.workloads.items() if own == scale]
    rows = [row for record in records for row in _rows(record, wanted, scale)]
    done = {row["workload"] for row in rows}
    left = [workload for workload in wanted if workload not in done]
    device = "device=cuda " if scale == "paper" else ""
    command = f"python -m dpexp.bench bench={target.preset} {device}'workloads=[{','.join(left)}]' out=results/bench/NAME"
    todo = (f"Not run: {', '.join(left)}. `{command}`",) if left else ()
    status = f"{scale} {len(done)}/{len(wanted)}" if done else ""
    return Section(f"scale={scale}", todo, rows=rows, scale=scale, done=status)


def _rows(measured: Measurement, workloads: Sequence[str], scale: str) -> Rows:
    settings = measured.content["settings"]
    torch = f"{PURE}, without the C++ kernels" if settings.get("native") is False else ""
    return as_rows(
        {
            "workload": row["workload"], "method": row["method"], "batch": row["batch_size"],
            "speed / non-private": number(row["time_ratio"] and 1 / row["time_ratio"]),
            "added memory / non-private": number(row["memory_ratio"]), "examples/s": number(row["examples_per_s"], ".4g"),
            "largest batch": row["max_batch"], "speed there / non-private": number(row["max_batch_throughput_ratio"]),
            "relative error": number(row["error"], ".1e"), "scale": scale, "hardware": measured.hardware,
            "precision": settings["precision"], "record": measured.path,
            "note": "; ".join(filter(None, (torch, measured.note(row)))),
        }
        for row in measured.content["rows"]
        if row["workload"] in workloads and settings.get("size") == "full"
    )  # fmt: skip


def _verdicts(target: Entry, rows: Rows) -> list[Verdict]:
    """One for each bound that rows of the present engine are about; each says so where others have none."""
    present = (row for row in rows if EARLIER not in row["note"])
    runs = grouped(present, lambda row: (row["record"], row["workload"])).values()
    bounds = [Bound(**said) for said in target.bounds]
    measured = [(bound, own) for bound in bounds if (own := [*filter(None, map(bound.ratio, runs))])]
    some = f"{len(measured)} of {len(bounds)} bounds" if len(measured) < len(bounds) else ""
    of_it = ", ".join(filter(None, (target.part, some)))
    part = f"{PART}{of_it}" if of_it else ""
    found = []
    for bound, of_bound in measured:
        # a method that was not measured has another one in its place in some records: that is another comparison
        for words, ratios in grouped(of_bound, attrgetter("words")).items():
            for word, holds in ((SUPPORTS, True), (CONTRADICTS, False)):
                # networks may differ, and machines: then it stands on both sides
                if chosen := [ratio for ratio in ratios if bound.holds(ratio.value) == holds]:
                    counted = f"{len(chosen)} of {len(ratios)} are {'' if holds else 'not '}{bound}"
                    on_machine = grouped(chosen, attrgetter("machine")).items()
                    values = (f"{', '.join(_on_each(own))} ({machine})" for machine, own in on_machine)
                    found.append(Verdict(words, f"{word}{part} ({counted})", ", ".join(values)))
    return found


def _on_each(ratios: Sequence[Ratio]) -> Iterator[str]:
    """ "0.87 to 0.89 on gpt2", "0.22 on roberta in pure torch": the records of each network together."""
    for network, own in grouped(ratios, attrgetter("network")).items():
        ends = dict.fromkeys(f"{end(ratio.value for ratio in own):.2f}" for end in (min, max))
        yield f"{' to '.join(ends)} on {network}"


def _method(name: str) -> str:
    """In words: "ours, per-layer" of "auto/layer"."""
    engine, _, clipping = re.sub("[:/]", " ", name.removesuffix(LEAN)).partition(" ")
    engine = {"auto": "ours", "opacus": "Opacus", "nonprivate": "no privacy"}.get(engine, engine)
    return " ".join(filter(None, (engine, clipping.replace("layer", "per-layer"))))


def _newest(rows: Rows) -> Rows:
    """Of each method on each network the last measurement by its name; those of the present engine come after the others."""
    found: dict[tuple[str, ...], dict[str, str]] = {}
    for row in sorted(rows, key=lambda row: EARLIER not in row["note"]):
        if row["speed / non-private"] and row["method"] != "nonprivate":
            found[row["workload"], row["method"], str(PURE in row["note"])] = row
    return [found[key] for key in sorted(found)]


def _bars(axes: Any, rows: Rows) -> None:
    labels = [
        f"{row['workload']}  {row['method']}{' (torch)' if PURE in row['note'] else ''}"
        f"{'*' if EARLIER in row['note'] else ''}"
        for row in rows
    ]
    methods = sorted({row["method"] for row in rows})
    colours = [COLOURS[methods.index(row["method"]) % len(COLOURS)] for row in rows]
    for axis, key in zip(axes, ("speed / non-private", "added memory / non-private"), strict=True):
        values = [float(row[key] or "nan") for row in rows]
        axis.hlines(range(len(rows)), 1.0, values, color=colours, linewidth=2.0)
        axis.scatter(values, range(len(rows)), color=colours, s=22, zorder=3)
        axis.axvline(1.0, color="0.3", linewidth=0.9)
        axis.set_yticks(range(len(rows)), labels, fontsize=7)
        axis.invert_yaxis()
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_locator(LogLocator(2, numticks=6))
        axis.xaxis.set_major_formatter(lambda x, _: f"{x:g}x" if x >= 1 else f"1/{1 / x:g}x")
        axis.set_xlabel(key.replace("/ non-private", "beside non-private"))
    axes[1].set_yticklabels([])
    if any(EARLIER in row["note"] for row in rows):
        axes[0].figure.supxlabel("* with an earlier engine", fontsize=8)


# Speed and memory on the workloads that this project set itself goals for, before anything was measured.

EFFICIENCY = "efficiency"
# the network of the same kind in Table 1 of Bu et al.
_LIKE = {"gpt2": "gpt2_large", "roberta": "roberta_large", "vit": "beit_large"}
_BLOCKS = {True: "with the C++ kernels", False: "pure torch, no compiler on the machine"}


def efficiency(records: Sequence[Measurement]) -> Document:
    """The page: a block with the native kernels and one without, methods of other libraries as they were measured beside."""
    sections = []
    for native, kernels in _BLOCKS.items():
        rows = [row for record in records for row in _beside_goals(record, native)]
        command = f"python -m dpexp.bench native={str(native).lower()} threads=2 out=results/bench/NAME"
        lacking = () if rows else (f"Not run: `{command}`",)
        sections.append(Section(f"scale=small, {kernels}", lacking, rows=rows, scale="small"))
    every: list[Rows] = []
    for section in sections:
        finished = (row for row in section.rows if row["goals"] and not row["note"])
        every += grouped(finished, itemgetter("workload", "method")).values()
    met = [all(row["goals"] == "met" for row in own) for own in every]
    said = "Not run."
    if met:
        pairs = f"{sum(met)} of {len(met)} pairs of a network and a method"
        said = f"{pairs} meet both goals in every finished measurement of the present engine."
    return page(EFFICIENCY, sections, otherwise=f"small {len(every)}" if every else "not run", met=said)


def _beside_goals(measured: Measurement, native: bool) -> Rows:
    settings = measured.content["settings"]
    wanted = {"size": "full", "device": "cpu", "precision": "fp32", "native": native}
    if any(settings.get(name) != value for name, value in wanted.items()):
        # records from before there was a choice don't say whether they are native
        return []
    goals, lines = listed("goals")["native" if native else "torch"], []
    for row in measured.content["rows"]:
        workload, method = row["workload"], row["method"]
        if workload not in goals["auto/flat"] or method == "nonprivate":
            continue
        time, memory = goals.get(method.removesuffix(LEAN), {}).get(workload, (None, None))
        lines.append({
            "workload": workload, "method": method, "time / non-private": number(row["time_ratio"]),
            "goal for time": number(time), "memory / non-private": number(row["memory_ratio"]),
            "goal for memory": number(memory), "tensors / non-private": number(row.get("tensors_ratio")),
            "goals": _met(row, time, memory),
            "printed for the like": for_the_like(workload, method), "scale": "small", "hardware": measured.hardware,
            "record": measured.path, "note": measured.note(row),
        })  # fmt: skip
    return as_rows(lines)


def _met(row: dict[str, Any], time: float | None, memory: float | None) -> str:
    """As shown: two digits."""
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
    if method == "auto/flat" and workload in _LIKE:
        (cell,) = selected("bu2023", "1", "Relative Speed over non-DP", model=_LIKE[workload])
        return f"{1 / float(cell.value):.2f} ({cell.row.split()[1]}, Bu et al.)"
    return ""
