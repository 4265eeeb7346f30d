"""Bare parameters in the ways that models use them: exact step after step, and without the per-example loop."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpexp.clipping import attach
from tests.clipping.exact_steps import WIDTH, Batch, rows
from tests.clipping.test_unusual_inputs import Own, exact, linears, of_x

LENGTH = 6


def own(forward: Callable[..., Tensor], constants: int = 0, **shapes: tuple[int, ...]) -> nn.Module:
    model = Own(forward, **linears("first", "out"))
    for name, shape in shapes.items():
        model.register_parameter(name, nn.Parameter(torch.randn(shape)))
    for index in range(constants):
        model.register_buffer(f"constant{index}", torch.rand(WIDTH) + 0.5)
    return model


def in_place(self: Any, x: Tensor) -> Tensor:
    h = self.first(x)
    h += self.positions
    h[:, 1:] += self.rest
    return self.out(torch.tanh(h))


def windows(self: Any, x: Tensor) -> Tensor:
    """Attention in two windows of each example, with a bias that all windows share."""
    h = self.first(x).view(2 * len(x), LENGTH // 2, 2, WIDTH // 2).transpose(1, 2)
    return self.out(((h @ h.mT + self.bias).softmax(-1) @ h).transpose(1, 2).reshape(x.shape))


def shifted_windows(self: Any, x: Tensor) -> Tensor:
    """A bias beside a mask, of each window another one, that is repeated for each example: as Swin has them."""
    h = self.first(x).view(2 * len(x), LENGTH // 2, WIDTH)
    mask = torch.stack([torch.zeros(LENGTH // 2, LENGTH // 2), torch.eye(LENGTH // 2)]).to(x)
    bias = self.bias + mask.expand(len(x), *mask.shape).reshape(-1, *mask.shape[1:])
    return self.out((h @ h.mT + bias).softmax(-1) @ h).reshape(x.shape)


def router(self: Any, x: Tensor) -> Tensor:
    flat = self.first(x).reshape(-1, WIDTH)
    return self.out(flat * (F.linear(flat, self.weight).softmax(-1) @ self.values)).view(x.shape)


def kinds(self: Any, x: Tensor) -> Tensor:
    """Numbers of the batch take the kind of a weight, and stay numbers of the batch."""
    h = self.first(x).type_as(self.weight).to(self.scale)
    return self.out(F.linear(h, self.weight) * self.scale)


def class_token(self: Any, x: Tensor) -> Tensor:
    token = (self.token + self.constant0.view(1, 1, -1)).expand(len(x), -1, -1)
    queries = self.queries.repeat(len(x), 1, 1)
    return self.out(torch.cat([token, queries, self.first(x)], 1).cumsum(1))


def biases(self: Any, x: Tensor) -> Tensor:
    bias = torch.cat((self.q, self.constant0, self.v))
    return self.out(
        F.linear(x, self.weight, bias).unflatten(-1, (3, -1)).prod(-2) * (self.q / self.constant0)
    )


def gates(self: Any, x: Tensor) -> Tensor:
    mixed = (torch.stack([x, self.first(x)], -1) * F.softmax(self.mix, dim=0)).sum(-1)
    return F.linear(F.normalize(mixed, dim=-1), F.normalize(self.centres)) * torch.sigmoid(self.gate)


def heads(self: Any, x: Tensor) -> Tensor:
    parts = torch.einsum("btd,dhk->bthk", self.first(x), self.weight)
    return torch.einsum("bthk,hkd->btd", torch.tanh(parts), self.back) + x @ self.plain


def frozen_norm(self: Any, x: Tensor) -> Tensor:
    channels = self.first(x).transpose(1, 2)
    h = F.batch_norm(channels, self.constant0, self.constant1, self.scale, self.shift)
    return self.out(torch.tanh(h).transpose(1, 2))


def stacked(self: Any, x: Tensor) -> Tensor:
    """A matrix for each position, as tabular models have one for each feature."""
    h = self.first(x).transpose(0, 1) @ self.weight
    return self.out(torch.tanh(torch.einsum("tbd,tde->tbe", h, self.back)).transpose(0, 1))


def experts(self: Any, x: Tensor) -> Tensor:
    """The tokens of all examples behind three experts, as many as there are examples in one of the batches."""
    flat = self.first(x).flatten(0, 1)
    gates = F.linear(flat, self.router).sigmoid().T[..., None]
    h = torch.tanh(torch.bmm(flat.expand(3, *flat.shape) * gates, self.up) + self.bias)
    return self.out(torch.bmm(h, self.down).sum(0)).view(x.shape)


def identity(self: Any, x: Tensor) -> Tensor:
    """A layer that is given the batch, and the identity matrix to read its weight, as DoRA does it."""
    read = self.first(torch.eye(WIDTH, dtype=x.dtype)).T
    return self.out(torch.tanh(self.first(x)) * self.scale / read.detach().norm(dim=1)) @ read


def time_first(self: Any, x: Tensor) -> Tensor:
    """Positions in front, with a table of theirs, and gates of the second half."""
    h = self.first(x).transpose(0, 1) + self.positions[: x.shape[1]]
    h[LENGTH // 2 :] *= self.gates
    return self.out(torch.tanh(h)).transpose(0, 1)


def like_the_batch(self: Any, x: Tensor) -> Tensor:
    """Values in the shape of rows that are written to afterwards, with the batch in front and behind."""
    h = self.first(x)
    h[:, 0].copy_(self.scale.expand_as(h[:, 0]))
    turned = h.transpose(0, 1) * self.shift.expand_as(h.transpose(0, 1))
    return self.out(turned.transpose(0, 1) + self.scale.view_as(x[0, 0]))


def repeated(self: Any, x: Tensor) -> Tensor:
    """A table of two heads beside those of each example, as disentangled attention has it; and a weight made of equal parts."""
    h = self.first(x).unflatten(-1, (2, WIDTH // 2)).transpose(1, 2).flatten(0, 1)
    table = self.out(self.table).unflatten(-1, (2, WIDTH // 2)).transpose(0, 1).repeat(len(x), 1, 1)
    scores = torch.bmm(h, table.mT).unflatten(0, (-1, 2)).sum(1)
    return F.linear(scores, self.third.repeat(WIDTH, 1)) + self.out(x).sum(-1, keepdim=True)


def passages(self: Any, x: Tensor) -> Tensor:
    """Several rows of each example, with token types that nobody gave: the same ones for all."""
    h = self.first(x).reshape(2 * len(x), LENGTH // 2, WIDTH)
    kinds = torch.zeros(1, LENGTH // 2, dtype=torch.long).expand(h.shape[:2])
    return self.out(torch.tanh(h + F.embedding(kinds, self.table))).view(x.shape)


def attention(self: Any, x: Tensor) -> Tensor:
    """Torch's function with weights of one's own: in three matrices with a learnt mask, and in one for other keys."""
    h = self.first(x).transpose(0, 1)
    size, bias, out = (WIDTH, 2), torch.cat([self.bias, self.bias, self.last]), self.out
    three = {"use_separate_proj_weight": True, "q_proj_weight": out.weight}
    three |= {"k_proj_weight": self.key, "v_proj_weight": self.value}
    more = None, None, False, 0.0, self.value, self.last
    mask = self.mask.repeat(len(x), 1, 1)
    y, seen = F.multi_head_attention_forward(h, h, h, *size, None, bias, *more, attn_mask=mask, **three)
    z, _ = F.multi_head_attention_forward(y[:2], y, y, *size, self.three, None, *more, need_weights=False)
    return out(torch.cat([y, z])).transpose(0, 1).flatten(1) * seen.sum((1, 2))[:, None]


def names_of_numpys(self: Any, x: Tensor) -> Tensor:
    """Arguments by the names that numpy has for them, which torch takes, too."""
    h = torch.add(x1=F.linear(x=self.first(x), weight=self.weight), x2=self.shift)
    return torch.matmul(a=torch.tanh(h), x2=self.back) + torch.broadcast_to(x=self.shift, size=x.shape)


D = WIDTH
USES: dict[str, nn.Module] = {
    "in place": own(in_place, positions=(1, LENGTH, D), rest=(D,)),
    "windows": own(windows, bias=(1, 2, LENGTH // 2, LENGTH // 2)),
    "flattened": own(router, weight=(3, D), values=(3, D)),
    "class tokens": own(class_token, 1, token=(1, 1, D), queries=(2, D)),
    "kinds": own(kinds, weight=(D, D), scale=(D,)),
    "constants": own(biases, 1, q=(D,), v=(D,), weight=(3 * D, D)),
    "gates": own(gates, mix=(2,), centres=(3, D), gate=()),
    "products": own(heads, weight=(D, 2, 3), back=(2, 3, D), plain=(D, D)),
    "shifted windows": own(shifted_windows, bias=(1, LENGTH // 2, LENGTH // 2)),
    "stacked": own(stacked, weight=(LENGTH, D, D), back=(LENGTH, D, D)),
    "experts": own(experts, router=(3, D), up=(3, D, 5), bias=(3, 1, 5), down=(3, 5, D)),
    "identity": own(identity, scale=(D,)),
    "time first": own(time_first, positions=(LENGTH + 1, 1, D), gates=(LENGTH // 2, 1, 1)),
    "repeated": own(repeated, table=(5, D), third=(3, 5)),
    "passages": own(passages, table=(2, D)),
    "attention": own(
        attention, key=(D, D), value=(D, D), three=(3 * D, D), bias=(D,), last=(D,), mask=(2, LENGTH, LENGTH)
    ),
    "like the batch": own(like_the_batch, scale=(D,), shift=(D,)),
    "names of numpy's": own(names_of_numpys, weight=(D, D), back=(D, D), shift=(D,)),
    "constant statistics": own(frozen_norm, 2, scale=(D,), shift=(D,)),
}


@pytest.mark.parametrize("engine", ["auto", "ghost", "loop"])
@pytest.mark.parametrize("use", USES)
def test_uses(use: str, engine: str) -> None:
    """With batches as large as other dimensions, and of one example."""
    torch.manual_seed(0)
    looped = exact(copy.deepcopy(USES[use]), [rows(n, LENGTH) for n in (3, D, 1, LENGTH, 5)], of_x, engine)
    assert engine == "loop" or looped == []


@pytest.mark.parametrize("engine", ["auto", "ghost", "loop"])
def test_complex_numbers_are_held_as_real_ones(engine: str) -> None:
    """As who has complex parameters is told: a filter of frequencies. It needs the loop."""

    def forward(self: Any, x: Tensor) -> Tensor:
        scaled = torch.fft.rfft(self.first(x)) * torch.view_as_complex(self.weight)
        return self.out(torch.fft.irfft(scaled, n=x.shape[-1]))

    model = own(forward, weight=(WIDTH // 2 + 1, 2))
    assert "weight" in exact(model, [rows(n, LENGTH) for n in (3, 5, 3)], of_x, engine)


@pytest.mark.parametrize("engine", ["auto", "ghost", "mixghost", "fastgrad"])
def test_nobody_takes_the_output_of_one_of_two_uses(engine: str) -> None:
    """The other use is summed all the same, also where a second back-propagation does so."""

    def forward(self: Any, x: Tensor) -> Tensor:
        self.out(x)
        return self.out(torch.tanh(self.first(x)))

    assert exact(own(forward), [rows(n, LENGTH) for n in (3, 5, 3)], of_x, engine) == []


def test_a_gradient_that_vanishes_needs_no_loop() -> None:
    """That of a bias before a softmax, in a table that is made of parameters alone, as ConViT's is of positions."""

    def forward(self: Any, x: Tensor) -> Tensor:
        place = torch.arange(LENGTH, dtype=x.dtype)
        apart = (place[:, None] - place)[..., None]
        scores = F.linear(apart, self.weight, self.shift).movedim(-1, 0)
        h = self.first(x).unflatten(-1, (2, -1)).transpose(1, 2)
        attended = (h @ h.mT).softmax(-1) + self.gate * scores.softmax(-1)
        return self.out((attended @ h).transpose(1, 2).flatten(2))

    model = own(forward, weight=(2, 1), shift=(2,), gate=())
    assert exact(model, [rows(n, LENGTH) for n in (3, 4, 1)], of_x, "auto") == []


def test_rows_of_a_table_by_indices_of_the_batch() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.first(self.table[x])))

    batches: list[Batch] = [{"x": torch.randint(-5, 5, (n, 4))} for n in (3, 4, 1)]
    assert exact(own(forward, table=(5, D)), batches, of_x, "auto") == []


@pytest.mark.parametrize("first", [1, 3, LENGTH])
def test_a_table_that_is_no_batch(first: int) -> None:
    """Whether it has as many rows as the first batch, a multiple of them, or as many as a later one."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.out(self.first(x) + torch.ones(LENGTH, D, dtype=x.dtype) * self.scale)

    exact(own(forward, scale=(D,)), [rows(n, LENGTH) for n in (first, 4, LENGTH, 1)], of_x, "auto")


@pytest.mark.parametrize("first", [1, 3, 4, LENGTH])
def test_positions_in_a_grid_are_no_batch(first: int) -> None:
    """Where there are as many examples as the grid has rows, one of the two coordinates repeats itself as if for each: of learned
    frequencies (mixed rotary embeddings), and of a table by relative positions."""

    def forward(self: Any, x: Tensor) -> Tensor:
        place = torch.arange(LENGTH)
        column, row = place % 2, place // 2
        angles = column[:, None] * self.both[0].unsqueeze(-2) + row[:, None] * self.both[1].unsqueeze(-2)
        cos, sin = angles.flatten(0, 1)
        bias = self.table[row[:, None] - row + 2, column[:, None] - column + 1]
        h = self.first(x) * cos.cos()
        return self.out((h @ h.mT + bias).softmax(-1) @ h * sin.sin())

    batches: list[Batch] = [rows(n, LENGTH) for n in (first, LENGTH, 1, 3, 3)]
    assert exact(own(forward, both=(2, 2, 1, D), table=(5, 3)), batches, of_x, "auto") == []


@pytest.mark.parametrize("engine", ["auto", "ghost", "bk"])
def test_a_table_of_which_a_few_rows_train(engine: str) -> None:
    """As the trainable tokens of PEFT: what is looked up is a function of the parameter."""

    def forward(self: Any, x: Tensor) -> Tensor:
        table = self.table.index_copy(0, torch.tensor([1, 3]), self.trained)
        return self.out(torch.tanh(self.first(F.embedding(x, table))))

    model = own(forward, trained=(2, D))
    model.register_buffer("table", torch.randn(5, D))
    batches: list[Batch] = [{"x": torch.randint(5, (n, 4))} for n in (3, 4, 1)]
    assert exact(model, batches, of_x, engine) == []


@pytest.mark.parametrize("engine", ["auto", "bk"])
def test_positions_first_and_several_rows_of_each_example_behind_them(engine: str) -> None:
    """As XLNet reads the choices of a question; of positions there may be a multiple of the examples."""

    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.first(torch.cat([x, x.cos()], 1).view(2 * len(x), LENGTH, WIDTH)).transpose(0, 1)
        return self.out(torch.tanh(h + self.shift) * self.scale).transpose(0, 1).reshape(len(x), -1)

    assert (
        exact(own(forward, shift=(D,), scale=(D,)), [rows(n, LENGTH) for n in (5, 3, 4, 2, 1)], of_x, engine)
        == []
    )


def test_a_number_may_be_expanded_to_a_number() -> None:
    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 2)
            self.gain = nn.Parameter(torch.tensor(2.0))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.gain.expand(())

    model = Scaled()
    attach(model, clip_norm=1e6).backward(model(torch.randn(4, 3)).square().sum(1))
    assert model.gain.grad is not None


def test_what_a_use_has_saved_is_freed_without_a_collection_of_garbage() -> None:
    """A cycle among the engine's objects would hold the activations of one batch during the next ones."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    clipper, kept = attach(model), []
    model[2].register_forward_pre_hook(lambda module, given: kept.append(weakref.ref(given[0])))
    collects = gc.isenabled()
    gc.disable()
    try:
        for _ in range(3):
            # of the first steps some are looked at again
            kept.clear()
            clipper.backward(model(torch.randn(3, 4)).square().sum(1))
        assert kept
        assert not any(activation() is not None for activation in kept)
    finally:
        if collects:
            gc.enable()
