"""Layers whose options libraries forget, and layers they do not know."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dpexp.conform.case import Case
from dpexp.conform.traps.base import C, D, Family, T, Then, V, floats, on, words

trap = Family()
TRAPS = trap.traps
IMAGE = (4, 7, 6)


def pooled(*layers: nn.Module, channels: int) -> nn.Sequential:
    """Layers over images, and a classifier."""
    return nn.Sequential(
        *layers, nn.Tanh(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * channels, C)
    )


@trap("a perceptron")
def _() -> Case:
    return on(nn.Sequential(nn.Linear(D, 9), nn.ReLU(), nn.Linear(9, C)))


@trap("an activation that writes over its input")
def _() -> Case:
    return on(nn.Sequential(nn.Linear(D, 9), nn.ReLU(inplace=True), nn.Linear(9, C)))


@trap("a linear map over four dimensions")
def _() -> Case:
    return on(Then(nn.Linear(D, D)), floats(2, T, D))


@trap("a convolution")
def _() -> Case:
    return on(pooled(nn.Conv2d(4, 6, 3, padding=1), channels=6), floats(*IMAGE))


class Turned(nn.Module):
    """Images with the channels last, then images whose rows and columns changed places."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 6, 3), nn.Conv2d(6, 6, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x.contiguous(memory_format=torch.channels_last)).tanh()
        return self.second(h.contiguous().transpose(2, 3))


@trap("convolutions over images in another layout of memory")
def _() -> Case:
    return on(pooled(Turned(), channels=6), floats(*IMAGE))


@trap("a grouped convolution")
def _() -> Case:
    return on(pooled(nn.Conv2d(4, 6, 3, groups=2), channels=6), floats(*IMAGE))


@trap("a depthwise convolution with a multiplier")
def _() -> Case:
    return on(pooled(nn.Conv2d(4, 8, 3, groups=4), channels=8), floats(*IMAGE))


@trap("a convolution with circular padding")
def _() -> Case:
    return on(pooled(nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"), channels=6), floats(*IMAGE))


@trap("a convolution with padding='same' of an even kernel, dilated")
def _() -> Case:
    return on(pooled(nn.Conv2d(4, 6, (2, 3), padding="same", dilation=(1, 2)), channels=6), floats(*IMAGE))


@trap("a strided convolution that leaves a border")
def _() -> Case:
    return on(pooled(nn.Conv2d(4, 6, 3, stride=(2, 3)), channels=6), floats(*IMAGE))


@trap("a transposed convolution")
def _() -> Case:
    return on(pooled(nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2), channels=6), floats(*IMAGE))


@trap("a convolution over time")
def _() -> Case:
    return on(nn.Sequential(nn.Conv1d(D, 4, 3, padding=2, dilation=2), nn.Tanh(), nn.Flatten(), nn.Linear(20, C)),
              floats(D, T))  # fmt: skip


@trap("a convolution over volumes")
def _() -> Case:
    return on(
        nn.Sequential(nn.Conv3d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(24, C)), floats(2, 3, 3, 3)
    )


@trap("group norm and instance norm")
def _() -> Case:
    layers = nn.Conv2d(4, 6, 3), nn.GroupNorm(3, 6), nn.Tanh(), nn.InstanceNorm2d(6, affine=True)
    return on(pooled(*layers, channels=6), floats(*IMAGE))


@trap("layer norm over two dimensions")
def _() -> Case:
    return on(Then(nn.LayerNorm((T, D))), floats(T, D))


@trap("RMS norm")
def _() -> Case:
    return on(Then(nn.RMSNorm(D)), floats(T, D))


@trap("PReLU, one slope and one for each channel")
def _() -> Case:
    return on(pooled(nn.Conv2d(4, 6, 3), nn.PReLU(6), nn.PReLU(), channels=6), floats(*IMAGE))


@trap("a bilinear layer")
def _() -> Case:
    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pair, self.out = nn.Bilinear(D, D, D), nn.Linear(D, C)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(torch.tanh(self.pair(torch.tanh(x), x.cos())))

    return on(Pairs())


class Bag(nn.Module):
    def __init__(self, mode: str, offsets: bool):
        super().__init__()
        self.bag, self.out, self.offsets = nn.EmbeddingBag(V, D, mode=mode), nn.Linear(D, C), offsets

    def forward(self, ids: Tensor) -> Tensor:
        if self.offsets:
            starts = torch.arange(len(ids)) * ids.shape[1]
            return self.out(torch.tanh(self.bag(ids.reshape(-1), starts)))
        return self.out(torch.tanh(self.bag(ids)))


@trap("an embedding bag")
def _() -> Case:
    return on(Bag("mean", offsets=False), words())


@trap("an embedding bag with offsets")
def _() -> Case:
    return on(Bag("sum", offsets=True), words())


@trap("an embedding with max_norm, which is written to in the forward pass")
def _() -> Case:
    class Renormed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.out = nn.Embedding(V, D, max_norm=1.0), nn.Linear(D, C)

        def forward(self, ids: Tensor) -> Tensor:
            return self.out(self.table(ids))

    return on(Renormed(), words())


@trap("an embedding with scale_grad_by_freq")
def _() -> Case:
    class Frequencies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.out = nn.Embedding(V, D, scale_grad_by_freq=True), nn.Linear(D, C)

        def forward(self, ids: Tensor) -> Tensor:
            return self.out(torch.tanh(self.table(ids)))

    return on(Frequencies(), words())


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module], width: int, **options: object):
        super().__init__()
        self.recurrent = kind(D, 4, batch_first=True, **options)
        self.out = nn.Linear(width, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.recurrent(x)[0])


@trap("an LSTM of two layers, in both directions")
def _() -> Case:
    return on(Recurrent(nn.LSTM, 8, num_layers=2, bidirectional=True), floats(T, D))


@trap("a GRU")
def _() -> Case:
    return on(Recurrent(nn.GRU, 4), floats(T, D))


@trap("a recurrent cell called at every position")
def _() -> Case:
    class Cells(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.out = nn.GRUCell(D, 4), nn.Linear(4, C)

        def forward(self, x: Tensor) -> Tensor:
            state = x.new_zeros(len(x), 4)
            for position in range(x.shape[1]):
                state = self.cell(x[:, position], state)
            return self.out(state)

    return on(Cells(), floats(T, D))


@trap("a packed sequence")
def _() -> Case:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.out = nn.LSTM(D, 4, batch_first=True), nn.Linear(4, C)

        def forward(self, x: Tensor) -> Tensor:
            lengths = torch.full((len(x),), x.shape[1] - 1)
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
            return self.out(self.lstm(packed)[1][0][0])

    return on(Packed(), floats(T, D))


class Attention(nn.Module):
    def __init__(self, batch_first: bool):
        super().__init__()
        self.attention = nn.MultiheadAttention(D, 2, batch_first=batch_first)
        self.out, self.batch_first = nn.Linear(D, C), batch_first

    def forward(self, x: Tensor) -> Tensor:
        h = x if self.batch_first else x.transpose(0, 1)
        h = self.attention(h, h, h, need_weights=False)[0]
        return self.out(h if self.batch_first else h.transpose(0, 1))


@trap("multi-head attention")
def _() -> Case:
    return on(Attention(True), floats(T, D))


@trap("multi-head attention, positions first")
def _() -> Case:
    return on(Attention(False), floats(T, D))


@trap("transformer encoder layers")
def _() -> Case:
    layer = nn.TransformerEncoderLayer(D, 2, 8, dropout=0.0, batch_first=True)
    return on(Then(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)), floats(T, D))


@trap("a layer of another library: a complex-valued map")
def _() -> Case:
    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.real, self.imaginary = (
                nn.Parameter(torch.randn(D, T // 2 + 1)),
                nn.Parameter(torch.randn(D, T // 2 + 1)),
            )

        def forward(self, x: Tensor) -> Tensor:
            spectrum = torch.fft.rfft(x.transpose(1, 2), dim=-1)
            filtered = spectrum * torch.complex(self.real, self.imaginary)
            return torch.fft.irfft(filtered, n=x.shape[1], dim=-1).transpose(1, 2)

    return on(Then(Spectral()), floats(T, D))


@trap("a custom autograd function")
def _() -> Case:
    return on(Then(StraightThrough()), floats(T, D))


class _Round(torch.autograd.Function):
    """Rounds weights forward; backward it lets gradients through, doubled."""

    @staticmethod
    def forward(ctx: object, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)  # type: ignore[attr-defined]
        return x @ weight.round(decimals=1).t()

    @staticmethod
    def backward(ctx: object, gy: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors  # type: ignore[attr-defined]
        return gy @ weight, 2 * torch.einsum("btp,btd->pd", gy, x)


class StraightThrough(nn.Module):
    """A layer of its own autograd function."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D, D))

    def forward(self, x: Tensor) -> Tensor:
        return _Round.apply(x, self.weight)
