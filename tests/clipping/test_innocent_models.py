"""Models that mix nothing are looked at and not refused; looking leaves no trace and draws no random number."""

from __future__ import annotations

import copy
import random
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpexp.clipping import attach
from dpexp.errors import UserError
from tests.clipping.stepping import B, D, Forces, Net, T, step, x


class Noisy(nn.Module):
    """Every kind of chance, per example."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, 3)
        self.block = nn.TransformerEncoderLayer(D, 2, 8, dropout=0.3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(self.first(x), 0.4)
        h = h + 0.1 * torch.randn_like(h) + torch.distributions.Normal(0.0, 1.0).sample(h.shape)
        h = h * torch.bernoulli(torch.full((len(h), 1), 0.9)) + F.gumbel_softmax(h, hard=True)
        h = h.gather(1, torch.rand(len(h), D).argsort(1)) * torch.empty_like(h).uniform_(0.5, 1.5)
        h = h + torch.randint(0, 3, h.shape) + F.rrelu(h, training=True) + F.alpha_dropout(h, 0.2, True)
        h = self.block(h[:, None].expand(-1, T, -1)).mean(1)
        return self.last(h) * random.uniform(0.5, 1.5) * float(np.random.rand())


class TimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.last = nn.LSTM(D, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.rnn(x)[0])


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, 3)

    def forward(self, mask: Tensor, x: Tensor) -> Tensor:
        return self.last(torch.tanh(mask @ self.first(x)))


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, 3)

    def forward(self, batch: dict[str, list[Tensor]]) -> Tensor:
        return self.last(torch.tanh(self.first(torch.stack(batch["x"]))))


class Remembers(nn.Module):
    """Keeps its hidden states for a person to look at."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.seen = nn.Linear(D, D), nn.Linear(D, 3), []

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = torch.tanh(self.first(x))
        self.seen.append(self.hidden)
        return self.last(self.hidden)


class Writes(nn.Module):
    """Writes to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x.mul_(2))


INNOCENT: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...], int]] = {
    "chance": (Noisy, (x(),), 0),
    "the batch second": (TimeFirst, (x(T, B, D),), 1),
    "the batch second, as long as the sequence": (TimeFirst, (x(B, B, D),), 1),
    "a mask for all": (Masked, (x(T, T), x(B, T, D)), 0),
    "a mask for all, as long as the batch": (Masked, (x(B, B), x(B, B, D)), 0),
    "forces": (lambda: Forces(torch.tanh), (x(),), 0),
    "a list": (Listed, ({"x": list(x(B, D))},), 0),
    "hidden states that are kept": (Remembers, (x(),), 0),
    "one example": (lambda: Net(torch.relu), (x(1, D),), 0),
    "two examples": (lambda: Net(torch.relu), (x(2, D),), 0),
    "equal examples": (lambda: Net(torch.relu), (x(1, D).expand(B, D),), 0),
    "a batch that is written to": (Writes, (x(),), 0),
}


@pytest.mark.parametrize("name", INNOCENT)
def test_innocent_models_are_looked_at_and_not_refused(name: str) -> None:
    torch.manual_seed(0)
    build, batch, dim = INNOCENT[name]
    assert step(build(), *batch, dim=dim).notes == []


def test_however_many_inputs_a_model_has_it_is_looked_at_at_once() -> None:
    """A column of a table each, as recommenders have them: all ways to read them would be millions."""

    class Columns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ModuleList(nn.Embedding(5, 3) for _ in range(26))

        def forward(self, *ids: Tensor) -> Tensor:
            return torch.stack([table(i) for table, i in zip(self.tables, ids, strict=True)]).prod(0)

    torch.manual_seed(0)
    assert step(Columns(), *torch.randint(5, (26, B))).notes == []


def test_rows_of_one_example_may_mix_with_one_another_but_not_with_others() -> None:
    def centred(rows: int) -> nn.Module:
        return Net(lambda h: h - h.unflatten(0, (-1, rows)).mean(1).repeat_interleave(rows, 0).detach())

    clipper = attach(model := centred(2), rows_per_example=2)
    clipper.backward(model(x(6, D)).square().sum(1).view(3, 2).sum(1))
    clipper = attach(model := centred(3), rows_per_example=2)
    with pytest.raises(UserError, match="mixes examples"):
        clipper.backward(model(x(12, D)).square().sum(1).view(6, 2).sum(1))


def test_looking_leaves_no_trace() -> None:
    """Generators, buffers, attributes, inputs, graphs in flight and the gradient itself are as without a look."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(D, D)), nn.Dropout(0.5), Remembers()
    )
    twin = copy.deepcopy(model)
    inputs, results = x(), []
    for looks in (True, False):
        one = model if looks else twin
        clipper = attach(one, clip_norm=0.1, engine="loop")
        torch.manual_seed(3)
        for _ in range(3):
            losses, waiting = one(inputs).square().sum(1), one(inputs).square().sum(1)
            clipper.backward(losses)
            clipper.backward(waiting)
            if not looks:
                # a clipper that has looked already
                continue
        results.append(
            [*(p.grad for p in one.parameters()), *one.buffers(), torch.rand(1), *one[2].seen, one[2].hidden]
        )
        assert one.training
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in list(one.modules())[1:])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    assert len(model[2].seen) == 6
    assert torch.equal(inputs, x())


def test_the_look_draws_no_random_number() -> None:
    states = []
    for engine in ("auto", "loop"):
        model = Net(lambda h: F.dropout(h, 0.5))
        clipper = attach(model, engine=engine)
        losses = model(x()).square().sum(1)
        before = torch.get_rng_state(), random.getstate(), np.random.get_state()[2]
        clipper.backward(losses)
        states.append((before, (torch.get_rng_state(), random.getstate(), np.random.get_state()[2])))
    for before, after in states:
        assert torch.equal(before[0], after[0])
        assert before[1:] == after[1:]


def test_what_cannot_be_run_again_is_said() -> None:
    class Once(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(D, 3)

        def forward(self, batches: Any) -> Tensor:
            return self.last(next(batches))

    clipper = step(Once(), iter([x()]))
    assert "not looked at" in str(clipper)
    assert clipper.notes


def test_a_model_may_know_who_trains_it():
    """By a weak proxy, which says that it is a module and cannot be hashed: Lightning's."""
    model = nn.Sequential(nn.Linear(D, D), nn.Tanh())
    model.trainer = SimpleNamespace(model=weakref.proxy(model))
    clipper = attach(model)
    clipper.backward(model(torch.randn(B, D)).square().sum(1))
    assert clipper.notes == []


class HooksItself(nn.Module):
    """Adds its hook when it first runs, and notes that it has, as models of transformers do to return hidden states."""

    hooked = False

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.states = nn.Linear(D, D), []

    def forward(self, h: Tensor) -> Tensor:
        if not self.hooked:
            self.inner.register_forward_hook(lambda module, args, output: self.states.append(output))
            self.hooked = True
        self.states = []
        self.inner(h)
        return torch.stack(self.states).sum(0)


def test_hooks_that_a_forward_adds_are_not_added_again() -> None:
    model = Net(HooksItself())
    for _ in range(2):
        step(model, x()).detach()
    assert len(model.between.states) == len(model.between.inner._forward_hooks) == 1


def test_a_hook_that_was_there_for_one_forward_is_not_replayed() -> None:
    """It may hold what belongs to that batch alone: which position of each example goes on."""
    model, places = Net(lambda h: h), torch.arange(B)
    clipper = attach(model)
    handle = model.first.register_forward_hook(
        lambda module, args, output: output + places[: len(output), None]
    )
    losses = model(x()).square().sum(1)
    handle.remove()
    clipper.backward(losses)
    assert clipper.notes == []
