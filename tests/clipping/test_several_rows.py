"""Several rows of each example in one forward, or sets of rows: one's own may meet, those of others may not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpexp.clipping import attach
from dpexp.errors import UserError
from tests.clipping.exact_steps import ENGINES, Batch, D, exact_in_company, rows
from tests.clipping.test_unusual_inputs import Own, linears


class Mixing(nn.Module):
    def __init__(self, mix: Callable[[Tensor], Tensor]):
        super().__init__()
        self.first, self.out, self.mix = nn.Linear(D, D), nn.Linear(D, 3), mix

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.mix(torch.tanh(self.first(x))))


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
