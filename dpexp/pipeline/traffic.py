"""Bytes that a process sends to others, or moves between device and host, by what they are."""

from __future__ import annotations

from collections import Counter


class Traffic:
    """A count of bytes by kind: `activations` and `gradients` between stages, `norms` (flat clipping), `sums` (data parallel),
    `messages` (digests, counts), `parked` (per-example gradients moved to the host or back)."""

    def __init__(self) -> None:
        self.bytes: Counter[str] = Counter()

    def add(self, kind: str, count: int) -> None:
        """Count bytes of a kind."""
        if count:
            self.bytes[kind] += count
