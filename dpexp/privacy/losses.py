"""Composing privacy loss distributions with themselves, many times over: what Fourier transforms round must not reach δ.

``dp_accounting`` takes a transform to the power T in 64 bits. That is right to some T·2^-53, all of δ = 1e-10 after 10⁶ steps: ε
came out below the truth, although each step is rounded upwards. Here the transform has as many bits as the machine offers.
What may still be lost is set aside, as a release that tells everything with this probability.
"""

from __future__ import annotations

import math

import numpy as np
from dp_accounting.pld import common, pld_pmf, privacy_loss_distribution
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from scipy import fft

# of δ: beyond the range of a grid, as the library has it
_TRUNCATED = 1e-15


def rounding(steps: int) -> float:
    """Say how much of δ may be missing after so many steps: several times what was seen, up to 10⁷ of them."""
    return min(1.0, 4 * steps * float(np.finfo(np.longdouble).eps))


def lost_to_rounding(steps: int, interval: float) -> PrivacyLossDistribution:
    """Begin a composition of so many steps, of all kinds together, with what their rounding may cost.

    ``interval``: of the grid of losses.
    """
    told = common.DifferentialPrivacyParameters(0, rounding(steps))
    return privacy_loss_distribution.from_privacy_parameters(told, interval)


def self_composed(losses: PrivacyLossDistribution, count: int) -> PrivacyLossDistribution:
    """Compose a distribution with itself."""
    directions = [losses._pmf_remove] if losses._symmetric else [losses._pmf_remove, losses._pmf_add]
    return PrivacyLossDistribution(*(_power(pmf.to_dense_pmf(), count) for pmf in directions))


def _power(pmf: pld_pmf.DensePLDPmf, count: int) -> pld_pmf.DensePLDPmf:
    if count == 1:
        return pmf
    first, last = common.compute_self_convolve_bounds(pmf._probs, count, _TRUNCATED)
    length = fft.next_fast_len(max(last - first + 1, pmf.size))
    transform = fft.rfft(np.asarray(pmf._probs, np.longdouble), length)
    probs = np.roll(fft.irfft(transform**count, length), -first)[: last - first + 1].astype(np.float64)
    told = _TRUNCATED - math.expm1(count * math.log1p(-pmf._infinity_mass))
    return pld_pmf.DensePLDPmf(
        pmf._discretization, pmf._lower_loss * count + first, probs, told, pmf._pessimistic_estimate
    )
