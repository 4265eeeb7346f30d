"""Rows that a model puts in another order, also one that changes nothing in the first batch: proven again, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpexp.clipping import attach
from dpexp.errors import UserError
from tests.clipping.exact_steps import ENGINES, Batch, D, exact_in_company, rows, square
from tests.clipping.naive import weighted_passes
from tests.clipping.test_unusual_inputs import Own, linears


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
