"""The pairs of a text-to-text task: a source and a target (see `sources.py`)."""

from __future__ import annotations

import tempfile
from collections.abc import Container, Hashable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from dpexp.errors import UserError
from dpexp.tasks.demo import DEMO_NAME
from dpexp.tasks.files import Table, find_file
from dpexp.tasks.formats import FORMATS, SOURCE, TARGET, Columns, Format
from dpexp.tasks.formats.base import hub_table
from dpexp.tasks.formats.demo import write_demo
from dpexp.tasks.sources import Found, Reader, find

if TYPE_CHECKING:
    from dpexp.schemas import DataConfig, TaskConfig

# where the configuration declares no N
DEMO_ROWS = 2000
DEMO_FILES = {"train": "train.jsonl", "dev": "dev.jsonl"}


def find_pairs(task: TaskConfig, data: DataConfig, scale: str) -> Found[Table]:
    """The tables of a generation task, with the columns of `dpexp.tasks.formats`; as `find`.

    A row without a target is an error in train, where N counts it; elsewhere it is left out and counted.
    """
    reader = PairReader(task, data)
    found = find(reader, scale)
    several = reader.format.several
    return replace(
        found,
        splits={split: _checked(split, table) for split, table in found.splits.items()},
        notes=[*found.notes, *([f"{several} (epsilon is that of one example)"] if several else [])],
    )


class PairReader(Reader[Table]):
    """Reads `format` (of a published data set), `files`, `hub_id`, `hub_config` of a task, and the columns of own files:
    `text` is the source's, `label` the target's."""

    hub_splits: ClassVar = {"train": ("train",), "dev": ("validation",), "test": ("test",)}

    def __init__(self, task: TaskConfig, data: DataConfig) -> None:
        super().__init__(task, data)
        if task.format and task.format not in FORMATS:
            raise UserError(f"task.format={task.format} is unknown: choose one of {', '.join(FORMATS)}")
        names = data.text or task.text, data.label or task.label
        columns = Columns(*names, tuple(task.columns), task.malformed == "skip")
        self.format: Format = FORMATS[task.format] if task.format else columns

    def own(self, paths: dict[str, Path]) -> Found[Table]:
        tables = {split: self.format.read([path]) for split, path in paths.items()}
        return Found("own files", str(self.data.train), tables)

    def demo(self, rows: int | None) -> Found[Table]:
        task = self.task
        layout, files = (self.format.layout, task.files) if task.format else ("columns", DEMO_FILES)
        form = self.format if task.format else Columns("source", "target")
        with tempfile.TemporaryDirectory() as folder:
            write_demo(Path(folder), layout, files, rows or DEMO_ROWS)
            tables = {split: form.read([Path(folder) / stem]) for split, stem in files.items()}
        named = {split: replace(table, where=f"{DEMO_NAME}, {split}") for split, table in tables.items()}
        return Found("demo", DEMO_NAME, named)

    def published(self, files: dict[str, Any]) -> Found[Table]:
        tables = {split: self.format.read(paths) for split, paths in files.items()}
        return Found("files", ", ".join(self.task.files.values()), tables)

    def place(self, root: Path, name: str) -> list[Path] | None:
        for layout in self.format.layouts(self.task.files[name]):
            paths = [path for path in (find_file(root, stem) for stem in layout) if path is not None]
            if len(paths) == len(layout):
                return paths
        return None

    def from_hub(self, dataset: Any, split: str, where: str) -> Table:
        return hub_table(self.format, dataset, where)

    def identities(self, split: Table) -> Iterable[Hashable]:
        return zip(split.columns[SOURCE], split.columns[TARGET], strict=True)


def _checked(split: str, table: Table) -> Table:
    empty = [row for row, target in enumerate(table.columns[TARGET]) if not target.strip()]
    if empty and split == "train":
        raise UserError(
            f"{table.at(empty[0])}: the target is empty, so there is nothing to learn from this row"
        )
    return replace(without(table, set(empty)), skipped=table.skipped + len(empty)) if empty else table


def without(table: Table, rows: Container[int]) -> Table:
    """The table without these rows."""
    kept = [row for row in range(len(table)) if row not in rows]
    columns = {name: [cells[row] for row in kept] for name, cells in table.columns.items()}
    return replace(table, columns=columns, lines=[table.lines[row] for row in kept])
