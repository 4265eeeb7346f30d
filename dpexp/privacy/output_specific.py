"""Output-specific individual privacy: what one run's own outputs told about each example (Yu et al. 2023).

Plans count every example with the largest contribution that clipping allows. An example whose clipped gradient was z·C in
step t told as much as PoissonSampled(q, Gaussian(σ/z)) along the path that was taken. Its ε is that of the composition, a
number for this example *and this output*. It is an analysis of a finished run, not a guarantee, and it is private itself:
norms went into it without noise. Two things make it affordable: norms of all examples are computed every K steps and taken
for the K steps after, and z is rounded upwards to multiples of r, so that few different mechanisms have to be composed.
"""

from __future__ import annotations

import math

import numpy as np
from dp_accounting.rdp import compute_epsilon
from numpy.typing import NDArray

from dpexp.errors import UserError
from dpexp.privacy.renyi import divergences

# as many as matter for ε between 0.05 and 50
ORDERS = (1.25, 1.5, 1.75, *(float(order) for order in (*range(2, 33), 40, 48, 64, 96, 128, 256, 512)))


class OutputSpecific:
    """Adds up what each of N examples has contributed.

    Args:
        num_examples: N.
        rounding: r, in (0, 1], of z = ‖clipped gradient‖/C.
    """

    def __init__(self, num_examples: int, rounding: float) -> None:
        if not 0 < rounding <= 1:
            raise UserError(f"rounding={rounding} must be above 0 and at most 1")
        self.rounding = rounding
        self.spent = np.zeros((num_examples, len(ORDERS)))

    def add(self, ratios: NDArray[np.float64], sample_rate: float, sigma: float, steps: int) -> None:
        """Charge steps that all have these contributions.

        Args:
            ratios: ``[N]``, z; NaN counts as 1.
            sample_rate: q.
            sigma: noise multiplier of the gradients.
            steps: how many.
        """
        levels = np.ceil(np.clip(np.nan_to_num(ratios, nan=1.0), 0, 1) / self.rounding - 1e-9).astype(int)
        table = np.zeros((math.ceil(1 / self.rounding) + 1, len(ORDERS)))
        for level in np.unique(levels):
            z = min(1.0, level * self.rounding)
            if z > 0:
                table[level] = divergences(sample_rate, sigma / z, ORDERS)
        self.spent += steps * table[levels]

    def epsilons(self, delta: float) -> NDArray[np.float64]:
        """``[N]`` ε of each example along this run's outputs."""
        rows, where = np.unique(self.spent, axis=0, return_inverse=True)
        found = [compute_epsilon(ORDERS, row.tolist(), delta)[0] if row.any() else 0.0 for row in rows]
        return np.asarray(found)[where.reshape(-1)]
