"""Numbers of the staircase by place: the first turn of all, and further turns for those that are not sure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpexp.privacy import staircase
from dpexp.privacy.staircase import GROUP

# blocks of the cipher whose words stay in a core's cache
_CACHED = 1 << 14


class Piece(NamedTuple):
    """`length` places of a stream, from `start` on, a multiple of `GROUP`."""

    stream: int
    start: int
    length: int


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
    drawn = torch.empty(8 * len(counters), dtype=torch.float64, device=device)
    # On a CPU as much as stays in the cache.
    size = max(1, len(counters)) if device.type == "cuda" else _CACHED
    first_turn, settle = _on(device)
    turned = [
        first_turn(key, *blocks)
        for blocks in zip(counters.split(size), streams.split(size), drawn.split(8 * size), strict=True)
    ]
    first, second = (torch.cat([turn[i] for turn in turned]) for i in (0, 1))
    waiting = torch.cat([turn[2] + 8 * size * i for i, turn in enumerate(turned)])
    block = waiting // GROUP * 16
    drawn[waiting] = settle(key, counters[block] * 8 + waiting % GROUP, streams[block], first, second)
    padded = drawn.split([number * GROUP for number in groups])
    return [numbers[: piece.length] for numbers, piece in zip(padded, pieces, strict=True)]


@cache
def _on(device: torch.device) -> Any:
    """`staircase.first_turn` and `staircase.settle`, or on a GPU their kernels, where these draw the same numbers."""
    if device.type == "cuda":
        try:
            from dpexp.privacy import staircase_gpu
        except ImportError:
            # torch without Triton
            return staircase.first_turn, staircase.settle
        if staircase_gpu.trusted(device):
            return staircase_gpu.first_turn, staircase_gpu.settle
    return staircase.first_turn, staircase.settle
