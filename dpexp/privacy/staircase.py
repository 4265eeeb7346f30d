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
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from dpexp.privacy.cipher import MASK, chacha

# the standard deviation is 2^40
SCALE_BITS = 40
# no number is larger than 16 standard deviations; what is cut weighs 2^-188
TAIL = 16
# of every probability below 11 standard deviations; 2^-90 lies beyond
RELATIVE_ERROR = 2.0**-45
# places that 16 blocks of the cipher serve
GROUP = 128

_LAYERS = 256
LAYER_BITS = 8
# of a number, uniform; the table decides the rest
LOW_BITS = 23
WIDTH_BITS = 21
# units of height for exp(0) = 1: the most that 256 layers can cover
_TOTAL = 6_627_564


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
    scale = 1 << (SCALE_BITS - LOW_BITS)
    widths, heights = [TAIL * scale - 1], [0]
    while heights[-1] < total:
        heights.append(heights[-1] + (1 << 32) // widths[-1])
        reached = math.sqrt(2 * math.log(max(total / heights[-1], 1)))
        widths.append(math.floor(scale * reached) + 2)
    # Above the last layer there is nothing: no proposal of it is accepted without a look.
    widths[-1] = 2
    # Up to two units below the width of the layer above, the whole layer lies below the curve.
    sure = [((above - 2) << 32) // width for width, above in itertools.pairwise(widths)]
    packed = [(words >> WIDTH_BITS << WIDTH_BITS) | width for words, width in zip(sure, widths, strict=False)]
    return Staircase(widths, heights, packed, total)


def first_turn(key: bytes, counters: Tensor, streams: Tensor, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Draw from the first words of blocks of the cipher.

    Args:
        key: 32 bytes.
        counters: ``[n]`` int64 of the blocks, n a multiple of 16.
        streams: ``[n]`` int64.
        out: ``[8 n]`` float64, for the numbers in the order of places.

    Returns:
        Both words (int64), and the place in ``out``, of those that are not sure.
    """
    words = chacha(key, counters, streams, 0)
    # Words k and k + 8 of block 16 g + 2 i make place 128 g + 16 k + i, those of block 16 g + 2 i + 1 place 128 g + 16 k + 8 + i:
    # two blocks are looked at as one number of 64 bits.
    length = len(counters) // 2
    halves = torch.empty(2, 2, 8, length, dtype=torch.int64, device=counters.device)
    pairs = words.view(torch.int64).view(2, 8, length)
    torch.bitwise_and(pairs, MASK, out=halves[:, 0])
    torch.bitwise_right_shift(pairs, 32, out=halves[:, 1]).bitwise_and_(MASK)
    first, second = halves.view(2, -1)
    numbers, sure = propose(first, second)
    out.view(-1, 8, 2, 8).copy_(numbers.view(2, 8, -1, 8).permute(2, 1, 0, 3))
    waiting = sure.logical_not_().nonzero().squeeze(1)
    half, row, pair = waiting // (8 * length), waiting // length % 8, waiting % length
    return first[waiting], second[waiting], pair // 8 * GROUP + row * 16 + half * 8 + pair % 8


def settle(key: bytes, places: Tensor, streams: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Draw for places that the first turn was not sure of, in as many turns as it takes.

    Args:
        key: 32 bytes.
        places, streams: ``[n]`` int64.
        first, second: ``[n]`` int64, the words that they have got.

    Returns:
        ``[n]`` float64.
    """
    device = places.device
    drawn = torch.empty(len(places), dtype=torch.float64, device=device)
    waiting = torch.arange(len(places), device=device)
    turns = torch.ones(1, dtype=torch.int64, device=device)
    while len(waiting):
        number = len(turns)
        blocks = chacha(
            key, places.repeat(number), streams.repeat(number), turns.repeat_interleave(len(waiting))
        )
        left = torch.ones(len(waiting), dtype=torch.bool, device=device)
        for words in blocks.view(16, number, -1).unbind(1):
            numbers, accepted = decide(first, second, words[:4])
            # Who is rejected gets two new words.
            first, second = words[4:6].long() & MASK
            again, sure = propose(first, second)
            drawn[waiting[left]] = torch.where(accepted, numbers, again.double())[left]
            left &= ~(accepted | sure)
        waiting, places, streams = waiting[left], places[left], streams[left]
        first, second = first[left], second[left]
        # One place of a hundred is left; for so few the cipher costs as much for several turns as for one.
        turns = turns[-1:] + torch.arange(1, 4, device=device)
    return drawn


def propose(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """A number from two words (int64), and whether it is accepted whatever else is drawn."""
    layer = _tables(first.device)[0].index_select(0, second & (_LAYERS - 1))
    width = layer & ((1 << WIDTH_BITS) - 1)
    product = first * width
    sure = first < layer.sub_(width)
    sure &= torch.bitwise_and(product, MASK, out=layer) >= width
    # The highest bit of the second word makes n of a magnitude m, or -1 - n: every whole number once.
    low = (1 << LOW_BITS) - 1
    magnitude = product.bitwise_right_shift_(32 - LOW_BITS).bitwise_and_(~low)
    magnitude |= torch.bitwise_right_shift(second, LAYER_BITS, out=layer).bitwise_and_(low)
    magnitude ^= torch.bitwise_right_shift(second, 31, out=layer).neg_()
    return magnitude, sure


def decide(first: Tensor, second: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
    """The number of two words, and whether it is accepted, given 128 further bits for its height within the layer."""
    packed, heights = _tables(first.device)
    layer = second & (_LAYERS - 1)
    width = packed[layer] & ((1 << WIDTH_BITS) - 1)
    whole = ((first * width) & MASK) >= (1 << 32) % width
    number = propose(first, second)[0].double()
    share = torch.zeros_like(number)
    for word in reversed(words.long() & MASK):
        share = (share + word) * 2.0**-32
    height = heights[layer] + share * (heights[layer + 1] - heights[layer])
    x = number * 2.0**-SCALE_BITS
    return number, whole & (height < staircase().total * torch.exp(x * x * -0.5))


@lru_cache(maxsize=8)
def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    stairs = staircase()
    packed = torch.tensor(stairs.packed, device=device)
    return packed, torch.tensor(stairs.heights, device=device, dtype=torch.float64)
