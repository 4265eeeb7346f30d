"""Where the pairs of a text-to-text task are found: own files, the published files below `data.root`, the hub, or the demo.

The order is that of classification (`dpexp.tasks.lookup`): the source is recorded, all splits come from one, and nothing is ever
taken in its place.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpexp.errors import UserError
from dpexp.models.sources import hub
from dpexp.tasks.base import declared_num_examples
from dpexp.tasks.demo import DEMO_NAME
from dpexp.tasks.files import Table, find_file
from dpexp.tasks.formats import FORMATS, TARGET, Columns, Format
from dpexp.tasks.formats.base import hub_table
from dpexp.tasks.formats.demo import write_demo
from dpexp.tasks.lookup import Found, is_demo

if TYPE_CHECKING:
    from dpexp.schemas import DataConfig, TaskConfig

HUB_SPLITS = {"train": "train", "dev": "validation", "test": "test"}
PARQUET = (
    "refs/convert/parquet"  # the hub's own copy of data sets whose loading script the library no longer runs
)
DEMO_ROWS = 2000  # where the configuration declares no N
DEMO_FILES = {"train": "train.jsonl", "dev": "dev.jsonl"}


def find_pairs(task: TaskConfig, data: DataConfig, scale: str) -> Found:
    """The tables of a generation task, with the columns of `dpexp.tasks.formats`.

    Args:
        task: `format` (of a published data set), `files`, `hub_id`, `hub_config`, and the columns of own files: `text`
            is the source's, `label` the target's.
        data: as for `find_tables`.
        scale: "paper", "small" or "demo".

    Raises:
        UserError: nothing was found, with everything that was tried; or what was found is malformed.
    """
    form: Format = Columns(data.text or task.text, data.label or task.label)
    if task.format:
        if task.format not in FORMATS:
            raise UserError(f"task.format={task.format} is unknown: choose one of {', '.join(FORMATS)}")
        form = FORMATS[task.format]
    if data.train is not None:
        paths = {"train": data.train, "dev": data.dev}
        tables = {
            split: form.read([Path(path).expanduser()]) for split, path in paths.items() if path is not None
        }
        return _checked(Found("own files", str(data.train), tables))
    if data.dev is not None:
        raise UserError("data.dev is given without data.train: own data needs at least data.train=FILE")
    if is_demo(data, scale):
        return _checked(_demo(task, form, declared_num_examples(task, data, scale)))
    if not task.files and not task.hub_id:
        raise UserError(
            f"task={task.name} has no data of its own: give data.train=FILE data.text=COLUMN data.label=COLUMN, and "
            "data.dev=FILE to measure on"
        )
    tried: list[str] = []
    found = None
    if data.source in ("auto", "files"):
        found = _below_root(task, data.root, form, tried)
    if found is None and data.source in ("auto", "hub"):
        found = _on_hub(task, form, tried)
    if found is not None:
        return _checked(found)
    stems = ", ".join(stem + " (or .gz, .xz)" for stem in task.files.values())
    raise UserError(
        f"no data for task={task.name}. Tried: {'; '.join(tried)}. Next: put {stems} into a folder and give "
        "data.root=FOLDER or set DPEXP_DATA; or go online for the hub; or take scale=demo, which is synthetic"
    )


def _below_root(task: TaskConfig, root: str | None, form: Format, tried: list[str]) -> Found | None:
    if root is None:
        tried.append("files: neither data.root nor DPEXP_DATA is set")
        return None
    folder = Path(root).expanduser()
    if not folder.is_dir():
        raise UserError(f"data.root={root}: no such folder (it may have come from DPEXP_DATA)")
    paths = {split: _find(folder, form, stem) for split, stem in task.files.items()}
    missing = [task.files[split] for split, found in paths.items() if found is None]
    if missing or not paths:
        tried.append(f"data.root={root}: no {', no '.join(missing) or 'files declared'}, plain, .gz or .xz")
        return None
    tables = {split: form.read(found) for split, found in paths.items() if found is not None}
    return Found("files", ", ".join(task.files.values()), tables)


def _find(root: Path, form: Format, stem: str) -> list[Path] | None:
    for layout in form.layouts(stem):
        paths = [path for path in (find_file(root, name) for name in layout) if path is not None]
        if len(paths) == len(layout):
            return paths
    return None


def _demo(task: TaskConfig, form: Format, rows: int | None) -> Found:
    layout, files = (task.format, task.files) if task.format else ("columns", DEMO_FILES)
    form = form if task.format else Columns("source", "target")
    with tempfile.TemporaryDirectory() as folder:
        write_demo(Path(folder), layout, files, rows or DEMO_ROWS)
        tables = {split: form.read([Path(folder) / stem]) for split, stem in files.items()}
    named = {split: replace(table, where=f"{DEMO_NAME}, {split}") for split, table in tables.items()}
    return Found("demo", DEMO_NAME, named)


def _on_hub(task: TaskConfig, form: Format, tried: list[str]) -> Found | None:
    if not task.hub_id:
        tried.append("hub: the task names no data set there")
        return None
    name = f"{task.hub_id}/{task.hub_config}" if task.hub_config else task.hub_id
    import datasets

    splits: Any = None
    with hub() as reason:
        for revision in (None, PARQUET):
            try:
                splits = datasets.load_dataset(task.hub_id, task.hub_config, revision=revision)
                break
            except Exception as error:  # the libraries for files, formats and the hub each raise their own
                why = (
                    f"can't be reached ({reason}), and its cache has no copy"
                    if reason
                    else str(error).splitlines()[0]
                )
    if splits is None:
        tried.append(f"hub, data set {name}: {why}")
        return None
    tables = {}
    for split in task.files:
        there = HUB_SPLITS[split]
        if there not in splits:
            raise UserError(f"hub, data set {name}: no split {there}; it has {', '.join(splits)}")
        tables[split] = hub_table(form, splits[there], f"hub, data set {name}, {there}")
    return Found("hub", name, tables)


def _checked(found: Found) -> Found:
    """Without pairs that have no target: an error in train, where N counts them; left out and counted elsewhere."""
    tables = {}
    for split, table in found.tables.items():
        empty = [row for row, target in enumerate(table.columns[TARGET]) if not target.strip()]
        if empty and split == "train":
            raise UserError(
                f"{table.at(empty[0])}: the target is empty, so there is nothing to learn from this row"
            )
        tables[split] = _without(table, set(empty)) if empty else table
    return replace(found, tables=tables)


def _without(table: Table, rows: set[int]) -> Table:
    kept = [row for row in range(len(table)) if row not in rows]
    columns = {name: [cells[row] for row in kept] for name, cells in table.columns.items()}
    return replace(table, columns=columns, lines=[table.lines[row] for row in kept], skipped=len(rows))
