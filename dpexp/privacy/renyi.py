"""Rényi differential privacy of Poisson-sampled Gaussians (Mironov, Talwar & Zhang 2019), for any σ, q and
number of steps.

The Rényi curve is computed here, the conversion to (ε, δ) is ``dp_accounting``'s. Two things are wanted
that the library's curve does not give: for large σ its sum of order 1 cancels to noise (and may come out
negative), and epsilon below about 0.01 needs orders in the thousands, which a Python loop over each
binomial term makes slow. Tests compare the two."""

from __future__ import annotations

import math
from functools import cache, lru_cache

import numpy as np
from dp_accounting.rdp import compute_epsilon
from numpy.typing import NDArray
from scipy.special import gammaln

from dpexp.privacy.events import Releases

_FRACTIONAL = (*(x / 20 for x in range(21, 40)), *(x / 10 for x in range(21, 160) if x % 10))
_WHOLE = (*range(2, 65), *(int(64 * 1.1**k) for k in range(1, 45)))
_ORDERS = tuple(sorted(float(order) for order in (*_FRACTIONAL, *_WHOLE)))
_LARGEST_ORDER = 1 << 20
# larger ones are rare, and long
_KEPT_ORDER = 5000


def renyi_epsilon(parts: Releases, delta: float) -> float:
    """ε of the composition at δ, minimised over orders; inf where no order gives a finite value."""
    return _least(parts, delta)[0]


def best_order(parts: Releases, delta: float) -> float:
    """Find the order at which the composition has its least ε."""
    return _least(parts, delta)[1]


def divergence(parts: Releases, order: float) -> float:
    """Compute the Rényi divergence of the composition at one order; inf where something is released without noise."""
    if any(sigma == 0 for _, sigma in parts):
        return math.inf
    return sum(count * float(_curve(q, sigma, (order,))[0]) for (q, sigma), count in parts.items())


def divergences(q: float, sigma: float, orders: tuple[float, ...]) -> NDArray[np.float64]:
    """Compute the Rényi divergence of one Poisson-sampled Gaussian at each order."""
    return _curve(q, sigma, orders)


def _least(parts: Releases, delta: float) -> tuple[float, float]:
    """The least ε, and its order."""
    orders = _ORDERS
    epsilon, best = _minimum(parts, delta, orders)
    last = best
    while last == orders[-1] and 0 < epsilon < math.inf and last < _LARGEST_ORDER:
        # tiny ε: larger orders are better
        orders = tuple(int(orders[-1] * 1.2**k) for k in range(9))
        better, last = _minimum(parts, delta, orders)
        epsilon, best = min((epsilon, best), (better, last))
    return epsilon, best


def _minimum(parts: Releases, delta: float, orders: tuple[float, ...]) -> tuple[float, float]:
    total = sum(
        (count * _curve(q, sigma, orders) for (q, sigma), count in parts.items()), np.zeros(len(orders))
    )
    return compute_epsilon(orders, total.tolist(), delta)


@lru_cache(maxsize=4096)
def _curve(q: float, sigma: float, orders: tuple[float, ...]) -> NDArray[np.float64]:
    """Rényi divergence of one release at each order."""
    if q == 1:
        return np.asarray(orders) / (2 * sigma**2)
    curve = np.full(len(orders), math.inf)
    whole = np.asarray([float(order).is_integer() for order in orders])
    for i in np.flatnonzero(whole):
        curve[i] = _log_moment(q, sigma, int(orders[i])) / (orders[i] - 1)
    if not whole.all() and sigma > 0.05 and q * q * math.expm1(min(sigma**-2, 50.0)) > 1e-8:
        fractional = np.asarray(orders)[~whole]
        curve[~whole] = _log_moments_by_quadrature(q, sigma, fractional) / (fractional - 1)
    return curve


def _log_moment(q: float, sigma: float, order: int) -> float:
    """log E_{x~N(0,σ²)} [(1-q + q e^{(2x-1)/(2σ²)})^α] for a whole α: its binomial expansion (their eq. for
    integer α).

    The terms i = 0, 1 of the expansion and the "1" of every other add up to exactly 1. Without them all
    terms are positive, and nothing cancels however small the moment is."""
    i, log_binomial = (_binomial if order <= _KEPT_ORDER else _binomial.__wrapped__)(order)
    exponent = (i * i - i) / (2 * sigma**2)
    log_expm1 = np.where(exponent > 40, exponent, np.log(np.expm1(np.minimum(exponent, 40.0))))
    excess = _log_sum(log_binomial + i * math.log(q) + (order - i) * math.log1p(-q) + log_expm1)
    return math.log1p(math.exp(excess)) if excess < 0 else float(np.logaddexp(0.0, excess))


@cache
def _binomial(order: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """i = 2, …, α and log (α over i): the same for every q and σ of a calibration."""
    i = np.arange(2, order + 1, dtype=np.float64)
    return i, gammaln(order + 1) - gammaln(i + 1) - gammaln(order - i + 1)


def _log_moments_by_quadrature(q: float, sigma: float, orders: NDArray[np.float64]) -> NDArray[np.float64]:
    """The same for fractional orders by the trapezoidal rule in z = x/σ, which converges geometrically here.

    The integrand is analytic within πσ of the real line, so that a step of min(1, σ)/8 leaves an error
    below rounding."""
    step = min(1.0, sigma) / 8
    z = np.arange(-10.0, orders.max() / sigma + 10.0, step)
    log_ratio = np.logaddexp(math.log1p(-q), math.log(q) + z / sigma - 0.5 / sigma**2)
    log_density = -z * z / 2 - 0.5 * math.log(2 * math.pi) + math.log(step)
    return np.asarray([max(0.0, _log_sum(order * log_ratio + log_density)) for order in orders])


def _log_sum(logs: NDArray[np.float64]) -> float:
    """log of the sum of exponentials: SciPy's takes many times as long for a few hundred, and a budget asks for thousands."""
    largest = float(logs.max())
    return largest + math.log(float(np.exp(logs - largest).sum())) if math.isfinite(largest) else largest
