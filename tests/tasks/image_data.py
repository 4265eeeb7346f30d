"""Small files in the published layouts of image data sets, written by the tests themselves."""

import gzip
import io
import pickle
import struct
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

from dpexp.tasks.cifar import CIFAR

ROWS = 10  # of each file


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def mnist(root: Path, train: int = ROWS, dev: int = 6) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Files of task=mnist below `root`; split -> what is in them."""
    draw = np.random.default_rng(0)
    (root / "mnist").mkdir(parents=True)
    made = {}
    for split, name, rows in (("train", "train", train), ("dev", "t10k", dev)):
        pixels = draw.integers(0, 256, (rows, 28, 28), dtype=np.uint8)
        labels = np.arange(rows, dtype=np.uint8) % 10
        (root / f"mnist/{name}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(pixels)))
        (root / f"mnist/{name}-labels-idx1-ubyte").write_bytes(idx(labels))
        made[split] = pixels, labels
    return made


def python2_batch(pixels: np.ndarray, labels: list[int], key: str) -> bytes:
    """A batch as Python 2 pickled it in 2009: protocol 2 with byte strings for keys."""
    batch = {
        b"batch_label": b"a batch",
        key.encode(): labels,
        b"data": pixels,
        b"filenames": [b"x.png"] * len(labels),
    }
    return pickle.dumps(batch, protocol=2)


def cifar(
    root: Path, form: str, *, binary: bool = False, archive: bool = False
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The python or binary version of CIFAR with `ROWS` rows in each file; split -> pixels `[n, 3, 32, 32]`, labels."""
    layout = CIFAR[form][binary]
    classes = {"cifar10": 10, "cifar100": 100}[form]
    draw = np.random.default_rng(1)
    made, files = {}, {}
    for split, names in layout.splits.items():
        pixels = draw.integers(0, 256, (ROWS * len(names), 3072), dtype=np.uint8)
        labels = draw.integers(0, classes, ROWS * len(names))
        made[split] = pixels.reshape(-1, 3, 32, 32), labels
        for i, name in enumerate(names):
            rows = slice(i * ROWS, (i + 1) * ROWS)
            if binary:
                coarse = np.zeros((ROWS, layout.label_bytes - 1), np.uint8)
                files[name] = np.hstack([coarse, labels[rows, None].astype(np.uint8), pixels[rows]]).tobytes()
            else:
                files[name] = python2_batch(pixels[rows], labels[rows].tolist(), layout.key)
    if archive:
        with tarfile.open(root / layout.archive, "w:gz") as tar:
            for name, data in files.items():
                add(tar, f"{layout.folder}/{name}", data)
    else:
        (root / layout.folder).mkdir(parents=True)
        for name, data in files.items():
            (root / layout.folder / name).write_bytes(data)
    return made


def add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def jpeg(seed: int, size: int = 32, form: str = "JPEG") -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, form)
    return file.getvalue()


def folder(root: Path, classes: dict[str, int], size: int = 8, form: str = "PNG", first: int = 0) -> Path:
    """A person's own images: class -> how many; other images for another `first`."""
    for number, (name, count) in enumerate(classes.items()):
        (root / name).mkdir(parents=True)
        for i in range(count):
            (root / name / f"{i:03}.{form.lower()}").write_bytes(jpeg(first + 100 * number + i, size, form))
    return root
