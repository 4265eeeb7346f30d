"""Efficiency figures and tables from the records of ``python -m dpexp.bench`` in ``results/bench``, and what they say about a
bound that a paper prints. A record of an earlier engine (`dpexp.benchmark.methods.ENGINE`) is shown, named, and decides nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpexp.benchmark.methods import ENGINE
from dpexp.benchmark.render import note
from dpexp.errors import UserError
from dpexp.reproduce import goals
from dpexp.reproduce.documents import Document, Rows, Section, Verdict
from dpexp.reproduce.drawing import COLOURS, draw
from dpexp.reproduce.paper import paper_table
from dpexp.reproduce.statistics import CANNOT_TELL, CONTRADICTS, SUPPORTS

COLUMNS = (
    "workload", "method", "batch", "speed / non-private", "added memory / non-private", "examples/s", "largest batch",
    "speed there / non-private", "relative error", "scale", "hardware", "precision", "record", "note",
)  # fmt: skip
_PAPER = ("row", "column", "paper", "note")
EARLIER = "of an earlier engine: decides nothing"
BK, GHOST, OPACUS = ("bk/flat", "auto/flat"), ("ghost/flat", "opacus:ghost"), ("opacus:flat",)
LAYER, FLAT, PLAIN = ("auto/layer", "onepass/layer"), ("ghost/flat", "auto/flat"), ("nonprivate",)


@dataclass(frozen=True)
class Bound:
    """A printed bound on the ratio of two methods.

    Attributes:
        left, right: names of methods, of which the first that was measured counts.
        column: of the rows here, "examples/s", "added memory / non-private" or "largest batch".
        low, high: what the paper prints; None where there is no bound on this side.
    """

    left: tuple[str, ...]
    right: tuple[str, ...]
    low: float | None = None
    high: float | None = None
    column: str = "examples/s"

    def ratio(self, rows: Rows) -> tuple[str, float] | None:
        """In words, and its value in rows of one workload and one record; None where a side was not measured."""
        values = {row["method"]: float(row[self.column]) for row in rows if row[self.column]}
        sides = [next((name for name in side if name in values), None) for side in (self.left, self.right)]
        if None in sides or not values[sides[1] or ""]:
            return None
        return f"{sides[0]} : {sides[1]}", values[sides[0] or ""] / values[sides[1] or ""]

    def holds(self, value: float) -> bool:
        """Is it within what the paper prints?"""
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)

    def __str__(self) -> str:
        return " and ".join(
            f"{sign} {value:g}" for sign, value in (("≥", self.low), ("≤", self.high)) if value is not None
        )


@dataclass(frozen=True)
class Measured:
    """A table or figure that a benchmark answers.

    Attributes:
        paper, table: of the transcription.
        workloads: name -> "paper" where it is the paper's own network, "small" where a smaller one stands in.
        preset: of conf/bench.
        bounds: what the claim says in numbers.
    """

    paper: str
    table: str
    title: str
    claim: str
    workloads: dict[str, str]
    preset: str
    bounds: tuple[Bound, ...]


TARGETS: dict[str, Measured] = {
    "figure-he-1": Measured(
        "he2023", "figure1", "He et al., Figure 1: speed and memory on GPT-2",
        "Adaptive per-layer clipping runs within 15% of non-private speed in the same memory; ghost clipping is slower, Opacus"
        " needs far more memory.",
        {"gpt2_124m": "paper", "gpt2_tied": "small", "gpt2": "small"}, "he2023_fig1",
        (Bound(LAYER, PLAIN, low=0.85), Bound(LAYER, PLAIN, high=1.15, column="added memory / non-private")),
    ),
    "figure-he-9": Measured(
        "he2023", "figure9", "He et al., Figure 9: speed on another GPU",
        "On a Titan RTX too the gap is below 15%, and per-layer clipping is above 1.4x the speed of flat clipping.",
        {"gpt2_124m": "paper", "gpt2_tied": "small", "gpt2": "small"}, "he2023_fig1",
        (Bound(LAYER, PLAIN, low=0.85), Bound(LAYER, FLAT, low=1.4)),
    ),
    "table-bu-1": Measured(
        "bu2023", "1", "Bu et al., Table 1: Book-Keeping beside GhostClip, Opacus and non-private training",
        "BK is 1.33 to 1.36x as fast as GhostClip, 1.96 to 38x as Opacus, and 0.76 to 0.83x as non-private training.",
        {"roberta_large": "paper", "gpt2_large": "paper", "roberta": "small", "gpt2": "small", "vit": "small"}, "bu2023_fig5",
        (Bound(BK, GHOST, low=1.33), Bound(BK, OPACUS, low=1.96), Bound(BK, PLAIN, low=0.76)),
    ),
    "figure-bu-2": Measured(
        "bu2023", "figure2", "Bu et al., Figure 2: multilayer perceptrons",
        "On deep and shallow MLPs BK is nearly as fast as non-private training; Opacus runs out of memory on the wide one.",
        {"mlp_deep": "paper", "mlp": "paper", "mlp_wide": "paper"}, "bu2023_fig2",
        (Bound(BK, PLAIN, low=0.8), Bound(BK, OPACUS, low=1.0)),
    ),
    "figure-bu-5": Measured(
        "bu2023", "figure5", "Bu et al., Figure 5: GPT-2 and RoBERTa-large",
        "At a fixed batch the private speed is 0.86 to 0.89 of the non-private one.",
        {"gpt2_124m": "paper", "roberta_large": "paper", "gpt2": "small", "roberta": "small"}, "bu2023_fig5",
        (Bound(BK, PLAIN, low=0.86),),
    ),
    "figure-bu-6": Measured(
        "bu2023", "figure6", "Bu et al., Figure 6: VGG11 and BEiT-large",
        "With large images ghost-only methods fail on VGG11 and the hybrid wins; on BEiT-large hybrid and base are alike.",
        {"vgg11": "paper", "beit_large": "paper", "vit": "small", "vit_timm": "small"}, "bu2023_fig6",
        (Bound(("bk_mixopt/flat", "auto/flat"), ("bk/flat",), low=0.95),),
    ),
    "figure-li-5": Measured(
        "li2022", "figure5", "Li et al., Figure 5: largest batch and throughput of GPT-2",
        "Ghost clipping fits about three times Opacus' batch, almost that of non-private training.",
        {"gpt2_124m": "paper", "gpt2_medium": "paper", "gpt2_large": "paper", "gpt2": "small"}, "he2023_fig1",
        (
            Bound(("ghost/flat", "auto/flat", "auto/flat+lean"), (*OPACUS, "opacus:ghost"), low=2.5, column="largest batch"),
            Bound(("ghost/flat", "auto/flat", "auto/flat+lean"), PLAIN, low=0.9, column="largest batch"),
        ),
    ),
}  # fmt: skip


def load(folder: Path, *, show_unclean: bool = False) -> list[tuple[str, dict[str, Any], str]]:
    """(name, record, what its provenance lacks) of every benchmark, sorted.

    Raises:
        UserError: a record lacks something, unless ``show_unclean`` has it marked.
    """
    found = []
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        git = record.get("git") or {}
        problems = [
            f"lacks {key}"
            for key in ("settings", "hardware", "versions", "command", "rows")
            if not record.get(key)
        ]
        if not git.get("commit"):
            problems.append("its code was in no commit")
        elif git.get("dirty") is not False:
            problems.append("its code differed from its commit")
        if problems and not show_unclean:
            raise UserError(
                f"{path.name} can't be shown: {'; '.join(problems)}. Run it again from a clean checkout, or give"
                " --show-unclean to have it marked"
            )
        found.append((path.name, record, "; ".join(problems)))
    return found


def build(name: str, records: Sequence[tuple[str, dict[str, Any], str]]) -> Document:
    """The document of one target, its figure drawn where something was measured."""
    target = TARGETS[name]
    printed: Rows = [
        {
            "row": cell.row,
            "column": cell.column,
            "paper": f"{cell.value} {cell.unit}".strip() or "-",
            "note": cell.conditions,
        }
        for cell in paper_table(target.paper, target.table)
    ]
    sections = [Section("As printed", (), _PAPER, printed, "exact")] if printed else []
    every: Rows = []
    counts = []
    for scale in ("small", "paper"):
        rows = [
            row for file, record, problems in records for row in _rows(file, record, problems, target, scale)
        ]
        wanted = [w for w, own in target.workloads.items() if own == scale]
        done = {row["workload"] for row in rows}
        counts += [f"{scale} {len(done)}/{len(wanted)}"] if done else []
        left = ", ".join(w for w in wanted if w not in done)
        command = f"python -m dpexp.bench bench={target.preset} {'device=cuda ' if scale == 'paper' else ''}"
        todo = (
            f"Not run: {left}. `{command}'workloads=[{left.replace(' ', '')}]' out=results/bench/NAME`"
            if left
            else ""
        )
        sections.append(
            Section(f"scale={scale}", (todo,) if todo else (), COLUMNS if rows else (), rows, scale)
        )
        every += rows
    drawn = _newest(every)
    svg, png = draw(lambda axes: _bars(axes, drawn), 2, (4.6, 1 + 0.24 * len(drawn))) if drawn else ("", b"")
    verdicts = _verdicts(target, every)
    earlier = f" {sum(EARLIER in row['note'] for row in every)} rows are {EARLIER}." if every else ""
    words = (
        f"**Claim.** {target.claim}",
        f"**Our runs.** {'; '.join(map(str, verdicts)) or f'{CANNOT_TELL}: {_why(every)}'}.",
        "A printed bound holds, or not, for each network that both methods were measured on in one interleaved run; the paper's"
        f" hardware is another. Drawn is the last measurement of each method.{earlier}",
        "Speeds are examples/s relative to non-private training in the same interleaved run; a method that failed is a row.",
        f"Regenerate: `python -m dpexp.report {name}` (or `make {name}`).",
    )
    return Document(
        name, target.title, target.paper.rstrip("0123456789"), words, tuple(sections), (*COLUMNS, "row", "column", "paper"),
        svg=svg, png=png, status=", ".join(counts) or "not run", verdicts=tuple(verdicts),
    )  # fmt: skip


def _rows(file: str, record: dict[str, Any], problems: str, target: Measured, scale: str) -> Rows:
    settings = record["settings"]
    if settings.get("size") != "full":
        return []
    rows: Rows = []
    hardware = record["hardware"]
    for row in record["rows"]:
        if target.workloads.get(row["workload"]) != scale:
            continue
        notes = [
            note(row, settings["precision"]),
            goals.unfinished(record),
            f"UNCLEAN: {problems}" if problems else "",
            "" if record.get("engine") == ENGINE else EARLIER,
        ]
        if settings.get("native") is False:
            notes.insert(0, "pure torch, without the C++ kernels")
        rows.append({
            "workload": row["workload"], "method": row["method"], "batch": str(row["batch_size"]),
            "speed / non-private": _number(row["time_ratio"], invert=True),
            "added memory / non-private": _number(row["memory_ratio"]),
            "examples/s": _number(row["examples_per_s"], ".4g"), "largest batch": _number(row["max_batch"], "d"),
            "speed there / non-private": _number(row["max_batch_throughput_ratio"]),
            "relative error": _number(row["error"], ".1e"), "scale": scale,
            "hardware": str(hardware.get("gpu") or f"{hardware.get('cpu')}, {hardware.get('threads')} threads"),
            "precision": settings["precision"], "record": f"results/bench/{file}", "note": "; ".join(n for n in notes if n),
        })  # fmt: skip
    return rows


def _number(value: float | None, form: str = ".2f", *, invert: bool = False) -> str:
    if value is None:
        return ""
    return format(1 / value if invert else value, form)


def _verdicts(target: Measured, rows: Rows) -> list[Verdict]:
    """One for each bound that rows of the present engine are about."""
    groups: dict[tuple[str, str], Rows] = {}
    for row in rows:
        if EARLIER not in row["note"]:
            groups.setdefault((row["record"], row["workload"]), []).append(row)
    found = []
    for bound in target.bounds:
        measured = {place: said for place, own in groups.items() if (said := bound.ratio(own)) is not None}
        if not measured:
            continue
        held = [bound.holds(value) for _, value in measured.values()]
        word = SUPPORTS if all(held) else CANNOT_TELL if any(held) else CONTRADICTS
        (words, _), *_ = measured.values()
        values = ", ".join(f"{value:.2f} on {workload}" for (_, workload), (_, value) in measured.items())
        where = f"{words} in {bound.column.removesuffix(' / non-private')}"
        found.append(Verdict(where, f"{word} ({sum(held)} of {len(held)} are {bound})", values))
    return found


def _why(rows: Rows) -> str:
    """Why there is no verdict, in words."""
    if not rows:
        return "not run"
    if all(EARLIER in row["note"] for row in rows):
        return "measured with an earlier engine alone"
    return "the two methods of no bound were measured beside each other"


def _newest(rows: Rows) -> Rows:
    """Of each method on each network the last measurement; those of the present engine come after the others."""
    found: dict[tuple[str, ...], dict[str, str]] = {}
    for row in sorted(rows, key=lambda row: EARLIER not in row["note"]):
        if row["speed / non-private"] and row["method"] != "nonprivate":
            found[row["workload"], row["method"], str("pure torch" in row["note"])] = row
    return [found[key] for key in sorted(found)]


def _bars(axes: Any, rows: Rows) -> None:
    labels = [
        f"{row['workload']}  {row['method']}{' (torch)' if 'pure torch' in row['note'] else ''}"
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
        axis.xaxis.set_major_formatter("{x:g}x")
        axis.set_xlabel(
            key.replace("/ non-private", "beside non-private")
            + (" (* earlier engine)" if key[0] == "s" else "")
        )
    axes[1].set_yticklabels([])
