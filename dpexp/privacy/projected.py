"""Clipping by estimated norms, as an event: the sensitivity of a step is a random number, known to whoever knows the projections.

Bu et al. 2021 clip g to C·g/max(C, M), M² = (1/r)·Σ_j ⟨g, v_j⟩² with v_j ~ N(0, I). ⟨g, v_j⟩/‖g‖ is N(0, 1), whatever g is, so
that M/‖g‖ = √(χ²_r/r), and what an example adds has a norm of at most

    C·‖g‖/M = C·T,    T = √(r/χ²_r),

which is larger than C wherever M under-estimates. The v_j are drawn anew in each step from the secret key, and never from the
data; let the attacker know them. Given them, a step is a Poisson-sampled Gaussian of sensitivity C·T. Pairs of neighbours that
come with a label of known distribution have the expectation of the hockey-stick divergences: δ(ε) = E_T[δ_T(ε)] (joint
convexity holds with equality for a label that both share). So a step's privacy loss distribution is the mixture over T of those
of its Gaussians, and steps compose as ever. This is their Theorem with sampling; nothing is approximated but T, upwards.

P(T > t) falls like t^-r only, and the Rényi divergence of a Gaussian grows like e^{t²}: its expectation is infinite for every
order. No accountant by Rényi divergences can speak of this mechanism, and none that sees one Gaussian (gdp, prv here) does.
"""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
from dp_accounting import DpEvent
from dp_accounting.pld import pld_pmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from numpy.typing import NDArray
from scipy.special import ndtr
from scipy.stats import chi2

from dpexp.errors import UserError
from dpexp.privacy.events import coarsen, sampled, sequence
from dpexp.privacy.losses import lost_to_rounding, self_composed
from dpexp.privacy.mechanisms import ProjectedGaussianDpEvent

Floats = NDArray[np.float64]
Kinds = Counter[tuple[float, float, int]]
"""(sampling rate q, σ, projections r) -> how many steps."""

# of the sensitivities that the mixture is rounded to: their tail probabilities, evenly and then on a logarithmic scale
_BULK, _TAIL = 32, 80
# the share of δ at which T is called unbounded
_UNBOUNDED = 1e-3
_LARGEST_LOSS = 60.0
# the noise multiplier below which no grid of losses is worth its memory: the example counts as told
_SMALLEST = 0.1
# of steps that are composed as they are, see `events.coarsen`
_KINDS = 8
_LARGEST_EPSILON = 100.0


def projected(event: DpEvent) -> Kinds | None:
    """The event as steps of this kind; None where there are none of them, or others too."""
    counts: Kinds = Counter()
    for part, count in sequence(event):
        q, inner = sampled(part)
        if not isinstance(inner, ProjectedGaussianDpEvent):
            return None
        counts[q, float(inner.noise_multiplier), int(inner.projections)] += count
    return counts or None


def projected_epsilon(kinds: Kinds, delta: float) -> float:
    """ε of the steps at δ; never below the truth."""
    if delta == 0 or any(sigma <= 0 for _, sigma, _ in kinds):
        return math.inf
    unbounded = _UNBOUNDED * delta / sum(kinds.values())
    # the standard deviation of a step's loss, of which the grid is a tenth
    scale = min(q * math.sqrt(math.expm1(min(sigma**-2, 50.0))) for q, sigma, _ in kinds if q > 0)
    interval = min(max(scale / 10, 2e-4), 1e-2)
    total = lost_to_rounding(sum(kinds.values()), interval)
    for r in sorted({r for _, _, r in kinds}):
        alike = {(q, sigma): count for (q, sigma, other), count in kinds.items() if other == r and q > 0}
        for (q, sigma), count in coarsen(alike, _KINDS).items():
            total = total.compose(self_composed(one_step(q, sigma, r, unbounded, interval), count))
    found = float(total.get_epsilon_for_delta(delta))
    return found if found <= _LARGEST_EPSILON else math.inf


def one_step(
    q: float, sigma: float, projections: int, unbounded: float, interval: float = 1e-3
) -> PrivacyLossDistribution:
    """The privacy loss distribution of a step, by connect-the-dots from δ(ε) = E_T[δ_T(ε)].

    Args:
        q: sampling rate.
        sigma: noise over C.
        projections: r.
        unbounded: the probability with which T counts as infinite: the example is then told, if it was drawn.
        interval: of the grid of losses.
    """
    limits, shares = sensitivities(projections, unbounded)
    kept = sigma / limits >= _SMALLEST
    multipliers, shares_kept = sigma / limits[kept], shares[:-1][kept]
    told = 1.0 - float(shares_kept.sum())
    smallest = float(multipliers.min()) if len(multipliers) else 1.0
    top = min(math.log1p(q * math.expm1(min((1 + 20 * smallest) / (2 * smallest**2), 700.0))), _LARGEST_LOSS)
    count = math.ceil(top / interval)
    eps = np.arange(-count, count + 1, dtype=np.float64) * interval
    # of an example that is told: whether it was drawn is all that is hidden
    removed = told * (q + np.maximum(0.0, 1 - q - np.exp(eps)))
    added = told * np.maximum(0.0, 1 - (1 - q) * np.exp(eps))
    for multiplier, share in zip(multipliers, shares_kept, strict=True):
        removed += share * _removed(eps, q, float(multiplier))
        added += share * _added(eps, q, float(multiplier))
    pmfs = (
        pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(
            interval, -count, count, np.minimum.accumulate(np.clip(deltas, 0.0, 1.0))
        )
        for deltas in (removed, added)
    )
    return PrivacyLossDistribution(*pmfs)


def _removed(eps: Floats, q: float, sigma: float) -> Floats:
    """δ(ε) of (1 - q)·N(0, σ²) + q·N(1, σ²) against N(0, σ²): the ratio exceeds e^ε above one point."""
    inside = (np.exp(eps) - (1 - q)) / q
    x = sigma**2 * np.log(np.maximum(inside, 1e-300)) + 0.5
    nothing, something = ndtr(-x / sigma), ndtr((1 - x) / sigma)
    found = (1 - q - np.exp(eps)) * nothing + q * something
    return np.where(inside > 0, np.maximum(found, 0.0), -np.expm1(eps))


def _added(eps: Floats, q: float, sigma: float) -> Floats:
    """δ(ε) of N(0, σ²) against (1 - q)·N(0, σ²) + q·N(1, σ²): the ratio exceeds e^ε below one point."""
    inside = (np.exp(-eps) - (1 - q)) / q
    x = sigma**2 * np.log(np.maximum(inside, 1e-300)) + 0.5
    nothing, something = ndtr(x / sigma), ndtr((x - 1) / sigma)
    found = nothing - np.exp(eps) * ((1 - q) * nothing + q * something)
    return np.where(inside > 0, np.maximum(found, 0.0), 0.0)


def sensitivities(projections: int, unbounded: float) -> tuple[Floats, Floats]:
    """T rounded upwards.

    Returns:
        `[n]` values, ascending, and `[n + 1]` their probabilities, the last of which is that of what lies beyond.
    """
    if projections < 1:
        raise UserError(f"{projections} projections estimate no norm: at least one is needed")
    tails = np.concatenate(
        [np.linspace(1, 0.04, _BULK, endpoint=False)[1:], np.geomspace(0.04, unbounded, _TAIL)]
    )
    limits = np.sqrt(projections / chi2.ppf(tails, projections))
    return limits, -np.diff(np.concatenate([[1.0], tails, [0.0]]))
