"""What a reader wants first: every claim with its verdict, all runs in one table, and accuracy against ε."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dpexp.reproduce import catalogue, tables
from dpexp.reproduce.cells import TRAINING, Filling, described, measured
from dpexp.reproduce.documents import WORDS, Document, Rows, as_rows
from dpexp.reproduce.drawing import draw, style
from dpexp.reproduce.records import Record
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
# where ε = ∞ is drawn
NO_LIMIT = 14.0


def verdicts(documents: Sequence[Document]) -> Rows:
    """A row for each claim; those with a verdict come first, then arithmetic, then what nothing can be said about."""
    rows = []
    for document in documents:
        if document.paper and document.claim:
            rows.append(_verdict(document))
        elif not document.paper:
            # a page of ours about claims of several papers
            rows += as_rows(VERDICTS, [
                (verdict.where, verdict.word, document.name, verdict.ours or verdict.said, document.status)
                for verdict in document.verdicts
            ])  # fmt: skip
    return sorted(rows, key=lambda row: {"exact": 1, CANNOT_TELL: 2}.get(row["verdict"], 0))


def _verdict(document: Document) -> dict[str, str]:
    arithmetic = document.name in catalogue.EXACT and document.name not in CHOSEN
    said = {verdict.word for verdict in document.verdicts}
    word = "exact" if arithmetic else " and ".join(w for w in WORDS if w in said and w != CANNOT_TELL)
    decided = [verdict for verdict in document.verdicts if verdict.word in ("supports", "contradicts")]
    shown = decided or document.verdicts
    ours = "; ".join(f"{verdict.where}: {verdict.ours or verdict.said}" for verdict in shown)
    evidence = [
        "recomputed" if arithmetic else document.status,
        "a part of the claim" if any("for a part of the claim" in v.said for v in decided) else "",
        "stand-in data" if any("instead" in verdict.where for verdict in shown) else "",
    ]
    return {
        "claim": document.claim,
        "verdict": word or CANNOT_TELL,
        "where": document.name,
        "ours": CHOSEN.get(document.name, ours),
        "evidence": ", ".join(filter(None, evidence)),
    }


def leaders(records: Sequence[Record]) -> Rows:
    """A row for each configuration, best first within a task and ε."""
    fillings = [
        filling for name in sorted(set(map(_metric, records)) - {""}) for filling in _by_metric(records, name)
    ]
    plain: dict[tuple[str, ...], float] = {}
    for filling in fillings:
        if filling.records[0].spent is None:
            key = _comparable(filling)
            plain[key] = max(plain.get(key, filling.mean), filling.mean)

    def order(filling: Filling) -> tuple[Any, ...]:
        record = filling.records[0]
        return _title(record), record.spent or float("inf"), -filling.mean, record.configuration

    lines = []
    for filling in sorted(fillings, key=order):
        record, summary, (mean, std) = (
            filling.records[0],
            filling.records[0].summary,
            mean_std(filling.values),
        )
        best, memory = plain.get(_comparable(filling)), summary["performance"].get("peak_memory_mib")
        delta = summary["privacy"].get("delta")
        lines.append((
            _title(record), record.facts["scale"], "∞" if record.spent is None else f"{record.spent:.3g}", _method(record),
            described(record), filling.metric, f"{mean:.2f}", "" if std is None else f"{std:.2f}", len(filling.records),
            "" if best is None or record.spent is None else f"{best - mean:+.2f}",
            f"{mean_std([r.summary['wall_s'] for r in filling.records])[0]:.0f}", f"{memory:.0f}" if memory else "",
            "" if delta is None else f"{delta:.1e}",
        ))  # fmt: skip
    return as_rows(LEADERS, lines)


def _title(record: Record) -> str:
    return str(record.facts.get("task.title") or record.facts["task"])


def _metric(record: Record) -> str:
    """The task's own metric, as the record has it; "" where it has none."""
    named = str(record.facts.get("task.metric") or "accuracy")
    return next((n for n in (named, "accuracy", "bleu", "rouge_l") if record.metric(n) is not None), "")


def _by_metric(records: Sequence[Record], name: str) -> list[Filling]:
    """The configurations whose metric it is."""
    return measured((record for record in records if _metric(record) == name), name)


def _comparable(filling: Filling) -> tuple[str, ...]:
    names = ("task", "model", "scale", "peft.name", "model.trainable", "model.pooling", "model.head")
    return (*(str(filling.records[0].facts.get(name)) for name in names), filling.metric)


def _method(record: Record) -> str:
    facts = record.facts
    schedule, individual = facts.get("schedule.name"), facts.get("individual.name")
    extra = [
        schedule if schedule != "constant" else "",
        individual if individual != "none" else "",
        "adadp" if facts.get("optim.name") == "adadp" else "",
    ]
    return " + ".join([str(facts["clip"]), *filter(None, extra)])


def accuracy_against_epsilon(records: Sequence[Record]) -> str:
    """SVG: a panel for each task, our configurations filled, the papers' numbers open, with the spread of seeds as bars."""
    panels = [(n, [r for r in records if r.facts["task"] in tasks]) for n, tasks in DRAWN]
    panels = [(name, own) for name, own in panels if any(_metric(r) == "accuracy" for r in own)]
    if not panels:
        return ""
    clips = sorted({str(r.facts["clip"]) for _, own in panels for r in own})
    return draw(lambda axes: _panels(axes, panels, clips), len(panels), (3.9, 3.6))[0]


def _panels(axes: Any, panels: Sequence[tuple[str, list[Record]]], clips: Sequence[str]) -> None:
    open_marks = {"marker": "o", "markerfacecolor": "none", "color": "0.55", "linestyle": "none"}
    for axis, (name, records) in zip(axes, panels, strict=True):
        for x, y in _printed(name):
            axis.plot(x, y, markersize=6, **open_marks)
        for filling in _by_metric(records, "accuracy"):
            mean, std = (float(f"{value or 0:.2f}") for value in mean_std(filling.values))
            spent, looks = filling.records[0].spent, style(clips.index(str(filling.records[0].facts["clip"])))
            axis.errorbar(
                NO_LIMIT if spent is None else spent, mean, yerr=std, markersize=4, capsize=2, **looks
            )
        axis.set_title(str(records[0].facts.get("task.title") or name), fontsize=9)
        axis.set_xlabel("ε spent")
        axis.set_xscale("log")
        axis.set_xticks([1, 3, 8, NO_LIMIT], ["1", "3", "8", "∞"])
        axis.minorticks_off()
    axes[0].set_ylabel("accuracy, %")
    for number, clip in enumerate(clips):
        axes[-1].plot([], [], label=clip, **style(number) | {"linestyle": "none"})
    axes[-1].plot([], [], label="printed", **open_marks)
    axes[-1].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _printed(task: str) -> list[tuple[float, float]]:
    """(ε, accuracy) of every printed accuracy on a task; ε = ∞ where there is no privacy."""
    points = set()
    for cell in (cell for key in tables.claims() for cell in tables.printed_cells(*key)):
        said = cell.settings
        if said.get("task") != task or said.get("metric") != "accuracy" or cell.number is None:
            continue
        if cell.unit == "points" or "formulation" in said or said.get("split") in TRAINING:
            continue
        if said.get("epsilon") or said.get("clip") == "nonprivate":
            points.add((float(said.get("epsilon", NO_LIMIT)), cell.number))
    return sorted(points)
