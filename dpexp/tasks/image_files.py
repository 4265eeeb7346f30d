"""Image data sets in files: idx (MNIST), a tar of JPEG files, and what every layout needs (`cifar` is one of its own).

Every complaint names the file, and the row where there is one. What takes long to decode is kept in the cache.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import lzma
import math
import re
import tarfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from dpexp.durable import keep_cached
from dpexp.errors import UserError

# of the cached files: count up when decoding gives other pixels
FORMAT = 2
IDX_UINT8 = 8
OPENERS: dict[str, Callable[..., Any]] = {"": open, ".gz": gzip.open, ".xz": lzma.open}


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
            "it is empty" if not data else re.sub(" <_io.BytesIO object.*?>", "", str(error)).splitlines()[0]
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
    """What `make` gives, from the cache where it holds the same thing; see `keep_cached`.

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
    keep_cached(path, save({"pixels": images.pixels, "labels": images.labels}), "images")
    return images


def _sized(pixels: np.ndarray) -> str:
    return f"{pixels.shape[2]}x{pixels.shape[1]} pixels"
