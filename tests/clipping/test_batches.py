"""Batches that are no tensors with one row for each example: texts end to end, objects of any class."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpexp.clipping import attach
from dpexp.clipping.loop import LOOPED
from dpexp.errors import UserError
from tests.clipping.exact_steps import ENGINES, Batch, D, exact_in_company, rows, square
from tests.clipping.naive import weighted_passes
from tests.clipping.test_unusual_inputs import Own, linears
from tests.versions import needs_torch


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


def sorts(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
    """Rows are put in order where they are not."""
    if bool((lengths.diff() <= 0).all()):
        return self.out(torch.tanh(self.first(x)))
    order = lengths.argsort(descending=True)
    return self.out(torch.tanh(self.first(x[order]))[order.argsort()])


def in_order_at_first() -> list[Batch]:
    torch.manual_seed(0)
    sizes = ((5, 3, 2, 1), (4, 4, 2, 1), (1, 3, 2, 5))
    return [rows(4) | {"lengths": torch.tensor(given)} for given in sizes]


@pytest.mark.parametrize("engine", ENGINES)
def test_rows_that_are_sorted_where_they_need_it_are_proven_again(engine: str) -> None:
    batches = in_order_at_first()
    exact_in_company(Own(sorts, **linears("first", "out")), [*batches[:2], *batches], engine, patient=True)


def test_opacus_is_refused_where_rows_are_sorted() -> None:
    *batches, later = in_order_at_first()
    model = Own(sorts, **linears("first", "out")).double()
    clipper = attach(model, engine="opacus")
    for batch in batches:
        clipper.backward(square(model, batch))
    with pytest.raises(UserError, match="do not add up"):
        clipper.backward(square(model, later))


@pytest.mark.parametrize(
    "order",
    [
        lambda h, places: h[places],
        lambda h, places: h[places.tolist()],
        lambda h, places: h.index_select(0, places),
        lambda h, places: torch.zeros_like(h).index_copy(0, places, h),
        lambda h, places: h.gather(0, places[:, None].expand_as(h)),
        lambda h, places: torch.stack([h[i] for i in places]),
        lambda h, places: torch.cat([h[i : i + 1] for i in places]),
    ],
)
def test_opacus_is_proven_in_each_batch_where_rows_may_be_sorted(order: Any) -> None:
    """The norms of an example were made of its own rows in one layer, and of another one's in the next."""

    def forward(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
        places = lengths.argsort(descending=True, stable=True)
        return self.out(order(torch.tanh(self.first(order(x, places))), places.argsort()))

    *batches, later = in_order_at_first()
    model = Own(forward, **linears("first", "out")).double()
    clipper = attach(model, engine="opacus")
    for batch in batches:
        clipper.backward(square(model, batch))
    with pytest.raises(UserError, match="do not add up"):
        clipper.backward(square(model, later))


def test_opacus_is_proven_once_where_each_row_gives_its_last_token() -> None:
    def forward(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.out(h[torch.arange(len(x)), lengths - 1])

    torch.manual_seed(0)
    model = Own(forward, **linears("first", "out")).double()
    clipper = attach(model, engine="opacus")
    clipper.backward(square(model, rows(8, 3) | {"lengths": torch.tensor([3, 1, 2, 3, 1, 2, 3, 3])}))
    assert clipper._backend.proven
    assert not clipper._backend.routed


def test_an_order_of_python_that_changes_nothing_at_first_is_an_order() -> None:
    def forward(self: Any, x: Tensor, lengths: list[int]) -> Tensor:
        order = sorted(range(len(x)), key=lambda i: lengths[i])
        h = torch.tanh(self.first(x[order]))
        return self.out(torch.zeros_like(h).index_copy(0, torch.tensor(order), h))

    torch.manual_seed(0)
    first, later = list(range(8)), [3, 1, 2, 0, 7, 5, 4, 6]
    batches = [rows(8) | {"lengths": lengths} for lengths in (first, first, later, later)]
    exact_in_company(Own(forward, **linears("first", "out")), batches, "auto")


def by_length(lengths: Tensor) -> list[int]:
    return sorted(range(len(lengths)), key=lambda i: -int(lengths[i]))


def stacked(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
    """Rows are put in order by a list."""
    order = by_length(lengths)
    h = torch.tanh(self.first(torch.stack([x[i] for i in order])))
    return self.out(torch.stack([h[order.index(i)] for i in range(len(x))])[:, 0])


def taken_apart(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
    order, parts = by_length(lengths), x[:, 0].unbind(0)
    h = torch.tanh(self.first(torch.cat([parts[i][None] for i in order]))).unbind(0)
    return self.out(torch.stack([h[order.index(i)] for i in range(len(x))]))


def padded_again(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
    order = by_length(lengths)
    h = nn.utils.rnn.pad_sequence([x[i, : lengths[i]] for i in order], batch_first=True)
    h = torch.tanh(self.first(h)).cumsum(1)[:, 0]
    return self.out(torch.stack([h[order.index(i)] for i in range(len(x))]))


def sent(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
    """Rows are written to where they belong."""
    order = torch.tensor(by_length(lengths))
    h = torch.zeros_like(x[:, 0])
    h[order.argsort()] = x[:, 0]
    return self.out(torch.tanh(self.first(h))[order.argsort()])


def copied(h: Tensor, order: Tensor) -> Tensor:
    found = torch.zeros_like(h)
    for i, j in enumerate(order.tolist()):
        found[i].copy_(h[j])
    return found


def scattered(h: Tensor, order: Tensor) -> Tensor:
    found = torch.zeros_like(h)
    for i, j in enumerate(order.tolist()):
        found = torch.slice_scatter(found, h[j : j + 1], 0, i, i + 1)
    return found


def number_by_number(h: Tensor, order: Tensor) -> Tensor:
    """Without a dimension the numbers of all rows lie end to end."""
    return h.contiguous().take_along_dim(torch.arange(h.numel()).view(h.shape)[order].flatten()).view(h.shape)


# of rows [B, d], and of positions first: [T, B, d]
IN_ORDER: dict[str, tuple[bool, Callable[[Tensor, Tensor], Tensor]]] = {
    "a table": (False, lambda h, order: F.embedding(order, h)),
    "a matrix": (False, lambda h, order: F.one_hot(order).to(h) @ h),
    "named arguments": (False, lambda h, order: torch.index_select(input=h, dim=0, index=order)),
    "a table, in bags": (False, lambda h, order: F.embedding_bag(order[:, None], h, mode="sum")),
    "copied into views": (False, copied),
    "scattered slice by slice": (False, scattered),
    "reduced": (False, lambda h, order: torch.zeros_like(h).index_reduce(0, order.argsort(), h, "mean")),
    "columns": (False, lambda h, order: torch.column_stack([h[i] for i in order.tolist()]).T),
    "a matrix, added": (
        False,
        lambda h, order: torch.addmm(h.new_zeros(h.shape), F.one_hot(order).double(), h),
    ),
    "a matrix, added, by name": (
        False,
        lambda h, order: torch.addmm(input=h.new_zeros(h.shape), mat1=F.one_hot(order).double(), mat2=h),
    ),
    "a sparse matrix, added": (
        False,
        lambda h, order: torch.sparse.addmm(h.new_zeros(h.shape), F.one_hot(order).double().to_sparse(), h),
    ),
    "linear algebra": (False, lambda h, order: torch.linalg.matmul(F.one_hot(order).to(h), h)),
    "split": (False, lambda h, order: torch.cat([h.vsplit(len(h))[i] for i in order.tolist()])),
    "names of numpy's": (False, lambda h, order: torch.index_select(a=h, axis=0, index=order)),
    "number by number": (False, number_by_number),
    "a sparse matrix": (False, lambda h, order: torch.sparse.mm(F.one_hot(order).double().to_sparse(), h)),
    "matrices": (False, lambda h, order: torch.linalg.multi_dot([F.one_hot(order).double(), h])),
    "a linear map": (False, lambda h, order: F.linear(h.T, F.one_hot(order).double()).T),
    "a matrix in a batch of one": (
        False,
        lambda h, order: torch.bmm(F.one_hot(order).to(h)[None], h[None])[0],
    ),
    "a matrix on the right": (False, lambda h, order: (h.T @ F.one_hot(order).T.double()).T),
    "einsum": (False, lambda h, order: torch.einsum("sc,sd->cd", F.one_hot(order).T.to(h), h)),
    "positions first": (True, lambda h, order: h.index_select(1, order)),
    "einsum, examples last": (
        False,
        lambda h, order: torch.einsum("db,cb->dc", h.T, F.one_hot(order).double()).T,
    ),
    "positions first, by a matrix": (True, lambda h, order: F.one_hot(order).to(h) @ h),
    "positions first, by index": (True, lambda h, order: h[:, order]),
    "positions first, by a list": (True, lambda h, order: h[:, order.tolist()]),
    "positions first, one by one": (True, lambda h, order: torch.stack([h[:, i] for i in order.tolist()], 1)),
    "positions first, slice by slice": (
        True,
        lambda h, order: torch.hstack([h[:, i : i + 1] for i in order.tolist()]),
    ),
    "positions first, split": (
        True,
        lambda h, order: torch.cat(
            [torch.hsplit(input=h, sections=h.shape[1])[i] for i in order.tolist()], 1
        ),
    ),
    "positions first, gathered": (True, lambda h, order: h.gather(1, order[None, :, None].expand_as(h))),
    "positions first, gathered along an axis": (
        True,
        lambda h, order: h.gather(axis=1, index=order[None, :, None].expand_as(h)),
    ),
    "positions first, sent": (True, lambda h, order: torch.zeros_like(h).index_copy(1, order.argsort(), h)),
}


def ordering(way: str) -> Callable[..., Tensor]:
    positions_first, pick = IN_ORDER[way]

    def forward(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
        order = torch.tensor(by_length(lengths))
        h = x.transpose(0, 1) if positions_first else x[:, 0]
        h = pick(torch.tanh(self.first(pick(h, order))), order.argsort())
        return self.out(h.sum(0) if positions_first else h)

    return forward


@pytest.mark.parametrize(
    "forward",
    [stacked, taken_apart, padded_again, sent, *(pytest.param(ordering(way), id=way) for way in IN_ORDER)],
)
@pytest.mark.parametrize("engine", ENGINES)
def test_rows_in_an_order_that_changes_nothing_at_first(forward: Callable[..., Tensor], engine: str) -> None:
    sizes = ((2, 2, 2), (1, 2, 3), (2, 1, 3))
    torch.manual_seed(0)
    batches = [rows(3, 4) | {"lengths": torch.tensor(given)} for given in sizes]
    exact_in_company(Own(forward, **linears("first", "out")), batches, engine)


@pytest.mark.parametrize(("engine", "says"), [("auto", "mixes examples"), ("opacus", "do not add up")])
def test_rows_that_nobody_sees_put_in_order_are_refused_from_the_second_batch_on(
    engine: str, says: str
) -> None:
    def summed(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
        chosen = F.one_hot(torch.tensor(by_length(lengths))).double()[..., None]
        h = torch.tanh(self.first((chosen * x[:, 0]).sum(1)))
        return self.out((chosen.transpose(0, 1) * h).sum(1))

    torch.manual_seed(0)
    model = Own(summed, **linears("first", "out")).double()
    clipper = attach(model, engine=engine)
    clipper.backward(model(**rows(3, 4), lengths=torch.tensor([2, 2, 2])).square().sum(1))
    for lengths in ([1, 2, 3], [2, 1, 3]):
        with pytest.raises(UserError, match=says):
            clipper.backward(model(**rows(3, 4), lengths=torch.tensor(lengths)).square().sum(1))


@pytest.mark.parametrize("engine", ENGINES)
def test_rows_that_are_sorted_late_and_in_order_at_first(engine: str) -> None:
    """The way through the sort is new when nobody watches any more who picks rows."""

    def forward(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
        if int(lengths.max()) <= 2:
            return self.out(torch.tanh(self.first(x[:, 0])))
        order = lengths.argsort(stable=True)
        return self.out(torch.tanh(self.first(x[:, 0][order]))[order.argsort()])

    torch.manual_seed(0)
    sizes = ((1, 2, 1), (2, 1, 2), (3, 3, 3), (3, 1, 2), (1, 1, 1), (2, 3, 1))
    batches = [rows(3, 4) | {"lengths": torch.tensor(given)} for given in sizes]
    exact_in_company(Own(forward, **linears("first", "out")), batches, engine)


def written(self: Any, h: Tensor, mask: Tensor) -> Tensor:
    """As wav2vec 2.0 hides frames: one learnt vector, in any number of places."""
    h = h.clone()
    h[mask] = self.token.weight[0]
    return h


def written_by_index(self: Any, h: Tensor, mask: Tensor) -> Tensor:
    h = h.clone()
    h[mask.nonzero(as_tuple=True)] = self.token.weight
    return h


def written_to_a_slice(self: Any, h: Tensor, mask: Tensor) -> Tensor:
    h = h.clone()
    h[mask, 1:] = self.token.weight[0, 1:]
    return h


def given_copies(self: Any, h: Tensor, mask: Tensor) -> Tensor:
    return h.masked_scatter(mask[..., None], self.token.weight.expand(int(mask.sum()), -1))


def written_copies(self: Any, h: Tensor, mask: Tensor) -> Tensor:
    """Which a layer has been through."""
    h = h.clone()
    h[mask] = torch.tanh(self.first(self.token.weight.repeat(int(mask.sum()), 1)))
    return h


def written_zeros(self: Any, h: Tensor, mask: Tensor) -> Tensor:
    """Which have the batch's kind, and nothing of it."""
    h = h.clone()
    h[mask] = torch.tanh(self.first(h.new_zeros(int(mask.sum()), D))) + self.token.weight
    return h


def met_by_copies(self: Any, h: Tensor, mask: Tensor) -> Tensor:
    copies = self.token.weight.expand(int(mask.sum()), -1)
    return h.index_put((mask,), torch.tanh(h[mask] + copies))


@pytest.mark.parametrize(
    "hide",
    [
        written,
        written_by_index,
        # torch 2.8 itself takes no slice behind a mask of two dimensions
        pytest.param(written_to_a_slice, marks=needs_torch(2, 11)),
        given_copies,
        written_copies,
        written_zeros,
        met_by_copies,
    ],
)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_learnt_token_in_as_many_places_as_there_are_examples(
    hide: Callable[..., Tensor], engine: str
) -> None:
    """One place for each example in the first batches; then as many of them, two of one example and none of another."""

    def forward(self: Any, x: Tensor, mask: Tensor) -> Tensor:
        return self.out(torch.tanh(hide(self, x, mask)))

    torch.manual_seed(0)
    even, uneven = torch.eye(3).bool(), torch.tensor([[1, 1, 0], [0, 0, 0], [0, 0, 1]]).bool()
    batches = [rows(3, 3) | {"mask": mask} for mask in (even, even, uneven, uneven, even)]
    model = Own(
        forward,
        token=nn.Embedding(1, D),
        **linears("out", *["first"] * (hide in (written_copies, written_zeros))),
    )
    exact_in_company(model, batches, engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_picked_rows_without_a_gradient_have_as_many_features_as_there_are_examples(engine: str) -> None:
    def forward(self: Any, x: Tensor, mask: Tensor) -> Tensor:
        x = x.clone()
        x[mask] = self.first(x[mask]) + self.token.weight
        return self.out(torch.tanh(x[:, 0]))

    torch.manual_seed(0)
    masks = [torch.tensor([[0, 1, 1], [0, 0, 1], [0, 1, 0], [last, 0, 1]]).bool() for last in (1, 0, 1)]
    model = Own(forward, token=nn.Embedding(1, D), **linears("first", "out"))
    exact_in_company(model, [rows(4, 3) | {"mask": mask} for mask in masks], engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_windows_have_as_many_positions_as_there_are_examples_of_which_one_has_a_loss(engine: str) -> None:
    """What gradients tell fits examples in the second dimension as well; a bias of positions does not."""

    def forward(self: Any, x: Tensor, weights: Tensor) -> Tensor:
        windows = x.reshape(-1, 2, D) + self.positions.weight
        return self.out(torch.tanh(windows)).view(x.shape)[:, 0] * weights[:, None]

    torch.manual_seed(0)
    given = [(2, torch.ones(3)), (4, torch.tensor([1.0, 0.0])), (4, torch.ones(3))]
    batches = [rows(len(each), length) | {"weights": each.double()} for length, each in given]
    exact_in_company(Own(forward, positions=nn.Embedding(2, D), **linears("out")), batches, engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_matrices_of_heads_are_proven_again_where_one_head_has_no_gradient(engine: str) -> None:
    """Of one example with a loss all heads are its own."""

    def forward(self: Any, x: Tensor, counted: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        heads = torch.bmm(x[order].view(-1, 2, 2).transpose(0, 1), self.matrices).relu()
        return heads.transpose(0, 1).reshape(x.shape)[order.argsort()] * counted[:, None]

    torch.manual_seed(0)
    model = Own(forward)
    model.matrices = nn.Parameter(torch.ones(2, 2, 2))
    positive, counted = rows(3)["x"].abs(), torch.tensor([1.0, 0.0, 0.0]).double()
    halves = [positive, positive * torch.tensor([1, 1, -1, -1])]
    exact_in_company(model, [{"x": x, "counted": counted} for x in halves], engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_positions_first_meet_their_table_in_a_batch_without_any_gradient(engine: str) -> None:
    def forward(self: Any, x: Tensor, counted: Tensor) -> Tensor:
        h = torch.tanh(x.transpose(0, 1) + self.positions.weight[:, None])
        return self.out(h).sum(0) * counted[:, None]

    torch.manual_seed(0)
    batches = [rows(3, 4) | {"counted": torch.full((3,), counted).double()} for counted in (0.0, 1.0)]
    exact_in_company(Own(forward, positions=nn.Embedding(4, D), **linears("out")), batches, engine)


def test_a_token_that_is_written_by_a_mask_is_proven_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, x: Tensor, mask: Tensor) -> Tensor:
        return self.out(torch.tanh(written(self, x, mask)))

    torch.manual_seed(0)
    model = Own(forward, token=nn.Embedding(1, D), **linears("out")).double()
    clipper, asked = attach(model), weighted_passes(monkeypatch)
    for step, places in enumerate((4, 5, 0, 2, 7)):
        asked.clear()
        mask = (torch.arange(9) < places).view(3, 3).T
        clipper.backward(model(**rows(3, 3), mask=mask).square().sum((1, 2)))
        assert step < 2 or asked == [False]
    assert LOOPED not in clipper.choices.values()


def added(h: Tensor, first: Tensor) -> Tensor:
    later = (first != torch.arange(len(h))).nonzero()[:, 0]
    return h + torch.zeros_like(h).index_add(0, later, h[first[later]] - h[later])


@pytest.mark.parametrize("pick", [lambda h, i: h[i], lambda h, i: F.one_hot(i, len(h)).to(h) @ h, added])
@pytest.mark.parametrize("hidden", [True, False])
def test_rows_that_meet_behind_the_last_use_in_a_later_batch_are_refused(pick: Any, hidden: bool) -> None:
    """Of equal rows the first one stands for all, and there are none at first: neighbours in a sparse graph."""

    def forward(self: Any, x: Tensor) -> Tensor:
        first = (x[:, None] == x).all(2).int().argmax(1)
        h = torch.tanh(self.first(x))
        return self.out(pick(h, first)) if hidden else pick(self.out(h), first)

    torch.manual_seed(0)
    model = Own(forward, **linears("first", "out")).double()
    clipper = attach(model)
    batches = [rows(5)["x"].double() for _ in range(3)]
    batches[2][3] = batches[2][1]
    for x in batches[:2]:
        clipper.backward(square(model, {"x": x}))
    with pytest.raises(UserError, match="mixes examples"):
        clipper.backward(square(model, {"x": batches[2]}))


def once_each(self: Any, x: Tensor) -> Tensor:
    """Equal rows are computed once."""
    once, where = x.unique(dim=0, return_inverse=True)
    return self.out(torch.tanh(self.first(once)))[where]


@pytest.mark.parametrize("engine", ENGINES)
def test_equal_rows_are_computed_once_in_an_order_that_changes_nothing_at_first(engine: str) -> None:
    torch.manual_seed(0)
    batches = [rows(4), rows(4), rows(5)]
    batches[0]["x"] = batches[0]["x"][batches[0]["x"][:, 0].argsort()]
    batches[2]["x"][3] = batches[2]["x"][1]
    exact_in_company(Own(once_each, **linears("first", "out")), batches, engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_row_of_two_equal_examples_is_not_that_of_a_third(engine: str) -> None:
    """Whose weight in a proof is the mean of theirs."""
    torch.manual_seed(0)
    batches = [rows(5) for _ in range(10)]
    for batch, (one, other) in zip(batches, combinations(range(5), 2), strict=True):
        batch["x"][one] = batch["x"][other]
    exact_in_company(Own(once_each, **linears("first", "out")), batches, engine)


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


def of_both(model: nn.Module, batch: Batch) -> Tensor:
    """Two views of an example, in one forward."""
    one, other = model(torch.cat([batch["x"], batch["x"] + 1])).chunk(2)
    return (one * other).sum(1)


def of_three(model: nn.Module, batch: Batch) -> Tensor:
    """Three rows for each, one beside the other."""
    found = model(torch.stack([batch["x"], batch["x"] + 1, batch["x"] * 2], 1).flatten(0, 1))
    return found.unflatten(0, (-1, 3)).prod(1).sum(1)


def contrasted(model: nn.Module, batch: Batch) -> Tensor:
    found = model(torch.cat([batch["x"], batch["x"] + 1]))
    table = found @ found.T - 1e9 * torch.eye(len(found), dtype=found.dtype)
    return torch.logsumexp(table, 1).view(2, -1).mean(0)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("losses", [of_both, of_three])
def test_the_loop_may_give_the_model_several_rows_of_each_example(
    losses: Callable[..., Tensor], engine: str
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 3))
    exact_in_company(model, [rows(5), rows(5), rows(3), rows(2)], engine, losses)


def triplets(model: nn.Module, batch: Batch) -> Tensor:
    """Of most, as of examples that are far enough apart, no loss is left."""
    one, alike, other = model(torch.cat([batch["x"], batch["x"] + 1e-3, batch["x"].flip(1)])).chunk(3)
    found = torch.nn.functional.triplet_margin_loss(one, alike, other, reduction="none", margin=0.1)
    return found * (torch.arange(len(found)) < len(found) // 3)


def one_view(model: nn.Module, batch: Batch) -> Tensor:
    return model(torch.cat([batch["x"], batch["x"] + 1]))[: len(batch["x"])].square().sum(1)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("losses", [triplets, one_view])
def test_some_of_several_rows_may_have_no_loss(losses: Callable[..., Tensor], engine: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 3))
    exact_in_company(model, [rows(6), rows(5), rows(3), rows(2)], engine, losses)


def test_the_largest_losses_of_more_examples_are_not_those_of_a_batch() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 3)).double()
    clipper = attach(model)
    for examples in (6, 8, 20):
        losses = model(rows(2 * examples)["x"]).square().sum(1)
        with pytest.raises(UserError, match="of exactly the examples that entered"):
            clipper.backward(losses.topk(examples).values)


@pytest.mark.parametrize("engine", ENGINES)
def test_of_its_own_kind_a_weight_is_none_of_the_batch(engine: str) -> None:
    """As PEFT's adapters have it, in batches of as many examples as a weight has rows."""

    def forward(self: Any, x: Tensor) -> Tensor:
        blocks = self.blocks.to(x) @ self.turn.to(x)
        mask = (x > 0).to(self.blocks) + (x < 1).type_as(self.out.weight)
        return self.out(mask * (x @ torch.block_diag(*blocks.type_as(x))))

    torch.manual_seed(0)
    model = Own(forward, **linears("out"))
    model.blocks = nn.Parameter(torch.randn(2, D // 2, D // 2))
    model.register_buffer("turn", torch.randn(2, D // 2, D // 2))
    exact_in_company(model, [rows(3), rows(2), rows(2)], engine)


def test_several_rows_of_each_example_are_not_compared_with_those_of_others() -> None:
    model = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 3)).double()
    with pytest.raises(UserError, match="mixes examples"):
        attach(model).backward(contrasted(model, rows(5)))


@pytest.mark.parametrize("examples", [2, 5])
@pytest.mark.parametrize("losses", [of_both, of_three])
def test_models_are_looked_at_where_the_loop_gives_them_several_rows_of_each_example(
    losses: Callable[..., Tensor], examples: int
) -> None:
    torch.manual_seed(0)
    model = Mixing(lambda h: h).double()
    clipper = attach(model)
    clipper.backward(losses(model, rows(examples)))
    assert clipper.notes == []
    mixing = Mixing(lambda h: h - h.detach().mean(0)).double()
    with pytest.raises(UserError, match="mixes examples"):
        attach(mixing).backward(losses(mixing, rows(examples)))


@pytest.mark.parametrize("shape", [(4, 3, D), (6, 3, D), (4, 6, D)])
def test_rows_of_positions_are_not_taken_for_examples(shape: tuple[int, ...]) -> None:
    """Positions come first: that they are kept apart says nothing of the examples, which stand in the second dimension."""

    def losses(model: nn.Module) -> Tensor:
        found = model(torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
        return found.square().sum((0, 2)).view(3, -1).sum(1)

    torch.manual_seed(0)
    mixing = Mixing(lambda h: h - h.detach().mean(1, keepdim=True)).double()
    clipper = attach(mixing)
    if shape[1] == 3:
        with pytest.raises(UserError, match="mixes examples"):
            clipper.backward(losses(mixing))
    else:
        # several of each, whose rows no size tells: said, not passed in silence
        clipper.backward(losses(mixing))
        assert any(note.startswith("not looked at") for note in clipper.notes)


class Mixing(nn.Module):
    def __init__(self, mix: Callable[[Tensor], Tensor]):
        super().__init__()
        self.first, self.out, self.mix = nn.Linear(D, D), nn.Linear(D, 3), mix

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.mix(torch.tanh(self.first(x))))


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


def test_sets_in_a_list_may_have_one_element_or_as_many_as_there_are_sets() -> None:
    class OneByOne(Mixing):
        def forward(self, xs: list[Tensor]) -> Tensor:
            return self.out(self.mix(torch.stack([torch.tanh(self.first(x)).mean(0) for x in xs])))

    def losses(model: nn.Module, batch: Any) -> Tensor:
        return model(batch).square().sum(1)

    def sets(sizes: tuple[int, ...]) -> list[Tensor]:
        return [rows(size)["x"] for size in sizes]

    torch.manual_seed(0)
    several = (1, 2, 2, 4, 3, 1), (4, 1, 3, 1), (1, 3, 3), (3, 3, 3)
    for first, begun in enumerate(several):
        model = OneByOne(lambda h: h).double()
        clipper = attach(model)
        for sizes in several[first:] + several[:first]:
            clipper.backward(losses(model, sets(sizes)))
        mixing = OneByOne(lambda h: h - h.detach().mean(0)).double()
        with pytest.raises(UserError, match="mixes examples"):
            attach(mixing).backward(losses(mixing, sets(begun)))


def test_rows_that_several_examples_share_are_not_said_to_have_been_looked_at() -> None:
    """Texts end to end in one row, in which examples could meet unseen."""

    class InOneRow(Mixing):
        def forward(self, x: Tensor, begins: Tensor) -> Tensor:
            texts = torch.tanh(self.first(x))[0].tensor_split(begins[1:-1].tolist())
            return self.out(self.mix(torch.stack([text.mean(0) for text in texts])))

    model = InOneRow(lambda h: h - h.detach().mean(0)).double()
    clipper = attach(model)
    clipper.backward(model(rows(1, 14)["x"], torch.tensor([0, 5, 7, 10, 14])).square().sum(1))
    assert ["not looked at" in note for note in clipper.notes] == [True]


def test_two_inputs_in_a_list_are_not_taken_for_two_examples() -> None:
    """Also where there are two examples; mixed ones are refused, and others are not."""

    class Both(Mixing):
        def forward(self, xs: list[Tensor]) -> Tensor:
            return self.out(self.mix(torch.tanh(self.first(xs[0]) + sum(xs[1:]))))

    torch.manual_seed(0)
    batches = [[rows(2)["x"], rows(size)["x"]] for size in (2, 2, 1)]
    losses = lambda model, batch: model(batch).square().sum(1)  # noqa: E731
    model = Both(lambda h: h).double()
    clipper = attach(model)
    for batch in batches:
        clipper.backward(losses(model, batch))
    for batch in batches:
        mixing = Both(lambda h: h - h.detach().mean(0)).double()
        with pytest.raises(UserError, match="mixes examples"):
            attach(mixing).backward(losses(mixing, batch))


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


def test_examples_that_come_alone_are_not_proven_again_and_again() -> None:
    """A physical batch of one is what long texts are trained with: no second back-propagation, and few looks."""

    def forward(self: Any, x: Tensor) -> Tensor:
        seen.append(len(x))
        hidden = torch.tanh(self.first(x))
        if len(x) > 2:
            hidden = hidden - hidden.mean(0).detach()
        if hidden.requires_grad:
            hidden.register_hook(lambda _: back.append(len(x)))
        return self.out(hidden)

    seen: list[int] = []
    back: list[int] = []
    torch.manual_seed(0)
    model = Own(forward, **linears("first", "out"))
    clipper = attach(model)
    for _ in range(4):
        clipper.backward(model(x=torch.randn(1, D)).square().sum(1))
    seen.clear()
    back.clear()
    for _ in range(8):
        clipper.backward(model(x=torch.randn(1, D)).square().sum(1))
    assert (seen, back) == ([1] * 8, [1] * 8)
    # the first batch with company is looked at, as if nothing were known
    with pytest.raises(UserError, match="mixes examples"):
        clipper.backward(model(x=torch.randn(3, D)).square().sum(1))


@pytest.mark.parametrize("first", [True, False])
def test_what_is_proven_of_time_first_is_proven_once(monkeypatch: pytest.MonkeyPatch, first: bool) -> None:
    """Also where nothing that has entered has the batch in front, and behind a layer that turns it."""
    visits = weighted_passes(monkeypatch)

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.out(self.rnn(torch.tanh(self.first(x)))[0]).mean(1 if first else 0)

    torch.manual_seed(0)
    model = Own(forward, **linears("first", "out"), rnn=nn.GRU(D, D, batch_first=first))
    clipper = attach(model)
    for step in range(6):
        visits.clear()
        clipper.backward(model(x=torch.randn(*((5, 7) if first else (7, 5)), D)).square().sum(1))
        assert step < 2 or len(visits) == 1
    assert not any(method.startswith("one back-propagation") for method in clipper.choices.values())


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
