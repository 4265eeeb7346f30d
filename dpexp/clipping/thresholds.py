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

from dpexp.clipping.rules import SMALLEST
from dpexp.errors import UserError

# of an estimate: far above any gradient, far below overflow
CEILING = 1e12


class FixedThresholds:
    """The thresholds never move.

    Args:
        thresholds: ``[K]`` first estimates.
        floor: no estimate falls below it (a collapsed threshold could not recover its scale).
        rescale_to: the equivalent global threshold C; ``C_k`` becomes ``C * C_k / sqrt(sum_j C_j²)`` (App. A.1).
            None: the estimates themselves are the thresholds.
    """

    adaptive = False
    # `[K]`, of the norms that are summed; None: norms are counted
    bounds: Tensor | None = None

    def __init__(self, thresholds: Tensor, floor: float = 0.0, rescale_to: float | None = None):
        self.estimates = thresholds.detach().clone().clamp_(min=floor)
        self.floor, self.rescale_to = floor, rescale_to

    @property
    def values(self) -> Tensor:
        """``[K]`` thresholds to clip with."""
        if self.rescale_to is None:
            return self.estimates
        # twice the smallest that norms could be held against, for what float32 makes of the number
        return (self.rescale_to * self.estimates / self.estimates.norm()).clamp(min=2 * SMALLEST)

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
        floor, rescale_to: see `FixedThresholds`.
        arithmetic: ``C_k <- C_k - lr * (b_k - q)`` instead, the gradient step of Andrew et al. 2019: lr is then in the unit of
            the norms, and as many steps lead from 1 to 2 as from 100 to 101.
    """

    adaptive = True

    def __init__(
        self,
        initial: Tensor,
        target_quantile: float,
        lr: float,
        floor: float,
        rescale_to: float | None = None,
        arithmetic: bool = False,
    ):
        if not 0.0 < target_quantile < 1.0:
            raise UserError(f"target_quantile={target_quantile} must lie strictly between 0 and 1")
        if not (lr >= 0 and math.isfinite(lr)):
            raise UserError(f"quantile_lr={lr} must be a finite number that is not negative")
        if not floor > 0:
            raise UserError(f"threshold_floor={floor} must be positive")
        super().__init__(initial, floor, rescale_to)
        self.target_quantile, self.lr, self.arithmetic = target_quantile, lr, arithmetic

    def update(self, noisy_fraction: Tensor) -> None:
        """``noisy_fraction``: ``[K]`` noisy fractions of examples at or below their estimate."""
        # a share lies in [0, 1]; noise beyond that (tiny batches, many groups) must not make one step a runaway
        share = noisy_fraction.to(self.estimates).clamp(-1.0, 2.0)
        step = -self.lr * (share - self.target_quantile)
        moved = self.estimates + step if self.arithmetic else self.estimates * torch.exp(step)
        self.estimates = moved.clamp(min=self.floor, max=CEILING)


class NormThresholds(FixedThresholds):
    """Thresholds in proportion to the mean norm of the last step (van der Veen et al. 2018).

    ``C_k <- factor * m_k`` with ``m_k`` the noisy mean of the norms, each of which counts at most ``bounds = bound * C_k``.

    Args:
        initial: ``[K]`` first thresholds, positive.
        factor: the paper's alpha.
        bound: the paper's beta; factor * bound is how much a threshold can rise in one step.
        floor, rescale_to: see `FixedThresholds`.
    """

    adaptive = True

    def __init__(
        self, initial: Tensor, factor: float, bound: float, floor: float, rescale_to: float | None = None
    ):
        if not (factor > 0 and 1 < factor * bound < math.inf):
            raise UserError(
                f"norm_factor={factor} times norm_bound={bound} must be above 1: thresholds could only fall otherwise"
            )
        super().__init__(initial, floor, rescale_to)
        self.factor, self.bound = factor, bound

    @property
    def bounds(self) -> Tensor:  # type: ignore[override]
        """``[K]``, of the norms that are summed."""
        return self.bound * self.estimates

    def update(self, noisy_means: Tensor) -> None:
        """``noisy_means``: ``[K]`` noisy means of the bounded norms."""
        means = torch.minimum(noisy_means.to(self.estimates), self.bounds)
        self.estimates = (self.factor * means).clamp(min=self.floor, max=CEILING)
