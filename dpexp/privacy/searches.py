"""What a step-size search costs, and the filter under which its budget may move.

One step releases, from one Poisson sample: the noisy gradient, then the answer of the search, an index. The step's noise
multiplier σ is split between both by the share s, as that of adaptive thresholds is: the gradient gets σ/√(1-s), the search an ε
whose dominating Gaussian (`dpexp.privacy.mechanisms`) has multiplier σ/√s. At first all of it together costs what σ alone would.

A search that fails raises the budget of later steps. Their noise then depends on what earlier steps released, and no fixed
composition describes the run. It is covered by Rényi filters (Feldman & Zrnic 2021): if each step's divergence at the order α is
known before the step, and a step that would take the sum above ρ is not taken, then all that was released is (α, ρ)-Rényi-DP,
whatever the path. One order is not enough in practice: the divergence of sampled Gaussians at a large order explodes when the
noise falls a little. So m orders are fixed beforehand, each with the budget ρ_α that gives the same ε at δ/m, and the run goes on
while one of them is left. A transcript that ends with α left is as likely as under the filter of α alone, so the
transcripts of each α satisfy (ε, δ/m), and together they satisfy (ε, δ). ε is what the planned number of steps costs with the
first budgets at the best order, at δ/m: a raise is paid for with steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dp_accounting import DpEvent, GaussianDpEvent
from dp_accounting.rdp import compute_epsilon

from dpexp.errors import UserError
from dpexp.privacy.events import Releases
from dpexp.privacy.mechanisms import BoundedRangeDpEvent, PureDpEvent, pure_epsilon
from dpexp.privacy.renyi import best_order, divergence, renyi_epsilon

ORDERS = 4
"""m, the orders of the filter: the one that is best for the plan, and smaller ones: α - 1 falls by the factor √2."""

# of ε, relative
_ROUNDING = 1e-9
MECHANISMS = ("laplace", "exponential", "above_threshold", "gaussian")


@dataclass(frozen=True)
class SearchBudget:
    """How a step's budget is split between the gradient and a search.

    ``mechanism``: of the search, one of `MECHANISMS`; ``share``: s, in (0, 1); ``gradient_level``, ``search_level``: what the
    information 1/σ² of either is multiplied by, 1 at first.
    """

    mechanism: str
    share: float
    gradient_level: float = 1.0
    search_level: float = 1.0

    def __post_init__(self) -> None:
        if self.mechanism not in MECHANISMS:
            raise UserError(
                f"search.mechanism={self.mechanism} is not a choice; choices: {', '.join(MECHANISMS)}"
            )
        if not 0 < self.share < 1:
            raise UserError(
                f"search.share={self.share} must be in (0, 1): a search without budget would release its answer unprotected"
            )

    @classmethod
    def of(cls, value: SearchBudget | Mapping[str, Any] | None) -> SearchBudget | None:
        """A split from its plain values, as a JSON file has them."""
        return value if value is None or isinstance(value, SearchBudget) else cls(**value)

    def gradient_sigma(self, sigma: float) -> float:
        """Compute the noise multiplier that is left for the gradient of a step with σ."""
        return sigma / math.sqrt((1 - self.share) * self.gradient_level)

    @property
    def moves(self) -> bool:
        """Whether a search of this kind may raise budgets; one with Gaussian answers has a fixed share."""
        return self.mechanism != "gaussian"

    def multiplier(self, sigma: float) -> float:
        """Compute the noise multiplier of the search's share of a step with σ."""
        return sigma / math.sqrt(self.share * self.search_level)

    def epsilon(self, sigma: float) -> float:
        """Compute ε of one search in a step with σ; infinite without noise."""
        if sigma == 0:
            return math.inf
        mu = math.sqrt(self.share * self.search_level) / sigma
        return pure_epsilon(mu) * (2 if self.mechanism == "exponential" else 1)

    def event(self, sigma: float) -> DpEvent:
        """Name what the search of a step releases."""
        if self.mechanism == "gaussian":
            return GaussianDpEvent(self.multiplier(sigma))
        if self.mechanism == "exponential":
            return BoundedRangeDpEvent(self.epsilon(sigma), "noisy maximum, exponential mechanism")
        kind = "above threshold" if self.mechanism == "above_threshold" else "noisy maximum, Laplace noise"
        return PureDpEvent(self.epsilon(sigma), kind)

    def at(self, gradient_level: float, search_level: float) -> SearchBudget:
        """Give the same split with other levels."""
        return replace(self, gradient_level=gradient_level, search_level=search_level)


def filter_orders(planned: Releases, delta: float) -> list[float]:
    """Choose the orders of the filter from the plan alone: the best one, then falling ones, all above 1."""
    best = best_order(planned, delta / ORDERS)
    return [best, *(1 + (best - 1) / math.sqrt(2) ** k for k in range(1, ORDERS))]


def filter_admits(then: Releases, planned: Releases, delta: float) -> bool:
    """Decide whether some order of the filter has budget for everything in ``then``, the next step included."""
    target = renyi_epsilon(planned, delta / ORDERS) * (1 + _ROUNDING)
    return any(
        compute_epsilon([order], [divergence(then, order)], delta / ORDERS)[0] <= target
        for order in filter_orders(planned, delta)
    )
