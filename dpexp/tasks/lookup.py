"""Where a task's data is found: own files, the published files below `data.root`, the hub, or the embedded demo.

The order is fixed, the source is recorded, all splits come from one source, and nothing is ever taken in its place.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dpexp.errors import UserError
from dpexp.models.sources import hub
from dpexp.tasks.base import declared_num_examples
from dpexp.tasks.demo import DEMO_NAME, demo_tables
from dpexp.tasks.files import Table, find_file, from_dataset, read_table

if TYPE_CHECKING:
    from dpexp.schemas import DataConfig, TaskConfig

HUB_SPLITS = {
    "train": ("train",),
    "dev": ("validation", "validation_matched", "dev"),
    "dev_mismatched": ("validation_mismatched",),
}
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


@dataclass(frozen=True)
class Found:
    """Tables by split ("train", "dev", perhaps "dev_..."), their source and its name; see `DataInfo`."""

    source: str
    name: str
    tables: dict[str, Table]


def is_demo(data: DataConfig, scale: str) -> bool:
    """Whether the embedded data is what the configuration asks for."""
    return data.train is None and (data.source == "demo" or (data.source == "auto" and scale == "demo"))


def columns_of(task: TaskConfig, data: DataConfig) -> Columns:
    """The task's columns, or what `data` says instead."""
    return Columns(data.text or task.text, data.text_pair or task.text_pair, data.label or task.label)


def find_tables(task: TaskConfig, data: DataConfig, scale: str) -> Found:
    """The tables of a text classification task.

    Args:
        task: `files`, `hub_id`, `hub_config`, `labels` and column names.
        data: `train` and `dev` are a person's own files and come first. Else `source`: "files", "hub", "demo", or
            "auto", which is the demo at scale "demo", otherwise files below `root`, then the hub.
        scale: "paper", "small" or "demo".

    Raises:
        UserError: nothing was found, with everything that was tried and how to get the files; or what was found is
            malformed.
    """
    columns = columns_of(task, data)
    if data.train is not None:
        return _own_files(task, data, columns)
    if data.dev is not None:
        raise UserError("data.dev is given without data.train: own data needs at least data.train=FILE")
    if is_demo(data, scale):
        rows = declared_num_examples(task, data, scale)
        dev_sets = [split for split in task.files if split.startswith("dev")] or ["dev"]
        tables = demo_tables(task.labels, columns.text, columns.text_pair, columns.label, rows, dev_sets)
        return Found("demo", DEMO_NAME, tables)
    if not task.files and not task.hub_id:
        raise UserError(
            f"task={task.name} has no data of its own: give data.train=FILE data.text=COLUMN data.label=COLUMN, and "
            "data.dev=FILE to measure on"
        )
    tried: list[str] = []
    if data.source in ("auto", "files"):
        found = _below_root(task, data, columns, tried)
        if found is not None:
            return found
    if data.source in ("auto", "hub"):
        found = _on_hub(task, columns, tried)
        if found is not None:
            return found
    stems = ", ".join(stem + " (or .gz, .xz)" for stem in task.files.values())
    raise UserError(
        f"no data for task={task.name}. Tried: {'; '.join(tried)}. Next: put {stems} into a folder and give "
        "data.root=FOLDER or set DPEXP_DATA; or go online for the hub; or take scale=demo, which is synthetic"
    )


def _own_files(task: TaskConfig, data: DataConfig, columns: Columns) -> Found:
    paths = {"train": data.train, "dev": data.dev}
    tables = {
        split: _read(Path(path).expanduser(), task, columns)
        for split, path in paths.items()
        if path is not None
    }
    return Found("own files", str(data.train), _with_dev(task, tables))


def _below_root(task: TaskConfig, data: DataConfig, columns: Columns, tried: list[str]) -> Found | None:
    if data.root is None:
        tried.append("files: neither data.root nor DPEXP_DATA is set")
        return None
    root = Path(data.root).expanduser()
    if not root.is_dir():
        raise UserError(f"data.root={data.root}: no such folder (it may have come from DPEXP_DATA)")
    paths = {split: find_file(root, stem) for split, stem in task.files.items()}
    missing = [task.files[split] for split, path in paths.items() if path is None]
    if missing or not paths:
        tried.append(
            f"data.root={data.root}: no {', no '.join(missing) or 'files declared'}, plain, .gz or .xz"
        )
        return None
    tables = {split: _read(path, task, columns) for split, path in paths.items() if path is not None}
    return Found("files", ", ".join(task.files.values()), _with_dev(task, tables))


def _read(path: Path, task: TaskConfig, columns: Columns) -> Table:
    return read_table(
        path, columns.wanted, task.labels, header=task.columns, skip_malformed=task.malformed == "skip"
    )


def _with_dev(task: TaskConfig, tables: dict[str, Table]) -> dict[str, Table]:
    """The tables; where there is none for dev, the last rows of the training file become it, if the task asks for that."""
    if not task.held_out or "dev" in tables:
        return tables
    train = tables["train"]
    left = len(train) - task.held_out
    if left < 1:
        raise UserError(
            f"{train.where}: task.held_out={task.held_out} of {len(train)} rows leaves nothing to train on"
        )
    dev = replace(train.rows(left, len(train)), skipped=0)  # the file's malformed rows are counted once
    return {**tables, "train": train.rows(0, left), "dev": dev}


def _on_hub(task: TaskConfig, columns: Columns, tried: list[str]) -> Found | None:
    if not task.hub_id:
        tried.append("hub: the task names no data set there")
        return None
    name = f"{task.hub_id}/{task.hub_config}" if task.hub_config else task.hub_id
    import datasets

    with hub() as reason:
        try:
            splits = datasets.load_dataset(task.hub_id, task.hub_config)
        except Exception as error:  # the libraries for files, formats and the hub each raise their own
            why = (
                f"can't be reached ({reason}), and its cache has no copy"
                if reason
                else str(error).splitlines()[0]
            )
            tried.append(f"hub, data set {name}: {why}")
            return None
    renamed = HUB_COLUMNS.get((task.hub_id, task.hub_config or ""), {})
    tables = {}
    for split in task.files or ("train", "dev"):
        there = [candidate for candidate in HUB_SPLITS.get(split, (split,)) if candidate in splits]
        if not there:
            raise UserError(f"hub, data set {name}: no split for {split}; it has {', '.join(splits)}")
        dataset = splits[there[0]]
        dataset = dataset.rename_columns(
            {old: new for old, new in renamed.items() if old in dataset.column_names}
        )
        tables[split] = from_dataset(
            dataset, columns.wanted, f"hub, data set {name}, {there[0]}", task.labels
        )
    return Found("hub", name, tables)
