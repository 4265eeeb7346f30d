"""The images of a classification task (see `sources.py`)."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from dpexp.errors import UserError
from dpexp.tasks.cifar import CIFAR, find_cifar, read_cifar
from dpexp.tasks.demo_images import DEMO_IMAGES, demo_images
from dpexp.tasks.image_files import (
    Images,
    cached,
    checked,
    file_sha256,
    read_idx_pair,
    read_jpeg_tar,
)
from dpexp.tasks.image_folders import class_folders, read_folder
from dpexp.tasks.sources import Found, Reader, find

if TYPE_CHECKING:
    from dpexp.schemas import DataConfig, TaskConfig

FORMATS = ("idx", *CIFAR, "jpeg_tar")
"""What `task.format` may name for images."""
HUB_COLUMNS = {
    "ylecun/mnist": ("image", "label"),
    "uoft-cs/cifar10": ("img", "label"),
    "uoft-cs/cifar100": ("img", "fine_label"),
}
JPEG_NOTE = "the pixels went through lossy JPEG compression: a result on them is none on the data set they were made from"
# where the task has no classes of its own
DEMO_CLASSES = tuple(f"pattern {i}" for i in range(4))


def find_images(task: TaskConfig, data: DataConfig, scale: str, cache: Path) -> Found[Images]:
    """The images of a task, with the names of its classes; as `find`.

    Args:
        task: `format`, `files`, `hub_id`, `labels`, `image_size`, `channels`.
        data: own images are folders with one subfolder for every class.
        scale: "paper", "small" or "demo".
        cache: a folder for decoded images.
    """
    return find(ImageReader(task, data, cache), scale)


class ImageReader(Reader[Images]):
    """Reads folders of images, idx files, CIFAR's archives and tars of JPEG files."""

    own_data = "data.train=FOLDER with one subfolder of images for every class, and data.dev=FOLDER"
    hub_splits: ClassVar = {"train": ("train",), "dev": ("test", "validation")}

    def __init__(self, task: TaskConfig, data: DataConfig, cache: Path) -> None:
        super().__init__(task, data)
        if task.format and task.format not in FORMATS:
            raise UserError(f"task.format={task.format} is unknown: choose one of {', '.join(FORMATS)}")
        self.cache, self.labels = cache, [str(label) for label in task.labels]

    def own(self, paths: dict[str, Path]) -> Found[Images]:
        task = self.task
        labels, notes = self.labels, []
        if not labels:
            labels = class_folders(paths["train"], "data.train")
            notes.append(
                "the classes were taken from the private training folder and are treated as public; declare them with "
                "task.labels=[...]"
            )
        splits: dict[str, Images] = {}
        for split, path in paths.items():
            images, passed_over = read_folder(
                path,
                labels,
                f"data.{split}",
                channels=task.channels,
                size=task.image_size or None,
                cache=self.cache,
            )
            if splits and images.pixels.shape[1:] != splits["train"].pixels.shape[1:]:
                _, height, width = images.pixels.shape[1:]
                raise UserError(
                    f"data.{split}={path}: its images have {width}x{height} pixels, and those of data.train another size: give "
                    "task.image_size=N to make all of them N x N"
                )
            private = " (counted without noise on private data)" if split == "train" else ""
            if passed_over:
                notes.append(f"{split}: {passed_over} files that are no images were passed over{private}")
            splits[split] = images
        if size := task.image_size:
            notes.append(f"images of another size were scaled and cut to {size}x{size} pixels")
        else:
            notes.append(
                "the size of the images was taken from the private training folder and is treated as public; task.image_size=N "
                "declares it"
            )
        return Found("own files", str(self.data.train), splits, labels, notes)

    def demo(self, rows: int | None) -> Found[Images]:
        size, labels = self.task.image_size or 32, self.labels or list(DEMO_CLASSES)
        splits = demo_images(len(labels), (self.task.channels, size, size), rows)
        return Found("demo", DEMO_IMAGES, splits, labels)

    def splits(self) -> tuple[str, ...]:
        return ("train", "dev")

    def wanted(self) -> dict[str, str]:
        if self.task.format in CIFAR:
            return {self.task.format: f"{self.how_to_place()}, there or in {self.task.format}/"}
        return super().wanted()

    def how_to_place(self) -> str:
        if self.task.format in CIFAR:
            return " or ".join(f"{layout.folder}/ or {layout.archive}" for layout in CIFAR[self.task.format])
        return super().how_to_place()

    def place(self, root: Path, name: str) -> Any:
        return find_cifar(root, name) if name in CIFAR else super().place(root, name)

    def published(self, files: dict[str, Any]) -> Found[Images]:
        task, classes, name = self.task, len(self.labels), ", ".join(self.task.files.values())
        if task.format in CIFAR:
            path, layout = files[task.format]
            return Found("files", path.name, read_cifar(path, layout, classes), self.labels)
        if task.format == "idx":
            splits = {
                split: read_idx_pair(files[f"{split}_images"], files[f"{split}_labels"], classes)
                for split in self.splits()
            }
            return Found("files", name, splits, self.labels)
        side = task.image_size or 32
        splits = {}
        for split in self.splits():
            path = files[split]
            content = f"jpeg_tar {file_sha256([path])} {side} {list(task.labels)}"
            decoding = partial(read_jpeg_tar, path, task.labels, (side, side))
            splits[split] = cached(self.cache, content, str(path), decoding)
        return Found("files", task.title or name, splits, self.labels, [JPEG_NOTE])

    def from_hub(self, dataset: Any, split: str, where: str) -> Images:
        """Of columns of images and of numbers of classes, as the hub has it.

        Raises:
            UserError: other columns; images of different sizes; a label outside the classes.
        """
        image, label = HUB_COLUMNS.get(self.task.hub_id or "", ("image", "label"))
        if missing := {image, label} - set(dataset.column_names):
            raise UserError(
                f"{where}: no column {', '.join(sorted(missing))}; there are {', '.join(dataset.column_names)}"
            )
        mode = "L" if self.task.channels == 1 else "RGB"

        def make() -> Images:
            rows = [np.asarray(row.convert(mode), np.uint8) for row in dataset[image]]
            if len({row.shape for row in rows}) > 1:
                raise UserError(f"{where}: the images differ in size, and they must all have one")
            pixels = np.stack(rows)
            pixels = pixels[:, None] if mode == "L" else pixels.transpose(0, 3, 1, 2)
            return checked(pixels, np.asarray(dataset[label], np.int64), len(self.labels), where, where)

        content = f"hub {where} {dataset._fingerprint} {self.task.channels}"
        return cached(self.cache, content, where, make)

    def identities(self, split: Images) -> Iterable[Hashable]:
        return (hashlib.blake2b(image.tobytes(), digest_size=16).digest() for image in split.pixels)
