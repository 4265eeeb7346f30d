"""A person's own images: one subfolder per class."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dpexp.errors import UserError
from dpexp.tasks.image_files import Images, cached, decode

SUFFIXES = frozenset((".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".pgm", ".ppm"))


def shown_files(folder: Path) -> list[Path]:
    """All files below a folder, sorted. Hidden ones, and what lies in hidden folders, are copies that programs keep."""
    below = ((path, path.relative_to(folder).parts) for path in folder.rglob("*"))
    return sorted(
        path for path, parts in below if path.is_file() and not any(p.startswith(".") for p in parts)
    )


def class_folders(folder: Path, setting: str, least: int = 2) -> list[str]:
    """The names of the classes: the subfolders, sorted; hidden ones apart.

    Raises:
        UserError: no such folder, or fewer than ``least`` classes.
    """
    if not folder.is_dir():
        raise UserError(
            f"{setting}={folder}: no such folder; it must hold one subfolder of images for every class"
        )
    found = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if len(found) < least:
        raise UserError(
            f"{setting}={folder}: {len(found)} subfolders, and every class is one: a classifier needs at least two classes"
        )
    return found


def find_in_folder(folder: Path, labels: Sequence[str], setting: str) -> tuple[list[Path], list[int], int]:
    """Find all images of a split, class by class, in the order of their names, without opening one.

    Args:
        folder: holds a subfolder for every class.
        labels: the classes.
        setting: what named the folder, for messages.

    Returns:
        The images, the number of each one's class, and how many files with other names than those of images were passed over.

    Raises:
        UserError: a class to learn without images, a subfolder that is no class.
    """
    if unknown := set(class_folders(folder, setting, least=1)) - set(labels):
        # whose names stay unsaid: labels of private images
        raise UserError(
            f"{setting}={folder}: {len(unknown)} of its subfolders are none of the classes {', '.join(labels[:20])}: move "
            "them away, or declare their names in task.labels"
        )
    paths: list[Path] = []
    numbers: list[int] = []
    passed_over = 0
    for number, label in enumerate(labels):
        files = shown_files(folder / label)
        images = [path for path in files if path.suffix.lower() in SUFFIXES]
        passed_over += len(files) - len(images)
        if setting == "data.train" and not images:
            raise UserError(
                f"{folder / label}: the class {label} has no images ({', '.join(sorted(SUFFIXES))}): add some, or take the "
                "class away"
            )
        paths += images
        numbers += [number] * len(images)
    if not paths:
        raise UserError(f"{setting}={folder}: no images there ({', '.join(sorted(SUFFIXES))})")
    return paths, numbers, passed_over


def read_folder(
    folder: Path, labels: Sequence[str], setting: str, *, channels: int, size: int | None, cache: Path
) -> tuple[Images, int]:
    """Read the images that `find_in_folder` finds.

    Args:
        folder: holds a subfolder for every class.
        labels: the classes.
        setting: what named the folder, for messages.
        channels: 1 or 3; images are converted.
        size: make every image a square of this many pixels (see `decode`); None: they must all have one size.
        cache: where decoded images are kept.

    Returns:
        The images, and how many files with other names than those of images were passed over.

    Raises:
        UserError: what `find_in_folder` refuses, a file that can't be decoded, another size.
    """
    paths, numbers, passed_over = find_in_folder(folder, labels, setting)
    contents = [_read(path) for path in paths]
    digest = hashlib.sha256(f"{channels} {size}".encode())
    for data, number in zip(contents, numbers, strict=True):
        digest.update(hashlib.sha256(data).digest() + number.to_bytes(4, "little"))

    def make() -> Images:
        decoded = [
            decode(data, str(path), channels=channels, resize=size)
            for data, path in zip(contents, paths, strict=True)
        ]
        for pixels, path in zip(decoded, paths, strict=True):
            if pixels.shape != decoded[0].shape:
                (_, height, width), (_, first_height, first_width) = pixels.shape, decoded[0].shape
                raise UserError(
                    f"{path}: {width}x{height} pixels, and {paths[0]} has {first_width}x{first_height}: give "
                    f"task.image_size=N to make all of them N x N (such as task.image_size={min(height, width)})"
                )
        return Images(np.stack(decoded), np.asarray(numbers, np.int64), str(folder))

    return cached(cache, f"folder {digest.hexdigest()}", str(folder), make), passed_over


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: can't be read ({error.strerror})") from error
