"""A table of a paper beside our runs: a line for each printed cell and configuration, a block for each scale, and a verdict."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any

from dpexp.reproduce import cells, miniature
from dpexp.reproduce.cells import FACTS, Claim, Slot
from dpexp.reproduce.documents import Document, Section, not_run, page
from dpexp.reproduce.drawing import draw, heat
from dpexp.reproduce.fillings import ORIGIN, Filling, columns, described
from dpexp.reproduce.pairs import Finding, Pair, agreeing, compared
from dpexp.reproduce.paper import Cell, as_number, listed, numbered, paper_table, paper_tables, target_name
from dpexp.reproduce.paper import claims as paper_claims
from dpexp.reproduce.records import Record

COLUMNS = ("row", "column", "paper", "ours", "n", "dev error", "difference", "scale", *ORIGIN)
_WITH = {
    "clip": ("clip.",),
    "model": ("model.",),
    "peft": ("peft.", "model.trainable"),
    # as long as the same ε lasts
    "schedule": ("schedule.", "optim.steps", "optim.epochs"),
}
Filled = tuple[Slot, list[Filling]]


def claims() -> dict[tuple[str, str], Claim]:
    """(paper, table) -> its claim."""
    return paper_claims("cells", Claim)


def printed_cells(paper: str, table: str) -> list[Cell]:
    """The cells of a table that are numbers or may be, of the prose those with a metric; none where there is a picture alone."""
    if (paper, numbered(table)) not in paper_tables():
        return []
    found = paper_table(paper, table)
    return [cell for cell in found if "metric" in cell.settings or (cell.unit and table != "text")]


def build(paper: str, table: str, records: Sequence[Record]) -> Document:
    """The document of one table."""
    claim, printed = claims()[paper, table], printed_cells(paper, table)
    sections = [miniature.build(asked, records) for asked in claim.miniature]
    for scale, task in claim.blocks if printed else ():
        slots = [claim.slot(cell, scale, task) for cell in printed]
        filled = [(slot, slot.fillings(records)) for slot in slots]
        if block := _block(claim, scale, task, filled):
            sections.append(block)
    runnable = claim.miniature or any(section.commands for section in sections)
    measured = any(section.done for section in sections)
    pages = listed("pages")
    words = pages["cells"] if printed else pages["picture"] | {"notes": [claim.note]}
    return page(
        target_name(paper, table), sections, COLUMNS, words=words | vars(claim),
        otherwise="not run" if runnable or cells.presets(paper, table) else "not built",
        svg=_heat_map(claim.heat, printed, sections) if claim.heat else "",
        untold="beside the printed numbers, without a test" if measured else not_run(claim.needs),
    )  # fmt: skip


def _block(claim: Claim, scale: str, task: str, filled: Sequence[Filled]) -> Section | None:
    """The block of a scale; ``task``: on data that stand in for the cells' own, then only where there are runs or should be."""
    done, total = sum(bool(own) for _, own in filled), sum(not slot.reason for slot, _ in filled)
    heading = f"scale=small, on {task} instead" if task else f"scale={scale}"
    to_fill = scale == "paper" or task == claim.filled_with
    if not done and not to_fill:
        if task:
            return None
        # its data are not for everybody; another block has the commands for those that stand in
        command = next((slot.command for slot, _ in filled if slot.command), "")
        return Section(heading, (f"Not run; with the data set itself: `{command}`, …",), scale=scale)
    found = _finding(claim, filled, beside_print=not task)
    shown = [(slot, own) for slot, own in filled if own or task in ("", claim.filled_with)]
    lacking = dict.fromkeys(slot.command for slot, own in filled if slot.command and not own)
    words = (*_notes(claim, scale, task, filled), *(found.paragraphs if claim.compare else ()))
    return Section(
        heading, words, COLUMNS, [row for slot, own in shown for row in _rows(slot, own, task)], scale,
        done=f"{scale} {done}/{total}{f' on {task}' if task else ''}" if done else "",
        verdicts=(found.verdict(heading),) if claim.compare and done else (),
        commands=tuple(lacking) if to_fill else (),
    )  # fmt: skip


def _notes(claim: Claim, scale: str, task: str, filled: Sequence[Filled]) -> tuple[str, ...]:
    """Above a block: what a small run is not; of another data set, its name, and that there is no difference to be had."""
    notes = (claim.note,) if scale == "small" and claim.note else ()
    if not task:
        return notes
    titles = (filling.record.facts.get("task.title") for _, own in filled for filling in own)
    name = next((str(title) for title in titles if title), task)
    words = "the methods can be compared with each other, and no number with the paper's."
    return (*notes, f"**Another data set, {name}**: {words}")


def _rows(slot: Slot, fillings: Sequence[Filling], task: str) -> Iterator[dict[str, str]]:
    cell = slot.cell
    left = {"row": cell.row, "column": cell.column, "paper": printed_value(cell), "scale": slot.scale}
    if not fillings:
        yield left | {"ours": slot.reason or f"not run: `{slot.command}`"}
    for filling in sorted(fillings, key=attrgetter("rank"), reverse=True):
        digits = cell.decimals if cell.number is not None else 2
        apart = "" if cell.number is None or task else f"{filling.mean - cell.number:+.{digits}f}"
        yield left | columns(filling, digits) | {"difference": apart}


def printed_value(cell: Cell) -> str:
    """As in print: value, spread, and unit where it is not a matter of course."""
    spread = f" ± {cell.spread}" if cell.spread else ""
    seeds = f" (n = {cell.seeds})" if cell.seeds else ""
    unit = "" if cell.unit in ("%", "") else f" {cell.unit}"
    return f"{cell.value}{spread}{unit}{seeds}" if cell.value else "-"


def _heat_map(labels: Sequence[str], printed: Sequence[Cell], sections: Sequence[Section]) -> str:
    """The paper's values, and ours in each block that has some; ``labels`` of the rows and the columns."""
    paper = {(cell.row, cell.column): cell.number for cell in printed if cell.number is not None}
    grids = {"paper": paper} if paper else {}
    for section in sections:
        own: dict[tuple[str, str], float] = {}
        for row in section.rows:
            if row.get("n"):
                # the best stands first
                own.setdefault((row["row"], row["column"]), float(row["ours"].split()[0]))
        grids |= {f"ours, {section.heading}": own} if own else {}

    def plot(axes: Any) -> None:
        for axis, (title, values) in zip(axes, grids.items(), strict=True):
            rows = list(dict.fromkeys(row for row, _ in values))
            across = sorted(dict.fromkeys(column for _, column in values), key=_last_number)
            heat(axis, across, rows, values, title)
            axis.set_xlabel(labels[1])
        axes[0].set_ylabel(labels[0])

    return draw(plot, len(grids), (5.2, 3.4)) if grids else ""


def _last_number(name: str) -> float:
    """Of "B = 128"; names that end in none stay in order, at the end."""
    number = as_number(name.split()[-1])
    return math.inf if number is None else number


def _finding(claim: Claim, filled: Sequence[Filled], beside_print: bool) -> Finding:
    """What the seeds of a block say: cells that differ in what left and right say, over records that agree in the rest.

    ``beside_print``: whether the difference in print stands beside ours, as it does not for other data.
    """
    pairs: list[Pair] = []
    # of every two such cells: do both have records?
    asked: list[bool] = []
    for rule in claim.compare:
        varied = tuple({**rule["left"], **rule["right"]})
        apart = {*varied, *(FACTS[name] for name in varied)}
        prefixes = ("clip.", *(prefix for name in varied for prefix in _WITH.get(name, ())))
        runnable = [(slot, own) for slot, own in filled if not slot.reason]
        on_right = [(slot, own) for slot, own in runnable if slot.cell.has(rule["right"])]
        partners = {_rest(slot.cell, varied): (slot, own) for slot, own in on_right}
        for slot, own in runnable:
            rest = _rest(slot.cell, varied)
            if not slot.cell.has(rule["left"]) or rest not in partners:
                continue
            partner, others = partners[rest]
            asked.append(bool(own and others))
            common, name, partner_name = _apart(slot.cell, partner.cell)
            left, right = slot.cell.number, partner.cell.number
            printed = left - right if beside_print and left is not None and right is not None else None
            for one, two in agreeing(own, others, apart, prefixes):
                what = f"{common}, {described(one.filling.record)}"
                expected = rule["expect"], float(rule.get("margin", 0.0))
                pairs.append(compared(what, (name, one), (partner_name, two), *expected, printed))
    some = "" if all(asked) else f"{sum(asked)} of {len(asked)} comparisons in print"
    return Finding(pairs, ", ".join(filter(None, (claim.part, some))), claim.unstated)


def _apart(one: Cell, two: Cell) -> tuple[str, str, str]:
    """What two cells have in common, and their names without what both begin with: the printed model, which a stand-in is not."""
    if one.row == two.row:
        return one.row, one.column, two.column
    left, right = one.row.split(", "), two.row.split(", ")
    first = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), 0)
    return one.column, ", ".join(left[first:]), ", ".join(right[first:])


def _rest(cell: Cell, varied: Sequence[str]) -> tuple[tuple[str, str], ...]:
    names = {*FACTS, "metric", "split", "subset", "repetitions", "formulation"} - set(varied)
    return tuple(sorted((k, v) for k, v in cell.settings.items() if k in names))
