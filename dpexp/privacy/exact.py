"""The discrete Gaussian by whole numbers alone: exact, given random bits (Canonne, Kamath & Steinke 2020, Algorithms 1 to 3).

Nothing is rounded and nothing is compared with a number that had to be computed, so that there is no error to bound. The
standard deviation is a power of two, which turns every probability into products of simple ones. Vectorised over the elements.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Words = Callable[[int], NDArray[np.uint64]]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]


def discrete_gaussian(count: int, bits: int, words: Words) -> Integers:
    """Draw independent numbers with P(n) ∝ exp(-n²/2^(2·bits+1)), n ∈ ℤ.

    Args:
        count: how many.
        bits: the standard deviation is 2^bits, at most 2^40.
        words: n -> `[n]` random words of 64 bits, fresh ones at each call.

    Returns:
        `[count]` int64.
    """
    parts, missing = [], count
    while missing > 0:
        # Slightly fewer than half of the attempts are accepted.
        parts.append(_accepted(2 * missing + 64, bits, words)[:missing])
        missing -= len(parts[-1])
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _accepted(count: int, bits: int, words: Words) -> Integers:
    """What `count` attempts of Algorithm 3 with t = σ leave: discrete Laplaces y, kept with probability exp(-(|y| - σ)²/2σ²).

    With |y| = σ·(v + x), v whole and 0 ≤ x < 1, that is exp(-(v - 1 + x)²/2).
    """
    # Algorithm 2: x with probability ∝ exp(-x), then v with probability ∝ exp(-v), then a sign.
    x = _bits(words, count, bits)
    alive = np.flatnonzero(_decays(words, bits, x))
    v = np.zeros(count, np.int64)
    more = alive
    while len(more):
        more = more[_decays(words, bits, np.full(len(more), 1 << bits))]
        v[more] += 1
    negative = _bits(words, count, 1) == 1
    alive = alive[~(negative & (x == 0) & (v == 0))[alive]]
    below = v[alive] == 0
    inner, outer = alive[below], alive[~below]
    rest = (1 << bits) - x[inner]
    inner = inner[_decays(words, bits, rest, rest, halves=1)]
    # exp(-(k + x)²/2) = exp(-x²/2) · exp(-x)^k · exp(-1/2)^k² with k = v - 1
    outer = outer[_decays(words, bits, x[outer], x[outer], halves=1)]
    for times, part, halves in ((v - 1, x, 0), ((v - 1) ** 2, np.full(count, 1 << bits), 1)):
        turn = 0
        while (again := times[outer] > turn).any():
            stays = ~again
            stays[again] = _decays(words, bits, part[outer[again]], halves=halves)
            outer = outer[stays]
            turn += 1
    kept = np.sort(np.concatenate([inner, outer]))
    values = (v[kept] << bits) + x[kept]
    return np.where(negative[kept], -values, values)


def _decays(words: Words, bits: int, *factors: Integers, halves: int = 0) -> Flags:
    """Algorithm 1: true with probability exp(-γ), γ = 2^-halves · Π factor/2^bits ≤ 1."""
    count = len(factors[0])
    result = np.zeros(count, np.bool_)
    alive = np.arange(count)
    k = 1
    while len(alive):
        # True with probability γ/k.
        goes_on = _below(words, len(alive), k) == 0
        for factor in factors:
            goes_on &= _bits(words, len(alive), bits) < factor[alive]
        for _ in range(halves):
            goes_on &= _bits(words, len(alive), 1) == 0
        result[alive[~goes_on]] = k % 2 == 1
        alive = alive[goes_on]
        k += 1
    return result


def _bits(words: Words, count: int, bits: int) -> Integers:
    return (words(count) >> np.uint64(64 - bits)).astype(np.int64)


def _below(words: Words, count: int, bound: int) -> Integers:
    """Uniform numbers from 0 to bound - 1: words of the last, incomplete round of `bound` are drawn again."""
    if bound == 1:
        return np.zeros(count, np.int64)
    drawn = words(count)
    limit = np.uint64((1 << 64) // bound * bound - 1)
    while (bad := drawn > limit).any():
        drawn[bad] = words(int(bad.sum()))
    return (drawn % np.uint64(bound)).astype(np.int64)
