"""What composing privacy loss distributions by Fourier transforms may lose to rounding, as something to compose them with."""

from __future__ import annotations

from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.pld.common import DifferentialPrivacyParameters
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

# of δ, for each step; seven times the largest share that was missing in runs of 10⁵ to 10⁷ steps
_LOST = 2.0**-51


def lost_to_rounding(steps: int, interval: float) -> PrivacyLossDistribution:
    """Begin a composition of so many steps: everything is told, with the probability that may be missing in the end.

    A transform is right to some 2^-53, and its power T to T times as much. Of δ = 1e-9 after 10⁶ steps this is a tenth: without
    it ε would be too small, although each step is rounded upwards.

    Args:
        steps: T, of all kinds together.
        interval: of the grid of losses.
    """
    told = DifferentialPrivacyParameters(0, min(1.0, steps * _LOST))
    return privacy_loss_distribution.from_privacy_parameters(told, interval)
