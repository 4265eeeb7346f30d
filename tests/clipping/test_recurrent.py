"""Recurrent layers are written out: every option against one autograd pass per example, one tap for each weight, no loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from dpexp.clipping import attach
from dpexp.clipping.loop import LOOPED
from tests.clipping.test_engines import check, naive
from tests.clipping.zoo import Problem
from tests.covering import covering

B, T, D, H = 4, 6, 3, 5
LENGTHS = {"whole": None, "sorted": [6, 4, 4, 1], "unsorted": [2, 6, 1, 5]}
KINDS: dict[str, tuple[type[nn.RNNBase], dict[str, Any]]] = {
    "lstm of two layers": (nn.LSTM, {"num_layers": 2}),
    "projected in both directions": (nn.LSTM, {"proj_size": 4, "bidirectional": True}),
    "gru": (nn.GRU, {"num_layers": 2, "bidirectional": True}),
    "relu without biases": (nn.RNN, {"nonlinearity": "relu", "bias": False}),
}


class Model(nn.Module):
    """The first states are functions of parameters and of the example; all that a layer gives is used."""

    def __init__(self, kind: str, batch_first: bool, packed: str):
        super().__init__()
        cls, options = KINDS[kind]
        self.first, self.layer = nn.Linear(D, H), cls(D, H, batch_first=batch_first, **options)
        self.batch_first, self.packed = batch_first, packed
        self.states = self.layer.num_layers * (2 if self.layer.bidirectional else 1)
        self.start = nn.Parameter(torch.rand(self.states, 1, H))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        layer, lengthwise = self.layer, self.packed != "whole"
        first = torch.tanh(self.first(x[:, 0])).expand(self.states, -1, -1)
        first = first + self.start.expand(-1, len(x), -1)
        hidden = first[..., : layer.proj_size or H]
        given: Any = x if self.batch_first else x.transpose(0, 1)
        if lengthwise:
            given = pack_padded_sequence(
                given, lengths, self.batch_first, enforce_sorted=self.packed == "sorted"
            )
        y, last = layer(given, (hidden, first) if isinstance(layer, nn.LSTM) else hidden)
        last = torch.cat(last, -1) if isinstance(layer, nn.LSTM) else last
        if lengthwise:
            y = pad_packed_sequence(y, self.batch_first)[0]
        return torch.cat([y.square().sum(1 if self.batch_first else 0), last.sum(0)], -1)


@pytest.mark.parametrize(
    ("kind", "batch_first", "packed", "num_examples"),
    covering(list(KINDS), (True, False), list(LENGTHS), (B, 1)),
)
def test_one_tap_for_each_weight(kind: str, batch_first: bool, packed: str, num_examples: int) -> None:
    torch.manual_seed(0)
    model = Model(kind, batch_first, packed).double()
    x, lengths = (
        torch.randn(num_examples, T, D).double(),
        torch.tensor((LENGTHS[packed] or [T] * B)[:num_examples]),
    )

    def losses(rows: slice) -> Tensor:
        return (model(x[rows], lengths[rows]) - 0.3).square().sum(1)

    plain = losses(slice(None))
    naive = [
        torch.autograd.grad(losses(slice(i, i + 1)).sum(), list(model.parameters()))
        for i in range(num_examples)
    ]
    norms = torch.stack([torch.cat([g.flatten() for g in grads]).norm() for grads in naive])
    bound = float(norms.mean())
    clipper = attach(model, clip_norm=bound)
    for _ in range(2):
        model.zero_grad()
        found = losses(slice(None))
        torch.testing.assert_close(found, plain)
        torch.testing.assert_close(clipper.backward(found).norms[0], norms)
        for k, p in enumerate(model.parameters()):
            wanted = sum(
                grads[k] * min(1.0, bound / float(norm)) for grads, norm in zip(naive, norms, strict=True)
            )
            torch.testing.assert_close(p.grad, wanted)
    assert "back-propagation per example" not in str(clipper)


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("engine", ["auto", "ghost"])
def test_cells(kind: type[nn.RNNCellBase], bias: bool, engine: str) -> None:
    """As a loop of the model's own calls them, from nothing or from states that are parameters."""
    torch.manual_seed(0)

    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = kind(D, H, bias=bias), kind(H, H, bias=bias)
            self.start = nn.Parameter(torch.rand(H))

        def forward(self, x: Tensor) -> Tensor:
            lstm, state = kind is nn.LSTMCell, self.start.expand(len(x), -1)
            h: Any = None
            k: Any = (state, state) if lstm else state
            for given in x.unbind(1):
                h = self.first(given, h)
                k = self.second(h[0] if lstm else h, k)
            return torch.cat(k, 1) if lstm else k

    model = Steps().double()
    problem = Problem(model, {"x": torch.randn(B, T, D, dtype=torch.float64)}, of_output)
    alone = naive(problem)
    clipper = attach(model, clip_norm=0.5, engine=engine)
    check(problem, clipper, alone)
    assert LOOPED not in clipper.choices.values()


def of_output(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (model(**batch) - 0.3).square().flatten(1).sum(1)
