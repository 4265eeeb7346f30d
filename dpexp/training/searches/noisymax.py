"""NoisyMax: the best of some step sizes, by a noisy maximum (Lee & Kifer 2018; Monir et al., section 3.1.2, Figure 3a)."""

import numpy as np
from torch import Tensor

from dpexp.privacy.noise import KeyedGenerator
from dpexp.training.searches.base import StepSearch


class NoisyMax(StepSearch):
    """Compares the objective at θ - α·g̃ for the step sizes α = 0, α_max/m, …, α_max, and takes the noisily smallest.

    What is summed is Σ_i min(ℓ_i, C_obj). One more example raises every one of these sums by at most C_obj, and none falls
    (the query is monotonic), so that Laplace noise of scale C_obj/ε on each makes the index ε-DP, and Gumbel noise
    of the same scale is the exponential mechanism, whose losses lie in a range of width ε.

    α = 0 wins: g̃ is hardly a direction of descent, and the budget of gradients is multiplied by 1 + γ from now on. Every `window`
    steps that found a step size, α_max becomes 1 + `growth` times the largest one that was chosen among them.
    """

    NUMBERS = (*StepSearch.NUMBERS, "recent")

    # step sizes that were found
    recent: tuple[float, ...] = ()

    def search(self, gradient: list[Tensor], sample: list[np.ndarray], noise: KeyedGenerator) -> float:
        """Release the step size of the noisily smallest objective."""
        candidates = np.linspace(0.0, self.largest, self.settings.candidates + 1)
        totals = self.sums(gradient, candidates.tolist(), sample)
        rng = self.comparisons(noise)
        draw = rng.gumbel if self.settings.mechanism == "exponential" else rng.laplace
        noisy = -totals + draw(scale=self.bound / self.epsilon, size=len(totals))
        return float(candidates[int(noisy.argmax())])

    def contributions(self, before: np.ndarray, after: np.ndarray) -> np.ndarray:
        """The bounded losses at the candidate."""
        return after

    def failed(self, measured: list[Tensor]) -> None:
        """Spend more on gradients."""
        self.gradient_level *= 1 + self.settings.raise_by

    def succeeded(self, gradient: list[Tensor], size: float) -> None:
        """Let the step sizes reach a little further than those that were good."""
        self.recent = (*self.recent, size)
        if len(self.recent) == self.settings.window:
            self.largest = (1 + self.settings.growth) * max(self.recent)
            self.recent = ()
