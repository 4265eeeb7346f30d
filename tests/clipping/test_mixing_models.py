"""Models that mix examples through values that autograd does not see are refused by name, whatever their batches look like."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpexp.clipping import attach
from dpexp.errors import UserError
from tests.clipping.stepping import B, D, Forces, Net, T, step, x


class PerTensorInt8(nn.Module):
    """A scale for the whole batch, straight through."""

    def forward(self, h: Tensor) -> Tensor:
        scale = h.detach().abs().max() / 127
        return h + ((h / scale).round() * scale - h).detach()


class Centring(nn.Module):
    """Home-made running statistics: in a plain attribute, a list or an object of one's own."""

    def __init__(self, where: str):
        super().__init__()
        self.where, self.mean, self.kept = where, torch.zeros(D), [torch.zeros(D)]
        self.record = type("Record", (), {})()
        self.record.mean = torch.zeros(D)

    def forward(self, h: Tensor) -> Tensor:
        holder: Any = self.record if self.where == "object" else self
        mean = self.kept[0] if self.where == "list" else holder.mean
        moved = 0.99 * mean + 0.01 * h.detach().mean(0)
        if self.where == "list":
            self.kept[0] = moved
        elif self.where == "in place":
            mean.mul_(0.99).add_(0.01 * h.detach().mean(0))
            return h - mean.clone()
        else:
            holder.mean = moved
        return h - mean


class Experts(nn.Module):
    """A mixture of experts, each of which takes so many tokens as come first."""

    def __init__(self, capacity: int | None):
        super().__init__()
        self.router, self.last, self.capacity = nn.Linear(D, 3), nn.Linear(D, 3), capacity
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = x.reshape(-1, D)
        weight, chosen = self.router(h).softmax(-1).max(-1)
        out = torch.zeros_like(h)
        for k, expert in enumerate(self.experts):
            index = (chosen == k).nonzero()[:, 0][: self.capacity]
            out = out.index_add(0, index, expert(h[index]) * weight[index, None])
        return self.last(out.reshape(x.shape))


def other(h: Tensor) -> Tensor:
    return h.detach()[torch.randperm(len(h))]


COUPLED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "detached mean": (lambda: Net(lambda h: h - h.mean(0).detach()), r"\(root\) \(Net\)"),
    "detached spread": (lambda: Net(lambda h: h / h.detach().std(0)), r"\(root\) \(Net\)"),
    "detached neighbour": (lambda: Net(lambda h: h + 0.1 * h.roll(1, 0).detach()), r"\(root\) \(Net\)"),
    "mixing, detached": (lambda: Net(lambda h: h + 0.5 * other(h)), r"\(root\) \(Net\)"),
    "size of the batch": (lambda: Net(lambda h: h * len(h)), r"\(root\) \(Net\)"),
    "dynamic quantisation": (lambda: Net(PerTensorInt8()), r"between \(PerTensorInt8\)"),
    "FakeQuantize": (lambda: Net(torch.ao.quantization.FakeQuantize()), r"between \(FakeQuantize\)"),
    "running, attribute": (lambda: Net(Centring("attribute")), r"between \(Centring\)"),
    "running, in place": (lambda: Net(Centring("in place")), r"between \(Centring\)"),
    "running, list": (lambda: Net(Centring("list")), r"between \(Centring\)"),
    "running, object": (lambda: Net(Centring("object")), r"between \(Centring\)"),
}


@pytest.mark.parametrize("name", COUPLED)
@pytest.mark.parametrize("engine", ["auto", "loop", "opacus"])
def test_values_that_mix_examples_are_refused_by_name(name: str, engine: str) -> None:
    torch.manual_seed(0)
    build, where = COUPLED[name]
    model = build()
    with pytest.raises(UserError, match=rf"^{where}: mixes examples"):
        step(model, x(), engine=engine)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("engine", ["auto", "loop"])
def test_models_that_ask_for_gradients_on_their_way_are_looked_at(engine: str) -> None:
    """A replay keeps no graph, but where the model needs it itself."""
    with pytest.raises(UserError, match=r"^\(root\) \(Forces\): mixes examples"):
        step(Forces(lambda h: h - h.mean(0).detach()), x(), engine=engine)


def test_a_small_scale_change_and_bf16_are_seen_too() -> None:
    for _ in range(2):
        model = Net(lambda h: h * (1 + 0.004 * h.detach().mean()))
        clipper = attach(model)
        with torch.autocast("cpu", torch.bfloat16):
            losses = model(x()).float().square().sum(1)
        with pytest.raises(UserError, match="mixes examples"):
            clipper.backward(losses)


def test_capacity_of_experts_is_refused_and_experts_without_are_not() -> None:
    torch.manual_seed(0)
    step(Experts(None), x(B, T, D))
    with pytest.raises(UserError, match="mixes examples"):
        step(Experts(5), x(B, T, D))


@pytest.mark.parametrize("holders", [h for n in (1, 2, 3) for h in combinations(range(4), n)])
def test_a_maximum_is_seen_however_many_examples_hold_it_and_whatever_halves_they_are_in(
    holders: tuple[int, ...],
) -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(5, 3), nn.Linear(3, 3)
            with torch.no_grad():
                self.table.weight[4] = 9.0

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.table(ids)
            return self.head(x / x.detach().abs().max()).flatten(1)

    ids = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0]])
    ids[list(holders), 1] = 4
    torch.manual_seed(0)
    model = Shared()
    clipper = attach(model)
    with pytest.raises(UserError, match="mixes examples"):
        clipper.backward(model(ids).square().sum(1))


# Opacus takes examples in the first dimension
@pytest.mark.parametrize(
    ("dim", "flat", "engine"),
    [(0, False, "auto"), (0, True, "auto"), (1, False, "auto"), (1, True, "auto"), (0, False, "opacus")],
)
def test_with_as_many_tokens_as_examples_the_gradient_tells_which_are_the_examples(
    dim: int, flat: bool, engine: str
) -> None:
    """A mean over tokens is each example's own; one over examples is not, though it looks the same."""
    reduced = 0

    class Centred(nn.Linear):
        def forward(self, h: Tensor) -> Tensor:
            h = super().forward(h)
            h = h - h.mean(reduced, keepdim=True).detach()
            return h.flatten(0, 1) if flat else h

    def run() -> None:
        clipper = attach(Centred(D, D), engine=engine)
        outputs = clipper.model(x(B, B, D)).square().view(B, B, D)
        clipper.backward(outputs.transpose(0, dim).flatten(1).sum(1))

    reduced = 1 - dim
    run()
    reduced = dim
    with pytest.raises(UserError, match="mixes examples"):
        run()


class OverPositions(Net):
    """A convolution along the positions of each example, of which some are nobody's."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.last(self.between(h + 0.5 * h.roll(1, 1)))


@pytest.mark.parametrize("length", [1, 0])
def test_of_several_forwards_few_rows_with_a_gradient_do_not_tell_whose_they_are(length: int) -> None:
    """The one position of a batch in which one example has a loss is that example's, and no example."""
    model = OverPositions(lambda h: h).double()
    clipper, batch = attach(model), x(2, 1, D).double()
    counted = torch.tensor([1.0, 0.0], dtype=torch.float64)
    losses = model(batch).square().sum((1, 2)) * counted
    clipper.backward(losses + model(batch[:, :length]).square().sum((1, 2)))


class Tokens(nn.Module):
    """Looks up one table of positions in each forward."""

    def __init__(self, between: Callable[[Tensor], Tensor], labels: bool):
        super().__init__()
        self.words, self.places, self.last = nn.Embedding(9, D), nn.Embedding(T, D), nn.Linear(D, 3)
        self.between, self.labels = between, labels

    def forward(self, ids: Tensor) -> Tensor:
        h = self.last(self.between(self.words(ids) + self.places(torch.arange(T)[None])))
        return h.mean(1) if self.labels else h


# the last two have as many examples in all as there are tokens
@pytest.mark.parametrize("parts", [(2, 3), (T, T), (1, T - 1), (2, T - 2)])
@pytest.mark.parametrize("labels", [True, False])
def test_forwards_of_parts_of_the_examples_are_looked_at_whatever_the_number_of_tokens(
    parts: tuple[int, int], labels: bool
) -> None:
    for mixing in (False, True):
        model = Tokens((lambda h: h / h.detach().abs().mean()) if mixing else torch.tanh, labels)
        clipper = attach(model)
        outputs = [model(torch.randint(1, 9, (rows, T))) for rows in parts]
        losses = torch.cat([y.flatten(1).square().sum(1) for y in outputs])
        if mixing:
            with pytest.raises(UserError, match="mixes examples"):
                clipper.backward(losses)
        else:
            clipper.backward(losses)
            assert not clipper.notes


@pytest.mark.parametrize("texts", [1, 2])
def test_several_texts_in_one_row_are_not_looked_at_though_their_rows_are(texts: int) -> None:
    model = Net(lambda h: h + h.detach().mean(1, keepdim=True))
    clipper = attach(model)
    tokens = [model(torch.randn(1, T, D)) for _ in range(3)]
    clipper.backward(torch.cat([y.square().sum(2).view(texts, -1).sum(1) for y in tokens]))
    assert bool(clipper.notes) == (texts == 2)


class Keeps(nn.Module):
    """Copies a row of the batch into a frozen parameter, where others would have a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = nn.Parameter(torch.zeros(D), requires_grad=False)

    def forward(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            self.kept.copy_(h[0])
        return h


def test_a_row_that_is_copied_into_a_frozen_parameter_is_seen() -> None:
    with pytest.raises(
        UserError, match=r"between .* writes what depends on the batch into the parameter 'kept'"
    ):
        step(Net(Keeps()), x())


def test_examples_that_count_their_equals_are_refused() -> None:
    """In a batch of different examples nobody has any."""

    def counted(h: Tensor) -> Tensor:
        return h * (torch.cdist(h.detach(), h.detach()) < 1e-4).sum(1, keepdim=True)

    with pytest.raises(UserError, match="mixes examples"):
        step(Net(counted), x())


@pytest.mark.parametrize("look_up", [F.embedding, F.embedding_bag])
@pytest.mark.parametrize("option", [{"max_norm": 0.5}, {"scale_grad_by_freq": True}, {"sparse": True}])
@pytest.mark.parametrize("frozen", [False, True])
def test_options_of_a_table_that_is_looked_up_without_a_module_are_refused(
    look_up: Callable[..., Tensor], option: dict[str, Any], frozen: bool
) -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.last = nn.Parameter(torch.randn(7, D), requires_grad=not frozen), nn.Linear(D, 3)

        def forward(self, ids: Tensor) -> Tensor:
            return self.last(look_up(ids, self.table, **option))

    before = (model := Table()).table.detach().clone()
    with pytest.raises(UserError, match=f"table.* {next(iter(option))}"):
        step(model, torch.arange(8).reshape(4, 2) % 7)
    assert torch.equal(model.table, before)


class TwoInputs(nn.Module):
    """A vector and a picture of each example."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(D, 3), nn.Linear(D, 3)

    def forward(self, vectors: Tensor, pictures: Tensor) -> tuple[Tensor, Tensor]:
        seen = self.last(pictures).mean(1)
        return self.first(vectors), seen - seen.detach().mean(0)


@pytest.mark.parametrize("examples", [2, 3])
def test_as_many_examples_as_channels_do_not_make_a_picture_one_that_all_share(examples: int) -> None:
    model = TwoInputs()
    clipper = attach(model)
    first, last = model(x(examples, D), x(examples, 3, D))
    with pytest.raises(UserError, match="mixes examples"):
        clipper.backward((first + last).square().sum(1))
