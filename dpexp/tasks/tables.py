"""The rows of text classification: a text or two, and a label (see `sources.py`)."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from dpexp.errors import UserError
from dpexp.tasks.demo import DEMO_NAME, demo_tables
from dpexp.tasks.files import Table, from_dataset, read_table
from dpexp.tasks.sources import Found, Reader, find

if TYPE_CHECKING:
    from dpexp.schemas import DataConfig, TaskConfig

_GLUE_COLUMNS = {
    "mnli": {"premise": "sentence1", "hypothesis": "sentence2", "label": "gold_label"},
    "qqp": {"label": "is_duplicate"},
}
HUB_COLUMNS = {
    (hub, task): names for hub in ("glue", "nyu-mll/glue") for task, names in _GLUE_COLUMNS.items()
}
"""Data set on the hub -> its column names -> those of the published files, where the two differ."""


@dataclass(frozen=True)
class Columns:
    """The names of the columns that hold the text, the second text of a pair (or None), and the label."""

    text: str
    text_pair: str | None
    label: str

    @property
    def wanted(self) -> list[str]:
        """All of them that there are."""
        return [name for name in (self.text, self.text_pair, self.label) if name is not None]


def columns_of(task: TaskConfig, data: DataConfig) -> Columns:
    """The task's columns, or what `data` says instead."""
    return Columns(data.text or task.text, data.text_pair or task.text_pair, data.label or task.label)


def find_tables(task: TaskConfig, data: DataConfig, scale: str) -> Found[Table]:
    """The tables of a text classification task; as `find`."""
    return find(TableReader(task, data), scale)


class TableReader(Reader[Table]):
    """Reads `files`, `hub_id`, `hub_config`, `labels` and column names of a task."""

    hub_splits: ClassVar = {
        "train": ("train",),
        "dev": ("validation", "validation_matched", "dev"),
        "dev_mismatched": ("validation_mismatched",),
    }

    def __init__(self, task: TaskConfig, data: DataConfig) -> None:
        super().__init__(task, data)
        self.columns = columns_of(task, data)

    def own(self, paths: dict[str, Path]) -> Found[Table]:
        tables = self._with_dev({split: self._read(path) for split, path in paths.items()})
        notes = []
        if "dev" in tables and "dev" not in paths:
            notes.append(
                "dev is held out of the private training file: what is measured on these rows is published without noise, and "
                "nothing protects them"
            )
        return Found("own files", str(self.data.train), tables, notes=notes)

    def demo(self, rows: int | None) -> Found[Table]:
        dev_sets = [split for split in self.task.files if split.startswith("dev")] or ["dev"]
        names = (self.columns.text, self.columns.text_pair, self.columns.label)
        return Found("demo", DEMO_NAME, demo_tables(self.task.labels, *names, rows, dev_sets))

    def published(self, files: dict[str, Any]) -> Found[Table]:
        tables = self._with_dev({split: self._read(path) for split, path in files.items()})
        return Found("files", ", ".join(self.task.files.values()), tables)

    def from_hub(self, dataset: Any, split: str, where: str) -> Table:
        names = HUB_COLUMNS.get((self.task.hub_id or "", self.task.hub_config or ""), {})
        renamed = dataset.rename_columns(
            {old: new for old, new in names.items() if old in dataset.column_names}
        )
        return from_dataset(renamed, self.columns.wanted, where, self.task.labels)

    def identities(self, split: Table) -> Iterable[Hashable]:
        texts = [name for name in self.columns.wanted if name != self.columns.label]
        return zip(*(split.columns[name] for name in texts), strict=True)

    def _read(self, path: Path) -> Table:
        task = self.task
        return read_table(
            path,
            self.columns.wanted,
            task.labels,
            header=task.columns,
            skip_malformed=task.malformed == "skip",
        )

    def _with_dev(self, tables: dict[str, Table]) -> dict[str, Table]:
        """Where there is no file for dev, the last rows of the training file become it, if the task asks for that."""
        held_out = self.task.held_out
        if not held_out or "dev" in tables:
            return tables
        train = tables["train"]
        left = len(train) - held_out
        if left < 1:
            raise UserError(
                f"{train.where}: task.held_out={held_out} of {len(train)} rows leaves nothing to train on"
            )
        # the file's malformed rows are counted once
        dev = replace(train.rows(left, len(train)), skipped=0)
        return {**tables, "train": train.rows(0, left), "dev": dev}
