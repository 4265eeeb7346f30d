"""A table of a paper beside our runs: a line for each printed cell and configuration, a block for each scale, and a verdict."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from dpexp.reproduce import cells, miniature, pairs
from dpexp.reproduce.cells import FACTS, Filling, Presets, Slot
from dpexp.reproduce.documents import Document, Section, Verdict
from dpexp.reproduce.pairs import Choice, Pair
from dpexp.reproduce.paper import FOLDER, Cell, paper_table, paper_tables
from dpexp.reproduce.records import Record
from dpexp.reproduce.statistics import CANNOT_TELL, compare, mean_std

COLUMNS = (
    "row", "column", "paper", "ours", "n", "dev error", "difference", "scale", "configuration", "ε", "δ", "accountant",
    "sampling", "hardware", "record",
)  # fmt: skip
SHOWN = ("small", "paper")
_UNITS = ("%", "")
_TUNED = ("optim.lr", "optim.lr_schedule", "optim.warmup_ratio")  # of each method its own, as in the papers
_WITH = {
    "clip": ("clip.",),
    "model": ("model.",),
    "peft": ("peft.", "model.trainable"),
    "schedule": ("schedule.", "optim.steps", "optim.epochs"),  # as long as the same ε lasts
}


@dataclass(frozen=True)
class Claim:
    """One entry of ``claims.yaml``; see its header."""

    title: str
    claim: str
    compare: tuple[Mapping[str, Any], ...] = ()
    stand_ins: Mapping[str, Any] = field(default_factory=dict)
    instead: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    miniature: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    unstated: str = ""
    same_runs: tuple[str, ...] = ()
    tuned: tuple[Mapping[str, Any], ...] = ()
    audits: bool = False

    @property
    def filled_with(self) -> str:
        """The task of the block whose commands fill the table at scale=small; "" for the cells' own."""
        return next(iter(self.instead), "")

    @property
    def blocks(self) -> Iterator[tuple[str, str]]:
        """(scale, task that stands in for the cells' own, or "") of every block."""
        for scale in SHOWN:
            yield scale, ""
            yield from ((scale, task) for task in (self.instead if scale == "small" else ()))

    def slots(self, printed: Sequence[Cell], scale: str, task: str) -> list[Slot]:
        """The cells of a block."""
        more = self.instead.get(task, {})
        tuned = tuple((entry["where"], entry["add"]) for entry in self.tuned)
        presets = Presets(self.same_runs, tuned)
        slots = (cells.slot(cell, scale, self.stand_ins, task, presets) for cell in printed)
        return [replace(slot, where={**slot.where, **more}) for slot in slots]


@cache
def claims() -> dict[tuple[str, str], Claim]:
    """(paper, table) -> its claim. "he2023", "2"."""
    text = (Path(__file__).parent / "claims.yaml").read_text(encoding="utf-8")
    found = {}
    for name, entry in yaml.safe_load(text).items():
        paper, _, table = name.partition("_")
        for key in ("compare", "same_runs", "tuned"):
            entry[key] = tuple(entry.get(key, ()))
        found[paper, table.removeprefix("table")] = Claim(**entry)
    return found


def build(paper: str, table: str, records: Sequence[Record], folder: Path = FOLDER) -> Document:
    """The document of one table.

    Args:
        paper, table: as in the transcription's name.
        records: committed records; those with problems are marked.
        folder: of the transcriptions.
    """
    claim = claims()[paper, table]
    printed = [cell for cell in paper_table(paper, table, folder) if cell.unit or "metric" in cell.settings]
    sections, statuses, runnable = [], [], 0
    verdicts: list[Verdict] = []
    if claim.miniature:
        section, found = miniature.build(claim.miniature, records)
        sections.append(section)
        if section.rows:
            verdicts.append(Verdict(section.heading, pairs.verdict(found), pairs.in_short(found)))
            statuses.append(f"small {len(section.rows)} cells in miniature on {claim.miniature['task']}")
    for scale, task in claim.blocks:
        slots = claim.slots(printed, scale, task)
        filled = {id(slot): slot.fillings(records) for slot in slots}
        done, total = sum(map(bool, filled.values())), sum(not slot.reason for slot in slots)
        heading = f"scale=small, on {task} instead" if task else f"scale={scale}"
        runnable += total
        if done or scale == "paper" or task == claim.filled_with:
            compared = list(_pairs(claim, slots, filled))
            part = _part(claim, slots, filled)
            said = pairs.paragraphs(compared, part, claim.unstated) if claim.compare else ()
            sections.append(Section(heading, (*_notes(claim, scale, task, filled), *said), COLUMNS, [
                row for slot in slots for row in _rows(slot, filled[id(slot)], task)
                if task in ("", claim.filled_with) or "n" in row
            ], scale))  # fmt: skip
            if claim.compare and done:
                words = pairs.verdict(compared, part, claim.unstated)
                verdicts.append(Verdict(heading, words, pairs.in_short(compared)))
        elif (
            not task
        ):  # its data are not for everybody; another block has the commands for those that stand in
            command = next((slot.command for slot in slots if slot.command), "")
            sections.append(
                Section(heading, (f"Not run; with the data set itself: `{command}`, …",), (), [], scale)
            )
        statuses += [f"{scale} {done}/{total}{f' on {task}' if task else ''}"] if done else []
    name = target_name(paper, table)
    paragraphs = (
        f"**Claim.** {claim.claim}",
        f"**Our runs.** {'; '.join(map(str, verdicts)) or _no_test(statuses)}.",
        "Ours: mean ± standard deviation over n seeds; *dev error*: the standard error that a dev set of this size has by itself,"
        " which no test here knows of. Every block has one scale; the difference is ours minus paper, and at"
        " scale=small it compares another model and another length of training. ε under the record's accountant, δ of its"
        " guarantee; hyper-parameter search is not paid for (the record says how many configurations were tried).",
        f"Regenerate: `python -m dpexp.report {name}` (or `make {name}`); with `RUN=1 SCALE=small` the missing cells are run.",
    )
    return Document(
        name, claim.title, _short(paper), paragraphs, tuple(sections), COLUMNS,
        status=", ".join(statuses) or ("not run" if runnable or cells.has_presets(paper, table) else "not built"),
        verdicts=tuple(verdicts),
    )  # fmt: skip


def _no_test(statuses: Sequence[str]) -> str:
    """The verdict on a claim of which no pair of cells is an instance."""
    return f"{CANNOT_TELL}: {'beside the printed numbers, without a test' if statuses else 'not run'}"


def target_name(paper: str, table: str) -> str:
    """table-he-2, figure-li-2: of ("he2023", "2"), ("li2022", "figure2")."""
    kind, number = (
        ("figure", table.removeprefix("figure")) if table.startswith("figure") else ("table", table)
    )
    return f"{kind}-{_short(paper)}-{number}"


def missing(
    paper: str, table: str, records: Sequence[Record], scale: str, folder: Path = FOLDER
) -> list[str]:
    """The commands that fill what has no record at this scale, each once."""
    claim = claims()[paper, table]
    task = claim.filled_with if scale == "small" else ""
    slots = claim.slots(paper_table(paper, table, folder), scale, task)
    own = [slot.command for slot in slots if slot.command and not slot.fillings(records)]
    if scale == "small" and claim.miniature and not miniature.build(claim.miniature, records)[0].rows:
        own = [claim.miniature["command"]]
    return list(dict.fromkeys(own))


def known(folder: Path = FOLDER) -> list[tuple[str, str]]:
    """The tables that have a claim and a transcription."""
    transcribed = {(paper, table.removeprefix("table")) for paper, table in paper_tables(folder)}
    return [key for key in claims() if key in transcribed]


def _short(paper: str) -> str:
    return paper.rstrip("0123456789")


def _notes(claim: Claim, scale: str, task: str, filled: Mapping[int, Sequence[Filling]]) -> tuple[str, ...]:
    """Above a block: what a small run is not; of another data set, its name, and that there is no difference to be had."""
    notes = (claim.note,) if scale == "small" and claim.note else ()
    if not task:
        return notes
    records = [filling.records[0] for found in filled.values() for filling in found]
    name = next((str(title) for r in records if (title := r.facts.get("task.title"))), task)
    return (
        *notes,
        f"**Another data set, {name}**: the methods can be compared with each other, and no number with the paper's.",
    )


def _rows(slot: Slot, fillings: Sequence[Filling], task: str = "") -> Iterator[dict[str, str]]:
    cell = slot.cell
    left = {"row": cell.row, "column": cell.column, "paper": printed_value(cell), "scale": slot.scale}
    if not fillings:
        ours = slot.reason or f"not run: `{slot.command}`"
        yield left | {"ours": ours}
    for filling in fillings:
        digits = cell.decimals if cell.number is not None else 2
        difference = (
            "" if cell.number is None or task else f"{mean_std(filling.values)[0] - cell.number:+.{digits}f}"
        )
        yield left | cells.columns(filling, digits) | {"difference": difference}


def printed_value(cell: Cell) -> str:
    """As in print: value, spread, and unit where it is not a matter of course."""
    if not cell.value:
        return "-"
    spread = f" ± {cell.spread}" if cell.spread else ""
    seeds = f" (n = {cell.seeds})" if cell.seeds else ""
    unit = "" if cell.unit in _UNITS else f" {cell.unit}"
    return f"{cell.value}{spread}{unit}{seeds}"


# Comparisons: pairs of cells that differ in what left and right say, over records that agree in everything else.


def _pairs(claim: Claim, slots: Sequence[Slot], filled: Mapping[int, list[Filling]]) -> Iterator[Pair]:
    for rule, slot, partner in _printed_pairs(claim, slots):
        varied = tuple({**rule["left"], **rule["right"]})
        right = _best_of_each(filled[id(partner)], varied)
        for context, chosen in _best_of_each(filled[id(slot)], varied).items():
            if other := right.get(context):
                expect, margin = rule["expect"], float(rule.get("margin", 0.0))
                result = compare(chosen.filling.values, other.filling.values, expect, margin)
                what = f"{slot.cell.column}, {cells.described(chosen.filling.records[0])}"
                names = slot.cell.row, partner.cell.row
                yield pairs.compared(what, names, (chosen, other), expect, margin, result)


def _printed_pairs(claim: Claim, slots: Sequence[Slot]) -> Iterator[tuple[Mapping[str, Any], Slot, Slot]]:
    """(rule, left, right): every two cells of the block that the claim is about."""
    for rule in claim.compare:
        varied = tuple({**rule["left"], **rule["right"]})
        partners = {_rest(slot.cell, varied): slot for slot in slots if _has(slot.cell, rule["right"])}
        for slot in slots:
            partner = partners.get(_rest(slot.cell, varied)) if _has(slot.cell, rule["left"]) else None
            if partner is not None and not slot.reason and not partner.reason:
                yield rule, slot, partner


def _part(claim: Claim, slots: Sequence[Slot], filled: Mapping[int, Sequence[Filling]]) -> str:
    """Which part of the claim has records, in words; "" where it is all of it."""
    asked = [(slot, partner) for _, slot, partner in _printed_pairs(claim, slots)]
    done = sum(bool(filled[id(slot)] and filled[id(partner)]) for slot, partner in asked)
    return f"{done} of {len(asked)} comparisons in print" if done < len(asked) else ""


def _best_of_each(fillings: Sequence[Filling], varied: Sequence[str]) -> dict[str, Choice]:
    """Context -> the configuration that speaks for it."""
    found: dict[str, list[Filling]] = {}
    for filling in fillings:
        found.setdefault(_context(filling.records[0], varied), []).append(filling)
    return {context: pairs.choose(own) for context, own in found.items()}


def _context(record: Record, varied: Sequence[str]) -> str:
    """All that may change a result but what is compared, and what is tuned for each method."""
    apart = {*_TUNED, *(FACTS[name] for name in varied), *varied}
    prefixes = ("clip.", *(prefix for name in varied for prefix in _WITH.get(name, ())))
    kept = {k: v for k, v in record.science.items() if k not in apart and not k.startswith(prefixes)}
    return json.dumps(kept, sort_keys=True, default=str)


def _has(cell: Cell, settings: Mapping[str, Any]) -> bool:
    return all(cell.settings.get(name) == str(value) for name, value in settings.items())


def _rest(cell: Cell, varied: Sequence[str]) -> tuple[tuple[str, str], ...]:
    names = {*FACTS, "metric", "split", "subset", "repetitions"} - set(varied)
    return tuple(sorted((k, v) for k, v in cell.settings.items() if k in names))
