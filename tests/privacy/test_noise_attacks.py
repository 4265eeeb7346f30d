"""Attacks on one released sum by someone who knows both candidate sums and looks at which values are possible.

Each of them told membership without fail from noise that float32 had rounded before it was added, or that came from uniform
numbers of 24 or 31 bits, at noise multipliers that allow little more than a guess.
"""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from dpexp import native
from dpexp.privacy.noise import KeyedGenerator, SecureGenerator, add_gaussian_

CLIP = 1.0
GENERATORS = {
    "system": lambda trial: None,
    "torch": lambda trial: torch.Generator().manual_seed(trial),
    "keyed": lambda trial: KeyedGenerator(trial.to_bytes(32, "little")),
    "secure": lambda trial: SecureGenerator(trial.to_bytes(32, "little")),
}
# Looked for here, while the cache is not yet each test's own.
BUILT = native.kernels() is not None


@pytest.fixture(params=["kernels", "torch"])
def build(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(native, "kernels", lambda: None)
    elif not BUILT:
        pytest.skip("no C++ compiler builds the kernels")


def candidates(size, weights, seed):
    """The sums without and with the example, which has the norm C."""
    rng = np.random.default_rng(seed)
    without = np.zeros(size) if weights == "zero" else rng.standard_normal(size)
    example = rng.standard_normal(size)
    example *= CLIP / np.linalg.norm(example)
    return without.astype(np.float32), (without + example).astype(np.float32)


def reachable(released, candidate, std):
    """Which released values are candidate + std·z for a float32 z, rounded once or twice: one of few lies near enough."""
    std = float(np.float32(std))
    z = ((released.astype(np.float64) - candidate) / std).astype(np.float32)
    found = np.zeros(len(z), bool)
    for step in range(-3, 4):
        near = (z.view(np.int32) + step).view(np.float32)
        once = (candidate + near.astype(np.float64) * std).astype(np.float32)
        twice = candidate + near * np.float32(std)
        found |= (once == released) | (twice == released)
    return found


def most_right(trials, sigma):
    """The most guesses that may be right: the Gaussian mechanism allows Φ(1/2σ) of them, and chance adds to it."""
    return stats.binom.ppf(1 - 1e-5, trials, stats.norm.cdf(1 / (2 * sigma)))


@pytest.mark.parametrize("weights", ["zero", "ordinary"])
@pytest.mark.parametrize(
    ("generator", "size", "sigma", "trials"),
    [
        *((name, size, sigma, 50) for name in GENERATORS for size, sigma in ((3000, 1.07), (100, 10.0))),
        ("keyed", 100_000, 5.0, 25),
        ("secure", 10_000, 5.0, 25),
    ],
)
def test_possible_values_tell_no_more_than_epsilon(weights, generator, size, sigma, trials, build):
    right = 0
    coin = np.random.default_rng(0)
    for trial in range(trials):
        sums = candidates(size, weights, trial)
        truth = int(coin.integers(2))
        released = torch.from_numpy(sums[truth].copy())
        add_gaussian_([released], sigma * CLIP, GENERATORS[generator](trial))
        scores = [reachable(released.numpy(), candidate, sigma * CLIP).sum() for candidate in sums]
        guess = coin.integers(2) if scores[0] == scores[1] else int(scores[1] > scores[0])
        right += int(guess == truth)
    assert right <= most_right(trials, sigma)


@pytest.mark.parametrize("generator", GENERATORS)
def test_every_value_lies_on_the_public_grid_and_every_residue_is_as_frequent(generator, build):
    """In double precision the released integers can be read off: they must say nothing about the sum but its size."""
    grid = 3.0 * (1 + 2.0**-16) / 2**40
    released = torch.tensor([0.0, 1.0, math.pi, -1e-3], dtype=torch.float64).repeat_interleave(20_000)
    add_gaussian_(released, 3.0, GENERATORS[generator](7))
    multiples = released.numpy().reshape(4, -1) / grid
    assert np.abs(multiples - np.rint(multiples)).max() <= 2.0**-6
    for residues in np.rint(multiples).astype(np.int64) & 63:
        assert stats.chisquare(np.bincount(residues, minlength=64)).pvalue > 1e-5


# Where the two normals of one circle stood: distance within blocks, and bits of the uniform numbers.
CIRCLES = [(128, 256, 31), (8, 16, 24)]


@pytest.mark.parametrize(("distance", "block", "bits"), CIRCLES)
def test_no_two_values_lie_on_a_known_circle(distance, block, bits, build):
    """Box & Muller's pairs have exp(-r²/2) on a lattice, coarse enough to be seen where r is large."""
    released = torch.ones(1 << 22)
    add_gaussian_(released, 2.0, KeyedGenerator(b"k" * 32))
    normals = ((released.double() - 1) / 2).view(-1, block)
    first, second = normals[:, :distance], normals[:, distance : 2 * distance]
    lattice = torch.exp(-(first**2 + second**2) / 2).mul(2.0**bits).reshape(-1)
    # One step of the lattice is then 2^-15 of the value, a hundred times the rounding of float32.
    seen = lattice[lattice < 2.0**15]
    assert len(seen) > 20
    for offset in (0, 0.5):
        off_lattice = ((seen + offset).frac() - 0.5).abs().mul(2).numpy()
        assert stats.kstest(off_lattice, "uniform").pvalue > 1e-4


def test_an_attacker_who_weighs_the_values_gets_what_the_gaussian_mechanism_gives():
    """The likelihood ratio, the best test there is, is right in Φ(1/2σ) of the cases: no more, and no less for larger noise."""
    sigma, trials = 1.0, 20_000
    sums = [torch.from_numpy(candidate) for candidate in candidates(16, "ordinary", 0)]
    direction = (sums[1] - sums[0]).double()
    released = torch.cat([sums[trial % 2] for trial in range(trials)])
    add_gaussian_(released, sigma * CLIP, KeyedGenerator(b"k" * 32))
    projected = (released.view(trials, 16).double() - sums[0].double()) @ direction
    guesses = projected > direction.square().sum() / 2
    right = int((guesses == torch.arange(trials) % 2).sum())
    expected = trials * stats.norm.cdf(1 / (2 * sigma))
    assert abs(right - expected) < 4 * math.sqrt(trials) / 2
