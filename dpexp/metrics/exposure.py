"""How far a model has memorised a secret: the exposure of a canary (Carlini et al., 2019; Li et al., App. M, Table 9).

A canary is drawn at random from a space R of equally likely texts and put into the training data. The model's losses
then tell how well it stands out among the texts of R that were not put there. Losses are the summed negative
log-likelihoods of the texts (log-perplexities); one who guesses in their order finds the canary after `rank` guesses.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dpexp.errors import UserError

FEWEST_TO_FIT = 50
"""Candidates below which a distribution of three parameters is not worth fitting."""


def rank(canary_loss: float, other_losses: npt.ArrayLike) -> int:
    """The canary's place among the candidates by loss: 1 for the lowest.

    A candidate with the same loss comes first, so that a model that tells nothing apart exposes nothing.

    Args:
        canary_loss: of the text that was in the training data.
        other_losses: `[n]`, of texts of the same space that were not.

    Raises:
        UserError: no candidates, or a loss that is no number. Infinite losses are losses.
    """
    loss, others = _checked(canary_loss, other_losses)
    return 1 + int(np.sum(others <= loss))


def exposure(canary_loss: float, other_losses: npt.ArrayLike) -> float:
    """log2 |R| - log2 rank, in bits, with R the canary and the candidates given: from 0 to log2(n + 1).

    Exact where the candidates are all others of the space. Where they are a sample of it, an estimate that can't
    exceed log2(n + 1); `extrapolated_exposure` goes on from there.

    Args:
        canary_loss, other_losses: as in `rank`.
    """
    place = rank(canary_loss, other_losses)
    return math.log2(np.size(other_losses) + 1) - math.log2(place)


@dataclass(frozen=True)
class SkewNormal:
    """A distribution of losses.

    shape: 0 for a normal distribution.
    location, scale: in the unit of the losses.
    ks_pvalue: of a Kolmogorov-Smirnov test against the losses fitted to; small where the fit is bad. Being tested on
        what it was fitted to, it errs on the large side.
    """

    shape: float
    location: float
    scale: float
    ks_pvalue: float

    def log_cdf(self, loss: float) -> float:
        """The natural logarithm of the probability of a loss of at most this; accurate far below the range of floats."""
        from scipy import integrate, special, stats

        z = (loss - self.location) / self.scale
        probability = float(stats.skewnorm.cdf(z, self.shape))
        if probability > 1e-4:
            return math.log(min(probability, 1.0))

        def log_density(x: float) -> float:
            return (
                math.log(2) - x * x / 2 - math.log(2 * math.pi) / 2 + float(special.log_ndtr(self.shape * x))
            )

        # The density is log-concave and rises here: relative to its value at z it falls to nothing within a few of
        # these steps to the left.
        step = 1e-6
        slope = (log_density(z + step) - log_density(z - step)) / (2 * step)
        peak = log_density(z)
        area = integrate.quad(lambda u: math.exp(log_density(z - u / slope) - peak), 0, 40)[0]
        return peak + math.log(area / slope)


def fit(other_losses: npt.ArrayLike) -> SkewNormal:
    """The skew-normal distribution of the largest likelihood.

    Args:
        other_losses: `[n]`, finite, at least `FEWEST_TO_FIT`.

    Raises:
        UserError: too few, not finite, or all alike.
    """
    from scipy import stats

    _, losses = _checked(0.0, other_losses)
    if len(losses) < FEWEST_TO_FIT:
        raise UserError(
            f"exposure: {len(losses)} candidates are too few to fit their distribution; give {FEWEST_TO_FIT} or more, "
            "or take the exposure by rank"
        )
    if not np.isfinite(losses).all():
        raise UserError("exposure: an infinite loss among the candidates; take the exposure by rank")
    center, spread = float(losses.mean()), float(losses.std())
    if spread <= 1e-12 * max(1.0, abs(center)):
        raise UserError(
            "exposure: all candidates have the same loss, so that there is no distribution to fit"
        )
    # the search for the maximum starts better here
    standard = (losses - center) / spread
    shape, location, scale = (float(x) for x in stats.skewnorm.fit(standard))
    p = float(stats.kstest(standard, stats.skewnorm(shape, location, scale).cdf).pvalue)
    return SkewNormal(shape, center + spread * location, spread * scale, p)


def extrapolated_exposure(canary_loss: float, other_losses: npt.ArrayLike | SkewNormal) -> float:
    """-log2 of the probability that a candidate's loss is at most the canary's, in bits, by a fitted skew-normal.

    The approximation by distribution that Table 9 of Li et al. reports. It has no upper end: above log2 |R| the canary
    stands out further than the best of all candidates would by chance.

    Args:
        canary_loss: finite.
        other_losses: a sample of the space, as in `fit`; or what `fit` made of it, for several canaries.

    Raises:
        UserError: as `fit`, or a loss of the canary that is not finite.
    """
    if not math.isfinite(canary_loss):
        raise UserError(
            f"exposure: the canary's loss is {canary_loss}; was the model trained to a finite loss?"
        )
    losses = other_losses if isinstance(other_losses, SkewNormal) else fit(other_losses)
    return max(0.0, -losses.log_cdf(float(canary_loss)) / math.log(2))


def _checked(canary_loss: float, other_losses: npt.ArrayLike) -> tuple[float, npt.NDArray[np.float64]]:
    others = np.asarray(other_losses, np.float64)
    if others.ndim != 1 or not len(others):
        raise UserError(
            f"exposure: losses of candidates of shape {others.shape}; give one number for each, [n]"
        )
    if math.isnan(canary_loss) or np.isnan(others).any():
        raise UserError("exposure: a loss is NaN; was the model trained to a finite loss?")
    return float(canary_loss), others
