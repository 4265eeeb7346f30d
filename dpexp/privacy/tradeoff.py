"""What an attacker can achieve: the trade-off curve of a mechanism, and the numbers that sum it up.

f(α) is the least share of false negatives that any test for the presence of one example can have at a share α of false
positives (Dong, Roth & Su 2019), the smaller one of both directions (was the example added, or removed?). It follows from the
privacy profile δ(ε) by duality (their Proposition 2.12):

    f(α) = max over ε >= 0 of  1 - δ(ε) - e^ε α,  e^-ε (1 - δ(ε) - α),  0

δ(ε) is read off the pessimistic privacy loss distribution, so that f is never above the truth. Between the points of the grid
δ is linear in e^ε, and f is piecewise linear.

Following Gomez et al. (arXiv 2503.10945) it is reported as

- μ: the least μ with f(α) >= G_μ(α) = Φ(Φ^-1(1-α) - μ) wherever both error rates are at least 1e-10 (as in their implementation:
  in yet rarer cases the tails of a sampled Gaussian are those of an unsampled one, and no smaller μ would hold);
- its regret Δ: the least Δ with f(α + Δ) - Δ <= G_μ(α) for all α. What G_μ overstates; below 0.01 μ says nearly all there is;
- the largest share of true positives at a given share of false positives, 1 - f(α).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from dp_accounting import DpEvent
from numpy.typing import NDArray
from scipy.special import ndtr
from scipy.stats import norm

from dpexp.privacy.accountants import loss_distribution, too_large, unsampled
from dpexp.privacy.events import Releases, coarsen, releases
from dpexp.privacy.losses import rounding

FPR = 1e-3
TPR = f"tpr_at_fpr_{FPR:g}"
# error rates below are not looked at
_RAREST = 1e-10
# of releases that are composed as they are; see `accountants`
_KINDS = 48
_POINTS = 20_001


@dataclass(frozen=True)
class Attack:
    """The best that an attacker can do. μ may be infinite; the regret is then NaN."""

    mu: float
    regret: float
    tpr: float
    """True positives at `FPR`."""

    def plain(self) -> dict[str, float | None]:
        """For a record; None for what is not finite."""
        named = {"mu": self.mu, "mu_regret": self.regret, TPR: self.tpr}
        return {name: value if math.isfinite(value) else None for name, value in named.items()}


NO_BOUND = Attack(math.inf, math.nan, 1.0)


def attack(event: DpEvent) -> Attack | None:
    """Sum up the event's trade-off curve; None where it holds anything but (Poisson-sampled) Gaussians.

    Without sampling this is the closed form: μ of the one Gaussian, and no regret.
    """
    parts = releases(event)
    if parts is None:
        return None
    if any(sigma == 0 for _, sigma in parts):
        return NO_BOUND
    if (mu := unsampled(parts)) is not None:
        return Attack(mu, 0.0, float(ndtr(mu - norm.isf(FPR))))
    try:
        return _summed_up(tuple(coarsen(parts, _KINDS).items()))
    except (ArithmeticError, IndexError, TypeError, ValueError):
        # q or 1/σ next to the smallest of numbers, which no grid holds
        return NO_BOUND


@lru_cache(maxsize=64)
def _summed_up(kinds: tuple[tuple[tuple[float, float], int], ...]) -> Attack:
    """Once: it takes about a second, and a run asks for its plan and for its ledger."""
    parts = dict(kinds)
    if too_large(parts, _RAREST):
        return NO_BOUND
    alphas, betas = curve(*_profile(parts))
    mu = fitted_mu(alphas, betas)
    return Attack(mu, regret(alphas, betas, mu), float(1 - np.interp(FPR, alphas, betas)))


def curve(
    epsilons: NDArray[np.float64], deltas: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Corners (α, β) of f, α rising from 0 to 1, from points of the profile: ε rising from 0, δ falling.

    Two neighbouring points give the lines 1 - δ - e^ε α, which meet in a corner. The other half of f is its mirror image.
    """
    odds = np.exp(epsilons)
    alphas = (deltas[:-1] - deltas[1:]) / np.diff(odds)
    # f is convex: rounding must not say otherwise
    alphas = np.minimum.accumulate(np.maximum(alphas, 0.0))
    betas = 1 - deltas[:-1] - odds[:-1] * alphas
    # ε rises, so α falls: from the corner next to the diagonal to (0, 1 - δ(largest ε))
    alphas, betas = np.append(alphas, 0.0)[::-1], np.append(betas, 1 - deltas[-1])[::-1]
    return np.concatenate([alphas, betas[::-1]]), np.concatenate([betas, alphas[::-1]])


def fitted_mu(alphas: NDArray[np.float64], betas: NDArray[np.float64]) -> float:
    """The least μ with f >= G_μ wherever both error rates are at least 1e-10; inf where f is nowhere so high.

    The corners decide, and where the range ends: between them f is straight and G_μ sags.
    """
    first = float(np.interp(_RAREST, alphas, betas))
    seen = np.minimum(alphas, betas) > _RAREST
    alphas, betas = np.append(alphas[seen], _RAREST), np.append(betas[seen], first)
    if first <= _RAREST:
        return math.inf
    return max(0.0, float((norm.isf(alphas) - norm.ppf(betas)).max()))


def regret(alphas: NDArray[np.float64], betas: NDArray[np.float64], mu: float) -> float:
    """Δ: half the largest distance of f and G_μ along the diagonals α - β = constant, on which (α + Δ, β + Δ) lies."""
    if not math.isfinite(mu):
        return math.nan
    z = np.linspace(-9.0, 9.0 + mu, _POINTS)
    gaussian_alphas, gaussian_betas = ndtr(-z), ndtr(z - mu)
    reached = np.interp(gaussian_alphas - gaussian_betas, alphas - betas, alphas + betas)
    return max(0.0, float((reached - gaussian_alphas - gaussian_betas).max() / 2))


def _profile(parts: Releases) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Points (ε, δ) from ε = 0 to where δ is a hundredth of the rarest error rate, or, after many steps, rounding."""
    losses = loss_distribution(parts, _RAREST)
    least = max(_RAREST / 100, 2 * rounding(sum(parts.values())))
    epsilons = np.linspace(0.0, losses.get_epsilon_for_delta(least), _POINTS)
    return epsilons, np.asarray(losses.get_delta_for_epsilon(epsilons.tolist()))
