"""Models that do something unusual with their parameters or rows: exact step after step, or refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

from dpexp.clipping import attach
from dpexp.errors import UserError
from tests.clipping.exact_steps import WIDTH, Losses, exact, rows, square


class WrittenInPlace(nn.Module):
    """A masked weight: a copy of the parameter is written to before it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.clone()
        weight[torch.ones(WIDTH, WIDTH).triu(1) == 1] = 0
        weight *= 2
        return F.linear(x, weight)


class Spectral(nn.Module):
    """A convolution of a Fourier neural operator: complex weights for the lowest frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, WIDTH, WIDTH, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        frequencies = torch.fft.rfft(x, dim=1)
        low = torch.einsum("bki,kio->bko", frequencies[:, :3], self.weight)
        return torch.fft.irfft(F.pad(low, (0, 0, 0, frequencies.shape[1] - 3)), n=x.shape[1], dim=1)


class Parts(nn.Module):
    """Holds a complex weight as its two parts, as the refusal says."""

    def forward(self, real: Tensor, imag: Tensor) -> Tensor:
        return torch.complex(real, imag)

    def right_inverse(self, w: Tensor) -> tuple[Tensor, Tensor]:
        return w.real.clone(), w.imag.clone()


@pytest.mark.parametrize("engine", ["auto", "onepass"])
def test_complex_weights_are_exact_as_the_refusal_has_them(engine: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Spectral(), nn.Linear(WIDTH, 2))
    with pytest.raises(UserError, match=r"^1\.weight has dtype .*register_parametrization.*right_inverse"):
        attach(model)
    nn.utils.parametrize.register_parametrization(model[1], "weight", Parts())
    batches = [{"input": rows(size, 8)["x"]} for size in (5, 3)]
    exact(model, batches, engine)


class TokenByToken(nn.Module):
    """Looks each token up by itself, as a network over trees does."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.both = nn.Embedding(9, WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def of(self, tree: Tensor) -> Tensor:
        if not tree.dim():
            return self.table(tree)
        return torch.tanh(
            self.both(torch.cat([self.of(part[0] if len(part) == 1 else part) for part in tree.chunk(2)]))
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.of(tree) for tree in x])


@pytest.mark.parametrize("engine", ["auto", "onepass"])
def test_a_token_by_itself_has_no_dimension(engine: str) -> None:
    torch.manual_seed(0)
    exact(TokenByToken(), [{"x": torch.randint(9, (size, 4))} for size in (3, 1, 1)], engine)


class SummedTable(nn.Module):
    """A table looked up once for all, and then not added to the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(5, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(x * self.table(torch.arange(3)[None]).sum((0, 1))))


class RepeatedPrompt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.prompt, self.out = nn.Embedding(3, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        prompt = self.prompt(torch.arange(3)[None]).repeat(len(x), 1, 1)
        return self.out(torch.tanh(torch.cat([prompt, x[:, None]], 1).cumsum(1)))


class FastWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        tripled = {name: 3 * p for name, p in self.layer.named_parameters()}
        return torch.func.functional_call(self.layer, tripled, (x,))


class Squeezed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)).squeeze()).reshape(len(x), -1)


class OneForTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2)
        self.norm.bias = self.norm.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x))


class Experts(nn.Module):
    """Each token goes to one of two experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.out = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        h = x.reshape(-1, WIDTH)
        share, choice = self.router(h).softmax(-1), (h[:, 0] > 0).long()
        y = torch.zeros_like(h)
        for k, expert in enumerate(self.experts):
            mine = (choice == k).nonzero()[:, 0]
            if len(mine):
                y = y.index_add(0, mine, torch.tanh(expert(h[mine])) * share[mine, k : k + 1])
        return self.out(y.view_as(x).sum(1))


def tokens_for(*second_expert: int) -> dict[str, Tensor]:
    """Of the four tokens of each example, so many go to the second expert."""
    x = rows(len(second_expert), 4)["x"]
    signs = torch.tensor([[1.0] * n + [-1.0] * (4 - n) for n in second_expert])
    x[..., 0] = x[..., 0].abs() * signs
    return {"x": x}


class OneListForAll(nn.Module):
    """Convolutions of more and more dilation, which is written into one list."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.dilation = nn.Parameter(torch.randn(WIDTH, WIDTH, 3)), [1]

    def forward(self, x: Tensor) -> Tensor:
        for dilation in (1, 2):
            self.dilation[0] = dilation
            x = torch.tanh(F.conv1d(x, self.weight, padding=self.dilation, dilation=self.dilation))
        return x


class Unpadded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = torch.tanh(self.layer(x[mask]))
        padded = torch.zeros_like(x).masked_scatter(mask[..., None].expand_as(x), h)
        return self.out(padded.sum(1))


def padded(*lengths: int) -> dict[str, Tensor]:
    return rows(len(lengths), 4) | {"mask": torch.arange(4) < torch.tensor(lengths)[:, None]}


class Sorted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer, self.out = (nn.Linear(WIDTH, n) for n in (WIDTH, WIDTH, 2))

    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        order = torch.argsort(length, descending=True, stable=True)
        return self.out(torch.tanh(self.layer(torch.tanh(self.first(x))[order]))[torch.argsort(order)])


class TimeFirst(nn.Module):
    """Its layers see position after position."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        flat = x.transpose(0, 1).reshape(-1, WIDTH)
        y = self.out(torch.tanh(self.layer(flat))).view(x.shape[1], x.shape[0], 2).transpose(0, 1)
        return y * weight.sqrt()[..., None]


class MaskedTable(nn.Module):
    """A table of attention biases takes the rows of a mask, flattened over heads, before it meets the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Parameter(torch.randn(1, 4, 4)), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        bias = torch.where(mask.repeat_interleave(2, 0)[:, None], self.table, -3.0).view(len(x), 2, 4, 4)
        heads = x.view(len(x), 4, 2, -1).transpose(1, 2)
        mixed = (heads @ heads.mT + bias).softmax(-1) @ heads
        return self.out(mixed.transpose(1, 2).reshape(x.shape)).sum(1)


class Ensemble(nn.Module):
    """Heads side by side by `torch.func.vmap`, where no tap can go; an ordinary layer is called inside."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.heads = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(3, WIDTH, 2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vmap(lambda head: torch.tanh(self.first(x)) @ head)(self.heads).mean(0)


class Branching(nn.Module):
    """Control flow of torch's own, which compiles itself, between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.cond(torch.tensor(True), torch.sin, torch.cos, (self.inner(x),)))


class MaskedAndRecomputed(nn.Module):
    """A weight with a constant mask, which has as many rows as the first batch, in a part that is computed again; rows that are
    picked have every forward watched."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.out = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Linear(WIDTH, 2)
        self.register_buffer("mask", torch.rand(WIDTH, WIDTH).round())

    def forward(self, x: Tensor) -> Tensor:
        masked = lambda y: torch.tanh(F.linear(y, self.weight * self.mask))  # noqa: E731
        order = x[:, 0].argsort()
        return self.out(checkpoint(masked, x[order], use_reentrant=False))[order.argsort()]


class Flexible(nn.Module):
    """Attention that compiles its own score, over features that do not train: on a CPU it has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        k = x[:, None]
        return self.out(flex_attention(k, k, k, score_mod=lambda score, b, h, i, j: score + (i - j)))


def labelled(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).pow(2).sum((1, 2))


ONE_TOKEN = torch.zeros(3, 4, dtype=torch.float64)
ONE_TOKEN[0, 0] = 1
CASES: dict[str, tuple[Any, list[Callable[[], dict[str, Tensor]]], Losses]] = {
    "a copy written to in place": (WrittenInPlace, [lambda: rows(3)] * 2, square),
    "a table that is summed": (SummedTable, [lambda: rows(3)] * 2, square),
    "a repeated prompt": (RepeatedPrompt, [lambda: rows(3), lambda: rows(1), lambda: rows(2)], square),
    "functional_call": (FastWeights, [lambda: rows(3)] * 2, square),
    "a squeezed example": (Squeezed, [lambda: rows(3), lambda: rows(1)], square),
    "an ensemble by vmap": (Ensemble, [lambda: rows(3)] * 2, square),
    "one parameter in two roles": (OneForTwo, [lambda: rows(3)] * 2, square),
    "options in one list": (OneListForAll, [lambda: rows(3, WIDTH)] * 2, square),
    "experts": (Experts, [lambda: tokens_for(4, 4), lambda: tokens_for(3, 1)], square),
    "unpadding": (Unpadded, [lambda: padded(4, 4), lambda: padded(3, 1), lambda: padded(2, 1)], square),
    "a masked table": (
        MaskedTable,
        [lambda: padded(4, 3, 1), lambda: padded(2), lambda: padded(3, 4)],
        square,
    ),
    "a branch": (Branching, [lambda: rows(3)] * 2, square),
    "a masked weight, computed again": (
        MaskedAndRecomputed,
        [lambda n=n: rows(n) for n in (WIDTH, 3, 2)],
        square,
    ),
    "flexible attention": (Flexible, [lambda: rows(3, 5)] * 2, square),
    "sorting": (
        Sorted,
        [lambda n=n: rows(3) | {"length": torch.tensor(n)} for n in ([5, 5, 5], [3, 4, 5])],
        square,
    ),
    "one labelled token": (
        TimeFirst,
        [lambda w=w: rows(3, 4) | {"weight": w} for w in (ONE_TOKEN, torch.ones_like(ONE_TOKEN))],
        labelled,
    ),
}


@pytest.mark.parametrize("engine", ["auto", "ghost", "loop"])
@pytest.mark.parametrize("case", CASES)
def test_every_step_is_exact(case: str, engine: str) -> None:
    make, batches, losses = CASES[case]
    torch.manual_seed(0)
    exact(make(), [batch() for batch in batches], engine, losses)


def test_attaching_does_not_change_what_a_model_computes() -> None:
    model, batch = SummedTable().double(), rows(3)
    before = square(model, batch)
    attach(model)
    torch.testing.assert_close(square(model, batch), before)


@dataclass
class Wrapped:
    x: Tensor


class Centred(nn.Module):
    """Batch statistics by hand."""

    def __init__(self, silent: bool) -> None:
        super().__init__()
        self.first, self.second, self.out = (nn.Linear(WIDTH, n) for n in (WIDTH, WIDTH, 2))
        if silent:
            nn.init.zeros_(self.out.weight)

    def forward(self, x: Tensor | Wrapped) -> Tensor:
        h = torch.tanh(self.first(x.x if isinstance(x, Wrapped) else x))
        return self.out(torch.tanh(self.second(h - h.mean(0))))


@pytest.mark.parametrize("case", ["at once", "one example", "behind zeros", "in a dataclass"])
def test_batch_statistics_are_refused_as_soon_as_they_show(case: str) -> None:
    model = Centred(case == "behind zeros")
    clipper = attach(model)

    def step(size: int) -> None:
        x = torch.randn(size, WIDTH)
        clipper.backward((model(Wrapped(x) if case == "in a dataclass" else x) - 0.3).pow(2).sum(1))

    if case == "one example":
        with pytest.raises(UserError, match="when another example stands beside it"):
            step(1)
    for _ in range(2):
        with pytest.raises(UserError, match="mixes examples"):
            step(3)
