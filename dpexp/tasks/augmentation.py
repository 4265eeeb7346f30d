"""Random flips and crops whose choices are functions of (public seed, step, example, copy) alone.

An example's copies must not depend on which other examples a batch holds: a generator that runs through the batch would
move everybody's crop when one example is added, and the clipped sums of two neighbouring data sets would differ by more
than one example's share. So there is no generator: each choice is a hash (the output function of SplitMix64, Steele et
al. 2014) of its own four numbers.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor

AUGMENTATIONS = ("flip_crop", "crop", "flip")
"""What `task.augmentation` may name. Digits are no digits in a mirror: `crop` is for them."""
# pixels on each side before the crop, mirrored (De et al. 2022)
PAD = 4

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def choices(seed: int, step: int, indices: np.ndarray, copies: int) -> np.ndarray:
    """64 random bits for every copy of every example, `[len(indices), copies]` uint64.

    Args:
        seed: public.
        step: of the training.
        indices: `[B]` the numbers of the examples in the data set.
    """
    digest = hashlib.sha256(f"augmentation {seed} {step}".encode()).digest()
    key = np.frombuffer(digest[:8], "<u8").astype(np.uint64)
    number: np.ndarray = np.asarray(indices, np.uint64)[:, None] * np.uint64(copies) + np.arange(
        copies, dtype=np.uint64
    )
    bits: np.ndarray
    # arithmetic is modulo 2^64
    with np.errstate(over="ignore"):
        bits = key + (number + np.uint64(1)) * _GOLDEN
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def augment(pixels: Tensor, bits: np.ndarray, kind: str) -> Tensor:
    """Copies of every image, each flipped and shifted as its bits say.

    Args:
        pixels: `[B, C, H, W]`, at least `PAD` pixels each way.
        bits: `[B, M]` uint64, see `choices`.
        kind: one of `AUGMENTATIONS`: a horizontal flip with probability 1/2; a crop of H x W out of the image with `PAD`
            mirrored pixels around it, at one of (2·PAD + 1)² places.

    Returns:
        `[B·M, C, H, W]` where `pixels` are, the copies of an example adjacent.
    """
    count, _, height, width = pixels.shape
    flat = bits.reshape(-1)
    owners = torch.arange(count).repeat_interleave(bits.shape[1])
    rows = torch.arange(height).expand(len(flat), height)
    columns = torch.arange(width).expand(len(flat), width)
    if kind in ("flip_crop", "flip"):
        mirrored = torch.from_numpy((flat & np.uint64(1)).astype(bool))
        columns = torch.where(mirrored[:, None], width - 1 - columns, columns)
    if kind in ("flip_crop", "crop"):
        down, right = (
            (flat >> np.uint64(shift)) % np.uint64(2**24) % np.uint64(2 * PAD + 1) for shift in (8, 32)
        )
        rows = _mirrored(rows + torch.from_numpy(down.astype(np.int64))[:, None] - PAD, height)
        columns = _mirrored(columns + torch.from_numpy(right.astype(np.int64))[:, None] - PAD, width)
    owners, rows, columns = (places.to(pixels.device) for places in (owners, rows, columns))
    picked = pixels.permute(0, 2, 3, 1)[owners[:, None, None], rows[:, :, None], columns[:, None, :]]
    return picked.permute(0, 3, 1, 2).contiguous()


def _mirrored(places: Tensor, size: int) -> Tensor:
    """Places beyond either edge, seen in a mirror that stands on it."""
    places = torch.where(places < 0, -1 - places, places)
    return torch.where(places >= size, 2 * size - 1 - places, places)
