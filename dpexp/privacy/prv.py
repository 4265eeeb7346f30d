"""Privacy random variables (Gopi, Lee & Wutschitz 2021) by ``prv_accountant``, with its grid kept in place.

The package moves the grid of each variable, by less than half a cell, so that the discrete mean is the true one. T
compositions move it by T times as much: after 10^7 steps perhaps by more than its whole length, while the Fourier transform
composes on a circle. The circle has to be read from where the grid began. The package reads it from where the grid has
moved to: for q = 1e-5, σ = 0.471, 10^7 steps and δ = 1e-6 it finds an ε of -59."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from prv_accountant.composers import Fourier, Heterogeneous
from prv_accountant.discrete_privacy_random_variable import DiscretePrivacyRandomVariable
from prv_accountant.discretisers import CellCentred
from prv_accountant.domain import Domain
from prv_accountant.privacy_random_variables import (
    GaussianMechanism,
    PoissonSubsampledGaussianMechanism,
    PrivacyRandomVariableTruncated,
)

from dpexp.privacy.events import Releases


class _OnTheCircle(Fourier):
    """Compositions of one variable, on the grid that it was given."""

    def __init__(self, variable: DiscretePrivacyRandomVariable, start: float) -> None:
        super().__init__([variable])
        self._start = start

    def compute_composition(self, num_self_compositions: Sequence[int]) -> DiscretePrivacyRandomVariable:
        found = super().compute_composition(num_self_compositions)
        cell = found.domain.dt()
        cells = round((self._start - found.domain.t_min()) / cell)
        return DiscretePrivacyRandomVariable(
            np.roll(found.pmf, -cells), found.domain.shift_right(cells * cell), found.log_pmc_inf
        )


def bounds(
    parts: Releases, delta: float, eps_error: float, delta_error: float, reach: float
) -> tuple[float, float, float]:
    """(lower end, estimate, upper end) of ε on a grid from -reach to reach.

    Raises what the package raises where the grid is too coarse or δ too small for its arithmetic."""
    counts = list(parts.values())
    mesh = eps_error / math.sqrt(sum(counts) / 2 * math.log(12 / delta_error))
    domain = Domain.create_aligned(-reach, reach, mesh)
    variables = []
    for q, sigma in parts:
        whole = GaussianMechanism(sigma) if q == 1 else PoissonSubsampledGaussianMechanism(q, sigma)
        truncated = PrivacyRandomVariableTruncated(whole, domain.t_min(), domain.t_max())
        variables.append(CellCentred().discretise(truncated, domain))
    composer = Heterogeneous(variables)
    composer.self_composers = [_OnTheCircle(variable, domain.t_min()) for variable in variables]
    lower, estimate, upper = composer.compute_composition(counts).compute_epsilon(
        delta, delta_error, eps_error
    )
    return float(lower), float(estimate), float(upper)
