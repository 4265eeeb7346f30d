"""SAMSum (Gliwa et al. 2019): a JSON list of `{"id", "dialogue", "summary"}`.

One dialogue of the training set is empty (id 13828807). It stays: it is one of the published 14,732 records, N is public and must
not depend on what a record says, and its summary can be learnt from like any other, given the instruction alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dpexp.tasks.files import Table, read_table
from dpexp.tasks.formats.base import Format, make_table, text_of


class Samsum(Format):
    """Every dialogue has one summary; the line ends of some files (CR LF) become plain ones."""

    layout = "samsum"
    unit = "item"

    def read(self, paths: Sequence[Path]) -> Table:
        """The dialogue is the source, the summary the target."""
        found = read_table(paths[0], ["dialogue", "summary"])
        rows = zip(found.lines, found.columns["dialogue"], found.columns["summary"], strict=True)
        pairs = ((line, _lines(dialogue), summary.strip(), str(line)) for line, dialogue, summary in rows)
        return make_table(found.where, pairs, found.sha256, found.unit)

    def from_hub(self, row: dict[str, Any], where: str) -> Iterator[tuple[str, str, str]]:
        """The hub's columns are those of the files."""
        yield _lines(text_of(row, "dialogue", where)), text_of(row, "summary", where).strip(), ""


def _lines(dialogue: str) -> str:
    return dialogue.replace("\r\n", "\n").strip()
