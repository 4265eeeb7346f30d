"""Hooks of people's own, and what a back-propagation writes or asks for on its way: done for each example alone, or refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpexp.clipping import attach
from dpexp.clipping.methods.microbatches import MicrobatchClipper
from dpexp.clipping.methods.projected import ProjectedClipper
from dpexp.errors import UserError
from tests.clipping.exact_steps import ENGINES, WIDTH, exact_in_company, perceptron, positional, rows


def test_hooks_on_gradients_of_parameters_are_refused() -> None:
    """No gradient of a single example would pass through them."""
    model = perceptron()
    handle = model[0].weight.register_hook(lambda g: g * 0)
    with pytest.raises(UserError, match=r"0\.weight has a hook"):
        attach(model)
    handle.remove()
    clipper, x = attach(model), rows(5)["x"]
    clipper.backward(model(x).square().sum(1))
    model[2].bias.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(UserError, match=r"2\.bias has a hook"):
        model(x)


class Hooked(nn.Module):
    """Hangs a hook on a weight, or on what is computed from it, in its forward."""

    def __init__(self, hook: Callable[[Tensor], Tensor], derived: bool = True) -> None:
        super().__init__()
        self.layer, self.hook, self.derived = nn.Linear(WIDTH, 3), hook, derived

    def forward(self, x: Tensor) -> Tensor:
        weight = self.layer.weight
        value = weight * 2.0 if self.derived else weight
        if value.requires_grad:
            value.register_hook(self.hook)
        return F.linear(x, value, self.layer.bias)


def test_hooks_that_a_forward_hangs_on_parameters_are_refused() -> None:
    model = Hooked(lambda g: g * 0.1, derived=False).double()
    clipper = attach(model)
    with pytest.raises(UserError, match=r"layer\.weight has a hook"):
        clipper.backward(model(rows(5)["x"]).square().sum(1))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "hook",
    [
        lambda g: g * 0.1,
        lambda g: g.clamp(-0.3, 0.3),
        lambda g: g / g.norm().clamp(min=1.0),
        lambda g: g.clamp(min=0.0),
        lambda g: torch.where(g.abs() == g.abs().max(), g, 0.0),
    ],
)
def test_what_a_hook_makes_of_a_gradient_it_makes_of_each_examples(
    hook: Callable[[Tensor], Tensor], engine: str
) -> None:
    """A clamped sum is not the sum of what is clamped: an example could move it by more than its threshold."""
    exact_in_company(Hooked(hook), [rows(5), rows(4)], engine, positional)


class FixedPoint(nn.Module):
    """An equilibrium, whose gradient a hook solves for by gradients of its own."""

    def __init__(self, detached: bool) -> None:
        super().__init__()
        self.layer, self.detached = nn.Linear(WIDTH, WIDTH), detached

    def step(self, z: Tensor, x: Tensor, params: dict[str, Tensor]) -> Tensor:
        return torch.tanh(0.1 * torch.func.functional_call(self.layer, params, (z,)) + x)

    def forward(self, x: Tensor) -> Tensor:
        params: dict[str, Tensor] = dict(self.layer.named_parameters())
        z = torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(40):
                z = self.step(z, x, params)
        y = self.step(z, x, params)
        z.requires_grad_()
        if self.detached:
            params = {name: p.detach() for name, p in params.items()}
        again = self.step(z, x, params)

        def solve(gradient: Tensor) -> Tensor:
            solution = gradient
            for _ in range(40):
                solution = gradient + torch.autograd.grad(again, z, solution, retain_graph=True)[0]
            return solution

        if y.requires_grad:
            y.register_hook(solve)
        return y


@pytest.mark.parametrize("engine", ENGINES)
def test_a_back_propagation_inside_of_another_passes_no_tap(engine: str) -> None:
    """A solver of a fixed point asks for gradients of its iterations: what arrived there was added to the parameters' own."""
    exact_in_company(FixedPoint(detached=True), [rows(5), rows(4)], engine, positional)
    model = FixedPoint(detached=False).double()
    clipper = attach(model, engine=engine)
    with pytest.raises(UserError, match=r"layer .*inside of the one that clips.*detached parameters"):
        clipper.backward(positional(model, rows(5)))
    assert model.layer.weight.grad is None


class AddsByItself(torch.autograd.Function):
    """A product whose backward adds to the gradient of its weight by itself, as fused accumulation does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (x,), (g,) = ctx.saved_tensors, gradients
        gradient = x.T @ g
        if ctx.weight.grad is None:
            ctx.weight.grad = gradient
        else:
            ctx.weight.grad += gradient
        return g @ ctx.weight.T, None


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.fused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return AddsByItself.apply(self.first(x), self.fused._parameters["weight"])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("held", [False, True])
def test_a_gradient_that_is_written_on_the_way_is_refused(held: bool, engine: str) -> None:
    model = Fused().double()
    clipper = attach(model, engine=engine)
    for p in model.parameters() if held else ():
        p.grad = torch.zeros_like(p)
    with pytest.raises(UserError, match=r"writes to the gradient of fused\.weight"):
        clipper.backward(positional(model, rows(4)))
    assert model.fused.weight.grad is None


@pytest.mark.parametrize("held", [False, True])
def test_what_was_written_on_the_way_does_not_stay_where_the_pass_is_refused_for_another_reason(
    held: bool,
) -> None:
    model = Fused().double()
    clipper = attach(model)
    for p in model.parameters() if held else ():
        p.grad = torch.zeros_like(p)
    y = model(rows(4)["x"])
    with pytest.raises(UserError, match="mixes examples"):
        clipper.backward((y - y.mean(0)).square().sum(1))
    assert model.fused.weight.grad is None


@pytest.mark.parametrize(
    "make", [partial(ProjectedClipper, projections=2), partial(MicrobatchClipper, size=4)]
)
def test_of_clipping_without_taps_too(make: Any) -> None:
    model = Fused().double()
    clipper = make(model)
    clipper.prepare(1, dict)
    with pytest.raises(UserError, match=r"writes to the gradient of fused\.weight"):
        clipper.backward(positional(model, rows(4)))
    assert model.fused.weight.grad is None


def test_attention_computes_what_it_does_without_a_clipper() -> None:
    """Its own forward hands on the weights of its last layer, and never calls that: a hook there is not called with a clipper."""
    x, attention = torch.randn(3, 4, 8), nn.MultiheadAttention(8, 2, batch_first=True)
    attention.out_proj.register_forward_hook(lambda *_: 2 * _[-1])
    before = attention(x, x, x)[0]
    attach(attention)
    assert torch.allclose(attention(x, x, x)[0], before, atol=1e-6)
