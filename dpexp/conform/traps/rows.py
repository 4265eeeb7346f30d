"""Layers whose rows are not simply one for each example, in order."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpexp.conform.case import B, Batch, Case
from dpexp.conform.traps.base import C, D, Family, T, Then, floats, on

trap = Family()
TRAPS = trap.traps


class Flattened(nn.Module):
    """Layers that see ``[B·T, d]``, ``[T·B, d]`` or ``[T, B, d]``."""

    def __init__(self, order: str):
        super().__init__()
        self.inner, self.norm, self.out, self.order = nn.Linear(D, D), nn.LayerNorm(D), nn.Linear(D, C), order

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        if self.order == "batch":
            h = self.norm(torch.tanh(self.inner(x.reshape(b * t, d)))).reshape(b, t, d)
        else:
            h = x.transpose(0, 1)
            h = h.reshape(t * b, d) if self.order == "time" else h
            h = self.norm(torch.tanh(self.inner(h))).reshape(t, b, d).transpose(0, 1)
        return self.out(h.mean(1))


@trap("layers that see [B·T, d]")
def _() -> Case:
    return on(Flattened("batch"), floats(T, D))


@trap("layers that see [T·B, d]")
def _() -> Case:
    return on(Flattened("time"), floats(T, D))


@trap("layers that see [T, B, d]")
def _() -> Case:
    return on(Flattened("second"), floats(T, D))


@trap("layers that see [T, B, d] with T = B")
def _() -> Case:
    return on(Flattened("second"), floats(B, D))


@trap("the batch in the second dimension of the input")
def _() -> Case:
    class Second(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.out = nn.Linear(D, D), nn.Linear(D, C)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(torch.tanh(self.inner(x)).mean(0))

    x = torch.randn(T, B, D)
    x[:, -1] *= 20
    return on(Second(), {"x": x}, batch_dim=1)


@trap("windows: [B·n, t, d], as in Swin")
def _() -> Case:
    class Windows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.bias, self.out = (
                nn.Linear(D, D),
                nn.Parameter(torch.randn(3, 2, D)),
                nn.Linear(D, C),
            )

        def forward(self, x: Tensor) -> Tensor:
            h = x.reshape(len(x) * 3, 2, D)
            h = torch.tanh(self.inner(h)).view(len(x), 3, 2, D) + self.bias
            return self.out(h.view(len(x), 6, D))

    return on(Windows(), floats(6, D))


@trap("rows sorted by length")
def _() -> Case:
    class Sorted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner, self.out = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, C)

        def forward(self, x: Tensor, length: Tensor) -> Tensor:
            order = torch.argsort(length, descending=True, stable=True)
            h = torch.tanh(self.inner(torch.tanh(self.first(x))[order]))
            return self.out(h[torch.argsort(order)])

    batch = floats(D) | {"length": torch.tensor([2, 5, 3, 4])}
    other = floats(D) | {"length": torch.tensor([5, 2, 4, 3])}
    return on(Sorted(), batch, then=[other])


@trap("positions without padding, all examples in one row")
def _() -> Case:
    class Unpadded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.out = nn.Linear(D, D), nn.Linear(D, C)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            h = torch.tanh(self.inner(x[mask]))
            full = torch.zeros_like(x).masked_scatter(mask[..., None].expand_as(x), h)
            return self.out(full.sum(1))

    mask = torch.arange(T) < torch.tensor([5, 2, 4, 3])[:, None]
    other = torch.arange(T) < torch.tensor([3, 5, 5, 1])[:, None]
    return on(Unpadded(), floats(T, D) | {"mask": mask}, then=[floats(T, D) | {"mask": other}])


class Experts(nn.Module):
    """Each position goes to one of two experts; an expert may have room for so many positions of the batch only."""

    def __init__(self, capacity: int | None):
        super().__init__()
        self.router, self.out, self.capacity = nn.Linear(D, 2), nn.Linear(D, C), capacity
        self.experts = nn.ModuleList([nn.Linear(D, D) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        h = x.reshape(-1, D)
        share, chosen = self.router(h).softmax(-1), (h[:, 0] > 0).long()
        y = torch.zeros_like(h)
        for k, expert in enumerate(self.experts):
            mine = (chosen == k).nonzero()[: self.capacity, 0]
            if len(mine):
                y = y.index_add(0, mine, torch.tanh(expert(h[mine])) * share[mine, k : k + 1])
        return self.out(y.view_as(x).sum(1))


@trap("a mixture of experts")
def _() -> Case:
    return on(Experts(None), floats(T, D), then=[floats(T, D)])


@trap("a mixture of experts with a capacity: what is dropped depends on the others")
def _() -> Case:
    return on(Experts(4), floats(T, D))


@trap("nearest neighbours in the batch")
def _() -> Case:
    class Nearest(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.out = nn.Linear(D, D), nn.Linear(D, C)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.inner(x))
            distance = torch.cdist(x, x)
            nearest = (distance + 1e9 * torch.eye(len(x), dtype=x.dtype)).argmin(1)
            return self.out(h + h[nearest])

    return on(Nearest())


@trap("an example squeezed away when it is alone")
def _() -> Case:
    class Squeezed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.out = nn.Linear(D, D), nn.Linear(D, C)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(torch.tanh(self.inner(x)).squeeze()).reshape(len(x), -1)

    return on(Squeezed(), then=[floats(D, examples=1), floats(D)])


@trap("a batch of one, then of three, then of another length")
def _() -> Case:
    model = nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D), nn.Tanh(), nn.Linear(D, C))
    return on(model, floats(T, D), then=[floats(T, D, examples=1), floats(T, D, examples=3), floats(2, D)])


@trap("a mask over heads, flattened")
def _() -> Case:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.out = nn.Parameter(torch.randn(1, T, T)), nn.Linear(D, C)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            bias = torch.where(mask.repeat_interleave(2, 0)[:, None], self.table, -3.0).view(len(x), 2, T, T)
            heads = x.view(len(x), T, 2, -1).transpose(1, 2)
            mixed = (heads @ heads.mT / 20 + bias).softmax(-1) @ heads
            return self.out(mixed.transpose(1, 2).reshape(x.shape)).sum(1)

    mask = torch.arange(T) < torch.tensor([5, 2, 4, 3])[:, None]
    return on(Masked(), floats(T, D) | {"mask": mask})


@trap("a loss for one labelled position alone")
def _() -> Case:
    class Labelled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.out = nn.Linear(D, D), nn.Linear(D, C)

        def forward(self, x: Tensor, at: Tensor) -> Tensor:
            y = self.out(torch.tanh(self.inner(x.reshape(-1, D)))).view(len(x), T, C)
            return y[torch.arange(len(x)), at]

    return on(Labelled(), floats(T, D) | {"at": torch.tensor([0, 4, 2, 2])})


@trap("outputs of several layers, one of them unused")
def _() -> Case:
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.out = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, C)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"used": self.out(torch.tanh(self.a(x))), "unused": self.b(x)}

    def losses(net: nn.Module, batch: Batch) -> Tensor:
        return (net(batch["x"])["used"] - 0.3).pow(2).sum(1)

    return Case(Several(), floats(D), losses)


@trap("in-place writes to what a layer gave")
def _() -> Case:
    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.out = nn.Linear(D, D), nn.Linear(D, C)

        def forward(self, x: Tensor) -> Tensor:
            h = self.inner(x)
            h[:, 0] = 0
            h += 1
            return self.out(F.relu_(h))

    return on(Written(), floats(T, D))


@trap("a layer's input written to after it was used")
def _() -> Case:
    class Overwritten(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.out = nn.Linear(D, D), nn.Linear(D, C)

        def forward(self, x: Tensor) -> Tensor:
            held = x.clone()
            y = torch.sigmoid(self.inner(held.tanh()))
            held.mul_(0)
            return self.out(y + held)

    return on(Overwritten(), floats(T, D))


@trap("a view of the batch in the input of two layers")
def _() -> Case:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(D // 2, C), nn.Linear(D // 2, C)

        def forward(self, x: Tensor) -> Tensor:
            return self.left(x[..., : D // 2]) * self.right(x[..., D // 2 :])

    return on(Then(Views(), C), floats(T, D))
