"""ChaCha (Bernstein 2008) in torch's integers: random words under a secret key, addressed by place, the same on every device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# Attacks are known on up to 7.5 rounds, far beyond 2^128 steps; 20 would cost half as much again as all else that noise takes.
ROUNDS = 8

MASK = 0xFFFFFFFF


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
    # x * 2^by + the bits that it loses
    torch.bitwise_right_shift(x, 32 - by, out=spare).bitwise_and_((1 << by) - 1)
    torch.add(spare, x, alpha=1 << by, out=x)


def _low(x: Tensor) -> Tensor:
    """The low 32 bits, as int32."""
    return (((x & MASK) ^ (1 << 31)) - (1 << 31)).int()


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word
