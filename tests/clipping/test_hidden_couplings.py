"""Couplings that hide from a look: behind sorted random numbers, gradient mode, closed gates, rare choices, large numbers."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dpexp.clipping import attach
from dpexp.errors import UserError

SIZE = 8


class Net(nn.Module):
    """``mix`` is given the module and the first layer's output."""

    def __init__(self, mix: Callable[[Any, Tensor], Tensor]):
        super().__init__()
        self.first, self.last, self.mix = nn.Linear(6, 8), nn.Linear(8, 4), mix

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.mix(self, self.first(x))))


def x() -> Tensor:
    return torch.randn(SIZE, 6)


def step(
    model: nn.Module, losses: Callable[[Any], Tensor] = lambda y: (y - 0.3).square().sum(1)
) -> list[str]:
    clipper = attach(model)
    try:
        clipper.backward(losses(model(x())))
        return clipper.notes
    finally:
        clipper.detach()


def mean(h: Tensor) -> Tensor:
    return h.detach().mean(0)


ORDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "rand.argsort": lambda h: torch.rand(len(h)).argsort(),
    "stable": lambda h: torch.rand(len(h)).argsort(stable=True),
    "descending": lambda h: torch.rand(len(h)).argsort(descending=True),
    "randn.sort": lambda h: torch.randn(len(h)).sort().indices,
    "uniform_": lambda h: torch.empty(len(h)).uniform_().argsort(),
    "randn_like": lambda h: torch.randn_like(h[:, 0]).argsort(),
    "topk": lambda h: torch.rand(len(h)).topk(len(h)).indices,
    "randperm": lambda h: torch.randperm(len(h)),
    "multinomial": lambda h: torch.ones(len(h)).multinomial(len(h)),
}


@pytest.mark.parametrize("order", ORDERS)
def test_a_random_order_of_the_batch_is_seen(order: str) -> None:
    """Mixing behind the first layer, where gradients are looked at; then in front of it, where none shows."""
    for mixed in (
        Net(lambda _, h: 0.6 * h + 0.4 * h.detach()[ORDERS[order](h)]),
        nn.Sequential(Rows(ORDERS[order]), nn.Linear(6, 4)),
    ):
        with pytest.raises(UserError, match="mixes examples"):
            step(mixed)


class Rows(nn.Module):
    def __init__(self, order: Callable[[Tensor], Tensor]):
        super().__init__()
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        return 0.6 * x + 0.4 * x[self.order(x)]


def test_each_feature_taken_from_a_random_example_is_seen() -> None:
    """SCARF, CutMix by columns."""
    model = Net(
        lambda _, h: torch.where(torch.rand(h.shape) < 0.5, h, h.gather(0, torch.rand(h.shape).argsort(0)))
    )
    with pytest.raises(UserError, match="mixes examples"):
        step(model)


def test_a_random_order_within_each_example_is_not_refused() -> None:
    """As masked autoencoders hide patches."""

    def shuffled(_: Any, h: Tensor) -> Tensor:
        order = torch.rand(h.shape).argsort(1)
        return h.gather(1, order).cumsum(1).gather(1, order.argsort(1))

    assert not step(Net(shuffled))


def where_gradients_are_on(_: Any, h: Tensor) -> Tensor:
    return h - mean(h) if torch.is_grad_enabled() else h


def where_it_has_a_graph(_: Any, h: Tensor) -> Tensor:
    return h - mean(h) if h.requires_grad else h


@pytest.mark.parametrize("mix", [where_gradients_are_on, where_it_has_a_graph])
@pytest.mark.parametrize("engine", ["auto", "opacus"])
def test_what_is_done_in_training_alone_is_seen(mix: Callable[[Any, Tensor], Tensor], engine: str) -> None:
    model = Net(mix)
    with pytest.raises(UserError, match="mixes examples"):
        attach(model, engine=engine).backward((model(x()) - 0.3).square().sum(1))


def test_a_buffer_that_learns_where_gradients_are_on_is_named() -> None:
    def running(model: Any, h: Tensor) -> Tensor:
        before = model.kept.clone()
        if torch.is_grad_enabled():
            model.kept.lerp_(mean(h), 0.5)
        return h - before

    model = Net(running)
    model.register_buffer("kept", torch.zeros(8))
    with pytest.raises(UserError, match="'kept'"):
        step(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_scale_of_the_batch_that_a_norm_all_but_removes_is_seen(dtype: torch.dtype) -> None:
    """What is left of it, a few 1e-5 by the epsilon of the norm, adds up over a large batch."""

    class Scaled(nn.Embedding):
        def forward(self, ids: Tensor) -> Tensor:
            h = super().forward(ids)
            return h / (1 + h.detach().abs().max())

    for seed in range(10):
        torch.manual_seed(seed)
        model = nn.Sequential(Scaled(7, 4), nn.LayerNorm(4), nn.Linear(4, 4)).to(dtype)
        with pytest.raises(UserError, match="mixes examples"):
            attach(model).backward((model(torch.randint(7, (4, 2))) - 0.3).square().flatten(1).sum(1))


@pytest.mark.parametrize("evaluated", [False, True])
@pytest.mark.parametrize("keeps", [False, True])
def test_what_a_forward_without_gradients_leaves_behind_is_seen(keeps: bool, evaluated: bool) -> None:
    """A scale of a batch that is found first; or targets, one for each example, which are harmless."""

    def scaled(model: Any, h: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            model.scale = h.std(0) if keeps else 2.0
        return h / model.scale

    model = Net(scaled)
    clipper = attach(model)
    batch = x()
    model.train(not evaluated)
    with torch.no_grad():
        targets = model(0.9 * batch)
    model.train()
    losses = (model(batch) - targets).square().sum(1)
    if keeps:
        with pytest.raises(UserError, match="mixes examples"):
            clipper.backward(losses)
    else:
        clipper.backward(losses)
        assert not clipper.notes


@dataclass(slots=True)
class Slots:
    first: Tensor | None = None


@pytest.mark.parametrize("keeper", [Slots, nn.Module, SimpleNamespace])
def test_a_statistic_of_the_first_batch_is_seen_wherever_the_model_keeps_it(
    keeper: Callable[[], Any],
) -> None:
    def kept(model: Any, h: Tensor) -> Tensor:
        holder = model.hidden[0]
        if getattr(holder, "first", None) is None:
            holder.first = mean(h)
        return h - holder.first

    model = Net(kept)
    # a list hides a module from `children`
    model.hidden = [keeper()]
    with pytest.raises(UserError, match="mixes examples"):
        step(model)


def through_a_scalar(model: Any, h: Tensor) -> Tensor:
    return h + model.gate * torch.tanh(h - mean(h))


def through_a_matrix(model: Any, h: Tensor) -> Tensor:
    return h + (h - mean(h)) @ model.gate


@pytest.mark.parametrize(("mix", "shape"), [(through_a_scalar, ()), (through_a_matrix, (8, 8))])
def test_behind_a_weight_of_zero_examples_must_not_meet_either(mix: Any, shape: tuple[int, ...]) -> None:
    """ReZero, LoRA, an adapter that begins with nothing."""
    model = Net(mix)
    model.gate = nn.Parameter(torch.zeros(shape))
    with pytest.raises(UserError, match="mixes examples"):
        step(model)
    assert not model.gate.any()


DRAWS: dict[str, Callable[[int], int]] = {
    "torch": lambda n: int(torch.randint(n, ())),
    "python": random.randrange,
    "numpy": lambda n: int(np.random.randint(n)),
}


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("choices", [2, 3, 5, 6])
def test_a_choice_of_several_is_looked_at_in_each(draw: str, choices: int) -> None:
    for mixing in range(choices):

        def mix(_: Any, h: Tensor, mixing: int = mixing) -> Tensor:
            number = DRAWS[draw](choices)
            return h - mean(h) if number == mixing else h * (1 + number / 10)

        with pytest.raises(UserError, match="mixes examples"):
            step(Net(mix))


LIMITS: dict[str, Callable[[Tensor], Tensor]] = {
    **{f"largest, at least {limit}": lambda h, limit=limit: h.amax().clamp(min=limit) for limit in (2.0, 8.0, 100.0, 1e4)},
    "smallest, at most 0.01": lambda h: 1e3 * h.amax(1).min().clamp(max=0.01),
    "length, at least 1000": lambda h: h.norm().clamp(min=1e3),
}  # fmt: skip


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("seed", range(3))
def test_a_scale_of_the_batch_that_sleeps_until_a_large_or_a_small_row_comes_is_seen(
    limit: str, seed: int
) -> None:
    torch.manual_seed(seed)

    model = Net(lambda _, h: 8 * h / LIMITS[limit](h.detach().abs()))
    # or a small row is not small behind it
    nn.init.zeros_(model.first.bias)
    with pytest.raises(UserError, match="mixes examples"):
        step(model)


@pytest.mark.parametrize("masked", [-1e4, -1e9, torch.finfo(torch.float32).min, float("-inf")])
def test_a_masked_output_hides_nothing(masked: float) -> None:
    class Masked(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).masked_fill(torch.arange(4) == 3, masked)

    with pytest.raises(UserError, match="mixes examples"):
        step(
            Masked(lambda _, h: (h - mean(h)) / (h.detach().std(0) + 0.1)), lambda y: y[:, :3].square().sum(1)
        )


class Giving(Net):
    """Returns its result in one way or another, beside a harmless number for each example."""

    def __init__(self, way: str, mixes: bool):
        super().__init__(lambda _, h: h - mean(h) if mixes else h)
        self.way, self.table, self.kept = way, nn.Parameter(torch.randn(4)), None

    def forward(self, x: Tensor) -> Any:
        y, norms = super().forward(x), x.norm(dim=1)
        if self.way == "nested":
            return SimpleNamespace(norms=norms, inner=SimpleNamespace(result=y))
        if self.way == "list":
            return {"norms": norms, "result": list(y)}
        if self.way == "table":
            return {"norms": norms, "result": y, "table": self.table * 2}
        self.kept = y
        return norms

    def losses(self, given: Any) -> Tensor:
        if self.way == "nested":
            return given.inner.result.square().sum(1)
        if self.way == "list":
            return torch.stack(given["result"]).square().sum(1)
        if self.way == "table":
            return (given["result"] * given["table"]).square().sum(1)
        return self.kept.square().sum(1)


@pytest.mark.parametrize("way", ["nested", "table"])
def test_outputs_that_the_losses_use_are_compared(way: str) -> None:
    model = Giving(way, mixes=True)
    with pytest.raises(UserError, match="mixes examples"):
        step(model, model.losses)
    model = Giving(way, mixes=False)
    assert not step(model, model.losses)


@pytest.mark.parametrize("way", ["list", "attribute"])
def test_what_cannot_be_compared_is_said(way: str) -> None:
    model = Giving(way, mixes=False)
    (note,) = step(model, model.losses)
    assert note.startswith("not looked at")
    assert "the losses use something" in note


def test_a_branch_that_later_data_take_is_seen_in_time_or_late() -> None:
    """In the first batch, else in the 16th: what lies between is documented as not proven."""

    def guarded(_: Any, h: Tensor) -> Tensor:
        return h / h.detach().max() if h.detach().max() > 1e8 else h

    clipper = attach(model := Net(guarded))

    def backward(scale: float) -> None:
        clipper.backward((model(scale * x()) - 0.3).square().sum(1))

    for _ in range(15):
        backward(1.0)
    with pytest.raises(UserError, match="mixes examples"):
        backward(1e10)
    clipper.detach()
    with pytest.raises(UserError, match="mixes examples"):
        attach(model).backward((model(1e10 * x()) - 0.3).square().sum(1))


@pytest.mark.parametrize("switch", ["an attribute", "a number", "an argument"])
def test_what_is_switched_on_later_is_looked_at_at_once(switch: str) -> None:
    """Mixup after a warm-up, by whichever switch the model has for it."""

    class Warmed(Net):
        mixes, rate = False, 0.0

        def forward(self, x: Tensor, mixed: bool = False) -> Tensor:
            h = self.first(x)
            if mixed or self.mixes or self.rate > 0:
                h = h / h.detach().abs().max()
            return self.last(h)

    clipper = attach(model := Warmed(mean))
    for _ in range(3):
        clipper.backward(model(x()).square().sum(1))
    if switch == "an attribute":
        model.mixes = True
    elif switch == "a number":
        model.rate = 0.1
    losses = model(x(), mixed=switch == "an argument").square().sum(1)
    with pytest.raises(UserError, match="mixes examples"):
        clipper.backward(losses)


class Sorted(nn.Module):
    """Puts rows in order for a layer, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8).double(), nn.Linear(8, 4).double()

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        order = lengths.argsort(descending=True, stable=True)
        return self.last(torch.tanh(self.first(x[order]))[order.argsort()])


@pytest.mark.parametrize("groups", ["flat", "layer"])
def test_any_two_rows_may_change_places(groups: str) -> None:
    size = 12
    batch = torch.randn(size, 6, dtype=torch.float64) * torch.logspace(-1, 1, size)[:, None]
    for i in range(size):
        for j in range(i + 1, size, 3):
            lengths = torch.arange(size, 0, -1)
            lengths[[i, j]] = lengths[[j, i]]
            model = Sorted()

            def losses(rows: slice, model: nn.Module = model, lengths: Tensor = lengths) -> Tensor:
                return model(batch[rows], lengths[rows]).square().sum(1)

            each = [
                torch.autograd.grad(losses(slice(k, k + 1)).sum(), list(model.parameters()))
                for k in range(size)
            ]
            clipper = attach(model, groups, clip_norm=3.0)
            report = clipper.backward(losses(slice(None)))
            whole = torch.stack([torch.cat([g.flatten() for g in row]).norm() for row in each])
            torch.testing.assert_close(report.norms.square().sum(0).sqrt(), whole)
            clipper.detach()


class Experts(nn.Module):
    """Mixes two of three experts for each token, of all examples' tokens in one row after the other."""

    def __init__(self, routed: bool) -> None:
        super().__init__()
        self.routed, self.gate, self.out = routed, nn.Linear(6, 3), nn.Linear(6, 4)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = x.reshape(-1, 6)
        shares = self.gate(tokens).softmax(-1)
        mixed = torch.zeros_like(tokens)
        for k, expert in enumerate(self.experts):
            rows = (shares.topk(2).indices == k).any(1).nonzero()[:, 0] if self.routed else slice(None)
            mixed[rows] = mixed[rows] + expert(tokens[rows]) * shares[rows, k, None]
        return self.out(mixed.view_as(x).mean(1)), shares.view(*x.shape[:2], -1)


@pytest.mark.parametrize("routed", [True, False])
@pytest.mark.parametrize("of_all", [True, False])
@pytest.mark.parametrize("engine", ["auto", "bk", "ghost", "loop"])
def test_a_load_that_is_balanced_over_the_batch_is_seen(engine: str, of_all: bool, routed: bool) -> None:
    """The loop finds what each loss adds, but not that the load goes by all examples; that of one example alone is its own."""
    torch.manual_seed(0)
    model, batch = Experts(routed).double(), torch.randn(5, 7, 6, dtype=torch.float64)

    def losses(x: Tensor) -> Tensor:
        y, shares = model(x)
        load = shares.mean((0, 1) if of_all else 1).square().sum(-1)
        return y.square().sum(1) + load

    each = [
        torch.autograd.grad(losses(batch[i : i + 1]).sum(), list(model.parameters()), materialize_grads=True)
        for i in range(5)
    ]
    norms = torch.stack([torch.cat([g.flatten() for g in row]).norm() for row in each])
    clipper = attach(model, clip_norm=1e9, engine=engine)
    if of_all:
        with pytest.raises(UserError, match=r"gate .* mixes examples"):
            clipper.backward(losses(batch))
        return
    for _ in range(2):
        report = clipper.backward(losses(batch))
        torch.testing.assert_close(report.norms.square().sum(0).sqrt(), norms)


class Product(torch.autograd.Function):
    """A product that no tap sees."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gy @ weight.t(), x.t() @ gy


class OfOneProduct(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        return Product.apply(x, self.weight)


@pytest.mark.parametrize("forwards", [1, 2])
def test_losses_that_mix_what_a_model_without_taps_returns_are_seen(forwards: int) -> None:
    """Also where the backward passes of several forwards come later."""
    clipper = attach(OfOneProduct())
    outputs = [clipper.model(x()) for _ in range(forwards)]
    for y in outputs[1:]:
        clipper.backward(y.square().sum(1))
    with pytest.raises(UserError, match=r"what the model returns.* mixes examples"):
        clipper.backward((outputs[0] - outputs[0].mean(0)).square().sum(1))
    if forwards == 1:
        mixed = clipper.model(x())
        with pytest.raises(UserError, match="what the model returns"):
            clipper.backward(mixed.square().sum(1) + mixed.logsumexp(0).sum())
