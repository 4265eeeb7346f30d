"""Logical batches and their pieces."""

import numpy as np
import pytest

from dpexp.training.batching import physical_batches, sampler_for


def test_pieces_hold_every_example_once_the_longest_first():
    lengths = {3: 5, 8: 50, 9: 7, 20: 50, 21: 1}
    pieces = physical_batches(np.array(sorted(lengths)), lengths.__getitem__, 2)
    assert [piece.tolist() for piece in pieces] == [[8, 20], [9, 3], [21]]
    assert physical_batches(np.array([], dtype=np.int64), lengths.__getitem__, 2) == []


def test_a_poisson_sampler_has_the_expected_batch():
    sampler = sampler_for("poisson", 1000, 50.0, b"k" * 32)
    sizes = [len(sampler.draw(step)) for step in range(300)]
    assert np.mean(sizes) == pytest.approx(50, abs=5 * np.sqrt(50 / 300))
    assert np.std(sizes) > 3
