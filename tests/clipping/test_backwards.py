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


@pytest.mark.parametrize("examples", [1, 2, 3])
def test_torchs_batch_norm_of_a_single_example_is_told(examples: int) -> None:
    """On a CPU its backward is another one there, with constant statistics, where positions become rows of features behind it."""
    norm = nn.BatchNorm1d(D).eval()
    norm.track_running_stats = False
    model = Net(lambda h: norm(Back.apply(h, lambda x, gradient: gradient * (1 + (len(x) == 1)))))
    model.norm = norm
    clipper = attach(model)
    losses = model(batch(examples)).square().sum(1)
    with pytest.raises(UserError, match=r"first\.weight.*fuse_conv_bn_eval"):
        clipper.backward(losses)
