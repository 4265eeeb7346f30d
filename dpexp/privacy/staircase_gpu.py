"""`dpexp.privacy.staircase` in two Triton kernels: the same numbers, without a tensor for every operation of the cipher."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from dpexp.privacy import staircase
from dpexp.privacy.cipher import MASK, ROUNDS
from dpexp.privacy.staircase import LAYER_BITS, LOW_BITS, SCALE_BITS, WIDTH_BITS

# blocks of the cipher, 16 registers each, that one program computes
BLOCKS = 128
# programs whose numbers are compared before a device is trusted
COMPARED = 64


@triton.jit
def _rotated(x, by: tl.constexpr):
    return (x << by) | (x >> (32 - by))


@triton.jit
def _quarter(a, b, c, d):
    a += b
    d = _rotated(d ^ a, 16)
    c += d
    b = _rotated(b ^ c, 12)
    a += b
    d = _rotated(d ^ a, 8)
    c += d
    b = _rotated(b ^ c, 7)
    return a, b, c, d


@triton.jit
def _word(key, number: tl.constexpr, like):
    return tl.load(key + number).to(tl.uint32, bitcast=True) + tl.zeros_like(like)


@triton.jit
def _chacha(key, counter, stream, turn, rounds: tl.constexpr):
    """The 16 words of a block in each lane, uint32."""
    x12, x13, x14, x15 = counter.to(tl.uint32), (counter >> 32).to(tl.uint32), stream.to(tl.uint32), turn
    zero = tl.zeros_like(x12)
    # "expand 32-byte k"
    x0, x1, x2, x3 = zero + 0x61707865, zero + 0x3320646E, zero + 0x79622D32, zero + 0x6B206574
    x4, x5, x6, x7 = _word(key, 0, zero), _word(key, 1, zero), _word(key, 2, zero), _word(key, 3, zero)
    x8, x9, x10, x11 = _word(key, 4, zero), _word(key, 5, zero), _word(key, 6, zero), _word(key, 7, zero)
    s0, s1, s2, s3, s4, s5, s6, s7 = x0, x1, x2, x3, x4, x5, x6, x7
    s8, s9, s10, s11, s12, s13, s14, s15 = x8, x9, x10, x11, x12, x13, x14, x15
    for _ in range(rounds // 2):
        x0, x4, x8, x12 = _quarter(x0, x4, x8, x12)
        x1, x5, x9, x13 = _quarter(x1, x5, x9, x13)
        x2, x6, x10, x14 = _quarter(x2, x6, x10, x14)
        x3, x7, x11, x15 = _quarter(x3, x7, x11, x15)
        x0, x5, x10, x15 = _quarter(x0, x5, x10, x15)
        x1, x6, x11, x12 = _quarter(x1, x6, x11, x12)
        x2, x7, x8, x13 = _quarter(x2, x7, x8, x13)
        x3, x4, x9, x14 = _quarter(x3, x4, x9, x14)
    low = (x0 + s0, x1 + s1, x2 + s2, x3 + s3, x4 + s4, x5 + s5, x6 + s6, x7 + s7)
    high = (x8 + s8, x9 + s9, x10 + s10, x11 + s11, x12 + s12, x13 + s13, x14 + s14, x15 + s15)
    return low, high


@triton.jit
def _propose(
    layers, first, second, layer_bits: tl.constexpr, low_bits: tl.constexpr, width_bits: tl.constexpr
):
    """The number of two words, whether it is accepted in any case, and whether its words are of a complete round."""
    layer = tl.load(layers + (second & ((1 << layer_bits) - 1))).to(tl.uint32, bitcast=True)
    width = layer & ((1 << width_bits) - 1)
    product = first.to(tl.uint64) * width.to(tl.uint64)
    rest = product.to(tl.uint32)
    low = (second >> layer_bits) & ((1 << low_bits) - 1)
    magnitude = ((product >> 32) << low_bits).to(tl.int64) | low.to(tl.int64)
    number = (magnitude ^ -(second >> 31).to(tl.int64)).to(tl.float64)
    # 2^32 modulo the width
    whole = rest >= (tl.zeros_like(width) - width) % width
    return number, (first < layer - width) & (rest >= width), whole


@triton.jit
def _first_turn(
    key, counters, streams, layers, numbers, firsts, seconds, sure, count,
    rounds: tl.constexpr, layer_bits: tl.constexpr, low_bits: tl.constexpr, width_bits: tl.constexpr, blocks: tl.constexpr,
):  # fmt: skip
    """From a block in each lane eight numbers, their words, and whether the words alone accept them."""
    block = tl.program_id(0).to(tl.int64) * blocks + tl.arange(0, blocks)
    inside = block < count
    counter = tl.load(counters + block, mask=inside, other=0)
    stream = tl.load(streams + block, mask=inside, other=0)
    low, high = _chacha(key, counter, stream, tl.zeros((blocks,), dtype=tl.uint32), rounds)
    for row in tl.static_range(8):
        number, accepted, _ = _propose(layers, low[row], high[row], layer_bits, low_bits, width_bits)
        # the order of the twin
        place = block // 16 * 128 + 16 * row + block % 2 * 8 + block % 16 // 2
        tl.store(numbers + place, number, mask=inside)
        tl.store(firsts + place, low[row].to(tl.int32, bitcast=True), mask=inside)
        tl.store(seconds + place, high[row].to(tl.int32, bitcast=True), mask=inside)
        tl.store(sure + place, accepted.to(tl.int8), mask=inside)


@triton.jit
def _settle(
    key, places, streams, firsts, seconds, layers, heights, numbers, count, total: tl.constexpr, scale_bits: tl.constexpr,
    rounds: tl.constexpr, layer_bits: tl.constexpr, low_bits: tl.constexpr, width_bits: tl.constexpr, blocks: tl.constexpr,
):  # fmt: skip
    """Turn after turn until every lane has its number."""
    lane = tl.program_id(0) * blocks + tl.arange(0, blocks)
    inside = lane < count
    place = tl.load(places + lane, mask=inside, other=0)
    stream = tl.load(streams + lane, mask=inside, other=0)
    first = tl.load(firsts + lane, mask=inside, other=0).to(tl.uint32)
    second = tl.load(seconds + lane, mask=inside, other=0).to(tl.uint32)
    found = tl.zeros((blocks,), dtype=tl.float64)
    turn = tl.zeros((blocks,), dtype=tl.uint32)
    left = inside
    while tl.max(left.to(tl.int32), 0) > 0:
        turn += 1
        low, _ = _chacha(key, place, stream, turn, rounds)
        number, _, whole = _propose(layers, first, second, layer_bits, low_bits, width_bits)
        layer = second & ((1 << layer_bits) - 1)
        below, above = tl.load(heights + layer), tl.load(heights + layer + 1)
        share = low[3].to(tl.float64) * (1.0 / (1 << 32))
        share = (share + low[2].to(tl.float64)) * (1.0 / (1 << 32))
        share = (share + low[1].to(tl.float64)) * (1.0 / (1 << 32))
        share = (share + low[0].to(tl.float64)) * (1.0 / (1 << 32))
        x = number * (1.0 / (1 << scale_bits))
        accepted = whole & (below + share * (above - below) < total * tl.exp(x * x * -0.5))
        # who is rejected gets two new words
        first, second = low[4], low[5]
        again, sure, _ = _propose(layers, first, second, layer_bits, low_bits, width_bits)
        found = tl.where(left, tl.where(accepted, number, again), found)
        left = left & (accepted == 0) & (sure == 0)
    tl.store(numbers + lane, found, mask=inside)


BITS = ROUNDS, LAYER_BITS, LOW_BITS, WIDTH_BITS, BLOCKS


def first_turn(key: bytes, counters: Tensor, streams: Tensor, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Draw as `dpexp.privacy.staircase.first_turn` does; those that are not sure come in the order of places."""
    count, (layers, _) = len(counters), _tables(out.device)
    firsts, seconds = torch.empty(2, 8 * count, dtype=torch.int32, device=out.device)
    sure = torch.empty(8 * count, dtype=torch.int8, device=out.device)
    # Triton launches on the current device
    with torch.cuda.device_of(out):
        _first_turn[(triton.cdiv(count, BLOCKS),)](
            _words(key, out.device), counters, streams, layers, out, firsts, seconds, sure, count, *BITS
        )
    waiting = (sure == 0).nonzero().squeeze(1)
    return firsts[waiting].long() & MASK, seconds[waiting].long() & MASK, waiting


def settle(key: bytes, places: Tensor, streams: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Draw as `dpexp.privacy.staircase.settle` does."""
    numbers = torch.empty(len(places), dtype=torch.float64, device=places.device)
    if not len(places):
        return numbers
    with torch.cuda.device_of(numbers):
        _settle[(triton.cdiv(len(places), BLOCKS),)](
            _words(key, places.device), places, streams, first, second, *_tables(places.device), numbers, len(places),
            float(staircase.staircase().total), SCALE_BITS, *BITS,
        )  # fmt: skip
    return numbers


@cache
def trusted(device: torch.device) -> bool:
    """Tell whether the kernels, compiled for this device, draw the numbers of their twins; asked once per process."""
    # the last one has an edge; counters reach beyond 32 bits
    count = COMPARED * BLOCKS + 48
    key = bytes(range(200, 232))
    counters = torch.arange((1 << 35) - 64, (1 << 35) - 64 + count, device=device)
    streams = torch.arange(count, device=device) // 16
    mine, theirs = torch.zeros(2, 8 * count, dtype=torch.float64, device=device)
    try:
        first, second, waiting = first_turn(key, counters, streams, mine)
        mine[waiting] = settle(key, waiting, waiting % 7, first, second)
    except Exception:
        # a compiler that does not know the device, or none at all
        return False
    first, second, waiting = staircase.first_turn(key, counters, streams, theirs)
    theirs[waiting] = staircase.settle(key, waiting, waiting % 7, first, second)
    return torch.equal(mine, theirs)


@cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    stairs = staircase.staircase()
    layers = torch.tensor(stairs.packed, device=device).int()
    return layers, torch.tensor(stairs.heights, device=device, dtype=torch.float64)


def _words(key: bytes, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(key), dtype=torch.int32).to(device)
