"""Batches that are no tensors with one row for each example: texts end to end, objects of any class."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpexp.clipping import attach
from dpexp.errors import UserError
from tests.clipping.test_unusual_inputs import Batch, Own, linears
from tests.clipping.test_unusual_models import rows, square
from tests.clipping.test_users_code import ENGINES, D, exact_in_company


def texts(*lengths: int) -> Batch:
    return rows(sum(lengths)) | {"lengths": torch.tensor(lengths)}


@pytest.mark.parametrize("engine", ENGINES)
def test_texts_end_to_end_belong_to_other_examples_in_each_batch(engine: str) -> None:
    """Texts of equal lengths first, so that each example has a block of rows."""

    def forward(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
        parts = torch.tanh(self.first(x)).split(lengths.tolist())
        return self.out(torch.stack([part.cumsum(0).mean(0) for part in parts]))

    torch.manual_seed(0)
    batches = [texts(3, 3, 3, 3), texts(3, 3, 3, 3), texts(1, 5, 2, 4), texts(2, 2, 2), texts(1, 3, 2)]
    exact_in_company(Own(forward, **linears("first", "out")), batches, engine)


class Bag(nn.Module):
    """Tokens of all texts end to end, and where each text begins: as torchtext has it."""

    def __init__(self, mix: bool):
        super().__init__()
        self.bag, self.out, self.mix = nn.EmbeddingBag(9, D), nn.Linear(D, 3), mix

    def forward(self, tokens: Tensor, offsets: Tensor) -> Tensor:
        h = torch.tanh(self.bag(tokens, offsets))
        return self.out(h - h.mean(0).detach() if self.mix else h)


def losses_of_bags(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch["tokens"], batch["offsets"]).square().sum(1)


def bags(*lengths: int) -> Batch:
    sizes = torch.tensor(lengths)
    return {"tokens": torch.randint(9, (int(sizes.sum()),)), "offsets": sizes.cumsum(0) - sizes}


def test_texts_with_offsets_are_cut_where_they_begin() -> None:
    torch.manual_seed(0)
    model = Bag(mix=False)
    exact_in_company(model, [bags(2, 3, 1, 4), bags(1, 1, 1), bags(3, 1, 2, 2, 5)], "auto", losses_of_bags)
    fresh = Bag(mix=False).double()
    clipper = attach(fresh)
    clipper.backward(losses_of_bags(fresh, bags(2, 3, 1, 4)))
    assert clipper.notes == []
    mixing = Bag(mix=True).double()
    with pytest.raises(UserError, match="mixes examples"):
        attach(mixing).backward(losses_of_bags(mixing, bags(2, 3, 1, 4)))


@pytest.mark.parametrize("how", [lambda h: h - h.mean(0), lambda h: h - h.mean(0).detach()])
def test_texts_end_to_end_that_mix_are_refused(how: Callable[[Tensor], Tensor]) -> None:
    def forward(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
        parts = how(torch.tanh(self.first(x))).split(lengths.tolist())
        return self.out(torch.stack([part.cumsum(0).mean(0) for part in parts]))

    torch.manual_seed(0)
    model = Own(forward, **linears("first", "out")).double()
    with pytest.raises(UserError, match="mixes examples"):
        attach(model).backward(square(model, texts(1, 5, 2)))


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
