"""The weights of a proof tell examples apart, and the proof uses them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpexp.clipping import attach
from dpexp.clipping.survey.layouts import LEVELS, MANY_LEVELS, ROWS, SECOND, all_weights, candidates, weights
from dpexp.clipping.survey.observed import follows, signature
from dpexp.errors import LateError, UserError
from tests.clipping.exact_steps import exact_in_company
from tests.clipping.zoo import C, D

EXCHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "mirror images": lambda h: h.flip(0),
    "neighbours": lambda h: h.roll(1, 0),
    "halves": lambda h: h.roll(len(h) // 2, 0),
}


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_weights_change_when_examples_are_exchanged(exchange: str) -> None:
    for size in range(2, 200):
        found = weights(size)
        assert not torch.equal(found, EXCHANGES[exchange](found)), size


def test_multiplying_by_a_weight_rounds_nothing() -> None:
    x = torch.randn(100)
    for level in (*LEVELS, *MANY_LEVELS):
        assert torch.equal(x * level / level, x)


@pytest.mark.parametrize("levels", [LEVELS, MANY_LEVELS])
@pytest.mark.parametrize("size", [1, 2, 6, 7, 16, 17, 36, 37, 64, 300])
def test_no_two_examples_have_the_same_weights_in_all_proofs(size: int, levels: tuple[float, ...]) -> None:
    found = all_weights(size, levels)
    assert torch.equal(found[0], weights(size, levels=levels))
    assert len(set(zip(*(each.tolist() for each in found), strict=True))) == size


def test_a_proof_fails_for_one_row_and_says_nothing_about_zeros() -> None:
    value = torch.randn(6, 2)
    by_row = weights(6)
    plain, right = (value, value.abs()), (by_row[:, None] * value, value.abs())
    assert follows(plain, right, by_row, torch.float32)
    wrong = right[0].clone()
    wrong[4, 1] *= -1
    assert follows(plain, (wrong, value.abs()), by_row, torch.float32) is False
    zero = torch.zeros(6, 2)
    assert follows((zero, zero), (zero, zero), by_row, torch.float32) is None


def test_a_row_that_one_projection_does_not_see_follows_no_other_weight() -> None:
    directions = signature(torch.eye(9), ROWS, 9)[0]
    rows = torch.randn(2, 9)
    rows -= (rows @ directions[:, :1]) * directions[:, 0] / directions[:, 0].square().sum()
    by_row = torch.tensor([2.0, -2.0])
    plain, right, other = (signature(rows * w[:, None], ROWS, 2) for w in (torch.ones(2), by_row, -by_row))
    assert follows(plain, right, by_row, torch.float32)
    assert follows(plain, other, by_row, torch.float32) is False


class Mixed(nn.Module):
    """Each example is mixed with another one of its batch."""

    def __init__(self, exchange: Callable[[Tensor], Tensor]):
        super().__init__()
        self.first, self.second, self.exchange = nn.Linear(D, 6), nn.Linear(6, C), exchange

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.second(torch.tanh(0.7 * h + 0.3 * self.exchange(h)))


@pytest.mark.parametrize("engine", ["auto", "ghost", "opacus"])
@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_examples_mixed_with_each_other_are_refused(exchange: str, size: int, engine: str) -> None:
    model = Mixed(EXCHANGES[exchange])
    clipper = attach(model, engine=engine)
    with pytest.raises(UserError):
        clipper.backward(model(torch.randn(size, D)).pow(2).sum(1))
    assert all(p.grad is None for p in model.parameters())


class Turned(nn.Module):
    """Puts the rows in the opposite order for a layer, and back, by a function that says nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(D, D), nn.Linear(D, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.inner(x.T.fliplr().T)).T.fliplr().T)


@pytest.mark.parametrize("engine", ["auto", "ghost"])
def test_what_one_example_tells_is_not_believed_of_the_others(engine: str) -> None:
    """The loss of the middle one alone, whose row stays where it is, is no masked one in the first two batches."""
    model = Turned()
    clipper = attach(model, engine=engine)
    for counted in ([0, 0, 1, 0, 0], [0, 0, 1, 0, 0]):
        clipper.backward(model(torch.randn(5, D)).pow(2).sum(1) * torch.tensor(counted))
    with pytest.raises(UserError, match="mixes examples"):
        clipper.backward(model(torch.randn(5, D)).pow(2).sum(1))


@pytest.mark.parametrize("size", range(2, 9))
def test_a_hook_that_goes_by_the_largest_gradient_of_the_batch_is_refused(size: int) -> None:
    model = nn.Sequential(nn.Linear(D, 6), nn.Tanh(), nn.Linear(6, C))
    clipper = attach(model)
    x = torch.randn(size, D)
    model[0].register_forward_hook(lambda *a: a[2].register_hook(lambda g: g / g.abs().max()) and None)
    for largest in range(size):
        sizes = torch.ones(size).index_fill(0, torch.tensor(largest), 10.0)
        with pytest.raises(UserError, match="mixes examples"):
            clipper.backward(model(x).pow(2).sum(1) * sizes)


class TwoLayouts(nn.Module):
    """One linear map, used on flattened batches: example by example, and, last, position by position."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(D, D)

    def forward(self, x: Tensor, orders: str) -> Tensor:
        for order in orders:
            h = x.transpose(0, 1) if order == "t" else x
            h = torch.tanh(self.inner(h.reshape(-1, D))).view(h.shape)
            x = x + (h.transpose(0, 1) if order == "t" else h)
        return x


@pytest.mark.parametrize("engine", ["auto", "ghost"])
@pytest.mark.parametrize("calls", [("et",), ("te",), ("e", "t"), ("t", "e"), ("tt", "tt")])
def test_a_module_may_see_two_layouts(calls: tuple[str, ...], engine: str) -> None:
    """In one forward pass, or in two whose losses are added; also when both are known already."""
    model = TwoLayouts().double()
    x = torch.randn(3, 4, D, dtype=torch.float64)

    def losses(examples: slice) -> Tensor:
        return sum(((model(x[examples], orders) - 1).pow(2).sum((1, 2)) for orders in calls), torch.zeros(1))

    naive = [torch.autograd.grad(losses(slice(i, i + 1)).sum(), list(model.parameters())) for i in range(3)]
    norms = torch.stack([torch.cat([g.flatten() for g in gs]).norm() for gs in naive])
    clipper = attach(model, clip_norm=1.0, engine=engine)
    for _ in range(4):
        model.zero_grad()
        report = clipper.backward(losses(slice(None)))
        torch.testing.assert_close(report.norms[0], norms)
        for p, gs in zip(model.parameters(), zip(*naive, strict=True), strict=True):
            torch.testing.assert_close(p.grad, sum(g / n for g, n in zip(gs, norms, strict=True)))


@pytest.mark.parametrize("engine", ["auto", "ghost"])
@pytest.mark.parametrize("flat", [False, True])
def test_two_layouts_may_come_in_another_order_later(flat: bool, engine: str) -> None:
    """With as many positions as examples, or flattened, their shapes are the same."""

    class Turning(TwoLayouts):
        def forward(self, x: Tensor, orders: str) -> Tensor:
            if flat:
                return super().forward(x, orders)
            for order in orders:
                h = torch.tanh(self.inner(x.transpose(0, 1) if order == "t" else x))
                x = x + (h.transpose(0, 1) if order == "t" else h)
            return x

    torch.manual_seed(0)
    model = Turning().double()

    def losses(x: Tensor, orders: str) -> Tensor:
        return (model(x, orders) - 1).pow(2).sum((1, 2))

    def naive(x: Tensor, orders: str) -> Tensor:
        each = (
            torch.autograd.grad(losses(x[i : i + 1], orders).sum(), list(model.parameters()))
            for i in range(3)
        )
        return torch.stack([torch.cat([g.flatten() for g in gs]).norm() for gs in each])

    steps = [
        (torch.randn(3, n, D, dtype=torch.float64), o)
        for n, o in ((3, "eet"), (4, "eet"), (3, "ete"), (3, "eet"))
    ]
    norms = [naive(*step) for step in steps]
    clipper = attach(model, engine=engine)
    for step, expected in zip(steps, norms, strict=True):
        torch.testing.assert_close(clipper.backward(losses(*step)).norms[0], expected)


class TwoWays(nn.Module):
    """Flattens its batch example by example or position by position, and leaves as many nodes of autograd behind."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(D, D), nn.Linear(D, C)

    def forward(self, x: Tensor, turned: bool) -> Tensor:
        h = torch.einsum("btd->tbd", x) if turned else x.roll(1, 1)
        h = torch.tanh(self.first(h.reshape(-1, D))).view(h.shape)
        h = h.transpose(0, 1) if turned else h.roll(-1, 1)
        return self.out(h[:, -1])


@pytest.mark.parametrize("engine", ["auto", "ghost"])
@pytest.mark.parametrize(
    ("turns", "largest"), [([0, 0, 0, 1], 1.0), ([1, 1, 1, 1, 0], 1.0), ([1, 1, 0], 1e6)]
)
def test_another_layout_is_seen_in_its_first_batch(turns: list[int], largest: float, engine: str) -> None:
    """Also behind one example with a large gradient, of whose first row both layouts say the same."""
    torch.manual_seed(0)
    sizes = [3, 3, 3, 3, 3] if largest == 1 else [2, 2, 3]
    batches = [{"x": torch.randn(n, 2, D).double(), "turned": t} for n, t in zip(sizes, turns, strict=False)]

    def losses(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        scale = torch.ones(len(batch["x"])).index_fill(0, torch.tensor(0), largest)
        return model(**batch).pow(2).sum(1) * scale

    exact_in_company(TwoWays(), batches, engine, losses)


@pytest.mark.parametrize("engine", ["auto", "ghost"])
@pytest.mark.parametrize("length", [2, 3])
@pytest.mark.parametrize("inside", [True, False])
def test_another_layout_of_the_same_functions_is_seen(inside: bool, length: int, engine: str) -> None:
    """What is turned before it has a gradient, and back by a mean of the model's or of its losses, is the same functions."""

    class Pools(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.out = nn.Linear(D, D), nn.Linear(D, C)

        def forward(self, x: Tensor, turned: bool) -> Tensor:
            x = x.transpose(0, 1) if turned else x
            h = torch.tanh(self.first(x.reshape(-1, D)))
            if inside:
                h = h.view(*x.shape[:2], D).mean(0 if turned else 1)
            return self.out(h)

    def losses(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        out, turned = model(**batch), batch["turned"]
        if inside:
            return out.pow(2).sum(1)
        return out.view(length, 3, C).sum((0, 2)) if turned else out.view(3, length, C).sum((1, 2))

    torch.manual_seed(0)
    batches = [
        {"x": torch.randn(3, length, D).double(), "turned": t} for t in (False, False, False, True, False)
    ]
    exact_in_company(Pools(), batches, engine, losses)


@pytest.mark.parametrize("engine", ["auto", "ghost"])
def test_what_a_longer_batch_shows_is_not_believed_of_an_earlier_length(engine: str) -> None:
    class Squares(nn.Module):
        """Positions first where there are as many as examples."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.out = nn.Linear(D, D), nn.Linear(D, C)

        def forward(self, x: Tensor) -> Tensor:
            turned = x.shape[0] == x.shape[1]
            h = torch.tanh(self.first(x.transpose(0, 1) if turned else x))
            return self.out((h.transpose(0, 1) if turned else h).sum(1))

    torch.manual_seed(0)
    batches = [{"x": torch.randn(3, length, D).double()} for length in (3, 4, 3)]
    exact_in_company(Squares(), batches, engine)


def test_examples_with_the_same_weight_do_not_change_places_unseen() -> None:
    """In a model that puts rows in order later, before a lookup, which no gradient goes through; one example has a loss."""

    class Sorts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.sorts = nn.Embedding(4, 3), False

        def forward(self, x: Tensor) -> Tensor:
            if not self.sorts:
                return self.table(x.argmax(-1))
            order = x[:, 0, 0].argsort()[:, None, None].expand_as(x)
            found = self.table(x.gather(0, order).argmax(-1))
            order = order[..., :3]
            return torch.zeros_like(found).scatter(0, order, found)

    given = weights(8).tolist()
    first, second = next((a, b) for b in range(8) for a in range(b) if given[a] == given[b])
    torch.manual_seed(0)
    x = torch.randn(8, 4, 4).double()
    places = torch.arange(8)
    places[first], places[second] = second, first
    x[:, 0, 0] = places.double()
    model = Sorts().double()
    clipper = attach(model)
    clipper.backward(model(x).square().sum((1, 2)))
    model.sorts = True
    for _ in range(3):
        losses = model(x).square().sum((1, 2)) * torch.zeros(8).index_fill(0, torch.tensor(first), 1.0)
        try:
            norms = clipper.backward(losses).norms[0]
            break
        except LateError:
            continue
    assert norms.nonzero().flatten().tolist() == [first]


def test_features_are_no_examples_where_there_are_as_many() -> None:
    """Of rows that are mapped one by one, picked by index, say."""
    two = torch.Size([5, 4])
    assert candidates(two, torch.Size([5, 4]), 4) == []
    # ids, positions first; what only the output tells of
    assert candidates(two, torch.Size([5, 4, 7]), 4) == [SECOND]
    assert candidates(None, two, 4) == [SECOND]


def test_a_position_without_a_finite_gradient_in_every_example_is_no_mixing() -> None:
    """Of as many positions as a multiple of the examples."""
    model = nn.Linear(4, 4)
    clipper = attach(model)
    h = model(torch.randn(3, 6, 4))
    # the square root has no finite gradient at zero
    report = clipper.backward(h.square().sum((1, 2)) + (h[:, 0] * 0).sqrt().sum(1))
    assert report.norms.isnan().all()
    assert not any(bool(p.grad.any()) for p in model.parameters() if p.grad is not None)
