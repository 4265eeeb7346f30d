"""What goes back for one example may not go by the others, where what it gets out of the model does not."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dpexp.clipping import attach
from dpexp.errors import UserError

B, D = 6, 5


class Back(torch.autograd.Function):
    """Nothing on the way there, and ``way(x, gradient)`` on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, way: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.way = way
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.way(*ctx.saved_tensors, gradient), None


class Net(nn.Module):
    def __init__(self, between: Callable[[Tensor], Tensor]):
        super().__init__()
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, 3)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(torch.tanh(self.first(x))))


class Between(nn.Module):
    def __init__(self, between: Callable[[Tensor], Tensor]):
        super().__init__()
        self.between = between

    def forward(self, h: Tensor) -> Tensor:
        return self.between(h)


class StepSize(nn.Module):
    """A learned step of quantisation (LSQ), whose gradient is divided by how many numbers it rounds."""

    def __init__(self, of_batch: bool):
        super().__init__()
        self.step, self.of_batch = nn.Parameter(torch.tensor(0.2)), of_batch

    def forward(self, h: Tensor) -> Tensor:
        factor = 1 / math.sqrt(h.numel() if self.of_batch else h[0].numel())
        step = (self.step - self.step * factor).detach() + self.step * factor
        scaled = (h / step).clamp(-8, 7)
        return ((scaled.round() - scaled).detach() + scaled) * step


def hooked(h: Tensor, way: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    h, values = h * 1, h.detach()
    h.register_hook(lambda gradient: way(values, gradient))
    return h


def opposite(h: Tensor) -> Tensor:
    """Goes by the number of rows, in a way that is nothing in the sum over the rows of the weight before it."""
    parts = torch.tensor([3.0, -1.0, -1.0, -1.0, 0.0])
    return Back.apply(h, lambda x, g: g + len(x) * g[:, :1] * parts)


MIXED: dict[str, Callable[[], nn.Module]] = {
    "rows": lambda: Net(lambda h: Back.apply(h, lambda x, g: g / len(x))),
    "spread": lambda: Net(lambda h: Back.apply(h, lambda x, g: g * x.std())),
    "gate": lambda: Net(lambda h: Back.apply(h, lambda x, g: torch.where(x > x.mean(0), g, 0.0))),
    "hook": lambda: Net(lambda h: hooked(h, lambda x, g: g * x.std())),
    "step size": lambda: Net(StepSize(of_batch=True)),
    "none in few rows": lambda: Net(lambda h: h if len(h) > B // 2 else h.detach()),
    "opposite": lambda: nn.Sequential(nn.Linear(D, D, bias=False), Between(opposite)),
}
APART: dict[str, Callable[[], nn.Module]] = {
    "gate": lambda: Net(lambda h: Back.apply(h, lambda x, g: torch.where(x > 0, g, 0.0))),
    "hook": lambda: Net(lambda h: hooked(h, lambda x, g: g / x.norm(dim=1, keepdim=True))),
    "step size": lambda: Net(StepSize(of_batch=False)),
}


def batch(examples: int = B) -> Tensor:
    return torch.randn(examples, D, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("engine", ["auto", "ghost", "opacus"])
@pytest.mark.parametrize("name", MIXED)
def test_a_backward_that_goes_by_the_batch_is_refused(name: str, engine: str) -> None:
    torch.manual_seed(0)
    model = MIXED[name]()
    clipper = attach(model, engine=engine)
    with pytest.raises(UserError, match=r"the gradient of what one example gets|Opacus"):
        clipper.backward(model(batch()).square().sum(1))
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", APART)
def test_a_backward_of_each_example_alone_is_exact(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = APART[name]().to(dtype)
    plain, clipper, x = copy.deepcopy(model), attach(model, clip_norm=1e9), batch().to(dtype)
    clipper.backward(model(x).square().sum(1))
    for i in range(B):
        plain(x[i : i + 1]).square().sum().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("words", "classes"), [(150_000, 3), (270_000, 300_000)])
def test_a_large_first_table_shows_what_no_small_parameter_does(words: int, classes: int) -> None:
    """And of large parameters alone the smallest one does."""
    between = Between(lambda h: Back.apply(h, lambda x, g: g / len(x)))
    model = nn.Sequential(nn.Embedding(words, 8), between, nn.Linear(8, classes, bias=False))
    clipper = attach(model)
    with pytest.raises(UserError, match=r"0\.weight: the gradient of what one example gets"):
        clipper.backward(model(torch.arange(B)).square().sum(1))


def test_a_backward_that_takes_one_size_of_the_batch_only_is_told() -> None:
    def strict(x: Tensor, gradient: Tensor) -> Tensor:
        assert len(x) == B, "not my size"
        return gradient

    model = Net(lambda h: Back.apply(h, strict))
    clipper = attach(model)
    clipper.backward(model(batch()).square().sum(1))
    [note] = clipper.notes
    assert note.startswith("not looked at: whether the gradient")
    assert "AssertionError" in note


def test_what_is_computed_again_on_the_way_back_draws_nothing_and_leaves_nothing() -> None:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(D, D), nn.Dropout(0.5), nn.Tanh())
    model = nn.Sequential(nn.Linear(D, D), inner, nn.Linear(D, 3))
    inner.forward = lambda h: checkpoint(nn.Sequential(*inner), h, use_reentrant=False)  # type: ignore[method-assign]
    clipper = attach(model, clip_norm=1e9)
    for examples in (B, B + 1):
        model.zero_grad()
        clipper.backward(
            F.cross_entropy(model(batch(examples)), torch.zeros(examples).long(), reduction="none")
        )
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert not clipper.notes
    assert "one back-propagation per example" not in clipper.choices.values()


def test_what_is_drawn_on_the_way_back_alone_is_constant_in_a_look() -> None:
    drawn: list[Tensor] = []

    def shaken(x: Tensor, gradient: Tensor) -> Tensor:
        drawn.append(torch.rand(len(x), 2))
        return gradient * (drawn[-1][:, :1] < 2)

    model = Net(lambda h: Back.apply(h, shaken))
    clipper = attach(model)
    clipper.backward(model(batch()).square().sum(1))
    assert not clipper.notes
    # both halves among all, and alone
    constant = [len(numbers) for numbers in drawn if bool((numbers == numbers[0, 0]).all())]
    assert constant == [B, B // 2] * 2


class Kinks(nn.Module):
    """Rectifiers of what is next to zero, which rounding decides in 32 bits: kernels go by the size of the batch."""

    def __init__(self, size: int = 64) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(size, size, bias=False), nn.Linear(size, size, bias=False)
        self.head = nn.Linear(size, size)
        self.register_buffer("both", (self.two.weight.double() @ self.one.weight.double()).detach().float())

    def forward(self, x: Tensor) -> Tensor:
        nearly_zero = self.two(self.one(x)) - nn.functional.linear(x, self.both)
        return self.head(x) + nearly_zero.relu()


@pytest.mark.parametrize("examples", [2, 3, 5])
def test_gradients_that_rounding_decides_are_no_coupling(examples: int) -> None:
    torch.manual_seed(0)
    model = Kinks()
    clipper = attach(model)
    report = clipper.backward(model(torch.randn(examples, 64)).square().sum(1))
    assert report.norms.isfinite().all()


class Positions(nn.Module):
    """Positions become rows of features, and the gradient comes back in their order."""

    def forward(self, h: Tensor) -> Tensor:
        return F.layer_norm(h.flatten(2).transpose(1, 2), h.shape[1:2]).flatten(1)


class Column(nn.Module):
    """Rows of features become an image that is one pixel wide."""

    def forward(self, h: Tensor) -> Tensor:
        return h.transpose(1, 2).unsqueeze(-1)


def constant(norm: nn.Module, trained: bool = True) -> nn.Module:
    norm.track_running_stats = False
    return norm.eval().requires_grad_(trained)


ONE_WIDE = {
    "trained": lambda: [nn.Conv2d(3, 4, 1), constant(nn.BatchNorm2d(4)), Positions()],
    "frozen": lambda: [nn.Conv2d(3, 4, 1), constant(nn.BatchNorm2d(4), False), Positions()],
    "in space": lambda: [nn.Conv2d(3, 8, 1), nn.Unflatten(1, (4, 2)), constant(nn.BatchNorm3d(4)), Positions()],
    "a column": lambda: [nn.Linear(2, 4), nn.Flatten(1, 2), Column(), constant(nn.BatchNorm2d(4)), nn.Flatten()],
    "channels last": lambda: [
        nn.Conv2d(3, 4, 1), nn.InstanceNorm2d(4, affine=True), nn.GELU(), nn.Conv2d(4, 4, 1), nn.GELU(), nn.Flatten()
    ],
}  # fmt: skip


@pytest.mark.parametrize("examples", [1, 2, 3])
@pytest.mark.parametrize("kind", ONE_WIDE)
def test_the_gradient_of_a_norm_is_right_where_a_dimension_has_size_1(kind: str, examples: int) -> None:
    """On a CPU torch's own is wrong where input and gradient lie in memory in different orders: that of one example, too, whose
    dimension is that of the batch."""
    model = nn.Sequential(*ONE_WIDE[kind](), nn.LazyLinear(3)).double()
    x = torch.randn(examples, 3, 2, 2, dtype=torch.float64)
    model(x)
    if kind == "channels last":
        model.to(memory_format=torch.channels_last)
    params = [p for p in model.parameters() if p.requires_grad]
    losses = nn.Sequential(*map(written_out, model))(x).square().sum(1)
    rows = [torch.autograd.grad(loss, params, retain_graph=True) for loss in losses]
    expected = [torch.cat([gradient.flatten() for gradient in row]).norm() for row in rows]
    clipper = attach(model)
    report = clipper.backward(model(x).square().sum(1))
    torch.testing.assert_close(report.norms[0], torch.stack(expected), check_dtype=False)
    clipper.detach()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model)


def written_out(module: nn.Module) -> nn.Module:
    """A norm as a difference, a product and a sum."""

    def norm(h: Tensor) -> Tensor:
        var, mean = torch.var_mean(h, (2, 3), correction=0, keepdim=True)
        if module.running_mean is not None:
            mean, var = over_channels(module.running_mean), over_channels(module.running_var)
        scaled = (h - mean) / (var + module.eps).sqrt()
        return scaled * over_channels(module.weight) + over_channels(module.bias)

    def over_channels(values: Tensor) -> Tensor:
        return values.view(-1, 1, 1, 1) if isinstance(module, nn.BatchNorm3d) else values.view(-1, 1, 1)

    return Between(norm) if hasattr(module, "running_mean") else module
