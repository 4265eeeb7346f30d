"""Published image data sets in files: idx (MNIST), the python and binary versions of CIFAR, a tar of JPEG files.

Every complaint names the file, and the row where there is one. What takes long to decode is kept in the cache.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import logging
import lzma
import math
import os
import pickle
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from dpexp.errors import UserError

# of the cached files: count up when decoding gives other pixels
FORMAT = 2
IDX_UINT8 = 8
OPENERS: dict[str, Callable[..., Any]] = {"": open, ".gz": gzip.open, ".xz": lzma.open}
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Images:
    """A split.

    pixels: `[n, C, H, W]` uint8.
    labels: `[n]` int64, numbers of classes.
    where: the file or folder, as messages name it.
    """

    pixels: np.ndarray
    labels: np.ndarray
    where: str

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def sha256(self) -> str:
        """Of shape, pixels and labels, so that every layout of the same data set agrees; hexadecimal."""
        digest = hashlib.sha256(str(self.pixels.shape).encode())
        for array in (self.pixels, self.labels):
            digest.update(array.tobytes())
        return digest.hexdigest()


def read_idx(path: Path, dims: int) -> np.ndarray:
    """An idx file of unsigned bytes (the format of MNIST), plain, .gz or .xz.

    Args:
        path: two zero bytes, the type (8: unsigned byte), the number of dimensions, each of them as a big-endian
            32-bit number, then the values.
        dims: how many dimensions it must have: 3 for images, 1 for labels.

    Returns:
        uint8.

    Raises:
        UserError: a damaged file, another magic number, or more or fewer bytes than the header says.
    """
    data = read_bytes(path)
    head = 4 + 4 * dims
    if len(data) < head:
        raise UserError(f"{path}: the file ends inside its header ({len(data)} bytes): fetch it again")
    magic, wanted = int.from_bytes(data[:4], "big"), IDX_UINT8 << 8 | dims
    if magic != wanted:
        raise UserError(
            f"{path}: the magic number is {magic}, and {wanted} is that of idx {'images' if dims == 3 else 'labels'}: "
            "this is another file"
        )
    shape = tuple(int.from_bytes(data[4 + 4 * i : 8 + 4 * i], "big") for i in range(dims))
    if (found := len(data) - head) != math.prod(shape):
        raise UserError(
            f"{path}: the header promises {'x'.join(map(str, shape))} = {math.prod(shape)} bytes, and {found} follow: the "
            "file is cut off or damaged; fetch it again"
        )
    return np.frombuffer(data, np.uint8, offset=head).reshape(shape)


def read_idx_pair(images: Path, labels: Path, classes: int) -> Images:
    """A split of MNIST's layout: images `[n, H, W]` and labels `[n]`.

    Raises:
        UserError: as `read_idx`; different numbers of images and labels; a label outside the classes.
    """
    pixels, numbers = read_idx(images, 3), read_idx(labels, 1)
    if len(pixels) != len(numbers):
        raise UserError(
            f"{images} has {len(pixels)} images, and {labels} {len(numbers)} labels: they don't belong together"
        )
    return checked(pixels[:, None], numbers, classes, str(images), str(labels))


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


def read_jpeg_tar(path: Path, labels: Sequence[str], size: tuple[int, int]) -> Images:
    """A tar of SPLIT/CLASS/NUMBER.jpg members, plain or compressed, in the order of the archive.

    Args:
        labels: the classes, by the names of their folders.
        size: height and width of every image.

    Raises:
        UserError: a damaged archive or member, a folder that is no class, another size; named by its member.
    """
    number = {label: i for i, label in enumerate(labels)}
    pixels: list[np.ndarray] = []
    classes: list[int] = []
    try:
        with tarfile.open(path) as tar:
            for member in tar:
                if not member.isfile():
                    continue
                where = f"{path}: {member.name}"
                label = Path(member.name).parent.name
                if label not in number:
                    raise UserError(f"{where}: its folder {label} is none of the classes {', '.join(labels)}")
                file = tar.extractfile(member)
                assert file is not None
                pixels.append(decode(file.read(), where, channels=3))
                if pixels[-1].shape[1:] != size:
                    raise UserError(
                        f"{where}: {_sized(pixels[-1])}, and all images must be {size[1]}x{size[0]}"
                    )
                classes.append(number[label])
    except (tarfile.TarError, OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise UserError(f"{path}: the archive is damaged ({error}): fetch it again") from error
    if not pixels:
        raise UserError(f"{path}: the archive holds no images")
    return Images(np.stack(pixels), np.asarray(classes, np.int64), str(path))


def decode(data: bytes, where: str, *, channels: int, resize: int | None = None) -> np.ndarray:
    """One image file as `[channels, H, W]` uint8.

    Args:
        data: in any format that Pillow reads. The orientation that a camera noted is applied.
        where: for messages.
        channels: 1 (grey) or 3 (colours).
        resize: scale the shorter side to this many pixels (bicubic) and cut the middle of the longer one; None: as it is.

    Raises:
        UserError: this is no image, or a damaged one.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(io.BytesIO(data)) as image:
            if image.mode.startswith(("I", "F")):
                # which Pillow would cut off at 255
                raise ValueError(f"its pixels have more than 8 bits, mode {image.mode}: save it with 8")
            found: Any = ImageOps.exif_transpose(image).convert("L" if channels == 1 else "RGB")
            if resize is not None:
                found = ImageOps.fit(found, (resize, resize), Image.Resampling.BICUBIC)
            pixels = np.asarray(found, np.uint8)
    except Exception as error:
        # every decoder of Pillow has its own
        reason = (
            "it is empty" if not data else str(error).replace("<_io.BytesIO object at ", "<").splitlines()[0]
        )
        raise UserError(f"{where}: this image can't be read ({reason}): repair it or take it out") from error
    return pixels[None] if channels == 1 else np.ascontiguousarray(pixels.transpose(2, 0, 1))


def checked(pixels: np.ndarray, labels: np.ndarray, classes: int, where: str, of_labels: str) -> Images:
    """A split whose labels are numbers of classes.

    Raises:
        UserError: one is not, with its row; or there are no rows.
    """
    if not len(labels):
        raise UserError(f"{where}: no images")
    outside = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(outside):
        row = int(outside[0])
        raise UserError(
            f"{of_labels}, row {row + 1}: label {labels[row]} is outside the {classes} classes, which count from 0"
        )
    return Images(np.ascontiguousarray(pixels), labels.astype(np.int64), where)


def read_bytes(path: Path) -> bytes:
    """A file without its compression, .gz or .xz.

    Raises:
        UserError: it can't be read, or its compression is damaged.
    """
    try:
        with OPENERS[path.suffix if path.suffix in OPENERS else ""](path, "rb") as file:
            data: bytes = file.read()
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise UserError(f"{path}: can't be read ({error}): fetch it again") from error
    return data


def file_sha256(paths: Iterable[Path]) -> str:
    """Of the bytes of files as they lie there; hexadecimal."""
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def cached(cache: Path, content: str, where: str, make: Callable[[], Images]) -> Images:
    """What `make` gives, from the cache where it holds the same thing.

    The file is for its owner alone, because the images may be private, and appears under its name only when complete. A
    cache that can't be written costs time and nothing else: a warning.

    Args:
        cache: a folder.
        content: names what is decoded and how: a hash of the files, and the settings.
        where: of the result; the same pixels may lie in two places.
    """
    path = cache / "images" / f"{hashlib.sha256(f'{FORMAT} {content}'.encode()).hexdigest()}.safetensors"
    try:
        with safe_open(path, framework="np") as file:
            return Images(file.get_tensor("pixels"), file.get_tensor("labels"), where)
    except (OSError, SafetensorError):
        # not there, or not readable: made anew
        pass
    images = make()
    try:
        _write(path, save({"pixels": images.pixels, "labels": images.labels}))
    except OSError as error:
        log.warning("the cache of images could not be written: %s (%s)", path, error.strerror)
    return images


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # mode 0600
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".unfinished-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _sized(pixels: np.ndarray) -> str:
    return f"{pixels.shape[2]}x{pixels.shape[1]} pixels"
