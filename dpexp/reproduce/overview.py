"""What a reader wants first: every claim with its verdict, all runs in one table, and accuracy against ε."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter, itemgetter
from typing import Any

from dpexp.reproduce import tables
from dpexp.reproduce.cells import TRAINING
from dpexp.reproduce.documents import (
    ARITHMETIC,
    WORDS,
    Document,
    Rows,
    Section,
    Verdict,
    as_rows,
    bound,
    grouped,
    number,
    page,
)
from dpexp.reproduce.drawing import draw, style
from dpexp.reproduce.fillings import Filling, in_full, measured, method, spent
from dpexp.reproduce.paper import listed
from dpexp.reproduce.records import Record
from dpexp.reproduce.statistics import CANNOT_TELL

VERDICTS = ("claim", "verdict", "where", "ours", "evidence")
# some of its instances hold and others do not
MIXED = "mixed"
# evidence that needs no run
RECOMPUTED = "recomputed"
# where ε = ∞ is drawn
NO_LIMIT = 14.0
# by this factor ways to clip stand beside each other
APART = 1.05


def verdicts(documents: Sequence[Document]) -> Rows:
    """A row for each claim; those with a verdict come first, then arithmetic, then what nothing can be said about."""
    rows: Rows = []
    for document in documents:
        if document.claim:
            rows.append(_row(document.claim, document, document.verdicts))
        elif not document.paper:
            # a page of ours about claims of several papers
            rows += [_row(one.where, document, [replace(one, where="")]) for one in document.verdicts]
    rows.sort(key=lambda row: (row["verdict"] == CANNOT_TELL, row["evidence"].startswith(RECOMPUTED)))
    return rows


def _row(claim: str, document: Document, verdicts: Sequence[Verdict]) -> dict[str, str]:
    decided = [verdict for verdict in verdicts if verdict.word != CANNOT_TELL]
    said = [word for word in WORDS if any(verdict.word == word for verdict in decided)]
    shown = decided or verdicts
    evidence = [
        RECOMPUTED if document.status in ARITHMETIC else document.status,
        *dict.fromkeys(f"a part of the claim ({v.part})" for v in decided if v.part),
        f"{len(decided)} of {len(verdicts)} tests decide" if decided and len(decided) < len(verdicts) else "",
        "stand-in data" if any(" instead" in v.where or "in miniature" in v.where for v in shown) else "",
    ]
    return {
        "claim": claim,
        "verdict": MIXED if len(said) > 1 else "".join(said) or CANNOT_TELL,
        "where": document.name,
        "ours": "\n".join(_line(verdict, named=len(said) > 1) for verdict in shown) or document.untold,
        "evidence": ", ".join(filter(None, evidence)),
    }


def _line(verdict: Verdict, *, named: bool) -> str:
    """What one block or bound has to say, ``named`` with its verdict; without the small scale, which the evidence names."""
    where = re.sub(r"^scale=small(, (on )?)?|( instead)$", "", verdict.where)
    return ": ".join(filter(None, (verdict.word if named else "", where, verdict.ours or verdict.said)))


def leaders(records: Sequence[Record]) -> Rows:
    """A row for each configuration, best first within a task and ε."""
    by_metric = sorted(grouped(records, _metric).items())
    fillings = [filling for name, own in by_metric if name for filling in measured(own, name)]
    # neither noise nor clipping
    without = grouped((f for f in fillings if f.record.facts["clip"] == "nonprivate"), _comparable)
    plain = {key: max(own, key=lambda filling: filling.merit).mean for key, own in without.items()}

    def order(filling: Filling) -> tuple[Any, ...]:
        record = filling.record
        shown = float(spent(record, ".3g").replace("∞", "inf"))
        return _title(record), record.facts["scale"], shown, -filling.merit, record.configuration

    lines = []
    for filling in sorted(fillings, key=order):
        record, summary = filling.record, filling.record.summary
        best, memory = plain.get(_comparable(filling)), summary["performance"].get("peak_memory_mib")
        lines.append({
            "task": _title(record), "scale": record.facts["scale"],
            "ε spent": spent(record, ".3g"), "method": method(record),
            "model": in_full(record), "metric": filling.metric, "value": f"{filling.mean:.2f}", "± std": number(filling.std),
            "n": len(filling.records),
            "gap to non-private": "" if best is None or record.spent is None else f"{best - filling.mean:+.2f}",
            "seconds": f"{filling.seconds:.0f}", "MiB": number(memory or None, ".0f"),
            "δ": number(summary["privacy"].get("delta"), ".1e"),
        })  # fmt: skip
    return as_rows(lines)


def _title(record: Record) -> str:
    return str(record.facts.get("task.title") or record.facts["task"])


def _metric(record: Record) -> str:
    """The task's own metric, as the record has it; "" where it has none."""
    own = str(record.facts.get("task.metric") or "accuracy")
    names = (own, "accuracy", "bleu", "bleu_test", "rougeL_test")
    return next((name for name in names if record.metric(name) is not None), "")


def _comparable(filling: Filling) -> tuple[str, ...]:
    names = ("task", "model", "scale", "peft.name", "model.trainable", "model.pooling", "model.head")
    return (*(str(filling.record.facts.get(name)) for name in names), filling.metric)


def accuracy_against_epsilon(records: Sequence[Record]) -> str:
    """SVG: a panel for each task, at scale=small and with one ε for all examples; of one model the best configuration of each
    way to clip filled, with the spread of its seeds, and the papers' numbers open."""
    ours = [r for r in records if r.matches({"scale": "small"}) and _metric(r) == "accuracy"]
    found = {
        name: _of_one_model([record for record in ours if record.facts["task"] == task])
        for name, (_, task) in listed("pages")["report"]["drawn"].items()
    }
    panels = [(name, own) for name, own in found.items() if own]
    if not panels:
        return ""
    clips = sorted({str(r.facts["clip"]) for _, own in panels for r in own})
    return draw(lambda axes: _panels(axes, panels, clips), len(panels), (3.9, 3.6))


def _panels(axes: Any, panels: Sequence[tuple[str, list[Record]]], clips: Sequence[str]) -> None:
    open_marks = {"marker": "o", "markerfacecolor": "none", "color": "0.55", "linestyle": "none"}
    for axis, (name, records) in zip(axes, panels, strict=True):
        if printed := _printed(name):
            axis.plot(*zip(*printed, strict=True), markersize=6, **open_marks)
        for filling in _best(records):
            place = clips.index(str(filling.record.facts["clip"]))
            # beside each other where they would hide each other
            x = (filling.record.spent or NO_LIMIT) * APART ** (place - len(clips) // 2)
            looks = style(place) | {"linestyle": "none", "markersize": 4, "capsize": 2}
            y, spread = (float(f"{value or 0:.2f}") for value in (filling.mean, filling.std))
            axis.errorbar(float(f"{x:.4g}"), y, yerr=spread, **looks)
        title, _ = listed("pages")["report"]["drawn"][name]
        axis.set_title(f"{title}; {records[0].facts['model']}", fontsize=9)
        axis.set_xlabel("ε spent")
        axis.set_xscale("log")
        axis.set_xticks([1, 3, 8, NO_LIMIT], ["1", "3", "8", "∞"])
        axis.minorticks_off()
    axes[0].set_ylabel("accuracy, %")
    for place, clip in enumerate(clips):
        axes[-1].plot([], [], label=clip, **style(place) | {"linestyle": "none"})
    axes[-1].plot([], [], label="printed", **open_marks)
    axes[-1].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _of_one_model(records: Sequence[Record]) -> list[Record]:
    """Those of the best model on which three ways to clip were run, or as many as on any: beside another model's, a difference
    between ways to clip could be one between models."""
    models = grouped(records, lambda record: str(record.facts["model"]))

    def order(own: Sequence[Record]) -> tuple[int, float]:
        return min(3, len({r.facts["clip"] for r in own})), max(r.metric("accuracy") or 0.0 for r in own)

    return max(models.values(), key=order, default=[])


def _best(records: Sequence[Record]) -> list[Filling]:
    """Of each way to clip and ε the configuration of the highest mean; one seed counts only where there are no more."""
    fillings = measured(records, "accuracy")
    found = grouped(fillings, lambda f: (f.record.facts["clip"], f"{f.record.spent or 0:.1f}"))
    return [max(own, key=attrgetter("rank")) for own in found.values()]


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


# The page of committed training records: one row per run, scales never mixed.

_SORTED = ("task", "scale", "model", "trainable", "target ε", "clip", "lr", "seed")


def runs(records: Sequence[Record]) -> Document:
    """The page of all records, with a block for each task and scale."""
    every = sorted(as_rows(map(_of_run, records)), key=itemgetter(*_SORTED))
    blocks = grouped(every, itemgetter("task", "scale"))
    sections = (
        Section(f"{task}, scale={scale}", (), tuple(rows[0])[2:], rows, scale)
        for (task, scale), rows in blocks.items()
    )
    return page("runs", sections, otherwise="measured")


def _of_run(record: Record) -> dict[str, object]:
    summary, config = record.summary, record.summary["details"]["config"]
    privacy, metrics, epsilon = summary["privacy"], summary["metrics"], summary["privacy"]["epsilon"]
    accuracy = record.metric("accuracy")
    others = (f"{name} {record.metric(name):.4g}" for name in sorted(metrics) if name != "accuracy")
    return {
        "task": summary["task"], "scale": summary["scale"], "model": summary["model"],
        "trainable": config["model"]["trainable"], "clip": summary["clip"],
        "target ε": number(config["privacy"]["epsilon"], ".4g"),
        "ε rdp": bound(epsilon["rdp"], ".3f"), "ε pld": bound(epsilon["pld"], ".3f"), "δ": number(privacy["delta"], ".3g"),
        "σ": number(privacy["noise_multiplier"], ".4f"), "B": number(config["optim"]["batch_size"], "g"),
        "steps": privacy["steps"] or None, "lr": number(config["optim"]["lr"], "g"),
        "accuracy": number(None if accuracy is None else 100 * accuracy), "other metrics": ", ".join(others),
        "seed": summary["seed"], "trials": privacy.get("trials"), "sampling": privacy["sampling"],
        "hardware": summary["performance"]["device"],
        "data": f"{summary['data']['name']} ({summary['data']['rows']['train']} train)", "record": record.path,
    }  # fmt: skip
