"""The Gaussian mechanism in closed form, safe for any μ.

μ is the sensitivity divided by the standard deviation (one release: 1/σ; T releases: √T/σ).
"""

from __future__ import annotations

import math

from scipy.optimize import brentq
from scipy.special import erfcx, ndtr


def gaussian_delta(epsilon: float, mu: float) -> float:
    """δ(ε; μ) = Φ(-ε/μ + μ/2) - e^ε Φ(-ε/μ - μ/2) (Balle & Wang 2018, Theorem 8), for ε >= 0."""
    if mu == 0:
        return 0.0
    if math.isinf(mu):
        return 1.0
    return math.exp(_log_delta(epsilon / mu - mu / 2, mu))


def gaussian_epsilon(delta: float, mu: float) -> float:
    """The smallest ε >= 0 at which μ-GDP is (ε, δ)-DP; 0 < δ < 1."""
    if mu == 0 or gaussian_delta(0.0, mu) <= delta:
        return 0.0
    if not math.isfinite(mu * mu):
        return math.inf
    # In t = ε/μ - μ/2 the solution stays within a few units for any μ: δ is above Φ(40 - 1) ≈ 1 at t = -40,
    # and at most exp(-t²/2)/2 for t > 0.
    low = max(-mu / 2, -40.0)
    high = math.sqrt(-2 * math.log(2 * delta)) if delta < 0.5 else 0.0
    t = brentq(
        lambda t: _log_delta(t, mu) - math.log(delta), low, max(high, low) + 1.0, xtol=1e-13, rtol=1e-14
    )
    return max(0.0, mu * (t + mu / 2))


def _log_delta(t: float, mu: float) -> float:
    """log δ at ε = μ(t + μ/2). With erfcx(x) = e^{x²} erfc(x), the e^ε of the formula cancels before it can
    overflow."""
    second = 0.5 * erfcx((t + mu) / math.sqrt(2))
    if t > 0:
        difference = 0.5 * erfcx(t / math.sqrt(2)) - second
        return math.log(difference) - t * t / 2 if difference > 0 else -math.inf
    difference = ndtr(-t) - math.exp(-t * t / 2) * second
    return math.log(difference) if difference > 0 else -math.inf
