"""CIFAR-10 and CIFAR-100 as their authors publish them: the python and the binary version, unpacked or in their archives."""

from __future__ import annotations

import io
import lzma
import pickle
import tarfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dpexp.errors import UserError
from dpexp.tasks.image_files import Images, checked


@dataclass(frozen=True)
class Layout:
    """One version of CIFAR as its authors publish it.

    folder, archive: either of them is read; the archive holds the folder.
    splits: split -> its files.
    key: python version: where a batch keeps its labels. "" for the binary version.
    label_bytes: binary version: bytes before the pixels of a row, the last of which is the label.
    """

    folder: str
    archive: str
    splits: dict[str, tuple[str, ...]]
    key: str = ""
    label_bytes: int = 0


_BATCHES = tuple(f"data_batch_{i}" for i in range(1, 6))
CIFAR = {
    "cifar10": (
        Layout(
            "cifar-10-batches-py",
            "cifar-10-python.tar.gz",
            {"train": _BATCHES, "dev": ("test_batch",)},
            "labels",
        ),
        Layout(
            "cifar-10-batches-bin",
            "cifar-10-binary.tar.gz",
            {"train": tuple(f"{name}.bin" for name in _BATCHES), "dev": ("test_batch.bin",)},
            label_bytes=1,
        ),
    ),
    "cifar100": (
        Layout(
            "cifar-100-python",
            "cifar-100-python.tar.gz",
            {"train": ("train",), "dev": ("test",)},
            "fine_labels",
        ),
        Layout(
            "cifar-100-binary",
            "cifar-100-binary.tar.gz",
            {"train": ("train.bin",), "dev": ("test.bin",)},
            # the coarse class, then the fine one
            label_bytes=2,
        ),
    ),
}
"""`task.format` -> the versions that are looked for."""


def find_cifar(root: Path, form: str) -> tuple[Path, Layout] | None:
    """The first version that lies in `root` or in a folder of it named as the format; None if there is none."""
    for layout in CIFAR[form]:
        for place in (root, root / form):
            for path in (place / layout.folder, place / layout.archive):
                if path.exists():
                    return path, layout
    return None


def read_cifar(path: Path, layout: Layout, classes: int) -> dict[str, Images]:
    """Train and dev (the published test set), each row 3 x 32 x 32.

    Args:
        path: the folder, or the archive that holds it.

    Raises:
        UserError: a missing or damaged file; a pickle that holds more than arrays, lists and text; a label outside the
            classes.
    """
    splits = {}
    names = [name for files in layout.splits.values() for name in files]
    found = _members(path, layout.folder, names)
    for split, files in layout.splits.items():
        rows = [_batch(found[name], f"{path}/{name}", layout) for name in files]
        pixels = np.concatenate([pixels for pixels, _ in rows]).reshape(-1, 3, 32, 32)
        where = f"{path} ({files[0]}{', ...' if len(files) > 1 else ''})"
        splits[split] = checked(pixels, np.concatenate([labels for _, labels in rows]), classes, where, where)
    return splits


def _members(path: Path, folder: str, names: Sequence[str]) -> dict[str, bytes]:
    if path.is_dir():
        if missing := [name for name in names if not (path / name).is_file()]:
            raise UserError(f"{path}: {', '.join(missing)} missing: unpack the whole archive there")
        return {name: (path / name).read_bytes() for name in names}
    wanted = {f"{folder}/{name}": name for name in names}
    found = {}
    try:
        with tarfile.open(path) as tar:
            for member in tar:
                if (name := wanted.get(member.name.removeprefix("./"))) and (file := tar.extractfile(member)):
                    found[name] = file.read()
    except (tarfile.TarError, OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise UserError(f"{path}: the archive is damaged ({error}): fetch it again") from error
    if missing := [name for name in names if name not in found]:
        raise UserError(f"{path}: {', '.join(missing)} missing in the archive: fetch it again")
    return found


def _batch(data: bytes, where: str, layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    """Pixels `[n, 3072]` uint8 and labels `[n]`."""
    if not layout.key:
        size = layout.label_bytes + 3072
        if not data or len(data) % size:
            raise UserError(
                f"{where}: {len(data)} bytes are no whole number of rows of {size}: the file is cut off"
            )
        rows = np.frombuffer(data, np.uint8).reshape(-1, size)
        return rows[:, layout.label_bytes :], rows[:, layout.label_bytes - 1]
    try:
        batch = _ArraysOnly(io.BytesIO(data), encoding="bytes").load()
    except _ForbiddenError as error:
        raise UserError(
            f"{where}: this pickle asks for {error}, and a CIFAR batch holds arrays and lists alone: not opened"
        ) from None
    except Exception as error:
        # a damaged pickle can raise nearly anything
        raise UserError(
            f"{where}: this is no CIFAR batch ({type(error).__name__}): fetch it again"
        ) from error
    fields = (
        {key.decode() if isinstance(key, bytes) else key: value for key, value in batch.items()}
        if isinstance(batch, dict)
        else {}
    )
    pixels, labels = fields.get("data"), fields.get(layout.key)
    if not (
        isinstance(pixels, np.ndarray)
        and pixels.dtype == np.uint8
        and pixels.ndim == 2
        and pixels.shape[1] == 3072
    ):
        raise UserError(f"{where}: no field data of rows of 3072 bytes: this is no CIFAR batch")
    if not isinstance(labels, list) or len(labels) != len(pixels):
        raise UserError(
            f"{where}: {layout.key} must be a list of {len(pixels)} classes: this is no batch of this data set"
        )
    return pixels, np.asarray(labels)


class _ForbiddenError(Exception):
    """A pickle asked for something that it must not have."""


class _ArraysOnly(pickle.Unpickler):
    """Unpickles numpy arrays, lists, dicts, numbers and text; unpickling anything else could run anybody's code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in (
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy._core.multiarray", "_reconstruct"),
        ):
            from numpy._core import multiarray

            return multiarray._reconstruct
        if (module, name) in (("numpy", "ndarray"), ("numpy", "dtype")):
            return getattr(np, name)
        # how protocol 2 of Python 3 writes bytes
        if (module, name) == ("_codecs", "encode"):
            return lambda text, encoding: text.encode(encoding)
        raise _ForbiddenError(f"{module}.{name}")
