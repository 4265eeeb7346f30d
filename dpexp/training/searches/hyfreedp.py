"""HyFreeDP: the learning rate and the bound of the losses from noisy losses (Liu & Bu 2025)."""

import numpy as np
import torch
from torch import Tensor

from dpexp.privacy.noise import KeyedGenerator, add_gaussian_
from dpexp.training.searches.base import StepSearch

LARGEST_CHANGE = 2.0
"""By what factor η and the bound may move in one step: the noise of three losses must not be a runaway."""


class HyFreeDP(StepSearch):
    """Fits a parabola to the mean loss at θ, θ - η·g̃ and θ + η·g̃, and takes its lowest point as the step size.

        L₀, L₋, L₊: noisy means of the bounded losses there
        slope b = (L₊ - L₋)/(2η),    curvature a = (L₊ + L₋ - 2L₀)/η²,    η ← b/a where both are above 0

    Elsewhere η stays: a parabola that opens downwards, or rises along -g̃, is noise. Released are the three sums
    Σ_i (min(ℓ_i, R) - R/2): each moves by at most R/2 with an example, all together by √3·R/2. The bound follows the losses,
    R ← twice the largest of the three (the paper's is the last loss itself, which cuts off half of them), and the bound of the
    gradients is automatic: clip=auto_s. No budget ever moves, so this is a fixed composition of Gaussians, and every accountant
    speaks of it.
    """

    NUMBERS = (*StepSearch.NUMBERS, "size")

    # η; the largest to begin with
    size = 0.0

    def search(self, gradient: list[Tensor], sample: list[np.ndarray], noise: KeyedGenerator) -> float:
        """Release three losses, and derive η and the next bound."""
        self.size = eta = self.size or self.largest
        bound = self.bound
        noisy = torch.from_numpy(self.sums(gradient, [0.0, eta, -eta], sample))
        add_gaussian_(noisy, self.noise, noise)
        here, ahead, behind = (noisy / self.expected_batch + bound / 2).tolist()
        slope, curvature = (behind - ahead) / (2 * eta), (behind + ahead - 2 * here) / eta**2
        if slope > 0 and curvature > 0:
            self.size = eta * min(max(slope / curvature / eta, 1 / LARGEST_CHANGE), LARGEST_CHANGE)
        wanted = 2 * max(here, ahead, behind)
        self.bound = bound * min(max(wanted / bound, 1 / LARGEST_CHANGE), LARGEST_CHANGE)
        return self.size

    @property
    def noise(self) -> float:
        """Standard deviation of the noise on each sum: √3·R/2 times the multiplier of the search's share."""
        return 3**0.5 * self.bound / 2 * self.multiplier

    def contributions(self, before: np.ndarray, after: np.ndarray) -> np.ndarray:
        """The centred bounded losses."""
        return after - self.bound / 2

    def failed(self, measured: list[Tensor]) -> None:
        """Never: η is above 0."""
