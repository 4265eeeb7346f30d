"""Releases that are not Gaussian, as events, and the Gaussian that dominates each of them.

A step may release, from the same Poisson sample, a noisy gradient and the answer of a search. No accountant knows the
Poisson-sampled composition of both. So a search is accounted as the Gaussian mechanism whose trade-off curve lies below its own:

* Of an ε-DP mechanism nothing is worse than f(α) = max(1 - e^ε α, e^-ε (1 - α), 0), two lines that meet at α* = f(α*) =
  1/(1 + e^ε). The curve G_μ of N(0, 1) against N(μ, 1) is convex, G_μ(0) = 1, G_μ(1) = 0. If it passes through the corner it lies
  below both lines, because a convex curve lies below its chords. G_μ(α*) = α* gives μ = 2Φ^-1(e^ε/(1 + e^ε)).
* Of an exponential mechanism more is known: all its privacy losses lie in one interval [t - ε, t] (bounded range; Dong, Durfee &
  Rogers 2020). Nothing is worse than two points, with a corner at α = (1 - e^(t-ε))/(e^t - e^(t-ε)). The same argument holds for
  each t, and t = ε/2 needs the largest μ, that of an ε/2-DP mechanism: half the price.

Domination holds through adaptive composition and through Poisson sampling (Zhu, Dong & Wang 2022), so that
PoissonSampled(q, Composed([Gaussian(σ), Pure(ε)])) is at most PoissonSampled(q, Composed([Gaussian(σ), Gaussian(1/μ)])) under
every accountant.
"""

from __future__ import annotations

import math

import attr
from dp_accounting import DpEvent
from scipy.special import log_ndtr, ndtri_exp

from dpexp.errors import UserError


@attr.s(frozen=True, slots=True, auto_attribs=True)
class PureDpEvent(DpEvent):
    """A mechanism of which ε-DP is known and nothing else: NoisyMax with Laplace noise, AboveThreshold."""

    epsilon: float
    mechanism: str = ""


@attr.s(frozen=True, slots=True, auto_attribs=True)
class BoundedRangeDpEvent(DpEvent):
    """A mechanism whose privacy losses lie in one interval of length ε: the exponential mechanism."""

    epsilon: float
    mechanism: str = ""


@attr.s(frozen=True, slots=True, auto_attribs=True)
class ProjectedGaussianDpEvent(DpEvent):
    """A sum clipped by norms that are estimated from r random projections, under noise of σ thresholds; see `.projected`."""

    noise_multiplier: float
    projections: int


OWN_EVENTS: dict[str, type[DpEvent]] = {
    "ProjectedGaussianDpEvent": ProjectedGaussianDpEvent,
    "PureDpEvent": PureDpEvent,
    "BoundedRangeDpEvent": BoundedRangeDpEvent,
}
"""Events of this file by name: `dp_accounting` has no words for them."""


def dominating_mu(epsilon: float) -> float:
    """Compute the least μ for which N(0, 1) against N(μ, 1) is worse than every ε-DP mechanism; ε >= 0."""
    if epsilon == 0:
        return 0.0
    if math.isinf(epsilon):
        return math.inf
    # log 1/(1 + e^ε), without overflow
    corner = -(epsilon + math.log1p(math.exp(-epsilon)))
    return max(0.0, float(-2 * ndtri_exp(corner)))


def pure_epsilon(mu: float) -> float:
    """Compute the ε with `dominating_mu(ε)` = μ."""
    return float(log_ndtr(mu / 2) - log_ndtr(-mu / 2))


def noise_multiplier(event: DpEvent) -> float | None:
    """Find the noise multiplier 1/μ of the Gaussian that dominates an event of this file; None for any other event.

    0 stands for a release without any noise, infinity for one that says nothing.
    Raises `UserError` for an ε that is negative or no number.
    """
    if not isinstance(event, PureDpEvent | BoundedRangeDpEvent):
        return None
    if not event.epsilon >= 0:
        raise UserError(f"{event}: epsilon must be 0 or larger")
    mu = dominating_mu(event.epsilon if isinstance(event, PureDpEvent) else event.epsilon / 2)
    return math.inf if mu == 0 else 1 / mu
