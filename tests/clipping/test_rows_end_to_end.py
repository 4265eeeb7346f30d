"""Texts, sets, bags and padding that a model leaves out: rows end to end are proven to be of their examples in every batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpexp.clipping import attach
from dpexp.errors import UserError
from tests.clipping.exact_steps import ENGINES, Batch, D, exact_in_company, rows, square
from tests.clipping.test_unusual_inputs import Own, linears


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


def cut(x: Tensor, *lengths: int) -> Batch:
    return {"x": x, "kept": torch.arange(x.shape[1]) < torch.tensor(lengths)[:, None]}


@pytest.mark.parametrize("engine", ENGINES)
def test_padding_that_is_left_out_once_there_is_some_leaves_no_blocks(engine: str) -> None:
    """12 rows of three texts: four of each text at first, and by chance of texts of 5, 3 and 4 tokens."""

    def forward(self: Any, x: Tensor, kept: Tensor) -> Tensor:
        tokens = x.flatten(0, 1) if bool(kept.all()) else x[kept]
        h = torch.tanh(self.first(tokens))
        return self.out(x.new_zeros(len(x), D).index_add(0, kept.nonzero()[:, 0], h))

    torch.manual_seed(0)
    full, longer = (rows(3, columns)["x"] for columns in (4, 5))
    batches = [cut(full, 4, 4, 4), cut(full, 4, 4, 4), cut(longer, 5, 5, 5), cut(longer, 5, 3, 4)]
    exact_in_company(Own(forward, **linears("first", "out")), batches, engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_sparse_matrices_are_clipped(engine: str) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.out(torch.tanh(x.relu().to_sparse() @ self.first.weight))

    torch.manual_seed(0)
    exact_in_company(Own(forward, **linears("first", "out")), [rows(4), rows(3)], engine)


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


class OfSets(nn.Module):
    """Elements of all sets end to end, and how many each has, by a name of the author's own."""

    def __init__(self, mix: Callable[[Tensor], Tensor], each: bool):
        super().__init__()
        self.first, self.out, self.mix, self.each = nn.Linear(D, D), nn.Linear(D, 3), mix, each

    def forward(self, x: Tensor, many: Tensor) -> Tensor:
        h = self.mix(torch.tanh(self.first(x)))
        whose = torch.arange(len(many)).repeat_interleave(many)
        pooled = h.new_zeros(len(many), D).index_add(0, whose, h)
        return self.out(h + pooled[whose] if self.each else pooled)


def of_sets(model: Any, batch: Batch) -> Tensor:
    found, many = model(batch["x"], batch["many"]).square().sum(1), batch["many"]
    if not model.each:
        return found
    return found.new_zeros(len(many)).index_add(0, torch.arange(len(many)).repeat_interleave(many), found)


@pytest.mark.parametrize("each", [False, True])
def test_sets_are_cut_by_how_many_elements_each_has(each: bool) -> None:
    """Whatever that is called, and where what comes out lies end to end, too. Eight elements of four sets are no two of each."""
    torch.manual_seed(0)
    batches = [
        {"x": rows(sum(many))["x"], "many": torch.tensor(many)} for many in ((1, 4, 1, 2), (3, 1, 2), (2, 5))
    ]
    exact_in_company(OfSets(lambda h: h, each), batches, "auto", of_sets)
    for batch in batches:
        model = OfSets(lambda h: h, each).double()
        clipper = attach(model)
        clipper.backward(of_sets(model, batch))
        assert clipper.notes == []
        mixing = OfSets(lambda h: h - h.detach().mean(0), each).double()
        with pytest.raises(UserError, match="mixes examples"):
            attach(mixing).backward(of_sets(mixing, batch))


class Tables(nn.Module):
    """As recommenders have it: a bag of ids of each kind, and where those of each example begin."""

    def __init__(self) -> None:
        super().__init__()
        self.bags, self.out = nn.ModuleList(nn.EmbeddingBag(9, D) for _ in range(2)), nn.Linear(D, 3)

    def forward(self, x: Tensor, ids: list[Tensor], lS_o: list[Tensor]) -> Tensor:
        return self.out(x + sum(bag(i, o) for bag, i, o in zip(self.bags, ids, lS_o, strict=True)))


@pytest.mark.parametrize("lengths", [((2, 3, 1), (1, 1, 4)), ((2, 3, 1, 2), (1, 3, 1, 4))])
def test_bags_of_several_tables_are_cut_where_they_begin(lengths: tuple[tuple[int, ...], ...]) -> None:
    torch.manual_seed(0)

    def losses(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["x"], batch["ids"], batch["begins"]).square().sum(1)

    both = [bags(*some) for some in lengths]
    batch = rows(len(lengths[0])) | {
        "ids": [bag["tokens"] for bag in both],
        "begins": [bag["offsets"] for bag in both],
    }
    exact_in_company(Tables(), [batch, batch], "auto", losses)
