"""What a layout of text-to-text data must know: its files, its rows, and the rows of its copy on the hub.

A table has three columns: SOURCE (what the model is given, without the task's own instruction), TARGET (what it should
write), and GROUP: rows of one group are alternative references for one source.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from dpexp.errors import UserError
from dpexp.tasks.files import Table

SOURCE, TARGET, GROUP = "source", "target", "group"
CANDIDATES, SEPARATOR = "candidates", "|"
"""A column that a layout may have besides: what could stand in the place of the target, as ParlAI separates it."""
Pair = tuple[int, str, str, str]
"""Where a row stands in its file, counted from 1; source, target, group."""


class Format(ABC):
    """One published layout, in one of the ways to make text of its rows."""

    # the layout's name, which those ways share
    layout = ""
    # what the number of a pair counts
    unit = "line"
    # what a text of the file has to do with several examples, for the record: epsilon is that of one of them
    several = ""

    def layouts(self, stem: str) -> list[tuple[str, ...]]:
        """The files that can hold a split, the usual one first; each is one file or several that belong together."""
        return [(stem,)]

    @abstractmethod
    def read(self, paths: Sequence[Path]) -> Table:
        """The pairs of one split.

        Raises:
            UserError: a malformed row, with its file and its line or item.
        """

    @abstractmethod
    def from_hub(self, row: dict[str, Any], where: str) -> Iterator[tuple[str, str, str]]:
        """Source, target and group of the pairs in one row of the hub's copy; an empty group means a group for this row."""


def make_table(where: str, pairs: Iterable[Pair], sha256: str, unit: str) -> Table:
    """A table of pairs.

    Raises:
        UserError: there are none.
    """
    rows = list(pairs)
    if not rows:
        raise UserError(f"{where}: the file holds no rows")
    lines, sources, targets, groups = (list(column) for column in zip(*rows, strict=True))
    return Table(where, {SOURCE: sources, TARGET: targets, GROUP: groups}, lines, sha256, unit)


def hub_table(form: Format, dataset: Iterable[dict[str, Any]], where: str) -> Table:
    """The pairs of one split of a data set on the hub; the hash is that of the pairs, as JSON lines."""
    pairs: list[Pair] = []
    digest = hashlib.sha256()
    for number, row in enumerate(dataset, 1):
        for source, target, group in form.from_hub(row, f"{where}, row {number}"):
            pairs.append((number, source, target, group or str(number)))
            digest.update(json.dumps([source, target], ensure_ascii=False).encode() + b"\n")
    return make_table(where, pairs, digest.hexdigest(), "row")


def text_of(row: dict[str, Any], name: str, where: str) -> str:
    """A text cell of a JSON object or of a row on the hub.

    Raises:
        UserError: it is missing or no text.
    """
    if not isinstance(row, dict) or not isinstance(row.get(name), str):
        there = (
            f"its fields are {', '.join(map(str, row))}" if isinstance(row, dict) else "it is no JSON object"
        )
        raise UserError(f"{where}: malformed row: no text under {name!r}; {there}")
    return row[name]
