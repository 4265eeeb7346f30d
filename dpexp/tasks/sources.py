"""Where a task's data is found: own files, the published files below `data.root`, the hub, or the embedded demo.

The order is fixed, the source is recorded, all splits come from one source, and nothing is ever taken in its place. How a
split is read from each of them is the business of a `Reader`: of tables (`tables.py`), pairs (`pairs.py`) or images
(`image_sources.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from dpexp.errors import UserError, first_line
from dpexp.models.sources import hub
from dpexp.tasks.base import COUNTED, DataInfo, declared_num_examples
from dpexp.tasks.files import find_file

if TYPE_CHECKING:
    from dpexp.schemas import DataConfig, TaskConfig

# the hub's own copy of data sets whose loading script the library no longer runs
PARQUET = "refs/convert/parquet"
# a dev set with a larger share of training rows than this is the training data by another name
MOST_SHARED = 0.5
NO_DEV = "no dev set was given (data.dev), so nothing is measured"

Split = TypeVar("Split")
"""What a reader makes of a split: it has a length and a `sha256`."""


@dataclass(frozen=True)
class Found(Generic[Split]):
    """Splits ("train", "dev", perhaps "dev_..." and "test"), their source and its name (see `DataInfo`).

    labels: the classes, where the source knows them.
    notes: what the record must say of the data.
    """

    source: str
    name: str
    splits: dict[str, Split]
    labels: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def info(self, task: TaskConfig, data: DataConfig, scale: str, notes: Iterable[str]) -> DataInfo:
        """For the record, with further notes."""
        counted = [COUNTED] if declared_num_examples(task, data, scale) is None else []
        unmeasured = [] if "dev" in self.splits else [NO_DEV]
        splits: dict[str, Any] = dict(self.splits)
        return DataInfo(
            source=self.source,
            name=self.name,
            rows={name: len(split) for name, split in splits.items()},
            sha256={name: split.sha256 for name, split in splits.items()},
            notes=[*self.notes, *notes, *counted, *unmeasured],
        )


class Reader(ABC, Generic[Split]):
    """How the splits of one kind of task are read.

    Args:
        task, data: see their schemas.
    """

    own_data: ClassVar[str] = "data.train=FILE data.text=COLUMN data.label=COLUMN, and data.dev=FILE"
    # split -> its names on the hub, of which the first there counts
    hub_splits: ClassVar[dict[str, tuple[str, ...]]]

    def __init__(self, task: TaskConfig, data: DataConfig) -> None:
        self.task, self.data = task, data

    @abstractmethod
    def own(self, paths: dict[str, Path]) -> Found[Split]:
        """A person's own files, "train" and perhaps "dev"."""

    @abstractmethod
    def demo(self, rows: int | None) -> Found[Split]:
        """The embedded data, with so many rows in train; None where the configuration declares no N."""

    @abstractmethod
    def published(self, files: dict[str, Any]) -> Found[Split]:
        """The published files, each as `place` found it."""

    @abstractmethod
    def from_hub(self, dataset: Any, split: str, where: str) -> Split:
        """One split of a `datasets.DatasetDict`."""

    @abstractmethod
    def identities(self, split: Split) -> Iterable[Hashable]:
        """For each row something that is equal for equal rows."""

    def splits(self) -> tuple[str, ...]:
        """Those of the published data set."""
        return tuple(self.task.files) or ("train", "dev")

    def wanted(self) -> dict[str, str]:
        """Name -> file or folder below `data.root`."""
        return dict(self.task.files)

    def place(self, root: Path, name: str) -> Any:
        """Where the thing of this name in `wanted` is; None if it isn't there."""
        return find_file(root, self.wanted()[name])

    def how_to_place(self) -> str:
        """What to put into a folder, in words."""
        return ", ".join(stem + " (or .gz, .xz)" for stem in self.task.files.values())


def is_demo(data: DataConfig, scale: str) -> bool:
    """Whether the embedded data is what the configuration asks for."""
    return data.train is None and (data.source == "demo" or (data.source == "auto" and scale == "demo"))


def find(reader: Reader[Split], scale: str) -> Found[Split]:
    """The data of a task.

    Own files (`data.train`, `data.dev`) come first. Else `data.source` says: "files", "hub", "demo", or "auto", which is the
    demo at scale "demo", otherwise files below `data.root`, then the hub.

    Args:
        reader: of the task's kind.
        scale: "paper", "small" or "demo".

    Raises:
        UserError: nothing was found, with everything that was tried and how to get the files; or what was found is
            malformed; or a dev set that is the training data.
    """
    task, data = reader.task, reader.data
    if data.train is not None:
        given = {"train": data.train, "dev": data.dev}
        paths = {split: Path(path).expanduser() for split, path in given.items() if path is not None}
        return _compared(reader, reader.own(paths))
    if data.dev is not None:
        raise UserError("data.dev is given without data.train: own data needs at least data.train")
    if is_demo(data, scale):
        return reader.demo(declared_num_examples(task, data, scale))
    if not task.files and not task.hub_id:
        raise UserError(f"task={task.name} has no data of its own: give {reader.own_data} to measure on")
    tried: list[str] = []
    found = _below_root(reader, tried) if data.source in ("auto", "files") else None
    if found is None and data.source in ("auto", "hub"):
        found = _on_hub(reader, tried)
    if found is None:
        raise UserError(
            f"no data for task={task.name}. Tried: {'; '.join(tried)}. Next: put {reader.how_to_place()} into a folder and "
            "give data.root=FOLDER or set DPEXP_DATA; or go online for the hub; or take scale=demo, which is synthetic"
        )
    return found


def _compared(reader: Reader[Split], found: Found[Split]) -> Found[Split]:
    """Own data whose dev set is not its training set: what is measured on dev is published, as if dev were public.

    Of rows that stand in both, or in train more than once, the holder of the data is told.
    """
    train = Counter(reader.identities(found.splits["train"]))
    if copies := sum(count for count in train.values() if count > 1):
        note = (
            f"train: {copies} of its rows are equal to another one: where they are copies of one example, epsilon is that of "
            "each copy alone, unless unit=user and one user has them all (counted without noise on private data)"
        )
        found = replace(found, notes=[*found.notes, note])
    if "dev" not in found.splits:
        return found
    # of the training file itself, where task.held_out says so
    dev = list(reader.identities(found.splits["dev"]))
    shared = sum(row in train for row in dev)
    if reader.data.dev is not None and shared > MOST_SHARED * len(dev):
        raise UserError(
            f"data.dev={reader.data.dev}: most of its rows are in data.train too. What is measured there is published without "
            "noise, as if it were public, and tells nothing about new data: give other rows, or leave data.dev out"
        )
    if not shared:
        return found
    note = f"{shared} of {len(dev)} rows of dev are in train too (counted without noise on private data)"
    return replace(found, notes=[*found.notes, note])


def _below_root(reader: Reader[Split], tried: list[str]) -> Found[Split] | None:
    root = reader.data.root
    if root is None:
        tried.append("files: neither data.root nor DPEXP_DATA is set")
        return None
    folder = Path(root).expanduser()
    if not folder.is_dir():
        raise UserError(f"data.root={root}: no such folder (it may have come from DPEXP_DATA)")
    files = {name: reader.place(folder, name) for name in reader.wanted()}
    missing = [stem for name, stem in reader.wanted().items() if files[name] is None]
    if missing or not files:
        tried.append(f"data.root={root}: no {', no '.join(missing) or 'files declared'}, plain, .gz or .xz")
        return None
    return reader.published(files)


def _on_hub(reader: Reader[Split], tried: list[str]) -> Found[Split] | None:
    task = reader.task
    if not task.hub_id:
        tried.append("hub: the task names no data set there")
        return None
    name = f"{task.hub_id}/{task.hub_config}" if task.hub_config else task.hub_id
    import datasets

    there: Any = None
    with hub() as reason:
        for revision in (None, PARQUET):
            try:
                there = datasets.load_dataset(task.hub_id, task.hub_config, revision=revision)
                break
            except Exception as error:
                # the libraries for files, formats and the hub each raise their own
                why = (
                    f"can't be reached ({reason}), and its cache has no copy" if reason else first_line(error)
                )
    if there is None:
        tried.append(f"hub, data set {name}: {why}")
        return None
    splits = {}
    for split in reader.splits():
        names = [candidate for candidate in reader.hub_splits.get(split, (split,)) if candidate in there]
        if not names:
            raise UserError(f"hub, data set {name}: no split for {split}; it has {', '.join(there)}")
        splits[split] = reader.from_hub(there[names[0]], split, f"hub, data set {name}, {names[0]}")
    return Found("hub", name, splits, [str(label) for label in task.labels])
