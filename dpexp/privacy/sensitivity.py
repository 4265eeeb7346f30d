"""How far one example moves what a step releases, and the noise that follows: pure functions of torch tensors.

The derivation of the centred counts, which the accounting of adaptive thresholds rests on, is in `centred_counts`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dpexp.errors import UserError

ALLOCATIONS = ("global", "equal_budget", "weighted")


def noise_scales(thresholds: Tensor, sizes: Sequence[int], allocation: str) -> Tensor:
    """γ_k of every group (He et al., section 3.3 and Appendix E).

    Args:
        thresholds: `[K]`, C_k, positive.
        sizes: K numbers of trainable elements, d_k.
        allocation: ``global`` (γ_k = 1: the same noise on every coordinate), ``equal_budget`` (γ_k = C_k: every group
            has the same share of the budget) or ``weighted`` (γ_k = C_k/√d_k: the same signal-to-noise ratio).

    Returns:
        `[K]`, float64.
    """
    thresholds = thresholds.detach().to("cpu", torch.float64)
    if thresholds.ndim != 1 or len(thresholds) != len(sizes):
        raise ValueError(
            f"one threshold per group: {tuple(thresholds.shape)} thresholds for {len(sizes)} groups"
        )
    if not bool(((thresholds > 0) & torch.isfinite(thresholds)).all()):
        raise UserError(
            f"clipping thresholds must be positive and finite, but they are {thresholds.tolist()}"
        )
    if allocation == "global":
        return torch.ones_like(thresholds)
    if allocation == "equal_budget":
        return thresholds.clone()
    if allocation == "weighted":
        return thresholds / torch.tensor(sizes, dtype=torch.float64).clamp(min=1).sqrt()
    raise UserError(f"unknown noise allocation {allocation!r}: choose one of {', '.join(ALLOCATIONS)}")


def sensitivity(thresholds: Tensor, scales: Tensor) -> Tensor:
    """S = (Σ_k C_k²/γ_k²)^(1/2): the most that one example moves the vector of scaled sums (g_k/γ_k)_k, in L2.

    An example whose thresholds are multiplied by s moves it by s·S: that is in its event, not in the noise
    (`dpexp.privacy.individual`).

    Args:
        thresholds: `[K]`, C_k.
        scales: `[K]`, γ_k, see `noise_scales`.

    Returns:
        0-dimensional, float64.
    """
    return (thresholds.detach().to("cpu", torch.float64) / scales).square().sum().sqrt()


def noise_stds(thresholds: Tensor, sizes: Sequence[int], sigma_new: float, allocation: str) -> Tensor:
    """Standard deviation of the noise on every group's clipped sum: σ_new·S·γ_k with S² = Σ_k C_k²/γ_k².

    One example moves group k by at most C_k, so it moves the scaled vector (g_k/γ_k)_k by at most S; noise σ_new·S on
    that vector, scaled back by γ_k, is a Gaussian mechanism with noise multiplier σ_new for every choice of γ
    (He et al., Algorithm 1, line 13). In terms of the result: Σ_k C_k²/std_k² = 1/σ_new².

    Args:
        thresholds: `[K]`, the C_k that the sum was clipped with.
        sizes: K numbers of trainable elements.
        sigma_new: noise multiplier left for the gradients after the split of the budget.
        allocation: see `noise_scales`.

    Returns:
        `[K]`, float64.
    """
    scales = noise_scales(thresholds, sizes, allocation)
    return sigma_new * sensitivity(thresholds, scales) * scales


def centred_counts(norms: Tensor, estimates: Tensor) -> Tensor:
    """Σ_i (b_ki - 1/2) for every group, b_ki = 1 where example i's norm is at most the quantile estimate of group k.

    Algorithm 1 (line 16) adds noise to the raw count Σ b_i, which one example moves by up to 1, while Proposition 3.1
    pays for a movement of 1/2. Adding or removing one example adds or removes one term b_i - 1/2 = ±1/2 for each group,
    so the vector of K centred counts has L2 sensitivity √K/2, whatever the size of the (Poisson) batch, and that is
    what the plan's event says: noise multiplier 2·σ_b/√K.

    Args:
        norms: `[K, B]` per-example norms, B may be 0. A NaN counts as above the threshold (b = 0).
        estimates: `[K]` quantile estimates. With rescaled thresholds these are not the thresholds of the clipping: a
            rescaled threshold has its size dictated by C, and a count taken against it could not say where the
            quantile is (the factor is public, so scaling the thresholds moves no quantile of the norms).

    Returns:
        `[K]`, float64, exact: the sum over physical batches does not depend on how they were cut.
    """
    below = norms <= estimates.to(norms).unsqueeze(1)
    return below.sum(1).to(torch.float64).sub(norms.shape[1] / 2)


def centred_norms(norms: Tensor, bounds: Tensor) -> Tensor:
    """Σ_i (min(norm_ki, D_k) - D_k/2) for every group, D_k the bound of its norms.

    One example more or less moves the sum of a group by at most D_k/2, half of what it would move the sum of the bounded norms
    themselves (van der Veen et al. 2018). In units of D_k the vector has the sensitivity √K/2 of the centred counts, so that
    noise σ_b·D_k has the same event.

    Args:
        norms: `[K, B]` per-example norms, B may be 0. A NaN counts as D_k.
        bounds: `[K]`, D_k.

    Returns:
        `[K]`, float64.
    """
    limits = bounds.to(norms.device, torch.float64).unsqueeze(1)
    bounded = torch.minimum(norms.to(torch.float64).nan_to_num(nan=torch.inf), limits)
    return (bounded - limits / 2).sum(1)


def noisy_means(noisy_sums: Tensor, bounds: Tensor, expected_batch: float) -> Tensor:
    """The estimated mean of the bounded norms: noisy centred sum / expected batch + D_k/2."""
    return noisy_sums / expected_batch + bounds.to(noisy_sums) / 2


def noisy_fractions(noisy_counts: Tensor, expected_batch: float) -> Tensor:
    """b̃_k, the estimated share of examples whose norm is at most C_k: noisy centred count / expected batch + 1/2.

    The division is by the *expected* batch size: the drawn one is private. Not confined to [0, 1], like the noise.
    """
    return noisy_counts / expected_batch + 0.5
