"""Rows that are picked, written to places or computed once for several examples: each is still of its own example."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpexp.clipping import attach
from dpexp.clipping.loop import LOOPED
from dpexp.errors import UserError
from tests.clipping.exact_steps import ENGINES, D, exact_in_company, rows, square
from tests.clipping.naive import weighted_passes
from tests.clipping.test_unusual_inputs import Own, linears
from tests.versions import needs_torch


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
