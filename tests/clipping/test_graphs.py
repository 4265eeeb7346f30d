"""Graphs whose nodes stand end to end are clipped by graph, and refused where graphs hear of one another."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from dpexp.clipping import attach
from dpexp.clipping.loop import LOOPED
from dpexp.errors import UserError
from tests.clipping.exact_steps import ENGINES, Batch, D, exact_in_company, rows
from tests.clipping.naive import weighted_passes


def graphs(*sizes: int, edges: int = 3) -> Batch:
    """Nodes of all graphs end to end, edges between them by their numbers there, and whose each node is."""
    begins = torch.tensor(sizes).cumsum(0) - torch.tensor(sizes)
    pairs = [torch.randint(size, (2, edges)) + begin for size, begin in zip(sizes, begins, strict=True)]
    whose = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    return rows(sum(sizes)) | {"edges": torch.cat(pairs, 1), "whose": whose, "count": len(sizes)}


class Graphs(nn.Module):
    """Nodes hear of their neighbours, and each graph is the sum of its nodes."""

    def __init__(self, mix: Callable[[Tensor], Tensor], pools: bool = True):
        super().__init__()
        self.first, self.out, self.mix, self.pools = nn.Linear(D, D), nn.Linear(D, D), mix, pools

    def forward(self, x: Tensor, edges: Tensor, whose: Tensor | None = None, count: int = 0) -> Tensor:
        h = torch.tanh(self.first(x))
        h = self.mix(h + torch.zeros_like(h).index_add(0, edges[1], h[edges[0]]))
        return self.out(h.new_zeros(count, D).index_add(0, whose, h)) if whose is not None else self.out(h)


def of_graphs(model: nn.Module, batch: Batch) -> Tensor:
    return model(**batch).square().sum(1)


def of_nodes(model: nn.Module, batch: Batch) -> Tensor:
    nodes = model(batch["x"], batch["edges"]).square().sum(1)
    return nodes.new_zeros(batch["count"]).index_add(0, batch["whose"], nodes)


GRAPHS = [graphs(2, 4, 3), graphs(2, 4, 3), graphs(1, 5, 2, 2), graphs(3, 3, 3), graphs(4, 1)]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("losses", [of_graphs, of_nodes])
def test_graphs_are_clipped(losses: Callable[..., Tensor], engine: str) -> None:
    torch.manual_seed(0)
    exact_in_company(Graphs(lambda h: h), GRAPHS, engine, losses)


def test_graphs_need_no_loop_and_a_run_that_recalls_them_computes_the_same() -> None:
    torch.manual_seed(0)
    model = Graphs(lambda h: h).double()
    twin = copy.deepcopy(model)
    clipper, later = attach(model), attach(twin)
    for batch in GRAPHS[:3]:
        clipper.backward(of_graphs(model, batch))
    later.recall(clipper.remember())
    # as many nodes as two or three for each graph: shapes allow a layout, and for the second one a wrong one
    for batch in (GRAPHS[3], graphs(2, 4), graphs(1, 2, 3)):
        for one in (clipper, later):
            one.model.zero_grad()
            one.backward(of_graphs(one.model, batch))
            assert LOOPED not in one.choices.values()
        pairs = zip(clipper.params.values(), later.params.values(), strict=True)
        assert all(torch.equal(p.grad, q.grad) for p, q in pairs)


def test_later_graphs_go_back_once_more_than_the_engine_itself_and_losses_that_are_picked_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    model = Graphs(lambda h: h).double()
    clipper, asked = attach(model), weighted_passes(monkeypatch)
    clipper.may_begin_again()
    for batch in GRAPHS[:4]:
        asked.clear()
        clipper.backward(of_nodes(model, batch))
    assert asked == [True, False]
    # the largest three of nine nodes without neighbours
    nodes = model(**rows(9), edges=torch.zeros(2, 0, dtype=torch.long)).square().sum(1)
    with pytest.raises(UserError, match="the losses of exactly the examples"):
        clipper.backward(nodes.topk(3)[0])


@pytest.mark.parametrize("batch", GRAPHS)
@pytest.mark.parametrize("mix", [lambda h: h - h.mean(0), lambda h: h / h.detach().abs().mean()])
def test_graphs_that_mix_are_refused(mix: Callable[[Tensor], Tensor], batch: Batch) -> None:
    torch.manual_seed(0)
    model = Graphs(lambda h: h).double()
    clipper = attach(model)
    clipper.backward(of_graphs(model, batch))
    assert clipper.notes == []
    mixing = Graphs(mix).double()
    with pytest.raises(UserError, match="mixes examples"):
        attach(mixing).backward(of_graphs(mixing, batch))


@pytest.mark.parametrize(
    "mix", [lambda h: h - h.mean(0), lambda h: torch.cat([h[:, :1].flip(0), h[:, 1:]], 1)]
)
def test_nodes_of_one_graph_do_not_hear_of_another_one(mix: Callable[[Tensor], Tensor]) -> None:
    """Though nothing that enters the model says whose they are."""
    model = Graphs(mix).double()
    with pytest.raises(UserError, match="mixes examples"):
        attach(model).backward(of_nodes(model, graphs(1, 5, 2, 2)))
