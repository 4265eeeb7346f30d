"""Threshold policies: how the thresholds C_k move between steps.

A policy keeps *estimates* of a norm quantile per group, in raw units, and offers the *thresholds* to clip with. The two
differ when the thresholds are rescaled to an equivalent global threshold (He et al., App. A.1): the counts of Algorithm 1,
line 10, compare norms with the estimates, because the quantile of the norms does not change when the thresholds are scaled
by a common public factor. Both are functions of noisy counts only, so using them costs no further privacy.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dpexp.errors import UserError

CEILING = 1e12  # of an estimate: far above any gradient, far below overflow


class FixedThresholds:
    """The thresholds never move."""

    adaptive = False

    def __init__(self, thresholds: Tensor):
        self.estimates = thresholds.detach().clone()

    @property
    def values(self) -> Tensor:
        """``[K]`` thresholds to clip with."""
        return self.estimates

    def update(self, noisy_fraction: Tensor) -> None:
        """Fixed thresholds release no counts: there is nothing to learn from."""

    def state_dict(self) -> dict[str, Any]:
        return {"estimates": self.estimates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.estimates = state["estimates"].clone()


class QuantileThresholds(FixedThresholds):
    """Private quantile tracking by the geometric update (He et al., Algorithm 1, line 16; Andrew et al. 2019).

    ``C_k <- C_k * exp(-lr * (b_k - q))`` with ``b_k`` the noisy fraction of examples whose norm is at most C_k.

    Args:
        initial: ``[K]`` first estimates, positive.
        target_quantile: q, in (0, 1).
        lr: quantile learning rate, 0.3 in the paper.
        floor: no estimate falls below it (a collapsed threshold could not recover its scale).
        rescale_to: the equivalent global threshold C; ``C_k`` becomes ``C * C_k / sqrt(sum_j C_j²)`` (App. A.1).
            None: the estimates themselves are the thresholds.
    """

    adaptive = True

    def __init__(
        self,
        initial: Tensor,
        target_quantile: float,
        lr: float,
        floor: float,
        rescale_to: float | None = None,
    ):
        super().__init__(initial)
        if not 0.0 < target_quantile < 1.0:
            raise UserError(f"target_quantile={target_quantile} must lie strictly between 0 and 1")
        if not (lr >= 0 and math.isfinite(lr)):
            raise UserError(f"quantile_lr={lr} must be a finite number that is not negative")
        if not floor > 0:
            raise UserError(f"threshold_floor={floor} must be positive")
        self.target_quantile, self.lr, self.floor, self.rescale_to = target_quantile, lr, floor, rescale_to
        self.estimates.clamp_(min=floor)

    @property
    def values(self) -> Tensor:
        if self.rescale_to is None:
            return self.estimates
        return self.rescale_to * self.estimates / self.estimates.norm()

    def update(self, noisy_fraction: Tensor) -> None:
        """``noisy_fraction``: ``[K]`` noisy fractions of examples at or below their estimate."""
        # a share lies in [0, 1]; noise beyond that (tiny batches, many groups) must not make one step a runaway
        share = noisy_fraction.to(self.estimates).clamp(-1.0, 2.0)
        step = torch.exp(-self.lr * (share - self.target_quantile))
        self.estimates = (self.estimates * step).clamp(min=self.floor, max=CEILING)
