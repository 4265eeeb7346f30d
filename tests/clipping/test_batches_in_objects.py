"""Batches and results in objects of any class are taken apart and looked at, or it is said that they were not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpexp.clipping import attach
from dpexp.errors import UserError
from tests.clipping.exact_steps import Batch, D, exact_in_company, rows


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x: Tensor):
        self.x = x


class Deep:
    """As a batch of graphs keeps its tensors."""

    def __init__(self, x: Tensor):
        self.store = SimpleNamespace(kept={"x": x})

    @property
    def x(self) -> Tensor:
        return self.store.kept["x"]


OBJECTS = {"attributes": lambda x: SimpleNamespace(x=x), "slots": Slotted, "deep": Deep}


class OfObjects(nn.Module):
    """Takes an object that holds the batch."""

    def __init__(self, between: Callable[[Tensor], Tensor]):
        super().__init__()
        self.first, self.out, self.between = nn.Linear(D, D), nn.Linear(D, 3), between

    def forward(self, batch: Any) -> Any:
        return SimpleNamespace(logits=self.out(self.between(torch.tanh(self.first(batch.x)))))


def losses_of_objects(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).logits.square().sum(1)


@pytest.mark.parametrize("kind", OBJECTS)
def test_batches_in_objects_are_looked_into(kind: str) -> None:
    torch.manual_seed(0)
    model = OfObjects(lambda h: h)

    def losses(model: nn.Module, batch: Batch) -> Tensor:
        return losses_of_objects(model, OBJECTS[kind](batch["x"]))

    exact_in_company(model, [rows(5), rows(5), rows(3)], "auto", losses)
    fresh = OfObjects(lambda h: h).double()
    clipper = attach(fresh)
    batch = OBJECTS[kind](rows(5)["x"])
    clipper.backward(losses_of_objects(fresh, batch))
    assert clipper.notes == []
    assert batch.x.shape == (5, D)
    assert not any(method.startswith("one back-propagation") for method in clipper.choices.values())


@pytest.mark.parametrize("mix", [lambda h: h - h.mean(0), lambda h: h - h.mean(0).detach()])
@pytest.mark.parametrize("kind", OBJECTS)
def test_batches_in_objects_are_refused_where_they_mix(kind: str, mix: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model = OfObjects(mix).double()
    clipper = attach(model)
    with pytest.raises(UserError, match="mixes examples"):
        clipper.backward(losses_of_objects(model, OBJECTS[kind](rows(5)["x"])))


class Returns(nn.Module):
    """Returns its rows beside something else, without a gradient."""

    def __init__(self, what: Any):
        super().__init__()
        self.what, self.layer = what, nn.Linear(D, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        y = self.layer(x)
        return y, self.what(self, y.detach())


@pytest.mark.parametrize(
    ("what", "told"),
    [
        (lambda _, y: y.mean(0), True),
        (lambda _, y: y.amax(), True),
        (lambda _, y: [y, y.sum((0, 1), keepdim=True)], True),
        (lambda _, y: y.argmax(1), False),
        (lambda _, y: y + 1, False),
        (lambda model, _: model.layer.weight.detach().norm(), False),
        (lambda _, y: len(y), False),
    ],
)
def test_what_is_returned_of_the_whole_batch_without_a_gradient_is_told(what: Any, told: bool) -> None:
    """The losses may be held against it, and nothing but the loop's own lines shows that to a clipper."""
    torch.manual_seed(0)
    model = Returns(what)
    clipper = attach(model)
    y, _ = model(torch.randn(6, D))
    clipper.backward(y.square().sum(1))
    assert any("goes by the whole batch: the losses may not use it" in note for note in clipper.notes) == told
    assert len(clipper.notes) == told


class PackedTexts(nn.Module):
    """Reads packed sequences."""

    def __init__(self, between: Callable[[Tensor], Tensor]):
        super().__init__()
        self.first, self.out, self.between = nn.GRU(D, D), nn.Linear(D, 3), between

    def forward(self, packed: Any) -> Tensor:
        return self.out(self.between(self.first(packed)[1][0]))


class JaggedTexts(PackedTexts):
    """Reads a nested tensor."""

    def forward(self, nested: Tensor) -> Tensor:
        return self.out(self.between(torch.stack([text.mean(0) for text in nested.unbind()])))


class Graph:
    """One graph, as in `GraphBatch`."""

    def __init__(self, x: Tensor):
        self.x, self.num_nodes = x, len(x)


class GraphBatch:
    """Stands in for the batch of PyTorch Geometric: how many graphs it has is no attribute, and its parts lie in slices."""

    def __init__(self, graphs: list[Graph]):
        self.x = torch.cat([graph.x for graph in graphs])
        self._cuts = [graph.num_nodes for graph in graphs]

    num_graphs = property(lambda self: len(self._cuts))
    batch = property(lambda self: torch.arange(self.num_graphs).repeat_interleave(torch.tensor(self._cuts)))

    def keys(self) -> list[str]:
        return ["x", "batch"]

    def to_data_list(self) -> list[Graph]:
        return [Graph(x) for x in self.x.split(self._cuts)]

    @classmethod
    def from_data_list(cls, graphs: list[Graph], follow_batch: list[str]) -> GraphBatch:
        assert follow_batch == []
        return cls(graphs)


class OfGraphs(PackedTexts):
    """Reads a batch of graphs."""

    def forward(self, graphs: GraphBatch) -> Tensor:
        nodes = self.out(torch.tanh(graphs.x @ torch.ones(D, D, dtype=graphs.x.dtype)))
        pooled = nodes.new_zeros(graphs.num_graphs, 3).index_add(0, graphs.batch, nodes)
        return self.between(pooled)


BUNDLES: dict[str, tuple[type[PackedTexts], Callable[[list[Tensor]], Any]]] = {
    "packed": (PackedTexts, lambda texts: nn.utils.rnn.pack_sequence(texts, enforce_sorted=False)),
    "packed, sorted": (
        PackedTexts,
        lambda texts: nn.utils.rnn.pack_sequence(sorted(texts, key=len, reverse=True)),
    ),
    "nested": (JaggedTexts, lambda texts: torch.nested.nested_tensor(texts, layout=torch.jagged)),
    "graphs": (OfGraphs, lambda texts: GraphBatch([Graph(text) for text in texts])),
}


@pytest.mark.parametrize("lengths", [(2, 4, 1, 3), (3,)])
@pytest.mark.parametrize("kind", BUNDLES)
def test_batches_that_can_be_taken_apart_are_looked_at(kind: str, lengths: tuple[int, ...]) -> None:
    make, bundle = BUNDLES[kind]
    for between, mixes in ((lambda h: h, False), (lambda h: h - h.detach().mean(0), True)):
        torch.manual_seed(0)
        model = make(between).double()
        texts = [torch.randn(n, D, dtype=torch.float64) for n in lengths]
        clipper = attach(model)
        with pytest.raises(UserError, match="mixes examples") if mixes else nullcontext():
            clipper.backward(model(bundle(texts)).square().sum(1))
        assert clipper.notes == []


def test_nested_tensors_of_the_strided_layout_are_refused_where_they_enter() -> None:
    model = JaggedTexts(lambda h: h)
    attach(model)
    with pytest.raises(UserError, match=r"make it with .*jagged"):
        model(torch.nested.nested_tensor([torch.ones(2, D), torch.ones(3, D)], layout=torch.strided))


@pytest.mark.parametrize("examples", [1, 2, 3])
def test_a_parameter_that_is_returned_has_no_rows_of_examples(examples: int) -> None:
    """Weights of two losses, in a batch of two, or of one that is looked at beside another one."""

    class TwoLosses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out, self.scales = nn.Linear(D, 2), nn.Parameter(torch.zeros(2))

        def forward(self, x: Tensor) -> Any:
            return self.out(x), self.scales

    def losses(model: nn.Module, batch: Batch) -> Tensor:
        out, scales = model(batch["x"])
        return (out.square() * (-scales).exp() + scales).sum(1)

    torch.manual_seed(0)
    exact_in_company(TwoLosses(), [rows(examples), rows(examples)], "auto", losses)
