"""Time and space of the two ways to per-example norms on one generalised linear layer (Bu et al., Table 3).

The layer maps ``[B, T, d]`` to ``[B, T, p]``: B examples, T positions (tokens, pixels of the output, 1 for
plain vectors), d inputs and p outputs per position. A convolution has ``d = in_channels / groups * kernel
volume``. Flops count a multiplication and an addition as two; space counts floats, not bytes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """``flops``: multiplications and additions; ``floats``: numbers held in memory. Costs add."""

    flops: int
    floats: int

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.floats + other.floats)


def ghost_norm(B: int, T: int, p: int, d: int) -> Cost:
    """Module (3): per-example norms from the two T x T Gram matrices."""
    return Cost(2 * B * T * T * (p + d), 2 * B * T * T)


def instantiation(B: int, T: int, p: int, d: int) -> Cost:
    """Module (4): the per-example gradients themselves."""
    return Cost(2 * B * T * p * d, B * p * d)
