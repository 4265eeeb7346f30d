"""DP-AdamBC: Adam whose second moment is corrected for the noise that privacy adds (Tang, Shpilevskiy & Lécuyer 2024)."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class AdamBC(torch.optim.Optimizer):
    """Adam, minus what the noise adds to the mean of the squared gradients.

    A noisy mean gradient is g + z, z ~ N(0, s²), s = σ·C/B, and E(g + z)² = g² + s²: in late training s² is nearly all of Adam's
    second moment, and Adam is then SGD with momentum. The bias is known and public:

        v̂ = v_t/(1 - β₂^t),  Φ̂ = φ_t/(1 - β₂^t),  φ_t = β₂·φ_(t-1) + (1 - β₂)·s_t²
        θ ← θ - η·m̂/√max(v̂ - Φ̂, γ')

    The paper has one s for the whole run. Here s_t is that of the step and of the parameter's group, because schedules and
    adaptive thresholds move it; φ averages it as v averages the squares.

    Args:
        params: tensors; `p.grad` is the noisy mean gradient.
        lr: η.
        betas: β₁, β₂.
        floor: γ', of the corrected second moment.
        weight_decay: per step and unit of η.
        decoupled: decay the weights themselves (AdamW), not the loss.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        floor: float = 1e-8,
        weight_decay: float = 0.0,
        decoupled: bool = False,
    ):
        settings = {"lr": lr, "betas": betas, "floor": floor, "weight_decay": weight_decay}
        super().__init__(list(params), settings | {"decoupled": decoupled})
        self.noise_stds: dict[int, float] = {}

    def tell_noise(self, stds: dict[int, float]) -> None:
        """Before a step: the standard deviation of the noise in `p.grad`, by ``id(p)``; 0 where a parameter is missing."""
        self.noise_stds = stds

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Move the weights by `p.grad`."""
        for group in self.param_groups:
            (beta1, beta2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(step=0, noise=0.0, mean=torch.zeros_like(p), square=torch.zeros_like(p))
                gradient = p.grad
                if decay and group["decoupled"]:
                    p.mul_(1 - lr * decay)
                elif decay:
                    gradient = gradient.add(p, alpha=decay)
                variance = self.noise_stds.get(id(p), 0.0) ** 2
                state["step"] += 1
                state["noise"] += (1 - beta2) * (variance - state["noise"])
                state["mean"].lerp_(gradient, 1 - beta1)
                state["square"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
                correction = 1 - beta2 ** state["step"]
                clean = (state["square"] - state["noise"]).div_(correction).clamp_(min=group["floor"])
                p.addcdiv_(state["mean"], clean.sqrt_(), value=-lr / (1 - beta1 ** state["step"]))
