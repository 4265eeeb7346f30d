"""ADADP: a learning rate that follows from noisy gradients (Koskela & Honkela 2020, as reviewed by Monir et al., section 3.3)."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class ADADP(torch.optim.Optimizer):
    """One step of size η beside two of size η/2; their distance is the error of following the gradient flow, and decides η.

    Works in pairs of steps, each with a noisy gradient of a batch of its own, which the ledger charges like any other:

    ====== ================================================================================================
    first  θ_full = θ - η·g₁, then θ ← θ - η/2·g₁
    second θ_half = θ - η/2·g₂; err = ‖ |θ_full - θ_half| / max(1, |θ_full|) ‖₂ over all parameters together;
           θ ← θ_half where err ≤ τ, else back to where the pair began;
           η ← η·min(max(τ/err, α_min), α_max)
    ====== ================================================================================================

    The review's print has lost the gradient of the second half step, and writes η where the parameters are meant. All of it is
    post-processing of the noisy gradients. A run of an odd number of steps ends with a half step.

    Args:
        params: tensors; `p.grad` is the noisy mean gradient.
        lr: η of the first pair. Where a schedule sets ``lr`` anew, η is that times all the ratios so far.
        tolerance: τ.
        ratios: α_min < 1 < α_max.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        tolerance: float = 1.0,
        ratios: tuple[float, float] = (0.9, 1.1),
    ):
        super().__init__(
            list(params), {"lr": lr, "tolerance": tolerance, "ratios": ratios, "factor": 1.0, "second": False}
        )
        if len(self.param_groups) != 1:
            raise ValueError("ADADP has one learning rate: give all parameters as one group")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """A half step; the second one of a pair also decides about both and about η."""
        (group,) = self.param_groups
        size = group["lr"] * group["factor"]
        moved = [p for p in group["params"] if p.grad is not None]
        if not group["second"]:
            for p in moved:
                self.state[p] = {"start": p.clone(), "full": p - size * p.grad}
                p.sub_(p.grad, alpha=size / 2)
            group["second"] = True
            return
        squared = torch.zeros((), dtype=torch.float64)
        for p in moved:
            p.sub_(p.grad, alpha=size / 2)
            full = self.state[p]["full"]
            squared += ((full - p).abs() / full.abs().clamp(min=1)).double().square().sum().cpu()
        error = float(squared.sqrt())
        if error > group["tolerance"]:
            for p in moved:
                p.copy_(self.state[p]["start"])
        low, high = group["ratios"]
        group["factor"] *= min(max(group["tolerance"] / error, low), high) if error > 0 else high
        group["second"] = False
        self.state.clear()
