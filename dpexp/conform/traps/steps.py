"""Steps that are not one forward and one backward pass of finite 32-bit numbers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dpexp.conform.case import B, Batch, Case
from dpexp.conform.traps.base import C, D, Family, T, floats, on

trap = Family()
TRAPS = trap.traps


def perceptron() -> nn.Sequential:
    """Two layers."""
    return nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, C))


@trap("an empty batch between two others")
def _() -> Case:
    return on(perceptron(), then=[{"x": torch.zeros(0, D)}, floats(D)])


@trap("an empty batch of positions")
def _() -> Case:
    model = nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D), nn.Tanh(), nn.Linear(D, C))
    return on(model, floats(T, D), then=[{"x": torch.zeros(0, T, D)}, floats(T, D)])


@trap("an example whose values are NaN")
def _() -> Case:
    batch = floats(D)
    batch["x"][1] = torch.nan
    return on(perceptron(), batch)


@trap("an example whose gradient is infinite")
def _() -> Case:
    batch = floats(D)
    batch["x"] = batch["x"].abs()
    batch["x"][1] = 0

    def losses(net: nn.Module, b: Batch) -> Tensor:
        return net(b["x"]).pow(2).sum(1) + (net[0].weight[0] * b["x"]).abs().sum(1).sqrt()  # type: ignore[index]

    return Case(perceptron(), batch, losses)


@trap("an example without a gradient")
def _() -> Case:
    def losses(net: nn.Module, b: Batch) -> Tensor:
        return (net(b["x"]) - 0.3).pow(2).sum(1) * b["weight"]

    return Case(perceptron(), floats(D) | {"weight": torch.tensor([1.0, 0.0, 1.0, 2.0])}, losses)


class _Cancels(nn.Module):
    """The gradients of an example's two positions cancel but for a little."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(D, 2, bias=False)

    def forward(self, x: Tensor, sign: Tensor) -> Tensor:
        return (self.inner(x) * sign[..., None]).sum(1)


@trap("gradients that cancel between positions, in 32 bits", dtype=torch.float32)
def _() -> Case:
    x = torch.randn(B, 2, D)
    x[0] = 300 * torch.randn(D)
    x[0, 1] *= 1 + 2e-5
    sign = torch.tensor([[1.0, -1.0], [1.0, 1.0], [1.0, 1.0], [1.0, 1.0]])

    def losses(net: nn.Module, b: Batch) -> Tensor:
        return net(b["x"], b["sign"]).sum(1)

    return Case(_Cancels(), {"x": x, "sign": sign}, losses, clip_norm=1e-3, tolerance=2e-1, slack=1e-4)


@trap("gradients that cancel between two uses of a weight, in 32 bits", dtype=torch.float32)
def _() -> Case:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(D, 2, bias=False)

        def forward(self, x: Tensor, near: Tensor) -> Tensor:
            return self.inner(x) - self.inner(near)

    x = torch.randn(B, D)
    x[0] *= 300
    near = torch.randn(B, D)
    near[0] = x[0] * (1 + 2e-5)

    def losses(net: nn.Module, b: Batch) -> Tensor:
        return net(b["x"], b["near"]).sum(1)

    return Case(Twice(), {"x": x, "near": near}, losses, clip_norm=1e-3, tolerance=2e-1, slack=1e-4)


@trap("an ordinary example among others whose gradients cancel, in 32 bits", dtype=torch.float32)
def _() -> Case:
    x = torch.randn(B, 2, D)
    x[:3] = 300 * torch.randn(3, 1, D)
    x[:3, 1] *= 1 + 2e-5
    sign = torch.tensor([[1.0, -1.0]] * 3 + [[1.0, 1.0]])

    def losses(net: nn.Module, b: Batch) -> Tensor:
        return net(b["x"], b["sign"]).sum(1)

    return Case(
        _Cancels(), {"x": x, "sign": sign}, losses, clip_norm=0.1, tolerance=2e-1, slack=1e-4, left_out=(3,)
    )


@trap("32 bits, with gradients of very different sizes", dtype=torch.float32)
def _() -> Case:
    batch = floats(T, D)
    batch["x"] *= torch.tensor([1e-3, 1.0, 30.0, 1e3])[:, None, None]
    model = nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D), nn.Tanh(), nn.Linear(D, C))
    return on(model, batch)


@trap("a weight of four million numbers, in 32 bits", dtype=torch.float32)
def _() -> Case:
    # a norm that adds up one square after the other loses 1e-4 of it, always downwards
    return on(nn.Linear(2048, 2048), floats(2048))


@trap("bf16 autocast", dtype=torch.float32)
def _() -> Case:
    def losses(net: nn.Module, b: Batch) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = net(b["x"])
        return (y.float() - 0.3).pow(2).flatten(1).sum(1)

    model = nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D), nn.Tanh(), nn.Linear(D, C))
    batch = {"x": torch.randn(B, T, D)}
    return Case(model, batch, losses, tolerance=3e-2, slack=2e-3)


@trap("weights in bf16", dtype=torch.bfloat16)
def _() -> Case:
    model = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, C))
    return on(model, {"x": torch.randn(B, T, D)}, tolerance=5e-2, slack=2e-2)


@trap("accumulation over two physical batches")
def _() -> Case:
    return on(perceptron(), floats(D), pieces=2)


@trap("accumulation over physical batches of one")
def _() -> Case:
    return on(nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D), nn.Linear(D, C)), floats(T, D), pieces=B)


@trap("two forward passes for one loss")
def _() -> Case:
    def losses(net: nn.Module, b: Batch) -> Tensor:
        return (net(b["x"]) - 0.5 * net(b["x"].flip(1))).pow(2).sum(1)

    return Case(perceptron(), floats(D), losses)


@trap("two forward passes, one of them without gradients")
def _() -> Case:
    def losses(net: nn.Module, b: Batch) -> Tensor:
        with torch.no_grad():
            target = net(b["x"].flip(1))
        return (net(b["x"]) - target).pow(2).sum(1)

    return Case(perceptron(), floats(D), losses)


@trap("a forward pass whose loss is never used")
def _() -> Case:
    def losses(net: nn.Module, b: Batch) -> Tensor:
        net(b["x"] * 3)
        return (net(b["x"]) - 0.3).pow(2).sum(1)

    return Case(perceptron(), floats(D), losses)


@trap("a forward pass in evaluation mode in between")
def _() -> Case:
    def losses(net: nn.Module, b: Batch) -> Tensor:
        found = (net(b["x"]) - 0.3).pow(2).sum(1)
        net.eval()
        with torch.no_grad():
            net(b["x"][:1])
        net.train()
        return found

    return Case(perceptron(), floats(D), losses)


class _Recomputed(nn.Module):
    def __init__(self, reentrant: bool):
        super().__init__()
        self.first, self.scale, self.out = nn.Linear(D, D), nn.Parameter(torch.randn(D)), nn.Linear(D, C)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self._block, x, use_reentrant=self.reentrant)
        return self.out(x)

    def _block(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x)) * self.scale


@trap("activation checkpointing")
def _() -> Case:
    return on(_Recomputed(False), floats(T, D))


@trap("reentrant activation checkpointing")
def _() -> Case:
    return on(_Recomputed(True), floats(T, D), parts=("checkpointing",))


@trap("a gradient penalty: the loss contains a gradient")
def _() -> Case:
    def losses(net: nn.Module, b: Batch) -> Tensor:
        x = b["x"].clone().requires_grad_()
        score = net(x).sum(1)
        (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        return score.pow(2) + slope.pow(2).sum(1)

    return Case(perceptron(), floats(D), losses, parts=("gradient penalty", "create_graph"))


@trap("losses through a detached head")
def _() -> Case:
    class Stopped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.left, self.right = nn.Linear(D, D), nn.Linear(D, C), nn.Linear(D, C)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.first(x))
            return self.left(h) + self.right(h.detach())

    return on(Stopped())


@trap("gradients that hooks change on their way")
def _() -> Case:
    class Reversed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(D, D), nn.Linear(D, C)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.first(x))
            if h.requires_grad:
                h.register_hook(lambda gradient: -0.5 * gradient)
            return self.second(h)

    return on(Reversed())


@trap("torch.func.vmap inside the model")
def _() -> Case:
    class Mapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.out = nn.Linear(D, D), nn.Linear(D, C)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.first(x))
            return self.out(torch.func.vmap(lambda row: row * row.sum())(h))

    return on(Mapped(), floats(T, D))


@trap("several examples' rows stacked by the loss: two views of each")
def _() -> Case:
    def losses(net: nn.Module, b: Batch) -> Tensor:
        both = net(torch.cat([b["x"], b["x"].flip(-1)]))
        one, other = both.chunk(2)
        return (one - other).pow(2).sum(1)

    return Case(perceptron(), floats(D), losses)
