"""Bags of embeddings are written out: every option against one autograd pass per example, by rows of the table, no loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpexp.clipping import attach
from dpexp.clipping.loop import LOOPED
from dpexp.errors import UserError
from tests.clipping.test_engines import check, naive
from tests.clipping.zoo import Problem

OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"mode": "sum"},
    "max": {"mode": "max"},
    "sum with padding": {"mode": "sum", "padding_idx": 0},
    "mean with padding": {"padding_idx": 0},
    "max with padding": {"mode": "max", "padding_idx": 0},
    "last offset": {"include_last_offset": True},
}


class Bags(nn.Module):
    """Bags of one example each, or several of each side by side."""

    def __init__(self, of: str, weighted: bool, several: str):
        super().__init__()
        self.bag, self.out = nn.EmbeddingBag(7, 3, **OPTIONS[of]), nn.Linear(3, 2)
        self.weighted, self.several = weighted, several

    def forward(self, ids: Tensor, begins: Tensor) -> Tensor:
        weights = (1.0 + ids).to(self.out.weight.dtype) if self.weighted else None
        h = self.out(torch.tanh(self.bag(ids, begins, weights)))
        if self.several == "in front":
            return h.unflatten(0, (2, -1)).transpose(0, 1)
        return h.unflatten(0, (-1, 2)) if self.several else h


def bags(last: bool, *lengths: int) -> dict[str, Any]:
    sizes = torch.tensor(lengths)
    begins = torch.cat([torch.zeros(1, dtype=torch.long), sizes.cumsum(0)])
    return {"ids": torch.randint(7, (int(sizes.sum()),)), "begins": begins if last else begins[:-1]}


def losses_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (model(**batch) - 0.3).square().flatten(1).sum(1)


def per_example(model: Bags, batch: dict[str, Tensor], count: int) -> dict[str, Tensor]:
    """Gradients ``[B, …]``, from the loss of one example at a time: bags do not feel each other."""
    params = dict(model.named_parameters())
    found = [torch.autograd.grad(losses_of(model, batch)[i], list(params.values())) for i in range(count)]
    return {name: torch.stack(grads) for name, grads in zip(params, zip(*found, strict=True), strict=True)}


@pytest.mark.parametrize("several", ["", "in front", "behind"])
@pytest.mark.parametrize("of", OPTIONS)
@pytest.mark.parametrize("engine", ["auto", "ghost"])
def test_bags_that_begin_where_they_are_told(of: str, several: str, engine: str) -> None:
    torch.manual_seed(0)
    weighted = of.startswith("sum") and not several
    model = Bags(of, weighted, several).double()
    batches = [bags("last" in of, *n) for n in [(3, 1, 0, 2, 1, 1), (2, 2, 2, 2, 1, 3), (1, 5, 0, 1)]]
    count = [len(batch["begins"]) - ("last" in of) for batch in batches]
    of_each = 2 if several else 1
    expected = [per_example(model, b, n // of_each) for b, n in zip(batches, count, strict=True)]
    clipper = attach(model, clip_norm=0.5, engine=engine)
    for batch, grads in zip(batches, expected, strict=True):
        check(Problem(model, batch, losses_of), clipper, grads, times=1)
    assert LOOPED not in clipper.choices.values()


@pytest.mark.parametrize("of", [name for name in OPTIONS if "last" not in name])
def test_bags_of_one_length(of: str) -> None:
    torch.manual_seed(0)

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(7, 3, **OPTIONS[of])

        def forward(self, ids: Tensor) -> Tensor:
            return torch.tanh(self.bag(ids))

    model = Table().double()
    problem = Problem(model, {"ids": torch.randint(7, (4, 5))}, losses_of)
    alone = naive(problem)
    clipper = attach(model, clip_norm=0.5)
    check(problem, clipper, alone, times=2)
    assert LOOPED not in clipper.choices.values()
    # by index, and no table for each example
    assert "instantiate" not in str(clipper)


class Tables(nn.Module):
    """A recommender: several tables, each with ids of its own and where the bags of the examples begin."""

    def __init__(self, tables: int = 2) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(7, 3, mode="sum") for _ in range(tables))
        self.top = nn.Linear(3 * tables, 1)

    def forward(self, numbers: Tensor, ids: list[Tensor], begins: list[Tensor]) -> Tensor:
        found = [b(i, o) for b, i, o in zip(self.bags, ids, begins, strict=True)]
        return self.top(torch.cat(found, dim=1) * numbers)


@pytest.mark.parametrize(
    "lengths",
    [
        [[1], [4]],
        [[0], [3]],
        [[2, 3], [1, 1]],
        [[2, 0], [0, 2]],
        [[0, 0, 4], [1, 1, 1]],
        [[0, 1, 2], [4, 0, 0]],
        [[0, 0, 3], [2, 4, 4]],
        [[1, 4, 1], [2, 4, 4]],
    ],
    ids=str,
)
@pytest.mark.parametrize("stacked", [False, True])
def test_bags_of_several_tables_are_told_apart_however_short(lengths: list[list[int]], stacked: bool) -> None:
    """Offsets of zeros, ids as many as examples, tables as many as examples, offsets that add up to a number of ids."""
    torch.manual_seed(0)
    model = Tables(len(lengths)).double()
    parts = [bags(False, *own) for own in lengths]
    batch: dict[str, Any] = {name: [part[name] for part in parts] for name in ("ids", "begins")}
    batch["numbers"] = torch.rand(len(lengths[0]), 1, dtype=torch.float64)
    if stacked:
        batch["begins"] = torch.stack(batch["begins"])
    params = list(model.parameters())
    losses = losses_of(model, batch)
    alone = [torch.autograd.grad(loss, params, retain_graph=True) for loss in losses]
    factors = [min(1.0, 0.5 / float(sum(g.square().sum() for g in grads)) ** 0.5) for grads in alone]
    clipper = attach(model, clip_norm=0.5)
    clipper.backward(losses_of(model, batch))
    for i, p in enumerate(params):
        assert p.grad is not None
        torch.testing.assert_close(p.grad, sum(f * g[i] for f, g in zip(factors, alone, strict=True)))
    # rows of offsets may look like texts that end in the same id
    assert stacked or clipper.notes == []


@pytest.mark.parametrize(
    ("named", "ids"),
    [
        ("begins", [[0], [5, 2]]),
        ("begins", [[0, 5], [5]]),
        ("begins", [[6], [0, 1]]),
        ("offsets", [[0], [0, 3]]),
    ],
)
def test_ids_of_a_single_example_are_not_taken_for_where_bags_begin(named: str, ids: list[list[int]]) -> None:
    class Apart(Tables):
        def forward(self, numbers: Tensor, **parts: Tensor) -> Tensor:
            given = [[parts[f"{name}{i}"] for i in range(2)] for name in ("ids", named)]
            return super().forward(numbers, *given)

    batch = {f"{named}{i}": torch.zeros(1, dtype=torch.long) for i in range(2)}
    batch |= {f"ids{i}": torch.tensor(own) for i, own in enumerate(ids)}
    model = Apart()
    attach(model).backward(losses_of(model, {"numbers": torch.rand(1, 1)} | batch))


def test_bags_that_take_ids_of_their_neighbours_are_refused() -> None:
    class Shifted(Tables):
        def forward(self, numbers: Tensor, ids: list[Tensor], begins: list[Tensor]) -> Tensor:
            out = super().forward(numbers, ids, begins)
            return out - out.detach().mean(0)

    parts = [bags(False, 0, 4, 2), bags(False, 1, 1, 1)]
    batch: dict[str, Any] = {name: [part[name] for part in parts] for name in ("ids", "begins")}
    batch["numbers"] = torch.rand(3, 1)
    model = Shifted()
    with pytest.raises(UserError, match="mixes examples"):
        attach(model).backward(losses_of(model, batch))
