"""The noisy half of a step, as pure functions: how much noise, which counts, and what makes two releases the same.

The derivation of the centred counts, which the accounting of adaptive thresholds rests on, is in `centred_counts`.
"""

import hashlib
import hmac
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dpexp.errors import UserError

ALLOCATIONS = ("global", "equal_budget", "weighted")

_CHUNK = 1 << 17  # elements: a chunk and its weights stay in the cache
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
    sensitivity = (thresholds.detach().to("cpu", torch.float64) / scales).square().sum().sqrt()
    return sigma_new * sensitivity * scales


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


def noisy_fractions(noisy_counts: Tensor, expected_batch: float) -> Tensor:
    """b̃_k, the estimated share of examples whose norm is at most C_k: noisy centred count / expected batch + 1/2.

    The division is by the *expected* batch size: the drawn one is private. Not confined to [0, 1], like the noise.
    """
    return noisy_counts / expected_batch + 0.5


def all_reduce_sum_(tensors: Iterable[Tensor]) -> None:
    """Sum the tensors over all ranks, in place: the one place where a step meets the other processes.

    Does nothing in a single process.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    if torch.distributed.get_world_size() == 1:
        return
    for tensor in tensors:
        torch.distributed.all_reduce(tensor)


def checksum(tensors: Iterable[Tensor]) -> bytes:
    """32 bytes that differ when any bit of any tensor differs (by accident; this is no defence against an adversary).

    Every chunk contributes Σ_j bits_j·w_j mod 2^64 with fixed odd pseudo-random weights: one pass over memory, on the
    tensor's own device. A plain sum or exclusive-or would miss differences that cancel, such as one element a rounding
    step higher and another one lower.
    """
    sums: list[Tensor] = []
    weights: dict[torch.device, Tensor] = {}
    for tensor in tensors:
        device = tensor.device
        if device not in weights:
            weights[device] = _weights().to(device)
        bits = tensor.detach().reshape(-1).view(_BITS[tensor.element_size()])
        for chunk in bits.split(_CHUNK):
            sums.append((chunk.to(torch.int64) * weights[device][: len(chunk)]).sum())
    by_device: dict[torch.device, list[Tensor]] = {}
    for value in sums:
        by_device.setdefault(value.device, []).append(value)
    digest = hashlib.sha256()
    for values in by_device.values():
        digest.update(torch.stack(values).cpu().numpy().tobytes())
    return digest.digest()


def _weights() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(-(2**62), 2**62, (_CHUNK,), generator=generator, dtype=torch.int64)
    return drawn * 2 + 1


def fingerprint_of_facts(key: bytes, facts: Mapping[str, Any]) -> str:
    """First half of a fingerprint: everything that should make two computations of a step equal.

    Known before the step begins. 32 hex digits.
    """
    return hmac.new(key, json.dumps(facts, sort_keys=True, default=str).encode(), hashlib.sha256).hexdigest()[
        :32
    ]


def fingerprint(key: bytes, facts: Mapping[str, Any], sums: Iterable[Tensor]) -> str:
    """What makes two releases of a step the same release.

    Noise may be used twice for exactly the same sum only, because the difference of two sums under the same noise is
    their difference in the clear. The facts (configuration, data, code, runtime, noise scale) say that the sums should
    be equal; the checksum of the sums themselves says that they are, also where a runtime is not deterministic although
    nothing about it changed. It is taken before the noise, so it is keyed: without the run's secret key nobody can test
    a guess about the data against the ledger.

    Returns:
        `fingerprint_of_facts`, a dash, and 32 hex digits of the sums.
    """
    keyed = hmac.new(key, b"sums" + checksum(sums), hashlib.sha256).hexdigest()[:32]
    return f"{fingerprint_of_facts(key, facts)}-{keyed}"
