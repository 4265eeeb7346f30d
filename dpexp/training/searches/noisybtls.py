"""NoisyBTLS: a backtracking line search by the sparse vector technique (Chen & Lee 2020; Monir et al., section 3.1.2)."""

import math

import numpy as np
import torch
from torch import Tensor

from dpexp.privacy.noise import KeyedGenerator
from dpexp.training.searches.base import StepSearch

# Of ε, what the threshold of AboveThreshold gets: 1 : 2^(2/3) between it and the queries is best (Lyu, Su & Li 2017).
THRESHOLD_SHARE = 1 / (1 + 2 ** (2 / 3))


class NoisyBTLS(StepSearch):
    """Tries η = η_0, βη_0, β²η_0, … until the objective falls far enough, and learns from failures which budget is short.

    The queries are q(η) = Σ_i [min(ℓ_i(θ), C) - min(ℓ_i(θ - ηg̃), C)] - αηB‖ĝ‖² with C = C_obj: one example moves
    them by at most C in either direction. AboveThreshold compares them with 0: Lap(C/ε₁) on the threshold, Lap(2C/ε₂) on
    each query, ε₁ + ε₂ = ε for any number of queries.
    ‖ĝ‖² is ‖g̃‖² less what its noise adds on average, and 0 at least: a function of what is released.

    No η was good enough in `tries`: either the gradient is noise, or the search cannot tell. The next step measures another
    gradient at the same weights, and the angle between both decides. With θ̄ the moving average of the angles between gradients of
    consecutive weights: above φ_max·θ̄ the two disagree more than usual, and gradients get a larger budget; below φ_min·θ̄
    they agree, and the search does (the review's text says "to compute a more precise gradient" in both cases; for this one
    that would change nothing). When the budget of gradients is raised, C_grad and C_obj shrink by the factor 1 - ζ, once until
    a step succeeds.
    """

    NUMBERS = (*StepSearch.NUMBERS, "mean_angle", "shrunk")
    TENSORS = (*StepSearch.TENSORS, "last")

    mean_angle, shrunk = math.nan, False
    last: list[Tensor] | None = None

    def search(self, gradient: list[Tensor], sample: list[np.ndarray], noise: KeyedGenerator) -> float:
        """Release the first step size that noisily passes."""
        rng = self.comparisons(noise)
        first, second = self.epsilon * THRESHOLD_SHARE, self.epsilon * (1 - THRESHOLD_SHARE)
        threshold = rng.laplace(scale=self.bound / first)
        slope = self._squared_norm(gradient) * self.expected_batch * self.settings.armijo
        for k in range(self.settings.tries):
            size = self.largest * self.settings.backtrack**k
            query = float(self.sums(gradient, [size], sample)[0]) - slope * size
            if query + rng.laplace(scale=2 * self.bound / second) >= threshold:
                return size
        return 0.0

    def contributions(self, before: np.ndarray, after: np.ndarray) -> np.ndarray:
        """How far each example's bounded loss falls."""
        return before - after

    def failed(self, measured: list[Tensor]) -> None:
        """Raise the budget that is short, where a second gradient at the same weights tells which."""
        if self.kept is None:
            return
        again, usual = angle(measured, self.kept), self.mean_angle
        if math.isnan(usual) or again > self.settings.angle_high * usual:
            self.gradient_level *= 1 + self.settings.raise_by
            self._shrink()
        elif again < self.settings.angle_low * usual:
            self.search_level *= 1 + self.settings.raise_by

    def succeeded(self, gradient: list[Tensor], size: float) -> None:
        """Remember the angle to the gradient before."""
        if self.last is not None:
            turned, keep = angle(gradient, self.last), self.settings.angle_memory
            unknown = math.isnan(self.mean_angle)
            self.mean_angle = turned if unknown else keep * self.mean_angle + (1 - keep) * turned
        self.last = [g.clone() for g in gradient]
        self.shrunk = False

    def _shrink(self) -> None:
        if self.shrunk:
            return
        policy = self.release.policy
        policy.estimates = policy.estimates * (1 - self.settings.shrink)
        self.bound *= 1 - self.settings.shrink
        self.shrunk = True

    def _squared_norm(self, gradient: list[Tensor]) -> float:
        """‖ĝ‖² of the mean gradient."""
        squared = sum(float(g.double().square().sum()) for g in gradient)
        sizes = sum(g.numel() for g in gradient)
        information = self.kept_weight + self._information()
        return max(0.0, squared - sizes / information / self.expected_batch**2)


def angle(first: list[Tensor], second: list[Tensor]) -> float:
    """Compute the angle between two gradients, in [0, π]; π/2 where one of them is zero."""
    pairs = zip(first, second, strict=True)
    inner = sum(float(torch.sum(a.double() * b.double())) for a, b in pairs)
    lengths = [math.sqrt(sum(float(g.double().square().sum()) for g in each)) for each in (first, second)]
    norm = lengths[0] * lengths[1]
    return math.acos(max(-1.0, min(1.0, inner / norm))) if norm > 0 else math.pi / 2
