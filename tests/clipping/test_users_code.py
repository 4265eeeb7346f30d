"""What people's own code does in and around a model that is clipped: exact, or refused for a reason."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from dpexp.clipping import attach
from dpexp.clipping.loop import LOOPED
from dpexp.clipping.methods.microbatches import MicrobatchClipper
from dpexp.clipping.methods.projected import ProjectedClipper
from dpexp.errors import UserError
from tests.clipping.exact_steps import WIDTH, exact, rows, square
from tests.clipping.test_engines import expected
from tests.clipping.test_followed_parameters import own
from tests.clipping.test_unusual_inputs import Batch

D = WIDTH
ENGINES = ["auto", "ghost", "loop"]


def positional(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch["x"]).square().sum(1)


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3)).double()


def exact_in_company(
    model: nn.Module,
    batches: list[Batch],
    engine: str,
    losses: Callable[..., Tensor] = square,
    patient: bool = False,
) -> None:
    """Every step equals the loss-by-loss gradients of a model without a clipper, on the same batch.

    ``patient``: one that says so is run again.
    """
    model.double()
    plain = copy.deepcopy(model)
    clipper = attach(model, clip_norm=0.5, engine=engine)
    for batch in batches:
        each = [
            torch.autograd.grad(loss, list(plain.parameters()), retain_graph=True, materialize_grads=True)
            for loss in losses(plain, batch)
        ]
        per_example = {
            name: torch.stack([grads[j] for grads in each])
            for j, (name, _) in enumerate(plain.named_parameters())
        }
        model.zero_grad()
        try:
            report = clipper.backward(losses(model, batch))
        except UserError as error:
            if not patient or "run this step again" not in str(error):
                raise
            report = clipper.backward(losses(model, batch))
        norms, sums = expected(per_example, clipper.groups, clipper.thresholds)
        torch.testing.assert_close(report.norms, norms, rtol=1e-9, atol=1e-12)
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.grad, sums[name], rtol=1e-9, atol=1e-11)


def rehearsed(model: nn.Module, x: Tensor, public: Tensor) -> Tensor:
    return model(x).square().sum(1) + 0.1 * public.square().mean()


def like_prototypes(model: nn.Module, x: Tensor, public: Tensor) -> Tensor:
    return torch.cdist(model(x), public).log_softmax(1)[:, 0]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("losses", [rehearsed, like_prototypes])
def test_public_rows_have_a_part_in_every_loss(losses: Callable[..., Tensor], engine: str) -> None:
    """As many as there are examples, or others; without a word they are refused."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D), nn.Linear(D, 3)).double()
    rows, plain = torch.randn(4, D, dtype=torch.float64), copy.deepcopy(model)
    clipper = attach(model, clip_norm=0.5, engine=engine)
    for examples in (4, 3, 1):
        x = torch.randn(examples, D, dtype=torch.float64)
        each = [
            torch.autograd.grad(loss, list(plain.parameters()), retain_graph=True)
            for loss in losses(plain, x, plain(rows))
        ]
        names = [name for name, _ in plain.named_parameters()]
        per_example = {name: torch.stack(g) for name, g in zip(names, zip(*each, strict=True), strict=True)}
        model.zero_grad()
        with clipper.public():
            public = model(rows)
        clipper.backward(losses(model, x, public))
        _, sums = expected(per_example, clipper.groups, clipper.thresholds)
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.grad, sums[name], rtol=1e-9, atol=1e-11)
    assert clipper.notes == []
    clipper.detach()
    with pytest.raises(UserError, match="mixes examples"):
        attach(model, engine=engine).backward(
            losses(model, torch.randn(4, D, dtype=torch.float64), model(rows))
        )


# -- gradients of something else ---------------------------------------------------------------------------------------


def adversarial(model: nn.Module, batch: Batch) -> Tensor:
    """Losses on examples that were moved along the gradients of their own losses."""
    x = batch["x"].clone().requires_grad_(True)
    (direction,) = torch.autograd.grad(model(x).square().sum(), x)
    return model(batch["x"] + 0.1 * direction.sign()).square().sum(1)


def adversarial_by_backward(model: nn.Module, batch: Batch) -> Tensor:
    x = batch["x"].clone().requires_grad_(True)
    model(x).square().sum().backward(inputs=[x])
    return model(batch["x"] + 0.1 * x.grad.sign()).square().sum(1)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("losses", [adversarial, adversarial_by_backward])
def test_adversarial_examples_are_made_with_the_clipped_model(losses: Any, engine: str) -> None:
    exact_in_company(perceptron(), [rows(5), rows(5), rows(3)], engine, losses)


def test_a_generator_learns_through_a_clipped_discriminator() -> None:
    """As in every private GAN: the discriminator sees data, and the generator the discriminator."""
    discriminator, generator = perceptron(), nn.Linear(2, WIDTH).double()
    plain, noise = copy.deepcopy(discriminator), torch.randn(6, 2, dtype=torch.float64)
    right = torch.autograd.grad(plain(generator(noise)).sum(), list(generator.parameters()))
    clipper = attach(discriminator)
    for _ in range(2):
        clipper.backward(discriminator(rows(5)["x"]).square().sum(1))
        found = torch.autograd.grad(discriminator(generator(noise)).sum(), list(generator.parameters()))
        torch.testing.assert_close(found, right)
        before = {name: p.grad.clone() for name, p in discriminator.named_parameters()}
        generator.zero_grad()
        discriminator(generator(noise)).sum().backward(inputs=list(generator.parameters()))
        torch.testing.assert_close([p.grad for p in generator.parameters()], list(right))
        assert all(torch.equal(p.grad, before[name]) for name, p in discriminator.named_parameters())


def test_gradients_of_parameters_are_still_the_clippers() -> None:
    model, x = perceptron(), rows(5)["x"].requires_grad_(True)
    attach(model)
    params = list(model.parameters())
    with pytest.raises(RuntimeError, match=r"clipper\.backward"):
        model(x).square().sum().backward()
    with pytest.raises(RuntimeError, match=r"clipper\.backward|not have been used"):
        torch.autograd.grad(model(x).square().sum(), [x, *params])
    model(x).square().sum().backward(inputs=[x])
    assert all(p.grad is None for p in params)


def test_losses_behind_which_two_clippers_stand_are_refused() -> None:
    body, head = perceptron(), nn.Linear(3, 2).double()
    clippers = [attach(body), attach(head)]
    for clipper in clippers:
        losses = head(body(rows(5)["x"])).square().sum(1)
        with pytest.raises(UserError, match="two models with a clipper each"):
            clipper.backward(losses)
    assert all(p.grad is None for p in [*body.parameters(), *head.parameters()])


class Clamped(torch.autograd.Function):
    """A backward that is no multiple of what arrives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.clamp(-0.01, 0.01)


def selective(model: nn.Module, batch: Batch) -> Tensor:
    """Products are kept, all else is computed again."""
    kept = partial(
        create_selective_checkpoint_contexts, [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    )
    return checkpoint(model, batch["x"], use_reentrant=False, context_fn=kept).square().sum(1)


@pytest.mark.parametrize(
    ("losses", "reason"),
    [
        (selective, "selective activation checkpointing"),
        (lambda m, b: Clamped.apply(m(b["x"])).square().sum(1), "clamps or normalises gradients"),
    ],
)
def test_what_cannot_be_proven_is_told_by_its_name(losses: Callable[..., Tensor], reason: str) -> None:
    model = perceptron()
    with pytest.raises(UserError, match=reason):
        attach(model).backward(losses(model, rows(4)))
    assert all(p.grad is None for p in model.parameters())


def test_hooks_on_gradients_of_parameters_are_refused() -> None:
    """No gradient of a single example would pass through them."""
    model = perceptron()
    handle = model[0].weight.register_hook(lambda g: g * 0)
    with pytest.raises(UserError, match=r"0\.weight has a hook"):
        attach(model)
    handle.remove()
    clipper, x = attach(model), rows(5)["x"]
    clipper.backward(model(x).square().sum(1))
    model[2].bias.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(UserError, match=r"2\.bias has a hook"):
        model(x)


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


class Hooked(nn.Module):
    """Hangs a hook on a weight, or on what is computed from it, in its forward."""

    def __init__(self, hook: Callable[[Tensor], Tensor], derived: bool = True) -> None:
        super().__init__()
        self.layer, self.hook, self.derived = nn.Linear(WIDTH, 3), hook, derived

    def forward(self, x: Tensor) -> Tensor:
        weight = self.layer.weight
        value = weight * 2.0 if self.derived else weight
        if value.requires_grad:
            value.register_hook(self.hook)
        return F.linear(x, value, self.layer.bias)


def test_hooks_that_a_forward_hangs_on_parameters_are_refused() -> None:
    model = Hooked(lambda g: g * 0.1, derived=False).double()
    clipper = attach(model)
    with pytest.raises(UserError, match=r"layer\.weight has a hook"):
        clipper.backward(model(rows(5)["x"]).square().sum(1))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "hook",
    [
        lambda g: g * 0.1,
        lambda g: g.clamp(-0.3, 0.3),
        lambda g: g / g.norm().clamp(min=1.0),
        lambda g: g.clamp(min=0.0),
        lambda g: torch.where(g.abs() == g.abs().max(), g, 0.0),
    ],
)
def test_what_a_hook_makes_of_a_gradient_it_makes_of_each_examples(
    hook: Callable[[Tensor], Tensor], engine: str
) -> None:
    """A clamped sum is not the sum of what is clamped: an example could move it by more than its threshold."""
    exact_in_company(Hooked(hook), [rows(5), rows(4)], engine, positional)


class FixedPoint(nn.Module):
    """An equilibrium, whose gradient a hook solves for by gradients of its own."""

    def __init__(self, detached: bool) -> None:
        super().__init__()
        self.layer, self.detached = nn.Linear(WIDTH, WIDTH), detached

    def step(self, z: Tensor, x: Tensor, params: dict[str, Tensor]) -> Tensor:
        return torch.tanh(0.1 * torch.func.functional_call(self.layer, params, (z,)) + x)

    def forward(self, x: Tensor) -> Tensor:
        params: dict[str, Tensor] = dict(self.layer.named_parameters())
        z = torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(40):
                z = self.step(z, x, params)
        y = self.step(z, x, params)
        z.requires_grad_()
        if self.detached:
            params = {name: p.detach() for name, p in params.items()}
        again = self.step(z, x, params)

        def solve(gradient: Tensor) -> Tensor:
            solution = gradient
            for _ in range(40):
                solution = gradient + torch.autograd.grad(again, z, solution, retain_graph=True)[0]
            return solution

        if y.requires_grad:
            y.register_hook(solve)
        return y


@pytest.mark.parametrize("engine", ENGINES)
def test_a_back_propagation_inside_of_another_passes_no_tap(engine: str) -> None:
    """A solver of a fixed point asks for gradients of its iterations: what arrived there was added to the parameters' own."""
    exact_in_company(FixedPoint(detached=True), [rows(5), rows(4)], engine, positional)
    model = FixedPoint(detached=False).double()
    clipper = attach(model, engine=engine)
    with pytest.raises(UserError, match=r"layer .*inside of the one that clips.*detached parameters"):
        clipper.backward(positional(model, rows(5)))
    assert model.layer.weight.grad is None


def some_twice(model: nn.Module, batch: Batch) -> Tensor:
    """Losses of all examples, and of some of them once more."""
    x, losses = batch["x"], positional(model, batch)
    some = (x[:, 0] > 0).nonzero()[:, 0]
    return losses.index_add(0, some, positional(model, {"x": 2 * x[some]})) if len(some) else losses


@pytest.mark.parametrize("engine", ENGINES)
def test_a_model_may_be_called_again_on_some_examples(engine: str) -> None:
    """Where one use of a place is left to the loop, another one of the same backward pass may still be proven."""
    batches = [rows(size) for size in (2, 1, 3)]
    for batch in batches:
        batch["x"][:, 0].abs_().mul_(-1)[0].abs_()
    exact_in_company(perceptron(), batches, engine, some_twice)


class AddsByItself(torch.autograd.Function):
    """A product whose backward adds to the gradient of its weight by itself, as fused accumulation does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (x,), (g,) = ctx.saved_tensors, gradients
        gradient = x.T @ g
        if ctx.weight.grad is None:
            ctx.weight.grad = gradient
        else:
            ctx.weight.grad += gradient
        return g @ ctx.weight.T, None


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.fused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return AddsByItself.apply(self.first(x), self.fused._parameters["weight"])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("held", [False, True])
def test_a_gradient_that_is_written_on_the_way_is_refused(held: bool, engine: str) -> None:
    model = Fused().double()
    clipper = attach(model, engine=engine)
    for p in model.parameters() if held else ():
        p.grad = torch.zeros_like(p)
    with pytest.raises(UserError, match=r"writes to the gradient of fused\.weight"):
        clipper.backward(positional(model, rows(4)))
    assert model.fused.weight.grad is None


@pytest.mark.parametrize("held", [False, True])
def test_what_was_written_on_the_way_does_not_stay_where_the_pass_is_refused_for_another_reason(
    held: bool,
) -> None:
    model = Fused().double()
    clipper = attach(model)
    for p in model.parameters() if held else ():
        p.grad = torch.zeros_like(p)
    y = model(rows(4)["x"])
    with pytest.raises(UserError, match="mixes examples"):
        clipper.backward((y - y.mean(0)).square().sum(1))
    assert model.fused.weight.grad is None


@pytest.mark.parametrize(
    "make", [partial(ProjectedClipper, projections=2), partial(MicrobatchClipper, size=4)]
)
def test_of_clipping_without_taps_too(make: Any) -> None:
    model = Fused().double()
    clipper = make(model)
    clipper.prepare(1, dict)
    with pytest.raises(UserError, match=r"writes to the gradient of fused\.weight"):
        clipper.backward(positional(model, rows(4)))
    assert model.fused.weight.grad is None


# -- inside of the forward ---------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("engine", ENGINES)
def test_an_infinite_loss_adds_nothing_whatever_its_gradient(engine: str) -> None:
    """A constant that is infinite has a gradient all the same."""
    model, batch = perceptron(), rows(4)
    plain = copy.deepcopy(model)
    bad = torch.tensor([0.0, torch.inf, 0.0, 0.0])
    report = attach(model, engine=engine).backward(positional(model, batch) + bad)
    kept = torch.tensor([0, 2, 3])
    attach(plain, engine=engine).backward(positional(plain, {"x": batch["x"][kept]}))
    assert report.norms[0].isnan().tolist() == [False, True, False, False]
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


# -- tensors in lists --------------------------------------------------------------------------------------------------


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


# -- what it costs -----------------------------------------------------------------------------------------------------


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.one, self.other = (nn.Linear(D, D) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.body(x))
        return self.one(h), self.other(h)


@pytest.mark.parametrize("engine", ["auto", "ghost"])
def test_a_head_whose_output_nobody_takes_costs_nothing(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Like the pooler of BERT under a head of one's own: there is nothing to prove, again and again."""
    calls = []
    grad = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *a, **k: calls.append(1) or grad(*a, **k))
    model = TwoHeads().double()
    clipper = attach(model, engine=engine)
    for _ in range(3):
        calls.clear()
        clipper.backward(model(rows(5)["x"])[0].square().sum(1))
    assert len(calls) == (2 if engine == "ghost" else 1)


@pytest.mark.parametrize("engine", ENGINES)
def test_heads_in_turn(engine: str) -> None:
    torch.manual_seed(0)
    batches = [rows(5) | {"turn": turn} for turn in (0, 1, 0, 1, 1)]

    def losses(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["x"])[batch["turn"]].square().sum(1)

    exact_in_company(TwoHeads(), batches, engine, losses)


def test_attention_computes_what_it_does_without_a_clipper() -> None:
    """Its own forward hands on the weights of its last layer, and never calls that: a hook there is not called with a clipper."""
    x, attention = torch.randn(3, 4, 8), nn.MultiheadAttention(8, 2, batch_first=True)
    attention.out_proj.register_forward_hook(lambda *_: 2 * _[-1])
    before = attention(x, x, x)[0]
    attach(attention)
    assert torch.allclose(attention(x, x, x)[0], before, atol=1e-6)
