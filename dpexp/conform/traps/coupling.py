"""Examples that see each other, through gradients or through values alone, and buffers that keep what they saw.

The right answer to most of these is a refusal: with another example in the batch, an example's gradient is another one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dpexp.conform.case import B, Batch, Case
from dpexp.conform.traps.base import C, D, Family, T, Then, floats, on

trap = Family()
TRAPS = trap.traps


class Between(nn.Module):
    """Two layers and something between them."""

    def __init__(self, between: nn.Module, width: int = D):
        super().__init__()
        self.first, self.between, self.second = nn.Linear(D, width), between, nn.Linear(width, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.between(self.first(x))))


class _Normed(nn.Module):
    def __init__(self, affine: bool = True, momentum: float | None = 0.1):
        super().__init__()
        self.first, self.out = nn.Linear(D, D), nn.Linear(D, C)
        self.norm = nn.BatchNorm1d(D, affine=affine, momentum=momentum)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.norm(self.first(x).mT).mT))


@trap("batch norm")
def _() -> Case:
    return on(_Normed(), floats(T, D))


@trap("batch norm with momentum=None and no affine part")
def _() -> Case:
    return on(_Normed(affine=False, momentum=None), floats(T, D))


@trap("batch norm in evaluation mode: it only reads")
def _() -> Case:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.out = nn.Linear(D, D), nn.BatchNorm1d(D), nn.Linear(D, C)
            self.norm.register_buffer("running_mean", torch.randn(D))

        def train(self, mode: bool = True) -> Reads:
            super().train(mode)
            self.norm.eval()
            return self

        def forward(self, x: Tensor) -> Tensor:
            return self.out(torch.tanh(self.norm(self.first(x))))

    return on(Reads())


@trap("instance norm that tracks running statistics")
def _() -> Case:
    norm = nn.InstanceNorm1d(D, affine=True, track_running_stats=True)
    return on(nn.Sequential(nn.Conv1d(D, D, 1), norm, nn.Flatten(), nn.Linear(D * T, C)), floats(D, T))


class _Centred(nn.Module):
    def __init__(self, detached: bool):
        super().__init__()
        self.detached = detached

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(0)
        return x - (mean.detach() if self.detached else mean)


@trap("x - x.mean(0)")
def _() -> Case:
    return on(Between(_Centred(False)))


@trap("x - x.mean(0).detach()")
def _() -> Case:
    return on(Between(_Centred(True)))


@trap("x - x.mean(0) of the input, before the first layer")
def _() -> Case:
    return on(nn.Sequential(_Centred(False), nn.Linear(D, D), nn.Tanh(), nn.Linear(D, C)))


@trap("the standard deviation of the batch, under no_grad")
def _() -> Case:
    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                spread = x.std(0, unbiased=False) + 0.5
            return x / spread

    return on(Between(Scaled()))


@trap("dynamic quantisation by the largest value of the batch")
def _() -> Case:
    class Dynamic(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            scale = x.detach().abs().max() / 7
            return x + ((x / scale).round() * scale - x).detach()

    return on(Between(Dynamic()))


@trap("dynamic quantisation by the largest value of each position")
def _() -> Case:
    class ByRow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            scale = x.detach().abs().amax(-1, keepdim=True) / 7
            return x + ((x / scale).round() * scale - x).detach()

    return on(Between(ByRow()), floats(T, D))


@trap("FakeQuantize with a moving observer", dtype=None)
def _() -> Case:
    from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

    fake = FakeQuantize(observer=MovingAverageMinMaxObserver, quant_min=0, quant_max=15)
    return on(Between(fake), tolerance=1e-4)


class _Running(nn.Module):
    """Statistics by hand: used in this step, or only kept."""

    level: Tensor

    def __init__(self, used: bool):
        super().__init__()
        self.used = used
        self.register_buffer("level", torch.zeros(D))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.level.lerp_(x.mean(0).to(self.level.dtype), 0.1)
        return x - self.level if self.used else x


@trap("running statistics by hand, used at once")
def _() -> Case:
    return on(Between(_Running(True)))


@trap("running statistics by hand, kept in a buffer")
def _() -> Case:
    return on(Between(_Running(False)))


@trap("a buffer that copies a row of the batch")
def _() -> Case:
    class Keeps(nn.Module):
        last: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("last", torch.zeros(D))

        def forward(self, x: Tensor) -> Tensor:
            self.last.copy_(x[-1].detach())
            return x

    return on(Between(Keeps()))


@trap("a buffer replaced in the forward pass")
def _() -> Case:
    class Replaces(nn.Module):
        largest: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("largest", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.largest = torch.maximum(self.largest, x.detach().max().to(self.largest.dtype))
            return x

    return on(Between(Replaces()))


@trap("a buffer that counts steps")
def _() -> Case:
    class Counts(nn.Module):
        steps: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros((), dtype=torch.long))

        def forward(self, x: Tensor) -> Tensor:
            self.steps += 1
            return x

    return on(Between(Counts()))


@trap("a memory queue of earlier examples, as in MoCo")
def _() -> Case:
    class Queue(nn.Module):
        queue: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("queue", torch.randn(3 * B, D))

        def forward(self, x: Tensor) -> Tensor:
            kept = self.queue.to(x.dtype, copy=True)
            mixed = x + (x @ kept.t() / 10).softmax(-1) @ kept
            with torch.no_grad():
                self.queue.copy_(torch.cat([x.to(self.queue.dtype), self.queue])[: 3 * B])
            return mixed

    return on(Between(Queue()))


@trap("a vector-quantiser whose codebook follows the batch")
def _() -> Case:
    class Codebook(nn.Module):
        codes: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("codes", torch.randn(5, D))

        def forward(self, x: Tensor) -> Tensor:
            codes = self.codes.to(x.dtype)
            nearest = torch.cdist(x, codes).argmin(1)
            with torch.no_grad():
                for k in nearest.unique():
                    self.codes[k].lerp_(x[nearest == k].mean(0).to(self.codes.dtype), 0.1)
            return x + (codes[nearest] - x).detach()

    return on(Between(Codebook()))


@trap("attention between the examples of a batch")
def _() -> Case:
    class Across(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x @ x.t() / 30).softmax(-1) @ x

    return on(Between(Across()))


@trap("a convolution across the batch")
def _() -> Case:
    class Rolled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 0.5 * x.roll(1, 0)

    return on(Between(Rolled()))


@trap("mixup inside the model")
def _() -> Case:
    class Mixup(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 0.7 * x + 0.3 * x.flip(0)

    return on(nn.Sequential(Mixup(), nn.Linear(D, D), nn.Tanh(), nn.Linear(D, C)))


@trap("a path that is chosen by the whole batch")
def _() -> Case:
    class Switch(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.relu() if bool(x.detach().abs().max() > 10) else x.sin()

    return on(Between(Switch()))


@trap("the size of the batch as a factor")
def _() -> Case:
    class BySize(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / len(x)

    return on(Between(BySize()))


@trap("minibatch standard deviation, as in StyleGAN")
def _() -> Case:
    class Spread(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([x, x.std(0, unbiased=False).mean().expand(len(x), 1)], 1)

    class Critic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.spread, self.second = nn.Linear(D, D), Spread(), nn.Linear(D + 1, C)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.tanh(self.spread(self.first(x))))

    return on(Critic())


class _Padded(nn.Module):
    """Reads padded batches; the mean is over the padding as well, or over the words of the example alone."""

    def __init__(self, masked: bool):
        super().__init__()
        self.inner, self.out, self.masked = nn.Linear(D, D), nn.Linear(D, C), masked

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = torch.tanh(self.inner(x))
        if not self.masked:
            return self.out(h.mean(1))
        weights = mask.to(h.dtype)[..., None]
        return self.out((h * weights).sum(1) / weights.sum(1))


def _padded_batch() -> Batch:
    lengths = torch.tensor([2, 3, 2, 5])
    mask = torch.arange(5) < lengths[:, None]
    return {"x": torch.randn(B, 5, D) * mask[..., None], "mask": mask}


def _trimmed(batch: Batch) -> Batch:
    longest = int(batch["mask"].sum(1).max()) if len(batch["mask"]) else 0
    return {name: value[:, :longest] for name, value in batch.items()}


@trap("padding to the longest example, which moves a mean over positions")
def _() -> Case:
    return on(_Padded(False), _padded_batch(), trim=_trimmed)


@trap("padding to the longest example, masked as it should be")
def _() -> Case:
    return on(_Padded(True), _padded_batch(), trim=_trimmed)


@trap("a Fourier transform over padded positions, as in FNet")
def _() -> Case:
    class Fourier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.out = nn.Linear(D, D), nn.Linear(D, C)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.out(torch.tanh(torch.fft.fft2(self.inner(x)).real[:, 0] / 5))

    return on(Fourier(), _padded_batch(), trim=_trimmed)


@trap("a state that one forward leaves for the next")
def _() -> Case:
    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.state: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            y = x if self.state is None else x + self.state
            self.state = x.detach().mean(0)
            return y

    return on(Between(Remembers()))


@trap("statistics over the positions of one example")
def _() -> Case:
    class Own(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x - x.mean(1, keepdim=True).detach()) / (x.std(1, keepdim=True) + 0.1)

    return on(Then(Between(Own()), C), floats(T, D))
