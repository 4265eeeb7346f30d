"""A person's own pairs: two columns of a CSV, TSV, JSON or JSON-lines file, or of a saved Hugging Face data set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dpexp.tasks.files import Table, read_table
from dpexp.tasks.formats.base import GROUP, SOURCE, TARGET, Format, text_of


@dataclass(frozen=True)
class Columns(Format):
    """Rows of one source are alternative references for it.

    source, target: names of the columns.
    header, skip_malformed: see `read_table`.
    """

    source: str
    target: str
    header: tuple[str, ...] = ()
    skip_malformed: bool = False

    def read(self, paths: Sequence[Path]) -> Table:
        """As `read_table`."""
        wanted = [self.source, self.target]
        found = read_table(paths[0], wanted, header=self.header, skip_malformed=self.skip_malformed)
        sources, targets = found.columns[self.source], found.columns[self.target]
        return replace(found, columns={SOURCE: sources, TARGET: targets, GROUP: list(sources)})

    def from_hub(self, row: dict[str, Any], where: str) -> Iterator[tuple[str, str, str]]:
        """Not reached by a person's own files; a data set on the hub can be named all the same (`task.hub_id`)."""
        source = text_of(row, self.source, where)
        yield source, text_of(row, self.target, where), source
