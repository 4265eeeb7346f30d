"""What people's code does around a model that is clipped, such as to ask for gradients of its inputs: exact, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from dpexp.clipping import attach
from dpexp.errors import UserError
from tests.clipping.exact_steps import (
    ENGINES,
    WIDTH,
    Batch,
    D,
    exact_in_company,
    perceptron,
    positional,
    rows,
)
from tests.clipping.test_engines import expected


def rehearsed(model: nn.Module, x: Tensor, public: Tensor) -> Tensor:
    return model(x).square().sum(1) + 0.1 * public.square().mean()


def like_prototypes(model: nn.Module, x: Tensor, public: Tensor) -> Tensor:
    return torch.cdist(model(x), public).log_softmax(1)[:, 0]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("losses", [rehearsed, like_prototypes])
def test_public_rows_have_a_part_in_every_loss(losses: Callable[..., Tensor], engine: str) -> None:
    """As many as there are examples, or others; without a word they are refused."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D), nn.Linear(D, 3)).double()
    rows, plain = torch.randn(4, D, dtype=torch.float64), copy.deepcopy(model)
    clipper = attach(model, clip_norm=0.5, engine=engine)
    for examples in (4, 3, 1):
        x = torch.randn(examples, D, dtype=torch.float64)
        each = [
            torch.autograd.grad(loss, list(plain.parameters()), retain_graph=True)
            for loss in losses(plain, x, plain(rows))
        ]
        names = [name for name, _ in plain.named_parameters()]
        per_example = {name: torch.stack(g) for name, g in zip(names, zip(*each, strict=True), strict=True)}
        model.zero_grad()
        with clipper.public():
            public = model(rows)
        clipper.backward(losses(model, x, public))
        _, sums = expected(per_example, clipper.groups, clipper.thresholds)
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.grad, sums[name], rtol=1e-9, atol=1e-11)
    assert clipper.notes == []
    clipper.detach()
    with pytest.raises(UserError, match="mixes examples"):
        attach(model, engine=engine).backward(
            losses(model, torch.randn(4, D, dtype=torch.float64), model(rows))
        )


def adversarial(model: nn.Module, batch: Batch) -> Tensor:
    """Losses on examples that were moved along the gradients of their own losses."""
    x = batch["x"].clone().requires_grad_(True)
    (direction,) = torch.autograd.grad(model(x).square().sum(), x)
    return model(batch["x"] + 0.1 * direction.sign()).square().sum(1)


def adversarial_by_backward(model: nn.Module, batch: Batch) -> Tensor:
    x = batch["x"].clone().requires_grad_(True)
    model(x).square().sum().backward(inputs=[x])
    return model(batch["x"] + 0.1 * x.grad.sign()).square().sum(1)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("losses", [adversarial, adversarial_by_backward])
def test_adversarial_examples_are_made_with_the_clipped_model(losses: Any, engine: str) -> None:
    exact_in_company(perceptron(), [rows(5), rows(5), rows(3)], engine, losses)


def test_a_generator_learns_through_a_clipped_discriminator() -> None:
    """As in every private GAN: the discriminator sees data, and the generator the discriminator."""
    discriminator, generator = perceptron(), nn.Linear(2, WIDTH).double()
    plain, noise = copy.deepcopy(discriminator), torch.randn(6, 2, dtype=torch.float64)
    right = torch.autograd.grad(plain(generator(noise)).sum(), list(generator.parameters()))
    clipper = attach(discriminator)
    for _ in range(2):
        clipper.backward(discriminator(rows(5)["x"]).square().sum(1))
        found = torch.autograd.grad(discriminator(generator(noise)).sum(), list(generator.parameters()))
        torch.testing.assert_close(found, right)
        before = {name: p.grad.clone() for name, p in discriminator.named_parameters()}
        generator.zero_grad()
        discriminator(generator(noise)).sum().backward(inputs=list(generator.parameters()))
        torch.testing.assert_close([p.grad for p in generator.parameters()], list(right))
        assert all(torch.equal(p.grad, before[name]) for name, p in discriminator.named_parameters())


def test_gradients_of_parameters_are_still_the_clippers() -> None:
    model, x = perceptron(), rows(5)["x"].requires_grad_(True)
    attach(model)
    params = list(model.parameters())
    with pytest.raises(RuntimeError, match=r"clipper\.backward"):
        model(x).square().sum().backward()
    with pytest.raises(RuntimeError, match=r"clipper\.backward|not have been used"):
        torch.autograd.grad(model(x).square().sum(), [x, *params])
    model(x).square().sum().backward(inputs=[x])
    assert all(p.grad is None for p in params)


def test_losses_behind_which_two_clippers_stand_are_refused() -> None:
    body, head = perceptron(), nn.Linear(3, 2).double()
    clippers = [attach(body), attach(head)]
    for clipper in clippers:
        losses = head(body(rows(5)["x"])).square().sum(1)
        with pytest.raises(UserError, match="two models with a clipper each"):
            clipper.backward(losses)
    assert all(p.grad is None for p in [*body.parameters(), *head.parameters()])


class Clamped(torch.autograd.Function):
    """A backward that is no multiple of what arrives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.clamp(-0.01, 0.01)


def selective(model: nn.Module, batch: Batch) -> Tensor:
    """Products are kept, all else is computed again."""
    kept = partial(
        create_selective_checkpoint_contexts, [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    )
    return checkpoint(model, batch["x"], use_reentrant=False, context_fn=kept).square().sum(1)


@pytest.mark.parametrize(
    ("losses", "reason"),
    [
        (selective, "selective activation checkpointing"),
        (lambda m, b: Clamped.apply(m(b["x"])).square().sum(1), "clamps or normalises gradients"),
    ],
)
def test_what_cannot_be_proven_is_told_by_its_name(losses: Callable[..., Tensor], reason: str) -> None:
    model = perceptron()
    with pytest.raises(UserError, match=reason):
        attach(model).backward(losses(model, rows(4)))
    assert all(p.grad is None for p in model.parameters())


def some_twice(model: nn.Module, batch: Batch) -> Tensor:
    """Losses of all examples, and of some of them once more."""
    x, losses = batch["x"], positional(model, batch)
    some = (x[:, 0] > 0).nonzero()[:, 0]
    return losses.index_add(0, some, positional(model, {"x": 2 * x[some]})) if len(some) else losses


@pytest.mark.parametrize("engine", ENGINES)
def test_a_model_may_be_called_again_on_some_examples(engine: str) -> None:
    """Where one use of a place is left to the loop, another one of the same backward pass may still be proven."""
    batches = [rows(size) for size in (2, 1, 3)]
    for batch in batches:
        batch["x"][:, 0].abs_().mul_(-1)[0].abs_()
    exact_in_company(perceptron(), batches, engine, some_twice)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_infinite_loss_adds_nothing_whatever_its_gradient(engine: str) -> None:
    """A constant that is infinite has a gradient all the same."""
    model, batch = perceptron(), rows(4)
    plain = copy.deepcopy(model)
    bad = torch.tensor([0.0, torch.inf, 0.0, 0.0])
    report = attach(model, engine=engine).backward(positional(model, batch) + bad)
    kept = torch.tensor([0, 2, 3])
    attach(plain, engine=engine).backward(positional(plain, {"x": batch["x"][kept]}))
    assert report.norms[0].isnan().tolist() == [False, True, False, False]
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.one, self.other = (nn.Linear(D, D) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.body(x))
        return self.one(h), self.other(h)


@pytest.mark.parametrize("engine", ["auto", "ghost"])
def test_a_head_whose_output_nobody_takes_costs_nothing(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Like the pooler of BERT under a head of one's own: there is nothing to prove, again and again."""
    calls = []
    grad = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *a, **k: calls.append(1) or grad(*a, **k))
    model = TwoHeads().double()
    clipper = attach(model, engine=engine)
    for _ in range(3):
        calls.clear()
        clipper.backward(model(rows(5)["x"])[0].square().sum(1))
    assert len(calls) == (2 if engine == "ghost" else 1)


@pytest.mark.parametrize("engine", ENGINES)
def test_heads_in_turn(engine: str) -> None:
    torch.manual_seed(0)
    batches = [rows(5) | {"turn": turn} for turn in (0, 1, 0, 1, 1)]

    def losses(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["x"])[batch["turn"]].square().sum(1)

    exact_in_company(TwoHeads(), batches, engine, losses)
