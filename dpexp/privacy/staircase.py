"""The discrete Gaussian of standard deviation 2^40 from a stream cipher: integers with P(n) ∝ exp(-n²/2^81).

Rejection sampling below a staircase, as in the ziggurat of Marsaglia & Tsang (2000), with steps of whole numbers: which numbers
are proposed, and how often, is exact by construction, and 99.6% of them are accepted by comparing integers. Only at the edge of
a step is an exponential looked at, in double precision. docs/privacy.md derives what that costs (`RELATIVE_ERROR`).

The random words are those of ChaCha8 (Bernstein 2008) under a 256-bit key, addressed by place: the noise of an element
depends on (key, stream, place) alone. `dpexp.native` holds the same in C++; this twin in torch's integers serves any device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

SCALE_BITS = 40  # the standard deviation is 2^40
TAIL = 16  # no number is larger than 16 standard deviations; what is cut weighs 2^-188
RELATIVE_ERROR = 2.0**-45  # of every probability below 11 standard deviations; 2^-90 lies beyond
GROUP = 128  # places that 16 blocks of the cipher serve; pieces begin at a multiple

# Attacks are known on up to 7.5 rounds, far beyond 2^128 steps; 20 would cost half as much again as all else.
ROUNDS = 8

_LAYERS = 1024
_LOW_BITS = 20  # of a number, uniform; the table decides the rest
_TOTAL = 3_336_911  # units of height for exp(0) = 1: the most that 1024 layers can cover
_MASK = 0xFFFFFFFF


class Piece(NamedTuple):
    """`length` places of a stream, from `start` on, a multiple of `GROUP`."""

    stream: int
    start: int
    length: int


class Staircase(NamedTuple):
    """Layers of equal probability below which the curve lies.

    widths: 1024 + 1 widths, in units of 2^20, each proposing magnitudes below it.
    heights: 1024 + 1 lower edges, in units of exp(0)/`total`; a layer is as high as 32-bit words fall on each of its widths.
    """

    widths: list[int]
    heights: list[int]
    total: int


@lru_cache(maxsize=1)
def staircase(total: int = _TOTAL) -> Staircase:
    """The layers, from the bottom up: a layer is wide enough for all numbers whose probability reaches its lower edge."""
    scale = 1 << (SCALE_BITS - _LOW_BITS)
    widths, heights = [TAIL * scale], [0]
    while heights[-1] < total:
        heights.append(heights[-1] + (1 << 32) // widths[-1])
        reached = math.sqrt(2 * math.log(max(total / heights[-1], 1)))
        widths.append(math.floor(scale * reached) + 2)
    # Nothing above the last layer is accepted without a look: 3 is the least that the test of `_propose` knows.
    widths[-1] = 3
    return Staircase(widths, heights, total)


def integers(key: bytes, pieces: Sequence[Piece], device: torch.device) -> list[Tensor]:
    """Draw independent discrete Gaussians.

    Args:
        key: 32 bytes.
        pieces: which numbers of which streams.
        device: where to compute; every device gives the same numbers.

    Returns:
        For each piece `[length]` float64: whole numbers of standard deviation 2^40.
    """
    groups = [-(-piece.length // GROUP) for piece in pieces]
    counters = torch.cat(
        [
            torch.arange(piece.start // 8, piece.start // 8 + 16 * number, device=device)
            for piece, number in zip(pieces, groups, strict=True)
        ]
    )
    streams = torch.tensor([piece.stream for piece in pieces], device=device)
    streams = streams.repeat_interleave(16 * torch.tensor(groups, device=device))
    words = chacha(key, counters, streams, 0)
    # Place 128 g + 16 k + lane takes words k and k + 8 of block 16 g + lane.
    first, second = words.view(2, 8, -1, 16).transpose(1, 2).reshape(2, -1)
    drawn, sure = _propose(first, second)
    waiting = (~sure).nonzero().squeeze(1)
    first, second = first[waiting], second[waiting]
    block = waiting // GROUP * 16
    places, streams = counters[block] * 8 + waiting % GROUP, streams[block]
    turn = 1
    while len(waiting):
        words = chacha(key, places, streams, turn)
        accepted = _decide(first, second, words[:4])
        drawn[waiting[accepted]] = _propose(first, second)[0][accepted]
        left = ~accepted
        waiting, places, streams = waiting[left], places[left], streams[left]
        first, second = words[4][left], words[5][left]
        turn += 1
    padded = drawn.split([number * GROUP for number in groups])
    return [numbers[: piece.length] for numbers, piece in zip(padded, pieces, strict=True)]


def _propose(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """A number from two words, and whether it is accepted whatever else is drawn."""
    widths, _ = _tables(first.device)
    layer = second & (_LAYERS - 1)
    width, above = widths.index_select(0, layer), widths.index_select(0, layer + 1)
    product = (first.long() & _MASK) * width
    coarse, rest = product >> 32, product & _MASK
    # At coarse = 0 stands the zero, which must not count twice for its two signs.
    sure = (coarse > 0) & (coarse < above - 2) & (rest >= width)
    low = (second >> 10) & ((1 << _LOW_BITS) - 1)
    magnitude = (coarse << _LOW_BITS).add_(low).double()
    return magnitude.copysign(second), sure


def _decide(first: Tensor, second: Tensor, words: Tensor) -> Tensor:
    """Is a proposal accepted, given 128 further bits for its height within the layer?"""
    widths, heights = _tables(first.device)
    layer = second & (_LAYERS - 1)
    width = widths[layer]
    rest = ((first.long() & _MASK) * width) & _MASK
    whole = rest >= (1 << 32) % width
    value, _ = _propose(first, second)
    twice = (value == 0) & (second < 0)
    share = torch.zeros_like(value)
    for word in reversed(words.long() & _MASK):
        share = (share + word) * 2.0**-32
    height = heights[layer] + share * (heights[layer + 1] - heights[layer])
    x = value * 2.0**-SCALE_BITS
    return whole & ~twice & (height < staircase().total * torch.exp(x * x * -0.5))


@lru_cache(maxsize=8)
def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    stairs = staircase()
    widths = torch.tensor(stairs.widths, device=device)
    return widths, torch.tensor(stairs.heights, device=device, dtype=torch.float64)


def chacha(key: bytes, counters: Tensor, streams: Tensor | int, turn: int, rounds: int = ROUNDS) -> Tensor:
    """Compute blocks of ChaCha (RFC 8439, 2.3, for 20 rounds) with a 64-bit counter, as its author laid it out.

    Args:
        key: 32 bytes.
        counters: `[n]` int64, words 12 and 13 of the state.
        streams: `[n]` or one, word 14.
        turn: word 15.
        rounds: an even number.

    Returns:
        `[16, n]` int32, the words of every block.
    """
    device = counters.device
    constants = [_signed(int.from_bytes(b"expand 32-byte k"[i : i + 4], "little")) for i in range(0, 16, 4)]
    keys = [_signed(int.from_bytes(key[i : i + 4], "little")) for i in range(0, 32, 4)]
    start = torch.empty(16, len(counters), dtype=torch.int32, device=device)
    start[:12] = torch.tensor(constants + keys, dtype=torch.int32, device=device).unsqueeze(1)
    start[12], start[13] = _low(counters), _low(counters >> 32)
    start[14] = _low(streams) if isinstance(streams, Tensor) else _signed(streams)
    start[15] = turn
    a, b, c, d = (rows.clone() for rows in start.split(4))
    for _ in range(rounds // 2):
        for turned in (1, -1):
            a += b
            d = _rotated(d ^ a, 16)
            c += d
            b = _rotated(b ^ c, 12)
            a += b
            d = _rotated(d ^ a, 8)
            c += d
            b = _rotated(b ^ c, 7)
            # Columns, then diagonals, then columns again.
            b, c, d = b.roll(-turned, 0), c.roll(-2, 0), d.roll(turned, 0)
    return torch.cat([a, b, c, d]) + start


def _rotated(x: Tensor, by: int) -> Tensor:
    return (x << by) | ((x >> (32 - by)) & ((1 << by) - 1))


def _low(x: Tensor) -> Tensor:
    """The low 32 bits, as int32."""
    return (((x & _MASK) ^ (1 << 31)) - (1 << 31)).int()


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word
