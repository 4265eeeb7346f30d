"""Where the images of a task are found: own folders, the published files below `data.root`, the hub, or the demo.

The order is fixed, the source is recorded, all splits come from one source, and nothing is ever taken in its place.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dpexp.errors import UserError
from dpexp.models.sources import hub
from dpexp.tasks.base import declared_num_examples
from dpexp.tasks.demo_images import DEMO_IMAGES, demo_images
from dpexp.tasks.files import find_file
from dpexp.tasks.image_files import (
    CIFAR,
    Images,
    cached,
    checked,
    file_sha256,
    find_cifar,
    read_cifar,
    read_idx_pair,
    read_jpeg_tar,
)
from dpexp.tasks.image_folders import class_folders, read_folder

if TYPE_CHECKING:
    from dpexp.schemas import DataConfig, TaskConfig

FORMATS = ("idx", *CIFAR, "jpeg_tar")
"""What `task.format` may name for images."""
HUB_COLUMNS = {
    "ylecun/mnist": ("image", "label"),
    "uoft-cs/cifar10": ("img", "label"),
    "uoft-cs/cifar100": ("img", "fine_label"),
}
HUB_SPLITS = {"train": ("train",), "dev": ("test", "validation")}
JPEG_NOTE = "the pixels went through lossy JPEG compression: a result on them is none on the data set they were made from"
DEMO_CLASSES = tuple(f"pattern {i}" for i in range(4))  # where the task has no classes of its own


@dataclass(frozen=True)
class FoundImages:
    """Splits ("train", "dev"), the names of the classes, their source and its name (see `DataInfo`), what to say of them."""

    source: str
    name: str
    splits: dict[str, Images]
    labels: list[str]
    notes: list[str] = field(default_factory=list)


def find_images(task: TaskConfig, data: DataConfig, scale: str, cache: Path) -> FoundImages:
    """The images of a task.

    Args:
        task: `format`, `files`, `hub_id`, `labels`, `image_size`, `channels`.
        data: `train` and `dev` are a person's own folders and come first. Else `source`: "files", "hub", "demo", or
            "auto", which is the demo at scale "demo", otherwise files below `root`, then the hub.
        scale: "paper", "small" or "demo".
        cache: a folder for decoded images.

    Raises:
        UserError: nothing was found, with everything that was tried and how to get the files; or what was found is
            malformed.
    """
    if data.train is not None:
        return _own_folders(task, data, cache)
    if data.dev is not None:
        raise UserError("data.dev is given without data.train: own images need at least data.train=FOLDER")
    size = task.image_size or 32
    if data.source == "demo" or (data.source == "auto" and scale == "demo"):
        labels = list(task.labels or DEMO_CLASSES)
        rows = declared_num_examples(task, data, scale)
        splits = demo_images(len(labels), (task.channels, size, size), rows)
        return FoundImages("demo", DEMO_IMAGES, splits, labels)
    if not task.format:
        raise UserError(
            f"task={task.name} has no data of its own: give data.train=FOLDER with one subfolder of images for every class, "
            "and data.dev=FOLDER to measure on"
        )
    if task.format not in FORMATS:
        raise UserError(f"task.format={task.format} is unknown: choose one of {', '.join(FORMATS)}")
    tried: list[str] = []
    if data.source in ("auto", "files"):
        found = _below_root(task, data, tried, cache)
        if found is not None:
            return found
    if data.source in ("auto", "hub"):
        found = _on_hub(task, tried, cache)
        if found is not None:
            return found
    raise UserError(
        f"no data for task={task.name}. Tried: {'; '.join(tried)}. Next: put {_wanted(task)} into a folder and give "
        "data.root=FOLDER or set DPEXP_DATA; or go online for the hub; or take scale=demo, which is synthetic"
    )


def _wanted(task: TaskConfig) -> str:
    if task.format in CIFAR:
        return " or ".join(f"{layout.folder}/ or {layout.archive}" for layout in CIFAR[task.format])
    return ", ".join(stem + " (or .gz, .xz)" for stem in task.files.values())


def _own_folders(task: TaskConfig, data: DataConfig, cache: Path) -> FoundImages:
    folders = {"data.train": data.train, "data.dev": data.dev}
    paths = {setting: Path(folder).expanduser() for setting, folder in folders.items() if folder is not None}
    labels = list(task.labels) or class_folders(paths["data.train"], "data.train")
    notes = []
    if not task.labels:
        notes.append(
            "the classes were taken from the private training folder and are treated as public; declare them with "
            "task.labels=[...]"
        )
    splits: dict[str, Images] = {}
    size = task.image_size or None
    for setting, path in paths.items():
        split = setting.removeprefix("data.")
        images, passed_over = read_folder(
            path, labels, setting, channels=task.channels, size=size, cache=cache
        )
        if splits and images.pixels.shape[1:] != splits["train"].pixels.shape[1:]:
            _, height, width = images.pixels.shape[1:]
            raise UserError(
                f"{setting}={path}: its images have {width}x{height} pixels, and those of data.train another size: give "
                "task.image_size=N to make all of them N x N"
            )
        private = " (counted without noise on private data)" if split == "train" else ""
        if passed_over:
            notes.append(f"{split}: {passed_over} files that are no images were passed over{private}")
        splits[split] = images
    if size:
        notes.append(f"images were scaled and cut to {size}x{size} pixels")
    return FoundImages("own files", str(data.train), splits, labels, notes)


def _below_root(task: TaskConfig, data: DataConfig, tried: list[str], cache: Path) -> FoundImages | None:
    if data.root is None:
        tried.append("files: neither data.root nor DPEXP_DATA is set")
        return None
    root = Path(data.root).expanduser()
    if not root.is_dir():
        raise UserError(f"data.root={data.root}: no such folder (it may have come from DPEXP_DATA)")
    classes = len(task.labels)
    if task.format in CIFAR:
        there = find_cifar(root, task.format)
        if there is None:
            tried.append(f"data.root={data.root}: no {_wanted(task)}, there or in {task.format}/")
            return None
        path, layout = there
        return FoundImages("files", path.name, read_cifar(path, layout, classes), list(task.labels))
    paths = {name: find_file(root, stem) for name, stem in task.files.items()}
    files = {name: path for name, path in paths.items() if path is not None}
    if missing := [task.files[name] for name in paths if name not in files]:
        tried.append(f"data.root={data.root}: no {', no '.join(missing)}, plain, .gz or .xz")
        return None
    if task.format == "idx":
        splits = {
            split: read_idx_pair(files[f"{split}_images"], files[f"{split}_labels"], classes)
            for split in ("train", "dev")
        }
        return FoundImages("files", ", ".join(task.files.values()), splits, list(task.labels))
    side = task.image_size or 32
    splits = {}
    for split in ("train", "dev"):
        path = files[split]
        content = f"jpeg_tar {file_sha256([path])} {side} {list(task.labels)}"
        decoding = partial(read_jpeg_tar, path, task.labels, (side, side))
        splits[split] = cached(cache, content, str(path), decoding)
    name = task.title or ", ".join(task.files.values())
    return FoundImages("files", name, splits, list(task.labels), [JPEG_NOTE])


def _on_hub(task: TaskConfig, tried: list[str], cache: Path) -> FoundImages | None:
    if not task.hub_id:
        tried.append("hub: the task names no data set there")
        return None
    import datasets

    with hub() as reason:
        try:
            found = datasets.load_dataset(task.hub_id, task.hub_config)
        except Exception as error:  # the libraries for files, formats and the hub each raise their own
            why = (
                f"can't be reached ({reason}), and its cache has no copy"
                if reason
                else (str(error).splitlines() or [type(error).__name__])[0]
            )
            tried.append(f"hub, data set {task.hub_id}: {why}")
            return None
    splits = {}
    for split, names in HUB_SPLITS.items():
        there = [name for name in names if name in found]
        if not there:
            raise UserError(f"hub, data set {task.hub_id}: no split for {split}; it has {', '.join(found)}")
        splits[split] = from_dataset(found[there[0]], task, f"hub, data set {task.hub_id}, {there[0]}", cache)
    return FoundImages("hub", task.hub_id, splits, list(task.labels))


def from_dataset(dataset: Any, task: TaskConfig, where: str, cache: Path) -> Images:
    """A split of a `datasets.Dataset` with columns of images and of numbers of classes, as the hub has it.

    Raises:
        UserError: other columns; images of different sizes; a label outside the classes.
    """
    image, label = HUB_COLUMNS.get(task.hub_id or "", ("image", "label"))
    if missing := {image, label} - set(dataset.column_names):
        raise UserError(
            f"{where}: no column {', '.join(sorted(missing))}; there are {', '.join(dataset.column_names)}"
        )

    def make() -> Images:
        rows = [
            np.asarray(row.convert("L" if task.channels == 1 else "RGB"), np.uint8) for row in dataset[image]
        ]
        if len({row.shape for row in rows}) > 1:
            raise UserError(f"{where}: the images differ in size, and they must all have one")
        pixels = np.stack(rows)
        pixels = pixels[:, None] if task.channels == 1 else pixels.transpose(0, 3, 1, 2)
        return checked(pixels, np.asarray(dataset[label], np.int64), len(task.labels), where, where)

    return cached(cache, f"hub {where} {dataset._fingerprint} {task.channels}", where, make)
