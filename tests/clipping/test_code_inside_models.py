"""What people's code does inside of a forward, to parameters and with gradients: exact, or refused for a reason."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from dpexp.clipping import attach
from dpexp.clipping.loop import LOOPED
from dpexp.errors import UserError
from tests.clipping.exact_steps import (
    ENGINES,
    WIDTH,
    Batch,
    D,
    exact,
    exact_in_company,
    positional,
    rows,
    square,
)
from tests.clipping.test_followed_parameters import own


class Watched(nn.Module):
    """Is evaluated while its own forward runs, here or in another thread."""

    def __init__(self, by_thread: bool) -> None:
        super().__init__()
        self.layer, self.scale, self.by_thread = nn.Linear(WIDTH, 3), nn.Parameter(torch.rand(3)), by_thread
        self.said: list[Exception] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if torch.is_grad_enabled():
            if self.by_thread:
                thread = threading.Thread(target=self.evaluate, args=(x,))
                thread.start()
                thread.join()
            else:
                self.evaluate(x)
        return y * self.scale

    def evaluate(self, x: Tensor) -> None:
        try:
            with torch.no_grad():
                self(x)
        except Exception as error:
            self.said.append(error)


@pytest.mark.parametrize("by_thread", [True, False])
def test_an_evaluation_does_not_end_the_forward_that_it_comes_into(by_thread: bool) -> None:
    model = Watched(by_thread).double()
    clipper = attach(model)
    clipper.backward(model(rows(5)["x"]).square().sum(1))
    assert not model.said
    assert LOOPED not in clipper.choices.values()
    clipper.detach()
    exact_in_company(model, [rows(5), rows(4)], "auto", positional)


class InnerLoop(nn.Module):
    """Takes a step on each example alone before it answers, as in meta-learning."""

    def __init__(self, by_func: bool) -> None:
        super().__init__()
        self.weight, self.by_func = nn.Parameter(torch.randn(WIDTH, 3) / 2), by_func

    def forward(self, x: Tensor) -> Tensor:
        def error(weight: Tensor, row: Tensor) -> Tensor:
            return (row @ weight).tanh().square().sum()

        answers = []
        for row in x:
            if self.by_func:
                step = torch.func.grad(error)(self.weight, row)
            else:
                (step,) = torch.autograd.grad(error(self.weight, row), self.weight, create_graph=True)
            answers.append(row.flip(0) @ (self.weight - 0.1 * step))
        return torch.stack(answers)


def test_an_inner_loop_is_exact_by_torch_func_and_named_otherwise() -> None:
    model = InnerLoop(by_func=False).double()
    attach(model)
    with pytest.raises(UserError, match=r"gradient of weight .*torch\.func\.grad"):
        model(rows(5)["x"])
    exact_in_company(InnerLoop(by_func=True), [rows(5), rows(4)], "auto", positional, patient=True)


class Forces(nn.Module):
    """Energies of points and, of their places, the gradients of these."""

    def __init__(self, by_func: bool) -> None:
        super().__init__()
        self.first, self.out, self.by_func = nn.Linear(D, D), nn.Linear(D, 1), by_func

    def energies(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.first(x)))[:, 0]

    def forward(self, x: Tensor) -> Tensor:
        if self.by_func:
            forces = torch.func.grad(lambda x: self.energies(x).sum())(x)
        else:
            x = x.clone().requires_grad_()
            (forces,) = torch.autograd.grad(self.energies(x).sum(), x, create_graph=True)
        return torch.cat([self.energies(x)[:, None], forces], 1)


def test_a_gradient_of_the_input_is_exact_by_torch_func_and_named_otherwise() -> None:
    model = Forces(by_func=False).double()
    attach(model)
    with pytest.raises(UserError, match=r"a loss that contains a gradient .*torch\.func\.grad"):
        model(rows(5)["x"])
    exact_in_company(Forces(by_func=True), [rows(5), rows(4)], "auto", positional, patient=True)

    class Mixed(Forces):
        def forward(self, x: Tensor) -> Tensor:
            both = super().forward(x)
            return both - both.detach().mean(0)

    mixed = Mixed(by_func=True).double()
    with pytest.raises(UserError, match="mixes examples"):
        attach(mixed).backward(positional(mixed, rows(5)))


class Held(nn.Linear):
    """A layer whose weight is held to a norm, as networks for EEG do."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=0.3)
        return super().forward(x)


def test_what_a_forward_does_to_the_data_of_a_weight_is_done_to_the_parameter() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Held(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3)).double()
    plain, x = copy.deepcopy(model), rows(5)["x"]
    clipper = attach(model)
    assert torch.equal(model(x), plain(x))
    clipper.detach()
    assert torch.equal(model[0].weight, plain[0].weight)
    assert float(model[0].weight.norm(dim=1).max()) <= 0.3
    exact_in_company(model, [rows(5), rows(4)], "auto", positional)


class Copies(nn.Linear):
    """A layer that compares its weight with a copy, as a proximal term does."""

    def forward(self, x: Tensor) -> Tensor:
        before = copy.deepcopy(self.weight)
        return super().forward(x) + (self.weight - before).square().sum()


def test_a_forward_may_copy_a_weight() -> None:
    model = nn.Sequential(Copies(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))
    exact_in_company(model, [rows(5), rows(4)], "auto", positional)


class Follows(nn.Module):
    """A frozen teacher, which follows the student a little in every forward."""

    def __init__(self, gift: float = 0.0) -> None:
        super().__init__()
        self.student, self.gift = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 3)), gift
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for old, new in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            old.data = 0.9 * old.data + 0.1 * (new.data + 0.01) + self.gift * x.mean()
        return self.student(x) if self.gift else self.student(x) - self.teacher(x)


def test_a_teacher_that_follows_in_the_forward_is_left_where_it_is() -> None:
    torch.manual_seed(0)
    model, batch = Follows().double(), rows(5)
    plain = copy.deepcopy(model)
    clipper = attach(model)
    for _ in range(3):
        plain(batch["x"])
        clipper.backward(square(model, batch))
        assert all(map(torch.equal, model.teacher.parameters(), plain.teacher.parameters()))
    greedy = Follows(gift=0.1).double()
    with pytest.raises(
        UserError, match=r"teacher\.0.*writes what depends on the batch into the parameter 'weight'"
    ):
        attach(greedy).backward(square(greedy, batch))


class Doubled(nn.Parameter):
    """A parameter with an operation and a method of its own."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is F.linear:
                args = (args[0], 2 * args[1].as_subclass(Tensor), *args[2:])
            return func(*args, **(kwargs or {}))

    def halved(self) -> Tensor:
        return self / 2


class OfItsOwnKind(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.out = Doubled(torch.randn(D, D)), nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = F.linear(x, self.weight) + x @ self.weight.halved()
        return self.out(torch.tanh(h) * (2 if isinstance(self.weight, Doubled) else 1))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_parameter_of_a_kind_of_its_own_stays_of_this_kind(engine: str) -> None:
    exact(OfItsOwnKind(), [rows(3), rows(2)], engine)


def operator_in_place(self: Any, x: Tensor) -> Tensor:
    h = self.first(x)
    torch.ops.aten.add_.Tensor(h, self.shift)
    return self.out(torch.tanh(h))


def operators(self: Any, x: Tensor) -> Tensor:
    return torch.ops.aten.mul.Tensor(torch.ops.aten.linear.default(x, self.weight, self.shift), self.scale)


def masked(self: Any, x: Tensor) -> Tensor:
    """Two learnt queries; what is negative on average is hidden by -inf."""
    mask = torch.zeros(len(x), 1, x.shape[1], dtype=x.dtype)
    mask.masked_fill_((x.mean(-1) < -0.2)[:, None], -torch.inf)[..., 0] = 0
    return self.out(F.scaled_dot_product_attention(self.queries, x, x, mask))


def frozen_for_a_while(self: Any, x: Tensor) -> Tensor:
    """As an actor is trained through its critic, and both in one forward."""
    h = self.first(x)
    self.out.requires_grad_(False)
    through = self.out(h)
    self.out.requires_grad_(True)
    return through + self.out(torch.tanh(h.detach()))


INSIDE = {
    "an operator that writes": (operator_in_place, {"shift": (D,)}),
    "operators": (operators, {"weight": (D, D), "shift": (D,), "scale": (D,)}),
    "a mask of -inf": (masked, {"queries": (1, 2, D)}),
    "a layer that is frozen for a while": (frozen_for_a_while, {}),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", INSIDE)
def test_inside_of_a_forward(case: str, engine: str) -> None:
    torch.manual_seed(0)
    forward, shapes = INSIDE[case]
    exact(own(forward, **shapes), [rows(5, 6), rows(5, 6), rows(3, 6)], engine)


def asked_about(self: Any, x: Tensor) -> Tensor:
    """What people ask of a parameter before they use it."""
    known = isinstance(self.scale, nn.Parameter) and self.scale.is_leaf and self.scale.grad_fn is None
    return self.out(x * self.scale * self.scale.rate) if known else x


def test_a_parameter_is_the_same_for_who_asks_about_it() -> None:
    torch.manual_seed(0)
    model, batch = own(asked_about, scale=(D,)).double(), rows(5)
    model.scale.rate = 2.0
    before = model(**batch)
    clipper = attach(model)
    for _ in range(2):
        after = model(**batch)
        assert torch.equal(before, after)
        clipper.backward(after.square().sum(1))
    assert bool(model.scale.grad.any())


class Overwrites(nn.Module):
    """Writes to what a function was given that keeps less of it than a clipper does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shift = nn.Linear(D, D), nn.Parameter(torch.randn(D, D))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        y = torch.baddbmm(self.shift, h[:, :, None], x[:, None, :])
        return y.flatten(1) + h.zero_().repeat(1, D)


@pytest.mark.parametrize("engine", ENGINES)
def test_what_a_model_writes_to_is_left_to_autograd_from_the_next_forward_on(engine: str) -> None:
    torch.manual_seed(0)
    exact_in_company(Overwrites(), [rows(3), rows(2), rows(1), rows(3)], engine, patient=True)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_class_hears_of_no_subclass_while_a_clipper_is_attached(engine: str) -> None:
    known = []

    class Registered(nn.Linear):
        def __init_subclass__(cls, *, name: str) -> None:
            known.append(name)

    exact_in_company(nn.Sequential(Registered(D, D), nn.Tanh()), [rows(3), rows(2)], engine, positional)
    assert known == []


class Gated(nn.Module):
    """Time first, as long as the batch, and behind a gate that is closed at first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.weight = nn.Linear(D, 3), nn.Parameter(torch.randn(D, 3))
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.einsum("tbd,dk->btk", x.transpose(0, 1).contiguous(), self.weight)
        return self.first(x) + self.gate * mixed


@pytest.mark.parametrize("engine", ["auto", "ghost"])
@pytest.mark.parametrize("first", ["zeros", "NaN"])
def test_a_formula_is_not_believed_because_nothing_could_be_compared(first: str, engine: str) -> None:
    torch.manual_seed(0)
    model, batch = Gated().double(), rows(5, 5)
    plain = copy.deepcopy(model)
    plain.gate.data.fill_(1.0)
    clipper = attach(model, clip_norm=0.5, engine=engine)
    if first == "NaN":
        model.gate.data.fill_(1.0)
        batch["x"][1] = torch.nan
    clipper.backward(square(model, batch))
    model.gate.data.fill_(1.0)
    batch = rows(5, 5)
    report = clipper.backward(square(model, batch))
    for i, norm in enumerate(report.norms[0]):
        grads = torch.autograd.grad(
            square(plain, {"x": batch["x"][i : i + 1]}).sum(), list(plain.parameters())
        )
        torch.testing.assert_close(norm, torch.stack([g.norm() for g in grads]).norm())


class Tangents(nn.Module):
    """What a layer adds along a direction, by differentiation in forward mode."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(D, D), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        with forward_ad.dual_level():
            dual = torch.tanh(self.first(forward_ad.make_dual(x, torch.ones_like(x))))
            return self.out(forward_ad.unpack_dual(dual).tangent)


@pytest.mark.parametrize("engine", ["auto", "loop"])
def test_tangents_are_exact(engine: str) -> None:
    torch.manual_seed(0)
    exact(Tangents(), [rows(5), rows(5), rows(3)], engine)


class Shuffled(nn.Module):
    """Two rows in any order, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = (nn.Linear(D, D) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        order = torch.randperm(len(x))
        return self.out(torch.tanh(self.second(torch.tanh(self.first(x))[order]))[order.argsort()])


@pytest.mark.parametrize("seed", range(4))
def test_a_shuffle_that_leaves_two_rows_in_their_order_is_a_shuffle(seed: int) -> None:
    torch.manual_seed(seed)
    exact(Shuffled(), [rows(2) for _ in range(6)], "auto")


@torch.library.custom_op("dpexp_tests::mix", mutates_args=())
def mix(weight: Tensor, listed: list[Tensor], added: Tensor) -> Tensor:
    return listed[0] * weight + added


mix.register_autograd(
    lambda ctx, g: ((g * ctx.saved_tensors[1]).sum(0), [g * ctx.saved_tensors[0]], g),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0], inputs[1][0]),
)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.table, self.head = (
            nn.Parameter(torch.ones(D)),
            nn.Parameter(torch.randn(6, D)),
            nn.Linear(D, D),
        )

    def forward(self, x: Tensor, added: Tensor) -> Tensor:
        mixed = mix(self.weight, [x], added)
        # each example has a row of the table
        return self.head(torch.index_put(self.table, (torch.arange(len(x)),), mixed, accumulate=True))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_tensor_may_stand_behind_a_list_of_tensors(engine: str) -> None:
    """A custom operation, or ``index_put``: what is kept for its gradients comes back in its own place."""
    torch.manual_seed(0)
    batches = [{"x": torch.randn(6, D), "added": 100 * torch.randn(6, D)} for _ in range(3)]

    def losses(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["x"].double(), batch["added"].double()).square().sum(1)

    exact_in_company(Mixed(), batches, engine, losses)
