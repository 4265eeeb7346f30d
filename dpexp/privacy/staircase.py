"""The discrete Gaussian of standard deviation 2^40 from a stream cipher: integers with P(n) ∝ exp(-n²/2^81).

Rejection sampling below a staircase, as in the ziggurat of Marsaglia & Tsang (2000), with steps of whole numbers: which numbers
are proposed, and how often, is exact by construction, and 98.2% of them are accepted by comparing integers. Only at the edge of
a step is an exponential looked at, in double precision. docs/privacy.md derives what that costs (`RELATIVE_ERROR`).

The random words are those of ChaCha8 (Bernstein 2008) under a 256-bit key, addressed by place: the noise of an element
depends on (key, stream, place) alone. `dpexp.native` holds the same in C++; this twin in torch's integers serves any device.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

# the standard deviation is 2^40
SCALE_BITS = 40
# no number is larger than 16 standard deviations; what is cut weighs 2^-188
TAIL = 16
# of every probability below 11 standard deviations; 2^-90 lies beyond
RELATIVE_ERROR = 2.0**-45
# places that 16 blocks of the cipher serve; pieces begin at a multiple
GROUP = 128

# Attacks are known on up to 7.5 rounds, far beyond 2^128 steps; 20 would cost half as much again as all else.
ROUNDS = 8

_LAYERS = 256
_LAYER_BITS = 8
# of a number, uniform; the table decides the rest
_LOW_BITS = 23
_WIDTH_BITS = 21
# units of height for exp(0) = 1: the most that 256 layers can cover
_TOTAL = 6_627_564
_MASK = 0xFFFFFFFF
# blocks of the cipher
_CACHED = 1 << 13


class Piece(NamedTuple):
    """`length` places of a stream, from `start` on, a multiple of `GROUP`."""

    stream: int
    start: int
    length: int


class Staircase(NamedTuple):
    """Layers of equal probability below which the curve lies.

    widths: 256 + 1 widths, in units of 2^23, each proposing magnitudes below it.
    heights: 256 + 1 lower edges, in units of exp(0)/`total`; a layer is as high as 32-bit words fall on each of its widths.
    packed: for each layer its width and, in the 11 bits above, the first words below which a proposal is surely accepted.
    """

    widths: list[int]
    heights: list[int]
    packed: list[int]
    total: int


@lru_cache(maxsize=1)
def staircase(total: int = _TOTAL) -> Staircase:
    """The layers, from the bottom up: a layer is wide enough for all numbers whose probability reaches its lower edge."""
    scale = 1 << (SCALE_BITS - _LOW_BITS)
    widths, heights = [TAIL * scale - 1], [0]
    while heights[-1] < total:
        heights.append(heights[-1] + (1 << 32) // widths[-1])
        reached = math.sqrt(2 * math.log(max(total / heights[-1], 1)))
        widths.append(math.floor(scale * reached) + 2)
    # Above the last layer there is nothing: no proposal of it is accepted without a look.
    widths[-1] = 2
    # Up to two units below the width of the layer above, the whole layer lies below the curve.
    sure = [((above - 2) << 32) // width for width, above in itertools.pairwise(widths)]
    packed = [
        (words >> _WIDTH_BITS << _WIDTH_BITS) | width for words, width in zip(sure, widths, strict=False)
    ]
    return Staircase(widths, heights, packed, total)


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
    # On a CPU as much as stays in the cache.
    size = len(counters) if device.type == "cuda" else _CACHED
    parts = [
        _first_turn(key, *blocks) for blocks in zip(counters.split(size), streams.split(size), strict=True)
    ]
    if not parts:
        return [torch.empty(0, dtype=torch.float64, device=device) for _ in pieces]
    drawn, first, second = (torch.cat(values) for values in list(zip(*parts, strict=True))[:3])
    waiting = torch.cat([part[3] + 8 * size * i for i, part in enumerate(parts)])
    block = waiting // GROUP * 16
    places, streams = counters[block] * 8 + waiting % GROUP, streams[block]
    turns = torch.ones(1, dtype=torch.int64, device=device)
    while len(waiting):
        number = len(turns)
        blocks = chacha(
            key, places.repeat(number), streams.repeat(number), turns.repeat_interleave(len(waiting))
        )
        left = torch.ones(len(waiting), dtype=torch.bool, device=device)
        for words in blocks.view(16, number, -1).unbind(1):
            numbers, accepted = _decide(first, second, words[:4])
            # Who is rejected gets two new words.
            first, second = words[4:6].long() & _MASK
            again, sure = _propose(first, second)
            drawn[waiting[left]] = torch.where(accepted, numbers, again)[left]
            left &= ~(accepted | sure)
        waiting, places, streams = waiting[left], places[left], streams[left]
        first, second = first[left], second[left]
        # One place of a hundred is left; for so few the cipher costs as much for several turns as for one.
        turns = turns[-1:] + torch.arange(1, 4, device=device)
    padded = drawn.split([number * GROUP for number in groups])
    return [numbers[: piece.length] for numbers, piece in zip(padded, pieces, strict=True)]


def _first_turn(key: bytes, counters: Tensor, streams: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What the first words say: `[8 n]` numbers in the order of places; both words, and the place, of those that are not sure."""
    words = chacha(key, counters, streams, 0)
    # Words k and k + 8 of block 16 g + 2 i make place 128 g + 16 k + i, those of block 16 g + 2 i + 1 place 128 g + 16 k + 8 + i:
    # two blocks are looked at as one number of 64 bits.
    length = len(counters) // 2
    halves = torch.empty(2, 2, 8, length, dtype=torch.int64, device=counters.device)
    pairs = words.view(torch.int64).view(2, 8, length)
    torch.bitwise_and(pairs, _MASK, out=halves[:, 0])
    torch.bitwise_right_shift(pairs, 32, out=halves[:, 1]).bitwise_and_(_MASK)
    first, second = halves.view(2, -1)
    numbers, sure = _propose(first, second)
    drawn = numbers.view(2, 8, -1, 8).permute(2, 1, 0, 3).reshape(-1)
    waiting = (~sure).nonzero().squeeze(1)
    half, row, pair = waiting // (8 * length), waiting // length % 8, waiting % length
    return drawn, first[waiting], second[waiting], pair // 8 * GROUP + row * 16 + half * 8 + pair % 8


def _propose(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """A number from two words (int64), and whether it is accepted whatever else is drawn."""
    layer = _tables(first.device)[0].index_select(0, second & (_LAYERS - 1))
    width = layer & ((1 << _WIDTH_BITS) - 1)
    product = first * width
    sure = first < (layer - width)
    sure &= (product & _MASK) >= width
    # The highest bit of the second word makes n of a magnitude m, or -1 - n: every whole number once.
    low = (1 << _LOW_BITS) - 1
    magnitude = product.bitwise_right_shift_(32 - _LOW_BITS).bitwise_and_(~low)
    magnitude |= (second >> _LAYER_BITS).bitwise_and_(low)
    return magnitude.bitwise_xor_((second >> 31).neg_()).double(), sure


def _decide(first: Tensor, second: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
    """The number of two words, and whether it is accepted, given 128 further bits for its height within the layer."""
    packed, heights = _tables(first.device)
    layer = second & (_LAYERS - 1)
    width = packed[layer] & ((1 << _WIDTH_BITS) - 1)
    whole = ((first * width) & _MASK) >= (1 << 32) % width
    number, _ = _propose(first, second)
    share = torch.zeros_like(number)
    for word in reversed(words.long() & _MASK):
        share = (share + word) * 2.0**-32
    height = heights[layer] + share * (heights[layer + 1] - heights[layer])
    x = number * 2.0**-SCALE_BITS
    return number, whole & (height < staircase().total * torch.exp(x * x * -0.5))


@lru_cache(maxsize=8)
def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    stairs = staircase()
    packed = torch.tensor(stairs.packed, device=device)
    return packed, torch.tensor(stairs.heights, device=device, dtype=torch.float64)


def chacha(
    key: bytes, counters: Tensor, streams: Tensor | int, turn: Tensor | int, rounds: int = ROUNDS
) -> Tensor:
    """Compute blocks of ChaCha (RFC 8439, 2.3, for 20 rounds) with a 64-bit counter, as its author laid it out.

    Args:
        key: 32 bytes.
        counters: `[n]` int64, words 12 and 13 of the state.
        streams: `[n]` or one, word 14.
        turn: `[n]` or one, word 15.
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
    state = start.clone()
    a, b, c, d = state.split(4)
    spare = torch.empty_like(a)
    for _ in range(rounds // 2):
        # Columns, then diagonals: there row i of a meets row i + 1 of b, i + 2 of c and i + 3 of d.
        for by in (0, 1):
            for left, right in ((16, 12), (8, 7)):
                _with_rows(Tensor.add_, a, b, by)
                _with_rows(Tensor.bitwise_xor_, d, a, by)
                _rotate_(d, left, spare)
                _with_rows(Tensor.add_, c, d, by)
                _with_rows(Tensor.bitwise_xor_, b, c, by)
                _rotate_(b, right, spare)
    return state.add_(start)


def _with_rows(change_: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor, by: int) -> None:
    """Change row i of x with row i + by of y, of four."""
    if by == 0:
        change_(x, y)
        return
    change_(x[:-by], y[by:])
    change_(x[-by:], y[:by])


def _rotate_(x: Tensor, by: int, spare: Tensor) -> None:
    torch.bitwise_left_shift(x, by, out=spare)
    x.bitwise_right_shift_(32 - by).bitwise_and_((1 << by) - 1).bitwise_or_(spare)


def _low(x: Tensor) -> Tensor:
    """The low 32 bits, as int32."""
    return (((x & _MASK) ^ (1 << 31)) - (1 << 31)).int()


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word
