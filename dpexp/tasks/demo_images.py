"""Synthetic images for trying the program out without files or a network: digits of seven segments, coloured patterns.

They are no data set of anybody's, and no number measured on them says anything about one. Position, size, stroke,
contrast and noise differ from image to image; the class decides the segments, or the pattern and its hue.
"""

from __future__ import annotations

import numpy as np

from dpexp.errors import UserError
from dpexp.tasks.demo import DEMO_TRAIN_ROWS, check_rows
from dpexp.tasks.image_files import Images

DEMO_IMAGES = "synthetic demo images (embedded), not a published data set"
DEMO_DEV_ROWS = 500
# images at a time
CHUNK = 512

# x and y of both ends of a segment; the digit is 1 wide and 2 high around the origin.
_SEGMENTS = {
    "top": (-0.5, -1, 0.5, -1), "middle": (-0.5, 0, 0.5, 0), "bottom": (-0.5, 1, 0.5, 1),
    "upper left": (-0.5, -1, -0.5, 0), "upper right": (0.5, -1, 0.5, 0),
    "lower left": (-0.5, 0, -0.5, 1), "lower right": (0.5, 0, 0.5, 1),
}  # fmt: skip
_OFF = (
    ("middle",), ("top", "middle", "bottom", "upper left", "lower left"), ("upper left", "lower right"),
    ("upper left", "lower left"), ("top", "bottom", "lower left"), ("upper right", "lower left"), ("upper right",),
    ("middle", "bottom", "upper left", "lower left"), (), ("lower left",),
)  # fmt: skip
"""Which segments a digit does without."""
PATTERNS = 10


def demo_images(classes: int, shape: tuple[int, int, int], rows: int | None = None) -> dict[str, Images]:
    """The demo's train and dev, the same on every machine and for every seed.

    Args:
        classes: with one channel at most ten (the digits), with three at most a hundred.
        shape: channels (1 or 3), height and width.
        rows: of train; the declared N. Dev is the same for every N, and so are the first rows of train.

    Raises:
        UserError: more classes, or an unreasonable number of rows.
    """
    rows = DEMO_TRAIN_ROWS if rows is None else rows
    most = len(_OFF) if shape[0] == 1 else PATTERNS**2
    if not 2 <= classes <= most:
        raise UserError(
            f"the synthetic demo images have from 2 to {most} classes, and the task has {classes}: take another scale"
        )
    check_rows(rows)
    return {
        "train": _split(classes, shape, rows, 1, "the embedded train images"),
        "dev": _split(classes, shape, DEMO_DEV_ROWS, 2, "the embedded dev images"),
    }


def _split(classes: int, shape: tuple[int, int, int], rows: int, seed: int, where: str) -> Images:
    channels, height, width = shape
    pixels = np.empty((rows, *shape), np.uint8)
    labels = np.empty(rows, np.int64)
    for start in range(0, rows, CHUNK):
        # A generator for every chunk, and whole chunks of draws: what a row looks like does not depend on how many there are.
        draw = np.random.default_rng([seed, start, *shape, classes])
        label, chance = draw.integers(0, classes, CHUNK), draw.random((CHUNK, 8), np.float32)
        noise = draw.standard_normal((CHUNK, *shape), np.float32)
        drawn = (
            _digits(label, chance, height, width)
            if channels == 1
            else _patterns(label, classes, chance, height, width)
        )
        count = min(CHUNK, rows - start)
        grey = np.clip(255 * drawn + 12 * noise, 0, 255)
        pixels[start : start + count], labels[start : start + count] = (
            grey[:count].astype(np.uint8),
            label[:count],
        )
    return Images(pixels, labels, where)


def _grid(chance: np.ndarray, height: int, width: int, spread: float) -> tuple[np.ndarray, np.ndarray]:
    """x and y of every pixel around a centre of its own, `[n, height, width]`, in half image heights."""
    y, x = np.mgrid[:height, :width].astype(np.float32)
    centre_y, centre_x = (spread * (chance[:, i, None, None] - 0.5) for i in (0, 1))
    return (2 * x[None] - width + 1) / height - centre_x, (2 * y[None] - height + 1) / height - centre_y


def _digits(labels: np.ndarray, chance: np.ndarray, height: int, width: int) -> np.ndarray:
    """Brightness in [0, 1], `[n, 1, height, width]`."""
    x, y = _grid(chance, height, width, 0.35)
    size = (0.45 + 0.15 * chance[:, 2])[:, None, None]
    x, y = x / size, y / size
    # slanted
    x = x + (0.4 * chance[:, 3, None, None] - 0.1) * y
    stroke = (0.12 + 0.14 * chance[:, 4])[:, None, None]
    ink = np.zeros_like(x)
    for name, (x0, y0, x1, y1) in _SEGMENTS.items():
        lit = np.array([name not in off for off in _OFF])[labels]
        # The distance to an upright or level segment: to the nearest point of it in either direction.
        dx, dy = np.maximum(np.maximum(x0 - x, x - x1), 0), np.maximum(np.maximum(y0 - y, y - y1), 0)
        near = np.clip((stroke - np.hypot(dx, dy)) / 0.12 + 0.5, 0, 1)
        ink = np.maximum(ink, near * lit[:, None, None])
    return (ink * (0.7 + 0.3 * chance[:, 5, None, None]))[:, None]


def _patterns(labels: np.ndarray, classes: int, chance: np.ndarray, height: int, width: int) -> np.ndarray:
    """Colours in [0, 1], `[n, 3, height, width]`: a pattern in the hue of the class on a dim ground."""
    x, y = _grid(chance, height, width, 0.5)
    often = (2.2 + 0.8 * chance[:, 2])[:, None, None]
    radius, edge = np.hypot(x, y), 0.45 + 0.2 * chance[:, 3, None, None]
    waves = [np.sin(np.pi * often * way) > 0 for way in (x, y, (x + y) / 1.4, (x - y) / 1.4)]
    shapes = [
        *waves, waves[0] ^ waves[1], np.sin(1.4 * np.pi * often * radius) > 0, radius < edge,
        np.maximum(abs(x), abs(y)) < edge, np.minimum(abs(x), abs(y)) < 0.45 * edge, abs(radius - edge) < 0.16,
    ]  # fmt: skip
    figure = np.choose((labels % PATTERNS)[:, None, None], shapes)[:, None].astype(np.float32)
    colour = _hue(labels / classes + 0.04 * (chance[:, 4] - 0.5))[:, :, None, None]
    ground = (0.1 + 0.4 * chance[:, 5:8])[:, :, None, None]
    return figure * colour * (0.75 + 0.25 * chance[:, 2, None, None, None]) + (1 - figure) * ground


def _hue(turn: np.ndarray) -> np.ndarray:
    """Red, green and blue in [0.25, 1] of a hue in turns of the colour circle, `[n, 3]`."""
    thirds = 2 * np.pi * (turn[:, None] - np.arange(3) / 3)
    return 0.625 + 0.375 * np.cos(thirds)
