"""A table of a paper beside our runs: a line for each printed cell and configuration, a block for each scale, and a verdict."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from dpexp.reproduce import cells
from dpexp.reproduce.cells import FACTS, Filling, Slot
from dpexp.reproduce.documents import Document, Section
from dpexp.reproduce.paper import FOLDER, Cell, paper_table, paper_tables
from dpexp.reproduce.records import Record
from dpexp.reproduce.statistics import CANNOT_TELL, Comparison, compare, mean_std, overall

COLUMNS = (
    "row", "column", "paper", "ours", "n", "difference", "scale", "configuration", "ε", "δ", "accountant", "sampling",
    "hardware", "record",
)  # fmt: skip
SHOWN = ("small", "paper")
_UNITS = ("%", "")
_TUNED = ("optim.lr", "optim.lr_schedule", "optim.warmup_ratio")  # of each method its own, as in the papers
_WITH = {
    "clip": ("clip.",),
    "model": ("model.",),
    "peft": ("peft.", "model.trainable"),
    "schedule": ("schedule.",),
}


@dataclass(frozen=True)
class Claim:
    """One entry of ``claims.yaml``; see its header."""

    title: str
    claim: str
    compare: tuple[Mapping[str, Any], ...] = ()
    stand_ins: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""


@cache
def claims() -> dict[tuple[str, str], Claim]:
    """(paper, table) -> its claim. "he2023", "2"."""
    text = (Path(__file__).parent / "claims.yaml").read_text(encoding="utf-8")
    found = {}
    for name, entry in yaml.safe_load(text).items():
        paper, _, table = name.partition("_")
        entry["compare"] = tuple(entry.get("compare", ()))
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
    sections, verdicts, counts = [], [], {}
    for scale in SHOWN:
        slots = [cells.slot(cell, scale, claim.stand_ins) for cell in printed]
        filled = {id(slot): slot.fillings(records) for slot in slots}
        pairs = list(_pairs(claim, slots, filled))
        lines = "\n".join(f"- {_pair_line(pair)}" for pair in pairs)
        said = (f"**{_verdict_line(pairs)}**", *([lines] if pairs else [])) if claim.compare else ()
        note = (claim.note,) if scale == "small" and claim.note else ()
        rows = [row for slot in slots for row in _rows(slot, filled[id(slot)])]
        sections.append(Section(f"scale={scale}", (*note, *said), COLUMNS, rows, scale))
        ours = [slot for slot in slots if not slot.reason]
        counts[scale] = sum(bool(filled[id(slot)]) for slot in ours), len(ours)
        if claim.compare:
            verdicts.append(f"scale={scale}: {_verdict_line(pairs)}")
    name = target_name(paper, table)
    paragraphs = (
        f"**Claim.** {claim.claim}",
        *([f"**Our runs.** {'; '.join(verdicts)}."] if verdicts else []),
        "Ours: mean ± standard deviation over n seeds. Every block has one scale; the difference is ours minus paper, and at"
        " scale=small it compares another model and another length of training. ε under the record's accountant, δ of its"
        " guarantee; hyper-parameter search is not paid for (the record says how many configurations were tried).",
        f"Regenerate: `python -m dpexp.report {name}` (or `make {name}`); with `RUN=1 SCALE=small` the missing cells are run.",
    )
    return Document(
        name, claim.title, _short(paper), paragraphs, tuple(sections), COLUMNS, status=status_of(counts)
    )


def status_of(counts: Mapping[str, tuple[int, int]]) -> str:
    """For the coverage matrix: at which scales how many of the cells that can be run are filled."""
    found = [f"{scale} {done}/{total}" for scale, (done, total) in counts.items() if done]
    if found:
        return ", ".join(found)
    return "not run" if any(total for _, total in counts.values()) else "not built"


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
    slots = [cells.slot(cell, scale, claim.stand_ins) for cell in paper_table(paper, table, folder)]
    return list(dict.fromkeys(slot.command for slot in slots if slot.command and not slot.fillings(records)))


def known(folder: Path = FOLDER) -> list[tuple[str, str]]:
    """The tables that have a claim and a transcription."""
    transcribed = {(paper, table.removeprefix("table")) for paper, table in paper_tables(folder)}
    return [key for key in claims() if key in transcribed]


def _short(paper: str) -> str:
    return paper.rstrip("0123456789")


def _rows(slot: Slot, fillings: Sequence[Filling]) -> Iterator[dict[str, str]]:
    cell = slot.cell
    left = {"row": cell.row, "column": cell.column, "paper": printed_value(cell), "scale": slot.scale}
    if not fillings:
        ours = slot.reason or f"not run: `{slot.command}`"
        yield left | {"ours": ours}
    for filling in fillings:
        record, privacy = filling.records[0], filling.records[0].summary["privacy"]
        mean, std = mean_std(filling.values)
        digits = cell.decimals if cell.number is not None else 2
        accountant = privacy.get("accountant")
        spent = privacy["epsilon"].get(accountant) if accountant else None
        unclean = sorted({problem for r in filling.records for problem in r.problems})
        yield left | {
            "ours": f"{mean:.{digits}f}" + (f" ± {std:.2f}" if std is not None else ""),
            "n": str(len(filling.values)),
            "difference": "" if cell.number is None else f"{mean - cell.number:+.{digits}f}",
            "configuration": cells.described(record)
            + (f" (UNCLEAN: {'; '.join(unclean)})" if unclean else ""),
            "ε": "∞" if spent is None else f"{spent:.2f}",
            "δ": "" if privacy.get("delta") is None else f"{privacy['delta']:.3g}",
            "accountant": accountant or "none",
            "sampling": str(privacy.get("sampling")),
            "hardware": record.summary["performance"].get("device", ""),
            "record": ", ".join(cells.repository_path(r.name) for r in filling.records),
        }


def printed_value(cell: Cell) -> str:
    """As in print: value, spread, and unit where it is not a matter of course."""
    if not cell.value:
        return "-"
    spread = f" ± {cell.spread}" if cell.spread else ""
    seeds = f" (n = {cell.seeds})" if cell.seeds else ""
    unit = "" if cell.unit in _UNITS else f" {cell.unit}"
    return f"{cell.value}{spread}{unit}{seeds}"


# Comparisons: pairs of cells that differ in what left and right say, over records that agree in everything else.


@dataclass(frozen=True)
class Pair:
    """One instance of a claim: two cells, two configurations, and what their seeds say."""

    what: str
    left: str
    right: str
    expect: str
    result: Comparison
    sizes: tuple[int, int]


def _pairs(claim: Claim, slots: Sequence[Slot], filled: Mapping[int, list[Filling]]) -> Iterator[Pair]:
    for rule in claim.compare:
        varied = tuple(rule["left"])
        partners = {_rest(slot.cell, varied): slot for slot in slots if _has(slot.cell, rule["right"])}
        for slot in slots:
            partner = partners.get(_rest(slot.cell, varied)) if _has(slot.cell, rule["left"]) else None
            if partner is None:
                continue
            right = _best_of_each(filled[id(partner)], varied)
            for context, chosen in _best_of_each(filled[id(slot)], varied).items():
                if other := right.get(context):
                    margin = float(rule.get("margin", 0.0))
                    yield Pair(
                        f"{slot.cell.column}, {cells.described(chosen.records[0])}",
                        slot.cell.row,
                        partner.cell.row,
                        f"{rule['expect']}{f' (margin {margin:g})' if margin else ''}",
                        compare(chosen.values, other.values, rule["expect"], margin),
                        (len(chosen.values), len(other.values)),
                    )


def _best_of_each(fillings: Sequence[Filling], varied: Sequence[str]) -> dict[str, Filling]:
    """Context -> the configuration that speaks for it: of the most seeds, then of the highest mean."""
    found: dict[str, Filling] = {}
    for filling in sorted(fillings, key=lambda f: (len(f.values), mean_std(f.values)[0])):
        found[_context(filling.records[0], varied)] = filling
    return found


def _context(record: Record, varied: Sequence[str]) -> str:
    """All that may change a result but what is compared, and what is tuned for each method."""
    apart = {*_TUNED, *(FACTS[name] for name in varied), *varied}
    prefixes = ("clip.", *(prefix for name in varied for prefix in _WITH.get(name, ())))
    kept = {k: v for k, v in record.science.items() if k not in apart and not k.startswith(prefixes)}
    return json.dumps(kept, sort_keys=True, default=str)


def _has(cell: Cell, settings: Mapping[str, Any]) -> bool:
    return all(cell.settings.get(name) == str(value) for name, value in settings.items())


def _rest(cell: Cell, varied: Sequence[str]) -> tuple[tuple[str, str], ...]:
    names = {*FACTS, "metric", "split", "subset"} - set(varied)
    return tuple(sorted((k, v) for k, v in cell.settings.items() if k in names))


def _verdict_line(pairs: Sequence[Pair]) -> str:
    if not pairs:
        return f"{CANNOT_TELL}: no pair of records that differ in this alone"
    tested = [pair for pair in pairs if pair.result.p_for is not None]
    word = overall([pair.result for pair in pairs])
    if not tested:
        return f"{CANNOT_TELL}: fewer than two seeds on a side of each of {len(pairs)} pairs"
    return f"{word} ({len(tested)} of {len(pairs)} pairs tested, Welch's t over seeds, level 0.05)"


def _pair_line(pair: Pair) -> str:
    result, (left, right) = pair.result, pair.sizes
    interval = f", 95% [{result.low:+.2f}, {result.high:+.2f}]" if math.isfinite(result.low) else ""
    p = f", p for {result.p_for:.3f}, against {result.p_against:.3f}" if result.p_for is not None else ""
    return (
        f"{pair.what}: {pair.left} (n = {left}) minus {pair.right} (n = {right}) = {result.difference:+.2f}{interval};"
        f" expected {pair.expect}{p}: {result.verdict}"
    )
