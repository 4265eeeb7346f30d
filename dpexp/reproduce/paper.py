"""The papers' printed numbers, as transcribed in ``results/paper``: one CSV for each table or figure, one line for each cell.

Files are named ``<paper>_<table>.csv``: ``he2023_table1b.csv``, ``li2022_figure2.csv``, ``monir2023_text.csv`` (values that
only the prose gives). Papers: he2023 (He et al., group-wise clipping), bu2023 (Bu et al., Book-Keeping), li2022 (Li et al.,
strong DP learners), monir2023 (Monir et al., review).
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from dpexp.config.usage import shipped
from dpexp.errors import UserError, did_you_mean

FOLDER = shipped("results/paper")
PAPERS = {
    "he2023": "He et al. (ICLR 2023)",
    "bu2023": "Bu et al. (ICML 2023)",
    "li2022": "Li et al. (ICLR 2022)",
    "monir2023": "Monir et al. (2023)",
}


def short(paper: str) -> str:
    """As in the names of targets: "he" of "he2023"."""
    return paper.rstrip("0123456789")


SHORT = {short(paper): title for paper, title in PAPERS.items()}


def paper_of(target: str) -> str:
    """Whose a target is: "he" of "table-he-2"; "" where it belongs to no paper."""
    return next((part for part in target.split("-") if part in SHORT), "")


def target_name(paper: str, table: str) -> str:
    """table-he-2, figure-li-2: of ("he2023", "2"), ("li2022", "figure2")."""
    kind = "figure" if table.startswith("figure") else "table"
    return f"{kind}-{short(paper)}-{table.removeprefix('figure')}"


def numbered(table: str) -> str:
    """As in the names of files: "table1b" of "1b"; "figure2" of itself."""
    return f"table{table}" if table[:1].isdigit() else table


@cache
def listed(name: str) -> Any:
    """The content of a YAML file of ``results/paper`` ("claims", "settings") or of this package ("pages", "league")."""
    places = (folder / f"{name}.yaml" for folder in (FOLDER, Path(__file__).parent))
    return yaml.safe_load(next(place for place in places if place.is_file()).read_text(encoding="utf-8"))


# what an entry of ``claims.yaml`` has where it does not say so; see its header
UNSAID: dict[str, Any] = (
    {"key": ("", ""), "by": "cells", "metric": "accuracy", "audits": False}
    | dict.fromkeys(("title", "claim", "note", "part", "unstated", "needs", "kind", "x", "says", "preset", "arithmetic"), "")
    | dict.fromkeys(("compare", "miniature", "heat", "same_runs", "tuned", "along", "bounds"), ())
    | {name: {} for name in ("where", "stand_ins", "instead", "select", "commands", "workloads")}
)  # fmt: skip


class Entry(SimpleNamespace):
    """One entry of ``claims.yaml``.

    Raises:
        UserError: a setting that there is not.
    """

    def __init__(self, **said: Any):
        if odd := said.keys() - UNSAID.keys():
            raise UserError(f"claims.yaml: there is no setting {min(odd)}{did_you_mean(min(odd), [*UNSAID])}")
        super().__init__(**(UNSAID | said))


@cache
def claims(by: str, kind: type[Entry] = Entry) -> dict[tuple[str, str], Any]:
    """(paper, table) -> its claim, of those that are tested by "cells", "curves" or "bench". "he2023", "2"."""
    found = {}
    for name, entry in listed("claims").items():
        paper, _, table = name.partition("_")
        key = paper, table.removeprefix("table")
        found[key] = kind(key=key, **entry)
    return {key: claim for key, claim in found.items() if claim.by == by}


@cache
def targets(by: str) -> dict[str, Any]:
    """Those of `claims` by the names of their targets."""
    return {target_name(*key): claim for key, claim in claims(by).items()}


@dataclass(frozen=True)
class Cell:
    """One printed cell.

    Every field is text as it stands in print, so that digits are kept: ``value`` is "" where the cell is empty or lost in
    our copy, and ``conditions`` then says which; ``spread`` is a standard deviation, in ``unit``; ``seeds`` is the number of
    runs behind the value, "" where the paper does not say. ``conditions`` lists settings as ``name=value`` and remarks in
    words, separated by "; ".
    """

    paper: str
    table: str
    row: str
    column: str
    value: str
    spread: str
    seeds: str
    unit: str
    conditions: str

    @property
    def number(self) -> float | None:
        """The value as a number, in ``unit``; None for text and for empty cells."""
        return as_number(self.value)

    @property
    def decimals(self) -> int:
        """Digits after the point of the printed value: what "to the printed digit" means for this cell."""
        return len(self.value.partition(".")[2]) if self.number is not None else 0

    @property
    def settings(self) -> dict[str, str]:
        """The ``name=value`` parts of ``conditions``."""
        parts = (part.partition("=") for part in self.conditions.split("; "))
        return {name: value for name, equals, value in parts if equals}

    def has(self, settings: Mapping[str, object]) -> bool:
        """Does it have these settings?"""
        said = self.settings
        return all(said.get(name) == str(value) for name, value in settings.items())


COLUMNS = tuple(field.name for field in fields(Cell))


def paper_tables(folder: Path = FOLDER) -> list[tuple[str, str]]:
    """What there is, as ``(paper, table)`` sorted by file name; each is an argument pair of `paper_table`."""
    found = (path.stem.partition("_") for path in sorted(folder.glob("*_*.csv")))
    return [(paper, table) for paper, _, table in found]


@cache
def paper_table(paper: str, table: str, folder: Path = FOLDER) -> list[Cell]:
    """The cells of one table in the order of print, row by row.

    Args:
        paper: "he2023", "bu2023", "li2022" or "monir2023".
        table: "1b" or "table1b"; "figure2"; "text".
        folder: where the CSV files are.

    Raises:
        UserError: there is no such table, or its file is not a transcription.
    """
    path = folder / f"{paper}_{numbered(table)}.csv"
    if not path.is_file():
        known = ["_".join(pair) for pair in paper_tables(folder)]
        raise UserError(f"no transcription is called {path.name}{did_you_mean(path.stem, known)}")
    with path.open(encoding="utf-8", newline="") as file:
        header, *lines = [*csv.reader(file)] or [[]]
    if header != list(COLUMNS):
        raise UserError(f"{path}: its columns are {', '.join(header)}, expected {', '.join(COLUMNS)}")
    for number, line in enumerate(lines, 2):
        if len(line) != len(COLUMNS):
            raise UserError(f"{path}, line {number}: {len(line)} columns, expected {len(COLUMNS)}")
    return [Cell(*line) for line in lines]


@cache
def printed(paper: str, table: str, row: str, column: str) -> str:
    """The value in a row and a column, as it stands in print.

    Raises:
        UserError: there is no such table, row or column.
    """
    for cell in paper_table(paper, table):
        if (cell.row, cell.column) == (row, column):
            return cell.value
    raise UserError(f"{paper}, {table}: nothing is transcribed for {row!r}, {column!r}")


def selected(paper: str, table: str, column: str, **settings: str) -> list[Cell]:
    """The cells of a column that have these settings, in the order of print."""
    return [cell for cell in paper_table(paper, table) if cell.column == column and cell.has(settings)]


def as_number(text: str) -> float | None:
    """None where it is none."""
    try:
        return float(text)
    except ValueError:
        return None
