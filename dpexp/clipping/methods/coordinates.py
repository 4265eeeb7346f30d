"""Coordinate-wise clipping: each coordinate of a gradient is centred and scaled, then the whole is clipped.

    w_i = (g_i - a)/b,    ŵ_i = w_i·min(1, C/‖w_i‖),    released: Σ ŵ_i + N(0, σ²C²),    used: g̃ = b·w̃ + a

a and b are vectors known before the step. The sensitivity of what is released is C whatever they are, so that the event of a step
is that of flat clipping; b moves the noise from one coordinate to another. The classes differ in where a and b come from.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from dpexp.clipping.base import Rows
from dpexp.clipping.gradients import numerics
from dpexp.clipping.groups import Group
from dpexp.clipping.methods.whole import Method, flatten, representable, split


class Coordinates(Method):
    """Centred and scaled; a = 0, b = 1 until a subclass moves them."""

    KEPT: tuple[str, ...] = ("scale", "centre")

    def setup(self, params: dict[str, nn.Parameter], clip_norm: float) -> tuple[list[Group], list[float]]:
        """One group."""
        self.scale = filled(params, 1.0)
        self.centre: Rows | None = None
        return super().setup(params, clip_norm)

    def clip(self, rows: Rows, keep: Tensor, factors: Callable[[int, Tensor], Tensor]) -> tuple[Tensor, Rows]:
        """Σ ŵ_i."""
        squares = torch.zeros(len(keep), dtype=next(iter(rows.values())).dtype, device=keep.device)
        for name, g in rows.items():
            w = (g if self.centre is None else g - self.centre[name]) / self.scale[name]
            rows[name] = numerics.zero_examples(w, keep & representable(w))
            squares += numerics.squared_norms(rows[name])
        found = factors(0, squares)
        return squares[None], {name: torch.tensordot(found.to(w), w, 1) for name, w in rows.items()}

    def finish(self, stds: dict[int, float]) -> None:
        """g̃ = b·w̃ + a; then a and b for the next step follow from it."""
        noise: Rows = {}
        for name, p in self.params.items():
            assert p.grad is not None
            p.grad.mul_(self.scale[name])
            if self.centre is not None:
                p.grad.add_(self.centre[name])
            noise[name] = self.scale[name] * stds[id(p)]
        self.learn({name: p.grad.detach() for name, p in self.params.items() if p.grad is not None}, noise)

    def learn(self, gradients: Rows, noise: Rows) -> None:
        """Move a and b by the noisy mean gradient and the standard deviation of its noise."""


class AdaClip(Coordinates):
    """AdaClip (Pichapati et al. 2019): a is the mean of the gradients, b what makes the noise least.

    Under E‖w‖² = Σ s²/b² <= 1 the noise power Σ b² is least at b_j = √(s_j·Σ s), s the standard deviations of an example's
    coordinates. Both are estimated from the noisy means g̃ alone: with batches of B examples
    E(g̃ - a)² = s²/B + b²τ², τ the noise of w̃, so

        a ← β₁·a + (1 - β₁)·g̃,    s² ← β₂·s² + (1 - β₂)·clamp(B·((g̃ - a)² - b²τ²), h₁, h₂).

    Args:
        memory: β₁ and β₂, 0.99 and 0.9 in the paper.
        bounds: h₁ and h₂ of s².
        first: the norm to which gradients are clipped in the first step, where s is the same everywhere.
        expected_batch: B.
    """

    KEPT = ("scale", "centre", "variance")

    def __init__(
        self, memory: tuple[float, float], bounds: tuple[float, float], first: float, expected_batch: float
    ):
        self.memory, self.bounds, self.first, self.expected_batch = memory, bounds, first, expected_batch

    def setup(self, params: dict[str, nn.Parameter], clip_norm: float) -> tuple[list[Group], list[float]]:
        """s = first/√d everywhere."""
        made = super().setup(params, clip_norm)
        total = sum(p.numel() for p in params.values())
        self.variance = filled(params, self.first**2 / total)
        self.centre = filled(params, 0.0)
        self._rescale()
        return made

    def learn(self, gradients: Rows, noise: Rows) -> None:
        """See the class."""
        assert self.centre is not None
        (beta1, beta2), (low, high) = self.memory, self.bounds
        for name, g in gradients.items():
            seen = (g - self.centre[name]).square_().sub_(noise[name].square()).mul_(self.expected_batch)
            self.variance[name].lerp_(seen.clamp_(low, high), 1 - beta2)
            self.centre[name].lerp_(g, 1 - beta1)
        self._rescale()

    def _rescale(self) -> None:
        deviations = {name: v.sqrt() for name, v in self.variance.items()}
        total = float(sum(s.double().sum() for s in deviations.values()))
        self.scale = {name: (s * total).sqrt() for name, s in deviations.items()}


class ScaleThenPrivatise(Coordinates):
    """Adam's second moment scales the gradients before they are clipped (Ganesh et al. 2025; Li et al. 2023 with a delay).

    v ← β₂·v + (1 - β₂)·g̃², b = √v̂ + ε, divided by its root mean square: the noise is then as strong in all as with flat clipping
    at the same C, and lies where gradients are large.

    Args:
        memory: β₂.
        epsilon: ε, relative to the root mean square of √v̂.
    """

    KEPT = ("scale", "centre", "square", "steps")

    def __init__(self, memory: float, epsilon: float):
        self.memory, self.epsilon = memory, epsilon

    def setup(self, params: dict[str, nn.Parameter], clip_norm: float) -> tuple[list[Group], list[float]]:
        """b = 1."""
        self.square, self.steps = filled(params, 0.0), 0
        return super().setup(params, clip_norm)

    def learn(self, gradients: Rows, noise: Rows) -> None:
        """See the class."""
        self.steps += 1
        for name, g in gradients.items():
            self.square[name].lerp_(g.square(), 1 - self.memory)
        correction = 1 - self.memory**self.steps
        self.scale = _even({name: (v / correction).sqrt() for name, v in self.square.items()}, self.epsilon)


class Ellipsoid(Coordinates):
    """Private adaptive gradients (Asi et al. 2021, PAGAN): clipped to an ellipsoid that public examples give beforehand.

    For AdaGrad the price of noise is the sum of its standard deviations, Σ b, not of its variances. Under E‖w‖² = Σ r²/b² = 1
    that is least at b_j = r_j^(2/3)·√(Σ r^(2/3)), r the root mean square of a coordinate (their matrix is C_j = r_j^(-4/3)).

    Args:
        floor: the smallest r, relative to the root mean square of all: where public examples have no gradient, private ones may.
    """

    KEPT = ("scale", "centre", "measured")

    def __init__(self, floor: float):
        self.floor, self.measured = floor, False

    def prepare(self, seed: int, public: Callable[[], Rows]) -> None:
        """Measure r once."""
        if self.measured:
            return
        moments = flatten(public()).double().square().mean(0).sqrt()
        moments = moments.clamp(min=max(self.floor * float(moments.square().mean().sqrt()), 1e-12)).pow(2 / 3)
        scale = split(moments * math.sqrt(float(moments.sum())), self.params)
        self.scale = {name: value.to(self.params[name].dtype) for name, value in scale.items()}
        self.measured = True


def filled(params: dict[str, nn.Parameter], value: float) -> Rows:
    """A tensor like each parameter, of one number."""
    return {name: torch.full_like(p, value, requires_grad=False) for name, p in params.items()}


def _even(values: Rows, epsilon: float) -> Rows:
    """The values plus ε, divided by their root mean square."""
    size = _root_mean_square(values) or 1.0
    moved = {name: v / size + epsilon for name, v in values.items()}
    size = _root_mean_square(moved)
    return {name: v / size for name, v in moved.items()}


def _root_mean_square(values: Rows) -> float:
    every = values.values()
    return math.sqrt(float(sum(v.double().square().sum() for v in every)) / sum(v.numel() for v in every))
