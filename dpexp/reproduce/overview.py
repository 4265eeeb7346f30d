"""What a reader wants first: every claim with its verdict, all runs in one table, and accuracy against ε."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dpexp.reproduce import catalogue, tables
from dpexp.reproduce.cells import described, printed_factor
from dpexp.reproduce.documents import WORDS, Document, Rows
from dpexp.reproduce.drawing import COLOURS, MARKERS, draw
from dpexp.reproduce.paper import paper_table
from dpexp.reproduce.records import Record, by_configuration
from dpexp.reproduce.statistics import CANNOT_TELL, mean_std

VERDICTS = ("claim", "verdict", "where", "ours", "evidence")
LEADERS = (
    "task", "scale", "ε spent", "method", "model", "metric", "value", "± std", "n", "gap to non-private", "seconds", "MiB", "δ",
)  # fmt: skip
DRAWN = (("sst2", ("sst2",)), ("mnist", ("mnist",)), ("cifar10", ("cifar10_jpeg", "cifar10")))
# Figures that are computed from settings which the paper does not give: they were chosen here, or fitted to the printed numbers.
CHOSEN = {
    "figure-monir-10": "the decay rates are not in print and were chosen here",
    "figure-monir-13": "the settings are not in print and were fitted to the printed rates",
    "figure-monir-14": "the settings are not in print and were fitted to the printed thresholds",
}
NO_LIMIT = 14.0  # where ε = ∞ is drawn


def verdicts(documents: Sequence[Document]) -> Rows:
    """A row for each claim; those with a verdict come first, then arithmetic, then what nothing can be said about."""
    rows: Rows = []
    for document in documents:
        if document.paper and document.claim:
            rows.append(_verdict(document))
        elif not document.paper:  # a page of ours about claims of several papers
            rows += [
                {
                    "claim": verdict.where,
                    "verdict": verdict.word,
                    "ours": verdict.ours or verdict.said,
                    "evidence": document.status,
                    "where": document.name,
                }
                for verdict in document.verdicts
            ]
    return sorted(rows, key=lambda row: _RANK[row["verdict"]])


_RANK = {"supports": 0, "contradicts": 0, "supports and contradicts": 0, "exact": 1, CANNOT_TELL: 2}


def _verdict(document: Document) -> dict[str, str]:
    arithmetic = document.name in catalogue.EXACT and document.name not in CHOSEN
    said = {verdict.word for verdict in document.verdicts}
    decided = [verdict for verdict in document.verdicts if verdict.word in ("supports", "contradicts")]
    word = "exact" if arithmetic else " and ".join(w for w in WORDS if w in said and w != CANNOT_TELL)
    shown = decided or list(document.verdicts)
    part = any("for a part of the claim" in verdict.said for verdict in decided)
    instead = any("instead" in verdict.where for verdict in shown)
    ours = "; ".join(f"{verdict.where}: {verdict.ours or verdict.said}" for verdict in shown)
    evidence = "recomputed" if arithmetic else document.status
    return {
        "claim": document.claim,
        "verdict": word or CANNOT_TELL,
        "ours": CHOSEN.get(document.name, ours),
        "evidence": evidence
        + (", a part of the claim" if part else "")
        + (", stand-in data" if instead else ""),
        "where": document.name,
    }


def leaders(records: Sequence[Record]) -> Rows:
    """A row for each configuration, best first within a task and ε."""
    groups = [(group, name) for group in by_configuration(records) if (name := _metric(group[0]))]
    plain: dict[tuple[Any, ...], float] = {}
    for group, name in groups:
        if group[0].spent is None:
            key = _comparable(group[0], name)
            mean = mean_std(_values(group, name))[0]
            plain[key] = max(plain.get(key, mean), mean)
    found = []
    for group, name in groups:
        record, found_values = group[0], _values(group, name)
        mean, std = mean_std(found_values)
        best = plain.get(_comparable(record, name))
        performance = record.summary["performance"]
        privacy = record.summary["privacy"]
        row = {
            "task": str(record.facts.get("task.title") or record.facts["task"]),
            "scale": str(record.facts["scale"]),
            "ε spent": "∞" if record.spent is None else f"{record.spent:.3g}",
            "method": _method(record),
            "model": described(record),
            "metric": name,
            "value": f"{mean:.2f}",
            "± std": "" if std is None else f"{std:.2f}",
            "n": str(len(group)),
            "gap to non-private": "" if best is None or record.spent is None else f"{best - mean:+.2f}",
            "seconds": f"{mean_std([r.summary['wall_s'] for r in group])[0]:.0f}",
            "MiB": f"{performance.get('peak_memory_mib') or 0:.0f}"
            if performance.get("peak_memory_mib")
            else "",
            "δ": "" if privacy.get("delta") is None else f"{privacy['delta']:.1e}",
        }
        found.append(((row["task"], record.spent or float("inf"), -mean), row))
    return [row for _, row in sorted(found, key=lambda pair: pair[0])]


def _metric(record: Record) -> str:
    """The task's own metric, as the record has it; "" where it has none."""
    named = str(record.facts.get("task.metric") or "accuracy")
    return next(
        (name for name in (named, "accuracy", "bleu", "rouge_l") if record.metric(name) is not None), ""
    )


def _values(group: Sequence[Record], name: str) -> list[float]:
    return [printed_factor(name) * value for r in group if (value := r.metric(name)) is not None]


def _comparable(record: Record, metric: str) -> tuple[Any, ...]:
    facts = record.facts
    return tuple(
        str(facts.get(key))
        for key in ("task", "model", "scale", "peft.name", "model.trainable", "model.pooling", "model.head")
    ) + (metric,)


def _method(record: Record) -> str:
    facts = record.facts
    extra = [
        str(facts.get(key))
        for key, usual in (
            ("schedule.name", "constant"),
            ("individual.name", "none"),
            ("optim.name", "adadp"),
        )
        if (facts.get(key) not in (None, usual)) == (usual != "adadp") and facts.get(key)
    ]
    return " + ".join([str(facts["clip"]), *extra])


def accuracy_against_epsilon(records: Sequence[Record]) -> str:
    """SVG: a panel for each task, our configurations filled, the papers' numbers open, with the spread of seeds as bars."""
    panels = [(name, [r for r in records if r.facts["task"] in tasks]) for name, tasks in DRAWN]
    panels = [(name, own) for name, own in panels if any(_metric(r) == "accuracy" for r in own)]
    if not panels:
        return ""
    clips = sorted({str(r.facts["clip"]) for _, own in panels for r in own})
    return draw(lambda axes: _panels(axes, panels, clips), len(panels), (3.9, 3.6))[0]


def _panels(axes: Any, panels: Sequence[tuple[str, list[Record]]], clips: Sequence[str]) -> None:
    for axis, (name, records) in zip(axes, panels, strict=True):
        for x, y in _printed(name):
            axis.plot(x, y, marker="o", markerfacecolor="none", color="0.55", markersize=6, linestyle="none")
        for group in by_configuration(records):
            if _metric(group[0]) != "accuracy":
                continue
            mean, std = mean_std(_values(group, "accuracy"))
            number = clips.index(str(group[0].facts["clip"]))
            spent = group[0].spent
            axis.errorbar(
                NO_LIMIT if spent is None else spent, float(f"{mean:.2f}"), yerr=0.0 if std is None else float(f"{std:.2f}"),
                color=COLOURS[number % len(COLOURS)], marker=MARKERS[number % len(MARKERS)], markersize=4, capsize=2,
            )  # fmt: skip
        title = str(records[0].facts.get("task.title") or name)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("ε spent")
        axis.set_xscale("log")
        axis.set_xticks([1, 3, 8, NO_LIMIT], ["1", "3", "8", "∞"])
        axis.minorticks_off()
    axes[0].set_ylabel("accuracy, %")
    for number, clip in enumerate(clips):
        axes[-1].plot([], [], color=COLOURS[number % len(COLOURS)], marker=MARKERS[number % len(MARKERS)],
                      linestyle="none", label=clip)  # fmt: skip
    axes[-1].plot([], [], marker="o", markerfacecolor="none", color="0.55", linestyle="none", label="printed")
    axes[-1].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _printed(task: str) -> list[tuple[float, float]]:
    """(ε, accuracy) of every printed accuracy on a task; ε = ∞ where there is no privacy."""
    points = set()
    for paper, table in tables.known():
        for cell in paper_table(paper, table):
            said = cell.settings
            if said.get("task") != task or said.get("metric") != "accuracy" or cell.number is None:
                continue
            if cell.unit == "points" or "formulation" in said or said.get("split") in ("train", "training"):
                continue
            epsilon = said.get("epsilon")
            if epsilon or said.get("clip") == "nonprivate":
                points.add((float(epsilon) if epsilon else NO_LIMIT, cell.number))
    return sorted(points)
