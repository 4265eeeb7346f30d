"""Sequences of numbers beside their lengths: what their batch is padded to may not move an example."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from dpexp.errors import UserError
from tests.clipping.stepping import D, step, x


class OfLengths(nn.Module):
    """Reads ``[B, T, D]`` beside ``[B]`` lengths, and takes what it needs by these."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind, self.out = kind, nn.Linear(D, 3)
        self.convs = nn.ModuleList([nn.Conv1d(D, D, 3, padding=1) for _ in range(2)])
        self.lstm = nn.LSTM(D, D // 2, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        if "conv" in self.kind:
            inside = self.inside(x, lengths)
            for conv in self.convs:
                x = torch.tanh(conv(x.mT)).mT
                if self.kind == "masked conv":
                    x = x * inside
            return self.out((x * inside).sum(1) / lengths[:, None])
        if self.kind == "packed":
            x = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        y = self.lstm(x)[0]
        if self.kind == "packed":
            y, _ = nn.utils.rnn.pad_packed_sequence(y, batch_first=True)
        return self.out(y[torch.arange(len(y)), lengths - 1] + (y * self.inside(y, lengths)).sum(1))

    def inside(self, y: Tensor, lengths: Tensor) -> Tensor:
        return (torch.arange(y.shape[1]) < lengths[:, None]).to(y.dtype)[..., None]


def sequences() -> tuple[Tensor, Tensor]:
    lengths = torch.tensor([3, 7, 2, 5, 4])
    padded = x(5, 7, D) * (torch.arange(7) < lengths[:, None])[..., None]
    return padded, lengths


@pytest.mark.parametrize("kind", ["conv", "lstm"])
def test_padding_of_sequences_that_are_said_to_be_shorter_is_varied(kind: str) -> None:
    torch.manual_seed(0)
    with pytest.raises(UserError, match="when its batch is padded further"):
        step(OfLengths(kind), *sequences())
    step(OfLengths(kind), *sequences(), fixed_length=True)


class TimesLast(nn.Module):
    """Convolutions over ``[B, features, T]``, as spectra come, and a mean over what a mask or lengths say is an example's own."""

    def __init__(self, masked: bool):
        super().__init__()
        self.masked, self.out = masked, nn.Linear(D, 3)
        self.convs = nn.ModuleList([nn.Conv1d(D, D, 3, padding=1) for _ in range(2)])

    def forward(self, x: Tensor, mask: Tensor | None = None, lengths: Tensor | None = None) -> Tensor:
        inside = mask if lengths is None else torch.arange(x.shape[2]) < lengths[:, None]
        inside = inside[:, None].to(x.dtype)
        for conv in self.convs:
            x = torch.tanh(conv(x))
            x = x * inside if self.masked else x
        return self.out((x * inside).sum(2) / inside.sum(2))


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("given", ["mask", "lengths"])
def test_padding_of_series_with_their_times_last_is_varied_too(given: str, masked: bool) -> None:
    torch.manual_seed(0)
    lengths = torch.tensor([3, 11, 2, 5, 4])
    inside = torch.arange(11) < lengths[:, None]
    told = (None, lengths) if given == "lengths" else (inside.long(),)
    with nullcontext() if masked else pytest.raises(UserError, match="when its batch is padded further"):
        assert step(TimesLast(masked), x(5, D, 11) * inside[:, None], *told).notes == []


@pytest.mark.parametrize("kind", ["masked conv", "packed"])
def test_sequences_whose_padding_is_nothing_are_not_refused(kind: str) -> None:
    torch.manual_seed(0)
    assert step(OfLengths(kind), *sequences()).notes == []


class Windowed(nn.Module):
    """Two layers of attention to the neighbours."""

    def __init__(self, masked: float):
        super().__init__()
        self.masked, self.layers = masked, nn.ModuleList([nn.Linear(D, D) for _ in range(2)])

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        near = (places[:, None] - places).abs() <= 1
        hidden = ~(near & attention_mask[:, None].bool())
        for layer in self.layers:
            x = x + (x @ x.mT).masked_fill(hidden, self.masked).softmax(-1) @ layer(x)
        return (x * attention_mask[..., None]).sum(1)


def test_a_window_in_padding_that_gives_nan_is_named() -> None:
    padded, lengths = sequences()
    content = (torch.arange(7) < lengths[:, None]).long()
    # one column of padding: all windows hold a token, as those of a longer batch would not
    content[:, :6] = 1
    with pytest.raises(
        UserError, match="NaN or infinity of padding: where all that a position may attend to"
    ):
        step(Windowed(-torch.inf), padded, content)
    assert step(Windowed(torch.finfo(torch.float32).min), padded, content).notes == []


class Tokens(nn.Module):
    """Reads ids alone; the mean goes over all of them, or each position sees those before it."""

    def __init__(self, causal: bool):
        super().__init__()
        self.causal, self.table, self.out = causal, nn.Embedding(9, D), nn.Linear(D, 3)

    def forward(self, ids: Tensor) -> Tensor:
        y = self.table(ids)
        return self.out(y.cumsum(1)[:, 0] if self.causal else y.mean(1))


def test_what_may_be_padding_is_told_where_it_changes_an_example() -> None:
    torch.manual_seed(0)
    ids = torch.tensor([[3, 4, 5, 6, 7, 8], [3, 5, 0, 0, 0, 0], [1, 2, 3, 0, 0, 0], [8, 7, 6, 5, 4, 0]])
    notes = step(Tokens(causal=False), ids).notes
    assert len(notes) == 1
    # which one is private where it is no padding, and a note stands on the card
    assert notes[0].startswith(
        "rows of this batch end in the same id, and more of it changes what an example gets"
    )
    assert step(Tokens(causal=True), ids).notes == []
    # of one length, or not padded
    assert step(Tokens(causal=False), ids, fixed_length=True).notes == []
    assert step(Tokens(causal=False), ids.roll(3, 1)).notes == []
