"""Augmentations are what they say, and depend on nothing but seed, step, example and copy."""

import numpy as np
import pytest
import torch

from dpexp.tasks.augmentation import AUGMENTATIONS, PAD, augment, choices


def images(count: int = 6, channels: int = 3, height: int = 8, width: int = 10) -> torch.Tensor:
    return torch.randn(count, channels, height, width, generator=torch.Generator().manual_seed(0))


def test_choices_belong_to_the_example_and_not_to_its_place_or_its_company() -> None:
    everybody = choices(3, 7, np.arange(50), 4)
    some = np.array([41, 2, 17])
    assert np.array_equal(choices(3, 7, some, 4), everybody[some])
    assert np.array_equal(choices(3, 7, np.array([17]), 4)[0], everybody[17])


def test_choices_differ_between_seeds_steps_examples_and_copies() -> None:
    bits = np.stack([choices(seed, step, np.arange(100), 5) for seed in (0, 1) for step in (0, 1)])
    assert len(np.unique(bits)) == bits.size


def test_choices_are_uniform() -> None:
    bits = choices(0, 0, np.arange(20_000), 1)[:, 0]
    assert abs(float((bits & np.uint64(1)).mean()) - 0.5) < 0.015
    for shift in (8, 32):
        places = (bits >> np.uint64(shift)) % np.uint64(2**24) % np.uint64(2 * PAD + 1)
        share = np.bincount(places.astype(int), minlength=2 * PAD + 1) / len(bits)
        assert np.abs(share - 1 / 9).max() < 0.01


@pytest.mark.parametrize("kind", AUGMENTATIONS)
def test_copies_are_flips_and_mirrored_crops_of_their_own_image(kind: str) -> None:
    pixels, bits = images(), choices(0, 0, np.arange(6), 16)
    got = augment(pixels, bits, kind)
    assert got.shape == (96, 3, 8, 10)
    seen = set()
    for row, copy in enumerate(got):
        owner = np.pad(pixels[row // 16].numpy(), [(0, 0), (PAD, PAD), (PAD, PAD)], mode="symmetric")
        matches = [
            (flip, down, right)
            for flip in ((False, True) if kind != "crop" else (False,))
            for down in (range(2 * PAD + 1) if kind != "flip" else (PAD,))
            for right in (range(2 * PAD + 1) if kind != "flip" else (PAD,))
            if np.array_equal(_cut(owner, flip, down, right), copy.numpy())
        ]
        assert len(matches) == 1
        seen.add(matches[0])
    assert len(seen) == 2 if kind == "flip" else len(seen) > 40


def _cut(padded: np.ndarray, flip: bool, down: int, right: int) -> np.ndarray:
    cut = padded[:, down : down + 8, right : right + 10]
    return cut[:, :, ::-1] if flip else cut
