"""No example may influence another through values that autograd does not see; and nothing innocent is refused."""

from __future__ import annotations

import copy
import random
import weakref
from collections.abc import Callable, MutableMapping
from contextlib import nullcontext
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node

from dpexp.clipping import attach
from dpexp.clipping.independence.chance import Chance, WithoutChance
from dpexp.errors import UserError
from tests.versions import INSTALLED

B, T, D = 5, 4, 6


class Net(nn.Module):
    """Two layers with something between them."""

    def __init__(self, between: Callable[..., Tensor] | nn.Module):
        super().__init__()
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, 3)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(torch.tanh(self.first(x))))


def step(model: nn.Module, *batch: Any, engine: str = "auto", dim: int = 0, **settings: Any) -> Any:
    clipper = attach(model, engine=engine, **settings)
    losses = model(*batch).square()
    clipper.backward(losses.transpose(0, dim).flatten(1).sum(1))
    return clipper


def x(*shape: int) -> Tensor:
    return torch.randn(*(shape or (B, D)), generator=torch.Generator().manual_seed(1))


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


class Forces(Net):
    """Its features are the gradients of an energy."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (forces,) = torch.autograd.grad(super().forward(x).square().sum(), x)
        return super().forward(forces)


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


def test_one_example_alone_is_looked_at_beside_another() -> None:
    with pytest.raises(UserError, match="when another example stands beside it"):
        step(Net(lambda h: h - h.mean(0).detach()), x(1, D))


def test_a_batch_of_one_example_is_looked_at_where_others_were_before() -> None:
    """What is left of a logical batch: a model that takes it in another way gives its example another share of the sum."""
    model = Net(lambda h: h if len(h) > 1 else 2 * h)
    clipper = attach(model)
    for _ in range(2):
        clipper.backward(model(x(8, D)).square().sum(1))
    with pytest.raises(UserError, match="when another example stands beside it"):
        clipper.backward(model(x(1, D)).square().sum(1))
    clipper.detach()
    model.between = lambda h: h
    clipper = attach(model)
    for rows in (8, 1):
        clipper.backward(model(x(rows, D)).square().sum(1))
    # one look is enough
    assert not clipper._independence.due


def test_a_model_that_begins_later_is_noticed_at_the_sixteenth_step() -> None:
    model = Net(lambda h: h)
    clipper = attach(model)
    for _ in range(15):
        clipper.backward(model(x()).square().sum(1))
        model.between = lambda h: h - h.mean(0).detach()
    model.zero_grad()
    # also of who tries again
    for _ in range(3):
        with pytest.raises(UserError, match="mixes examples"):
            clipper.backward(model(x()).square().sum(1))
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("microbatches", [2, 8])
def test_it_is_noticed_where_several_forwards_wait_for_their_backward(microbatches: int) -> None:
    """As in a pipeline: no forward comes between the fifteenth backward pass and the sixteenth."""
    model = Net(lambda h: h)
    clipper = attach(model)

    def schedule() -> None:
        waiting = [model(x()).square().sum(1) for _ in range(microbatches)]
        for losses in waiting:
            clipper.backward(losses)

    for _ in range(16 // microbatches):
        schedule()
        model.between = lambda h: h - h.mean(0).detach()
    with pytest.raises(UserError, match="mixes examples"):
        schedule()
    assert not clipper.notes


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


class InModes(Net):
    """Centred where it is asked for, by an argument or by a switch."""

    centred = False

    def forward(self, x: Tensor, centred: bool = False) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.last(self.between(h) if centred or self.centred else h)


@pytest.mark.parametrize("forwards", [1, 3, 4, 12])
@pytest.mark.parametrize("by", ["argument", "switch"])
def test_one_of_many_forwards_of_a_step_is_looked_at_where_it_differs(by: str, forwards: int) -> None:
    model = InModes(lambda h: h - h.detach().mean(0))
    clipper = attach(model)
    model.centred = by == "switch"
    losses = model(x(), centred=by == "argument").square().sum(1)
    model.centred = False
    for _ in range(forwards):
        losses = losses + model(x()).square().sum(1)
    with pytest.raises(UserError, match="mixes examples"):
        clipper.backward(losses)


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


class Gated(Net):
    """A factor that no training moves stands where a look sees nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return self.gate * super().forward(x)


def test_behind_a_gate_that_is_closed_the_next_step_is_looked_at() -> None:
    model = Gated(lambda h: h - h.mean(0).detach())
    model.gate = 0.0
    clipper = attach(model)
    clipper.backward((model(x()) - 1).square().sum(1))
    model.gate = 0.1
    with pytest.raises(UserError, match="mixes examples"):
        clipper.backward((model(x()) - 1).square().sum(1))


# -- what must not be refused -------------------------------------------------------------------------------------------


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


class Solver(nn.Module):
    """Steps as long as the error of the whole batch allows, or until all of it has come to rest."""

    def __init__(self, by: str, each: bool) -> None:
        super().__init__()
        self.by, self.each = by, each

    def forward(self, h: Tensor) -> Tensor:
        if self.each:
            return torch.cat([self.solved(row) for row in h.split(1)])
        return self.solved(h)

    def solved(self, h: Tensor) -> Tensor:
        if self.by == "rest":
            start = h
            for _ in range(50):
                before, h = h, torch.tanh(0.5 * h + start)
                if (h - before).norm() < 0.1:
                    break
            return h
        time, size = 0.0, 0.5
        while time < 1.0:
            size = min(size, 1.0 - time)
            slope, ahead = -h * h.abs(), h - size * h * h.abs()
            error = float((ahead * ahead.abs() + slope).mul(size).detach().abs().mean())
            if error < 0.2 or size < 1e-3:
                h, time = h + size * slope, time + size
            else:
                size *= 0.5
        return h


@pytest.mark.parametrize("by", ["error", "rest"])
def test_what_is_decided_by_numbers_of_the_whole_batch_is_seen_within_four_steps(by: str) -> None:
    batches = [x(3, D) * size for size in (0.01, 0.02, 1.0, 0.5)]

    def trained(each: bool) -> Any:
        torch.manual_seed(0)
        model = Net(Solver(by, each))
        clipper = attach(model)
        for batch in batches:
            clipper.backward(model(batch).square().sum(1))
        return clipper

    with pytest.raises(UserError, match="mixes examples"):
        trained(each=False)
    assert trained(each=True).notes == []


def test_a_part_in_32_bits_of_a_model_of_64_is_not_taken_for_mixing() -> None:
    """A product rounds otherwise in a batch of another size; as routers of experts and scans have it in transformers."""

    def in_32_bits(h: Tensor) -> Tensor:
        return h + 0.1 * (h.float().repeat(1, 20) @ rounding).to(h)

    torch.manual_seed(0)
    rounding = torch.randn(20 * D, D) / 5
    assert step(Net(in_32_bits).double(), x().double()).notes == []


class Sensitive(nn.Module):
    """What it computes doubles a difference sixteen times, as of rounding."""

    def __init__(self, mix: float) -> None:
        super().__init__()
        self.first, self.last, self.mix = nn.Linear(64, 64), nn.Linear(64, 3), mix

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).sigmoid()
        h = h + self.mix * h.detach().mean(0)
        for _ in range(16):
            h = 3.99 * h * (1 - h)
        return self.last(h)


def test_rounding_that_grows_is_not_taken_for_mixing_and_hides_none() -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 64)
    clipper = attach(model := Sensitive(0.0))
    clipper.backward(model(x).square().sum(1))
    assert clipper.notes == []
    assert {p.dtype for p in model.parameters()} == {torch.get_default_dtype()} == {torch.float32}
    with pytest.raises(UserError, match="mixes examples"):
        attach(model := Sensitive(1e-6)).backward(model(x).square().sum(1))


def test_rounding_that_grows_in_a_transformer_is_not_taken_for_padding() -> None:
    from transformers import MPNetConfig, MPNetForSequenceClassification

    torch.manual_seed(0)
    config = MPNetConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=8, num_attention_heads=4, intermediate_size=64,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = MPNetForSequenceClassification(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1 and "embeddings" not in name:
                # as a training that diverges makes them
                p.mul_(60)
    ids, mask = torch.randint(5, 100, (8, 20)), torch.ones(8, 20, dtype=torch.long)
    mask[3:, 12:], ids[3:, 12:] = 0, 1
    clipper = attach(model)
    clipper.backward(model(input_ids=ids, attention_mask=mask).logits.square().sum(1))
    assert clipper.notes == []


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


# -- padding ------------------------------------------------------------------------------------------------------------

V, PAD = 30, 3


def texts(masked: bool, length: int = 12) -> dict[str, Tensor]:
    ids = torch.randint(4, V, (4, length), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[1, 7:] = mask[2, 9:] = 0
    batch = {"input_ids": ids.masked_fill(mask == 0, PAD)}
    return batch | ({"attention_mask": mask} if masked else {})


def classifier(kind: str) -> tuple[nn.Module, dict[str, Tensor]]:
    import transformers

    small = dict(
        vocab_size=V, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, pad_token_id=PAD,
        max_position_embeddings=40, hidden_dropout_prob=0.1,
    )  # fmt: skip
    if kind == "BigBird":
        small |= dict(block_size=2, num_random_blocks=1, attention_type="block_sparse")
    try:
        config = getattr(transformers, f"{kind}Config")(**small)
    except StrictDataclassError:
        pytest.skip("this version of transformers refuses its own defaults")
    model = getattr(transformers, f"{kind}ForSequenceClassification")(config)
    return model.train(), texts(masked=kind != "FNet")


@pytest.mark.parametrize("kind", ["FNet", "BigBird"])
def test_results_that_depend_on_padding_are_refused_unless_all_lengths_are_equal(kind: str) -> None:
    torch.manual_seed(0)
    model, batch = classifier(kind)
    clipper = attach(model)
    with pytest.raises(UserError, match=r"padded further(.|\n)*task\.pad_to"):
        clipper.backward(
            F.cross_entropy(model(**batch).logits, torch.zeros(4, dtype=torch.long), reduction="none")
        )
    clipper.detach()
    clipper = attach(model, fixed_length=True)
    clipper.backward(
        F.cross_entropy(model(**batch).logits, torch.zeros(4, dtype=torch.long), reduction="none")
    )
    with pytest.raises(UserError, match="one length"):
        model(**{name: tensor[:, :10] for name, tensor in batch.items()})


TINY = dict(
    vocab_size=V,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=24,
    pad_token_id=PAD,
)
MODELS: dict[str, dict[str, Any]] = {
    "Bert": TINY,
    "ModernBert": TINY | dict(global_attn_every_n_layers=2, local_attention=8, cls_token_id=1, sep_token_id=2,
                              bos_token_id=1, eos_token_id=2),
    "Gemma2": TINY | dict(num_key_value_heads=1, head_dim=8, sliding_window=6),
    "Mixtral": TINY | dict(num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2),
    "Mamba": dict(vocab_size=V, hidden_size=16, num_hidden_layers=2, state_size=4, pad_token_id=PAD),
    "Bart": dict(vocab_size=V, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
                 decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, max_position_embeddings=40,
                 pad_token_id=PAD, eos_token_id=2, bos_token_id=0, decoder_start_token_id=2),
}  # fmt: skip


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("side", ["right", "left"])
def test_models_of_transformers_are_not_refused(kind: str, side: str) -> None:
    import transformers

    if kind == "Mixtral" and INSTALLED < (2, 9):
        pytest.skip("transformers asks torch 2.8 for a product of experts that it has on GPUs alone")
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}Model")(
        getattr(transformers, f"{kind}Config")(**MODELS[kind])
    ).train()
    batch = texts(masked=True)
    if side == "left":
        if kind not in ("Gemma2", "Mixtral"):
            pytest.skip("counts positions from the left, or runs over the padding first")
        batch = {name: tensor.flip(1) for name, tensor in batch.items()}
    clipper = attach(model)
    hidden = model(**batch).last_hidden_state
    clipper.backward((hidden.square().mean(-1) * batch["attention_mask"]).sum(1))
    assert clipper.notes == []


LONG_TEXTS = {
    "Llama": dict(max_position_embeddings=48, rope_parameters=dict(rope_type="dynamic", factor=4.0, rope_theta=100.0)),
    "Phi3": dict(
        max_position_embeddings=400, original_max_position_embeddings=48,
        rope_parameters=dict(
            rope_type="longrope", rope_theta=100.0, short_factor=[1.0] * 4, long_factor=[4.0] * 4,
            original_max_position_embeddings=48,
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "side", "lengths"),
    [("Llama", "right", (12, 100)), ("Phi3", "left", (12, 100)), ("Phi3", "right", (100, 12))],
)
def test_what_begins_with_a_long_text_is_seen_when_the_first_one_comes(
    kind: str, side: str, lengths: tuple[int, int]
) -> None:
    """Rotary embeddings whose frequencies go by the longest text of a batch: it moves the gradients of all others."""
    import transformers

    torch.manual_seed(0)
    settings = TINY | dict(num_key_value_heads=2, bos_token_id=1, eos_token_id=2) | LONG_TEXTS[kind]
    config = getattr(transformers, f"{kind}Config")(**settings)
    model = getattr(transformers, f"{kind}Model")(config).train()
    for parameter in model.parameters():
        parameter.data *= 10
    clipper = attach(model)

    def step_of(length: int) -> None:
        batch = texts(masked=True, length=length)
        batch = {name: tensor.flip(1) for name, tensor in batch.items()} if side == "left" else batch
        hidden = model(**batch).last_hidden_state
        clipper.backward((hidden.square().mean(-1) * batch["attention_mask"]).sum(1))

    step_of(lengths[0])
    with pytest.raises(UserError, match="padded further"):
        step_of(lengths[1])


# -- what the losses reach ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["auto", "ghost", "opacus"])
def test_a_trainable_head_outside_of_the_model_is_refused(engine: str) -> None:
    model, head = nn.Linear(D, D), nn.Linear(D, 3)
    clipper = attach(model, engine=engine)
    with pytest.raises(UserError, match=r"shape \[3, 6\].*not in the attached model"):
        clipper.backward(head(model(x())).square().sum(1))
    assert model.weight.grad is None
    clipper.detach()
    head.requires_grad_(False)
    clipper = attach(model, engine=engine)
    clipper.backward(head(model(x())).square().sum(1))
    assert model.weight.grad is not None


def test_what_is_made_of_a_frozen_weight_is_refused_where_it_is_to_train() -> None:
    model = nn.Sequential(nn.Linear(D, D), nn.Linear(D, D).requires_grad_(False))
    clipper, head = attach(model), nn.Linear(D, D, bias=False)
    head.weight = nn.Parameter(model[1].weight)
    with pytest.raises(UserError, match=r"not in the attached model"):
        clipper.backward(head(model(x())).sum(1))
    optimizer = torch.optim.SGD([nn.Parameter(model[1].weight)], lr=1.0)
    with pytest.raises(UserError, match=r"not in the attached model"):
        clipper.backward(F.linear(model(x()), optimizer.param_groups[0]["params"][0]).sum(1))


def test_losses_that_nothing_trained_is_behind_say_what_may_be_merged() -> None:
    model = nn.Linear(D, D)
    with pytest.raises(UserError, match=r"adapters of PEFT alone that are merged or disabled"):
        attach(model).backward(model(x()).detach().sum(1))


def test_a_parameter_that_the_forward_makes_of_a_frozen_weight_is_no_head_beside_the_model() -> None:
    """As HiRA of peft does on the layers of GPT-2."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(D, 3), requires_grad=False)
            self.scale = nn.Parameter(torch.randn(3, D))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, nn.Parameter(self.weight.T) * self.scale)

    model, rows = Scaled(), x()
    (wanted,) = torch.autograd.grad(model(rows).square().sum(), [model.scale])
    clipper = attach(model, rule="none")
    clipper.backward(model(rows).square().sum(1))
    torch.testing.assert_close(model.scale.grad, wanted)


def test_an_empty_batch_that_a_model_cannot_take_is_said_in_words() -> None:
    model, batch = classifier("Bert")
    clipper = attach(model)
    with pytest.raises(UserError, match=r"the batch is empty.*clipper\.backward\(torch\.zeros\(0\)\)"):
        model(**{name: tensor[:0] for name, tensor in batch.items()})
    clipper.backward(torch.zeros(0))
    assert all(not p.grad.any() for p in model.parameters())
    clipper.backward(
        F.cross_entropy(model(**batch).logits, torch.zeros(4, dtype=torch.long), reduction="none")
    )


class Mixup(nn.Module):
    """Mixes its inputs, which no gradient shows, when a coin falls on one side; or scales them then, which is innocent."""

    def __init__(self, coin: Callable[[Tensor], Any], mixes: bool = True):
        super().__init__()
        self.coin, self.mixes, self.first, self.last = coin, mixes, nn.Linear(D, D), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.as_tensor(self.coin(x), dtype=x.dtype).reshape(-1, 1)
        return self.last(torch.tanh(self.first(x + weight * (x.flip(0) if self.mixes else x))))


COINS: dict[str, Callable[[Tensor], Any]] = {
    "python, often": lambda x: random.random() < 0.5,
    "python, rarely": lambda x: random.random() < 0.05,
    "python, mostly": lambda x: random.random() > 0.05,
    "numpy": lambda x: np.random.rand() > 0.9,
    "a numpy law that is nearly a coin": lambda x: np.random.beta(0.1, 0.1),
    "torch, below": lambda x: torch.rand(()) < 0.3,
    "torch, above": lambda x: torch.rand(1).item() > 0.9,
    "torch, a number": lambda x: torch.randint(0, 10, ()) == 9,
    "torch, bernoulli": lambda x: torch.bernoulli(torch.tensor(0.2)),
    "the second toss": lambda x: torch.rand(()) < 2 and torch.rand(()) > 0.6,
    "one for each row": lambda x: torch.rand(len(x)) < 0.2,
}


@pytest.mark.parametrize("name", COINS)
def test_mixing_that_a_coin_decides_is_seen_on_whichever_side_it_falls(name: str) -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    with pytest.raises(UserError, match="mixes examples"):
        step(Mixup(COINS[name]), x())


def test_a_coin_that_mixes_nothing_is_innocent_and_dropout_is_no_coin() -> None:
    for coin in (*COINS.values(), lambda x: torch.randn(len(x)), lambda x: [random.random() for _ in x]):
        step(Mixup(coin, mixes=False), x())
    h = x()
    with WithoutChance(Chance()) as chance:
        F.dropout(h, 0.3, training=True)
        assert not chance.drew
        torch.rand(3)
    assert chance.drew


def test_numbers_that_are_drawn_in_some_batches_alone_are_none_of_chance_there() -> None:
    """Read as a list, a number decides unseen: batches of the same shapes run without a look at each operation."""
    drawn = []

    def some(h: Tensor) -> Tensor:
        if h[0].detach().tolist() == first:
            return h
        drawn.append(torch.rand(len(h), 1))
        return h + 0 * drawn[-1]

    model = Net(some)
    first = torch.tanh(model.first(x()))[0].tolist()
    assert step(model, x()).notes == []
    drawn_by_chance = [bool((numbers != numbers[0]).any()) for numbers in drawn]
    assert drawn_by_chance.count(True) == 1
    assert not drawn_by_chance[-1]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("kept", [0.1, 0.9])
def test_a_mask_of_one_number_for_each_example_is_no_coin_where_one_is_alone(size: int, kept: float) -> None:
    """Stochastic depth: half of a batch of two is one example, whose mask has one number."""

    def depth(h: Tensor) -> Tensor:
        return h + 2 * h * h.new_empty(len(h), 1).bernoulli_(kept)

    step(Net(depth), x(size, D))
    with pytest.raises(UserError, match="mixes examples"):
        step(Net(lambda h: depth(h - h.mean(0).detach())), x(size, D))


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


def test_modules_that_begin_to_train_later_are_looked_at() -> None:
    """A part that looks at the batch in training mode alone, like batch norm; and somebody calls model.train()."""

    class Centres(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            return h - h.detach().mean(0) if self.training else h

    model = Net(Centres()).eval()
    clipper = attach(model)
    for _ in range(2):
        clipper.backward(model(x()).square().sum(1))
    model.train()
    with pytest.raises(UserError, match=r"between .* mixes examples"):
        clipper.backward(model(x()).square().sum(1))
    model.eval()
    clipper.backward(model(x()).square().sum(1))


def test_a_frozen_batch_norm_in_training_mode_again_is_told_as_such() -> None:
    norm = nn.BatchNorm1d(D, affine=False, track_running_stats=True).eval()
    norm.track_running_stats = False
    model = nn.Sequential(norm, nn.Linear(D, D))
    clipper = attach(model)
    values = torch.randn(4, D)
    clipper.backward(model(values).square().sum(1))
    model.train()
    with pytest.raises(
        UserError, match=r"0 \(BatchNorm1d\): it normalises .* behind each model.train\(\) too"
    ):
        clipper.backward(model(values).square().sum(1))


@pytest.mark.parametrize("engine", ["auto", "opacus"])
def test_an_input_that_was_empty_is_looked_at_once_it_is_not(engine: str) -> None:
    """Nodes of one graph as examples, of which those of the first batches are no neighbours."""

    class Nodes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(4, 3)

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            return self.out(x.index_add(0, edges[1], x[edges[0]]))

    model, none, some = Nodes(), torch.zeros(2, 0, dtype=torch.long), torch.tensor([[1, 2], [2, 1]])
    clipper = attach(model, engine=engine)
    for _ in range(2):
        clipper.backward(model(torch.randn(5, 4), none).square().sum(1))
    with pytest.raises(UserError, match="mixes examples"):
        clipper.backward(model(torch.randn(5, 4), some).square().sum(1))


def test_what_one_look_made_is_gone_before_the_next_one() -> None:
    """Logits are the largest tensors of a language model: beside those of the step there is room for one more."""
    made: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    class Noting(Net):
        def forward(self, x: Tensor) -> Tensor:
            alive.append(sum(output() is not None for output in made))
            output = super().forward(x)
            made.append(weakref.ref(output))
            return output

    model = Noting(nn.Identity())
    clipper = attach(model)
    output = model(x())
    clipper.backward(output.square().sum(1))
    assert len(alive) > 5
    assert max(alive) == 1


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


class Owned:
    """What makes a list of one's own of a list: it has attributes, and asks for an owner."""

    def __init__(self, values: Any = (), owner: Any = None):
        self.owner = owner
        super().__init__(values) if isinstance(self, list | set) else super().__init__()


class OwnedList(Owned, list):
    """A list of layers, as Keras' lists are."""

    def append(self, value: Any) -> None:
        raise AssertionError("nobody asked for another layer")


class OwnedSet(Owned, set):
    """A set of names, as Keras' sets are."""


class OwnedName(str):
    """A word with attributes."""


class OwnedNumber(int):
    """A number with attributes."""


@pytest.mark.parametrize("kind", [OwnedList, OwnedSet, OwnedName, OwnedNumber])
def test_what_a_container_of_ones_own_class_holds_is_there_when_the_forward_runs_again(kind: type) -> None:
    """Without it, a batch norm of Keras stands in evaluation mode there, and passes."""

    class Switched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.held = kind("1" if issubclass(kind, str) else 1 if issubclass(kind, int) else ["centre"])
            self.held.note = "an attribute"

        def forward(self, h: Tensor) -> Tensor:
            return h - h.detach().mean(0) if self.held else h

    with pytest.raises(UserError, match="mixes examples"):
        step(Net(Switched()), x())


class Scales(nn.Module):
    """Draws a factor for each row from a generator of its own."""

    def __init__(self, rng: Any, mixes: bool):
        super().__init__()
        self.rng, self.mixes = rng, mixes

    def forward(self, h: Tensor) -> Tensor:
        scale = torch.tensor([self.rng.uniform(0, 1) for _ in h])[:, None]
        return scale * (h - h.detach().mean(0) if self.mixes else h)


@pytest.mark.parametrize("kind", [random.Random, np.random.RandomState])
def test_a_generator_of_a_models_own_hides_no_mixing(kind: type) -> None:
    """It began anywhere in each run, and all of them differed; numpy's moved on with each, and innocent models were refused."""
    model, drawn = Net(Scales(kind(0), False)), kind(0)
    assert not step(model, x()).notes
    for _ in range(B):
        drawn.uniform(0, 1)
    # a look leaves no trace
    assert model.between.rng.uniform(0, 1) == drawn.uniform(0, 1)
    with pytest.raises(UserError, match="mixes examples"):
        step(Net(Scales(kind(0), True)), x())


class Rows(MutableMapping):
    """Tensors by name of so many rows, over which it goes, as TensorDict does."""

    def __init__(self, parts: dict[str, Tensor]):
        self.parts, self.size = parts, len(next(iter(parts.values())))

    def __getitem__(self, key: Any) -> Any:
        return self.parts[key] if isinstance(key, str) else Rows({k: v[key] for k, v in self.parts.items()})

    def __setitem__(self, key: str, value: Tensor) -> None:
        assert len(value) == self.size
        self.parts[key] = value

    def __delitem__(self, key: str) -> None:
        del self.parts[key]

    def __iter__(self) -> Any:
        return (self[i : i + 1] for i in range(self.size))

    def __len__(self) -> int:
        return self.size

    def keys(self) -> Any:
        return self.parts.keys()


register_pytree_node(
    Rows,
    lambda rows: ([*rows.parts.values()], [*rows.parts]),
    lambda parts, names: Rows(dict(zip(names, parts, strict=True))),
)


@pytest.mark.parametrize("between", [torch.tanh, lambda h: h - h.detach().mean(0)])
def test_a_batch_that_torch_can_take_apart_is_looked_at(between: Callable[[Tensor], Tensor]) -> None:
    """It was looked through by its rows: a `TypeError` with TensorDict."""

    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(between)

        def forward(self, rows: Rows) -> Tensor:
            rows["found"] = self.net(rows["features"])
            return rows["found"]

    with nullcontext() if between is torch.tanh else pytest.raises(UserError, match="mixes examples"):
        assert not step(Writes(), Rows({"features": x()})).notes


class Pairs(nn.Module):
    """Returns two vectors of each example, and their products with those of all others, as CLIP does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(D, 3), nn.Linear(D, 3)

    def forward(self, a: Tensor) -> Any:
        first, last = self.first(a), self.last(a)
        return {"all": first @ last.T, "first": first, "last": last}


def test_where_the_losses_do_not_use_what_compares_examples_the_way_out_is_to_leave_it_out() -> None:
    model = Pairs()
    clipper = attach(model)
    found = model(x())
    with pytest.raises(UserError, match="let the model return what they use"):
        clipper.backward((found["first"] * found["last"]).sum(1))


@pytest.mark.parametrize("other", [False, True])
@pytest.mark.parametrize("engine", ["auto", "ghost", "loop"])
def test_losses_of_a_forward_that_was_back_propagated_are_refused(engine: str, other: bool) -> None:
    model = Net(lambda h: h)
    clipper = attach(model, engine=engine)
    out = model(x())
    clipper.backward(out.square().sum(1))
    before = model.first.weight.grad.clone()
    with pytest.raises(UserError, match="call backward once for each forward"):
        clipper.backward(out.sin().sum(1) if other else out.square().sum(1))
    assert torch.equal(before, model.first.weight.grad)


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
