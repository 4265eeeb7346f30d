"""Time and space of the modules of private training on one generalised linear layer (Bu et al., Table 3).

The layer maps ``[B, T, d]`` to ``[B, T, p]``: B examples, T positions (tokens, pixels of the output, 1 for
plain vectors), d inputs and p outputs per position. A convolution has ``d = in_channels / groups * kernel
volume``. Flops count a multiplication and an addition as two; space counts floats, not bytes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """``flops``: multiplications and additions; ``floats``: numbers held in memory. Costs of modules add."""

    flops: int
    floats: int

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.floats + other.floats)


def forward_pass(B: int, T: int, p: int, d: int) -> Cost:
    """Module (1): the forward pass."""
    return Cost(2 * B * T * p * d, p * d + B * T * d)


def output_gradient(B: int, T: int, p: int, d: int) -> Cost:
    """Module (2a): back-propagating to the layer's input."""
    return Cost(2 * B * T * p * d, B * T * (p + d))


def parameter_gradient(B: int, T: int, p: int, d: int) -> Cost:
    """Module (2b): the summed gradient of the weight."""
    return Cost(2 * B * T * p * d, p * d)


def ghost_norm(B: int, T: int, p: int, d: int) -> Cost:
    """Module (3): per-example norms from the two T x T Gram matrices."""
    return Cost(2 * B * T * T * (p + d), 2 * B * T * T)


def instantiation(B: int, T: int, p: int, d: int) -> Cost:
    """Module (4): the per-example gradients themselves."""
    return Cost(2 * B * T * p * d, B * p * d)


def weighted_sum(B: int, T: int, p: int, d: int) -> Cost:
    """Module (5): the sum of instantiated per-example gradients times their factors."""
    return Cost(2 * B * p * d, 0)


MODULES = {
    "1": forward_pass,
    "2a": output_gradient,
    "2b": parameter_gradient,
    "3": ghost_norm,
    "4": instantiation,
    "5": weighted_sum,
}


def prefers_ghost(T: int, p: int, d: int) -> bool:
    """The layerwise rule of Bu et al., section 3.2: the ghost norm where ``2T² < pd``, instantiation elsewhere."""
    return p * d > 2 * T * T
