"""Filters of noisy gradients over time, in front of an ordinary optimiser. They see released gradients alone.

The noise of the steps is white; the gradient changes slowly. What changes slowly is kept.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dpexp.errors import UserError
from dpexp.training.optimizers.low_pass import check_low_pass


class Filtered(torch.optim.Optimizer):
    """Hands what a filter makes of `p.grad` to a base optimiser, and keeps the state of both.

    Args:
        base: the optimiser that moves the weights; its parameter groups are shared.
    """

    def __init__(self, base: torch.optim.Optimizer):
        if hasattr(base, "tell_noise"):
            raise UserError(
                f"{type(base).__name__} corrects for the noise in its gradients, of which a filter leaves another share: put "
                "torch.optim.Adam, say, behind the filter"
            )
        self.base = base
        super().__init__([p for group in base.param_groups for p in group["params"]], {})
        self.param_groups = base.param_groups

    @abstractmethod
    def filtered(self, p: Tensor) -> Tensor:
        """What takes the place of `p.grad`."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Filter the gradients, then let the base optimiser step."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.copy_(self.filtered(p))
        self.base.step()

    def state_dict(self) -> dict[str, Any]:
        """Of both."""
        return {"base": self.base.state_dict(), "filter": super().state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Of both."""
        self.base.load_state_dict(state_dict["base"])
        super().load_state_dict(state_dict["filter"])
        self.param_groups = self.base.param_groups


class Doppler(Filtered):
    """DOPPLER (Zhang et al. 2024): a linear low-pass filter, corrected for its start from zero.

        m_t = -Σ_(τ=1..) a_τ·m_(t-τ) + Σ_(τ=0..) b_τ·g_(t-τ),    ĝ_t = m_t/c_t,

    where c_t is the same filter of gradients that are all 1. a = (-0.9), b = (0.1) is Adam's first moment with its correction.

    Args:
        base: see `Filtered`.
        a: coefficients of the filtered past, from τ = 1 on.
        b: coefficients of the gradients, from τ = 0 on.

    Raises:
        UserError: the filter does not settle, or passes no constant gradient.
    """

    def __init__(self, base: torch.optim.Optimizer, a: Sequence[float], b: Sequence[float]):
        check_low_pass(a, b)
        self.a, self.b = tuple(a), tuple(b)
        super().__init__(base)

    def filtered(self, p: Tensor) -> Tensor:
        """ĝ_t."""
        state = self.state[p]
        if not state:
            state.update(inputs=[], outputs=[], ones=[], unit=[])
        state["inputs"] = [p.grad.clone(), *state["inputs"]][: len(self.b)]  # type: ignore[union-attr]
        state["ones"] = [1.0, *state["ones"]][: len(self.b)]
        out = sum(b * g for b, g in zip(self.b, state["inputs"], strict=False))
        out = out - sum(a * m for a, m in zip(self.a, state["outputs"], strict=False))
        unit = sum(b * g for b, g in zip(self.b, state["ones"], strict=False))
        unit -= sum(a * c for a, c in zip(self.a, state["unit"], strict=False))
        state["outputs"], state["unit"] = (
            [out, *state["outputs"]][: len(self.a)],
            [unit, *state["unit"]][: len(self.a)],
        )
        return out / unit


class DiSK(Filtered):
    """DiSK (Zhang et al. 2025, simplified Kalman filter): gradients at a point ahead, and their moving average.

        x' = x_t + γ·(x_t - x_(t-1)),    g̃_t = (1 - κ)·g̃_(t-1) + κ·g_t,    g_t the noisy gradient at x'

    Measuring ahead undoes the lag of the average. The paper mixes each example's gradients at x' and at x_t with the weights w
    and 1 - w, w = (1 - κ)/(κ·γ), before it clips; here γ = (1 - κ)/κ, for which w = 1, and a step costs what it costs without
    the filter.

    The step (`dpexp.training.steps`) calls `ahead` before it draws and `back` where it is given up; `step` comes back by itself,
    so that weights at rest are always x_t.

    Args:
        base: see `Filtered`.
        kappa: κ, in (0, 1]; 1 filters nothing.
    """

    def __init__(self, base: torch.optim.Optimizer, kappa: float):
        if not 0 < kappa <= 1:
            raise UserError(f"optim.kappa={kappa} must be above 0 and at most 1")
        self.kappa, self.gamma = kappa, (1 - kappa) / kappa
        self.at_rest: list[tuple[Tensor, Tensor]] = []
        super().__init__(base)

    @torch.no_grad()
    def ahead(self) -> None:
        """Move the weights to x'."""
        self.back()
        for group in self.param_groups:
            for p in group["params"]:
                if (last := self.state[p].get("moved")) is not None:
                    self.at_rest.append((p, p.detach().clone()))
                    p.add_(last, alpha=self.gamma)

    @torch.no_grad()
    def back(self) -> None:
        """Move the weights back to x_t, to the last bit."""
        for p, value in self.at_rest:
            p.copy_(value)
        self.at_rest = []

    def filtered(self, p: Tensor) -> Tensor:
        """g̃_t."""
        state, gradient = self.state[p], p.grad
        assert gradient is not None
        mean = state.get("mean")
        state["mean"] = gradient.clone() if mean is None else mean.lerp(gradient, self.kappa)
        return state["mean"]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Come back, filter, step, and remember the move."""
        self.back()
        tensors = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        before = [p.detach().clone() for p in tensors]
        super().step()
        for p, old in zip(tensors, before, strict=True):
            self.state[p]["moved"] = p.detach() - old
