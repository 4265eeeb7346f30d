"""Forwards that wait for their backward, are dropped, interrupted or computed again: each example still counts once."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dpexp.clipping import attach
from dpexp.clipping.backend import TapBackend
from dpexp.clipping.methods.projected import ProjectedClipper
from dpexp.clipping.tapping.roots import Roots
from dpexp.errors import UserError
from tests.clipping.small import losses_of, mlp
from tests.clipping.test_engines import OURS, expected, naive
from tests.clipping.zoo import ZOO, D


def test_several_forwards_before_their_backwards_and_forwards_that_are_dropped() -> None:
    problem = ZOO["tied_head"]()
    per_example = naive(problem)
    for engine in OURS:
        clipper = attach(problem.model, groups="layer", clip_norm=0.8, engine=engine)
        problem.losses(problem.model, problem.batch)  # dropped
        first = problem.losses(problem.model, problem.batch)
        second = problem.losses(problem.model, problem.batch)
        problem.model.zero_grad()
        clipper.backward(first)
        clipper.backward(second)
        _, sums = expected(per_example, clipper.groups, clipper.thresholds)
        for n, p in problem.model.named_parameters():
            torch.testing.assert_close(p.grad, 2 * sums[n])
        clipper.detach()


def test_forwards_of_one_example_each_that_wait_together_are_looked_at() -> None:
    """As the microbatches of a pipeline; a model whose own forward nobody calls is another matter."""
    model, x = mlp(), torch.randn(3, D, dtype=torch.float64)
    clipper = attach(model)
    for _ in range(4):
        for losses in [losses_of(model, one) for one in x.split(1)]:
            clipper.backward(losses)
    assert not clipper.notes
    clipper.detach()
    clipper = attach(model)
    clipper.backward(model[2](model[1](model[0](x))).square().sum(1))
    assert "own forward was not called" in clipper.notes[0]


def test_parts_that_run_alone_and_are_dropped_leave_nothing_behind() -> None:
    model, x = mlp(), torch.randn(4, D, dtype=torch.float64)
    clipper = attach(model)
    for _ in range(3):
        model[0](x)
        clipper.backward(model(x).square().sum(1))
        assert isinstance(clipper._backend, TapBackend)
        assert len(clipper._backend.recorder.alive) == 0


def test_a_forward_that_still_waits_decides_nothing_for_another_one() -> None:
    """Its inputs look like a batch of 3, too, the channels being 3; what it never back-propagates is not to be learnt from."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(64, 5)).double()
    clipper = attach(model, groups="layer", clip_norm=0.1)
    waiting = model(torch.randn(2, 3, 4, 4, dtype=torch.float64)).logsumexp(1)
    clipper.backward(model(torch.randn(3, 3, 4, 4, dtype=torch.float64)).logsumexp(1))
    assert "one back-propagation per example" not in str(clipper)
    model.zero_grad()
    clipper.backward(waiting)
    assert "one back-propagation per example" not in str(clipper)


@pytest.mark.parametrize("engine", OURS)
@pytest.mark.parametrize("held", [True, False])
def test_a_forward_that_no_loss_comes_from_changes_no_bit_of_the_sums(engine: str, held: bool) -> None:
    """Outputs that are kept for a log, or dropped; a run that is repeated may keep others, and is to end in the same weights."""
    x, sums = torch.randn(16, 50, generator=torch.Generator().manual_seed(0)), []
    for others in (False, True):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(50, 64), nn.Tanh(), nn.Linear(64, 30))
        clipper = attach(model, clip_norm=0.1, engine=engine)
        kept = []
        for _ in range(3):
            if others:
                kept.append(model(x))
            if not held:
                kept.clear()
            clipper.backward(losses_of(model, x))
        sums.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert torch.equal(*sums)


@pytest.mark.parametrize("engine", OURS)
def test_two_forwards_for_one_loss(engine: str) -> None:
    model, x = mlp(), torch.randn(4, D, dtype=torch.float64)

    def losses(m, a):
        return (m(a) * m(a.flip(1))).sum(1)

    rows = [torch.autograd.grad(losses(model, r[None]).sum(), list(model.parameters())) for r in x]
    clipper = attach(model, groups="layer", clip_norm=0.2, engine=engine)
    for _ in range(2):
        model.zero_grad()
        clipper.backward(losses(model, x))
        flat = [
            torch.stack([torch.cat([r[2 * k].flatten(), r[2 * k + 1].flatten()]) for r in rows])
            for k in range(2)
        ]
        for k, (weight, bias) in enumerate(
            ((model[0].weight, model[0].bias), (model[2].weight, model[2].bias))
        ):
            factor = (clipper.thresholds[k] / flat[k].norm(dim=1)).clamp(max=1)
            torch.testing.assert_close(torch.cat([weight.grad.flatten(), bias.grad]), factor @ flat[k])


def test_norms_without_sums_are_held_in_three_ways() -> None:
    model = mlp()
    losses = losses_of(model, torch.randn(3, D, dtype=torch.float64))
    with pytest.raises(UserError, match="held='gone' is not known: retained, parked, again"):
        attach(model).measure(Roots.of_losses(losses), held="gone")


def test_a_forward_that_was_interrupted_leaves_nothing_behind() -> None:
    """Ctrl-C is no `Exception`, and no hook of the forward hears of it."""

    class Interrupted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            super().forward(x)
            raise KeyboardInterrupt

    model = Interrupted(4, 3)
    clipper = attach(model)
    with pytest.raises(KeyboardInterrupt):
        model(torch.randn(5, 4))
    clipper.detach()
    assert not torch.overrides._get_current_function_mode_stack()
    # which a watched forward refuses
    nn.functional.embedding(torch.tensor([0]), torch.randn(3, 2), max_norm=1.0)


class Redrawn(nn.Module):
    """A checkpointed part that is not the same when it is computed again."""

    def __init__(self, draw: Any) -> None:
        super().__init__()
        self.layer, self.draw = nn.Linear(20, 2), draw

    def forward(self, x: Tensor) -> Tensor:
        def part(z: Tensor) -> Tensor:
            return self.layer(z * torch.as_tensor(self.draw(z) < 0.3))

        return checkpoint(part, x, use_reentrant=False, preserve_rng_state=False)


@pytest.mark.parametrize("draw", [torch.rand_like, lambda z: np.random.rand(*z.shape)])
def test_what_is_drawn_anew_is_not_back_propagated_twice(draw: Any) -> None:
    """The norm of one gradient does not bound another one, which a second back-propagation would sum."""
    for engine in ("auto", "onepass", "loop"):
        model, x = Redrawn(draw), torch.randn(1, 20)
        clipper = attach(model, clip_norm=1e-3, engine=engine)
        for _ in range(5):
            model.zero_grad()
            clipper.backward(losses_of(model, x))
            assert sum(p.grad.square().sum() for p in model.parameters()) <= 1.0001e-6
    for engine in ("ghost", "fastgrad", "mixghost"):
        model = Redrawn(draw)
        with pytest.raises(UserError, match="draws random numbers"):
            attach(model, engine=engine).backward(losses_of(model, x))
        assert model.layer.weight.grad is None
    model = Redrawn(draw)
    step = attach(model).measure(Roots.of_losses(losses_of(model, x)), held="again")
    with pytest.raises(UserError, match="draws random numbers"):
        step.finish(step.sq_norms)
    jl = ProjectedClipper(model := Redrawn(draw), projections=2)
    jl.prepare(1)
    with pytest.raises(UserError, match=r"draws random numbers|in proportion"):
        jl.backward(losses_of(model, x))


def test_reentrant_checkpointing_is_refused() -> None:
    model = mlp()
    clipper = attach(model)
    x = torch.randn(3, D, dtype=torch.float64, requires_grad=True)
    with pytest.raises(ValueError, match="use_reentrant=False"):
        clipper.backward(checkpoint(model, x, use_reentrant=True).pow(2).sum(1))


def test_gradients_of_a_checkpointed_model_that_are_none_of_training() -> None:
    """What is computed again is what was computed: by a search, or by whoever looks at losses, with a clipper attached."""

    class Checkpointed(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self[1], self[0](x), use_reentrant=False)

    model, x = (
        Checkpointed(nn.Linear(D, 5), nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))),
        torch.randn(3, D),
    )
    plain, clipper = copy.deepcopy(model), attach(model)
    for _ in range(2):
        with clipper.elsewhere():
            found = torch.autograd.grad(losses_of(model, x).sum(), list(model.parameters()))
        wanted = torch.autograd.grad(losses_of(plain, x).sum(), list(plain.parameters()))
        torch.testing.assert_close(found, wanted)
        clipper.backward(losses_of(model, x))
