"""The check of formulas spares memory where outputs are large, and tells as much."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from dpexp.clipping import attach
from dpexp.clipping.gradients import conv, outer
from dpexp.clipping.gradients.outer import Outer
from dpexp.clipping.survey import formula_check

B = 5
LOOPED = "one back-propagation per example"


class Words(nn.Module):
    """A table, convolutions and layers over a sequence, of which some have an axis that is not the batch in front."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.conv, self.norm = nn.Embedding(11, 6), nn.Conv1d(6, 8, 3), nn.LayerNorm(8)
        self.scale, self.head = nn.Parameter(torch.rand(8)), nn.Linear(8, 11)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.conv(self.table(ids).transpose(1, 2)).transpose(1, 2)) * self.scale
        return self.head(x.transpose(0, 1)).transpose(0, 1) + self.head(x.flatten(0, 1)).view(B, -1, 11)


def norms_and_looped(model: nn.Module, autocast: bool = False) -> tuple[Tensor, set[str]]:
    ids = torch.randint(11, (B, 7), generator=torch.Generator().manual_seed(1))
    clipper = attach(model, groups="layer", clip_norm=0.5)
    with torch.autocast("cpu", enabled=autocast):
        outputs = model(ids)
    losses = outputs.double().square().flatten(1).sum(1)
    norms = clipper.backward(losses).norms.clone()
    looped = {name for name, method in clipper.choices.items() if method == LOOPED}
    clipper.detach()
    return norms, looped


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Words().double()


def test_a_few_examples_at_a_time_prove_what_all_prove(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once, looped = norms_and_looped(model)
    assert looped == set()
    monkeypatch.setattr(formula_check, "LARGE", 1)
    few, looped = norms_and_looped(model)
    assert looped == set()
    torch.testing.assert_close(few, at_once)


@pytest.mark.parametrize(
    ("layer", "shape"), [(nn.Conv1d(2, 3, 5), (4, 2, 200)), (nn.Linear(2, 3), (4, 90, 2))]
)
def test_no_gram_matrix_of_many_positions_is_made(
    layer: nn.Module, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take minutes for a photograph, in a step that takes a second otherwise."""

    def too_long(a: Tensor, g: Tensor, scratch: object) -> tuple[Tensor, Tensor]:
        raise AssertionError(a.shape)

    for module in (conv, outer):
        monkeypatch.setattr(module, "gram_norms", too_long)
    clipper = attach(model := copy.deepcopy(layer), groups="flat", clip_norm=1.0)
    assert clipper.backward(model(torch.randn(shape)).square().flatten(1).sum(1)).norms.min() > 0


@pytest.mark.parametrize("large", [1, formula_check.LARGE])
@pytest.mark.parametrize("how", ["float64", "bfloat16", "float16", "autocast"])
def test_one_wrong_example_is_found_among_few(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch, how: str, large: int
) -> None:
    """Also in 16 bits, whose rounding would hide it."""
    model.to(torch.float32 if how == "autocast" else getattr(torch, how))
    right, looped = norms_and_looped(model, how == "autocast")
    assert looped == set()
    weighted_sum = Outer._weighted_sum

    def forgetful(self: Outer, factors: Tensor | None, out: Tensor | None) -> Tensor:
        # of whichever example carries the weight 1/4
        kept = factors if factors is None else torch.where(factors == 0.25, 0.0, factors)
        return weighted_sum(self, kept, out)

    monkeypatch.setattr(Outer, "_weighted_sum", forgetful)
    monkeypatch.setattr(formula_check, "LARGE", large)
    norms, looped = norms_and_looped(model, how == "autocast")
    assert "head.weight" in looped
    rounding = {} if how == "float64" else {"rtol": 0.05, "atol": 0.0}
    torch.testing.assert_close(norms, right, **rounding)


def test_a_few_examples_at_a_time_do_without_an_input_that_nobody_needs(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where biases alone train, no input is saved."""
    for name, p in model.named_parameters():
        p.requires_grad_(name.endswith("bias"))
    at_once, looped = norms_and_looped(model)
    assert looped == set()
    monkeypatch.setattr(formula_check, "LARGE", 1)
    few, looped = norms_and_looped(model)
    assert looped == set()
    torch.testing.assert_close(few, at_once)


def summed(model: nn.Module, x: Tensor, hidden: Tensor) -> Tensor:
    return torch.einsum("bid,ij,de->bje", x, (~hidden).to(x), model.weight)


def filled(model: nn.Module, x: Tensor, hidden: Tensor) -> Tensor:
    return (x @ model.weight @ x.mT).masked_fill(hidden, model.bias.sum()).softmax(-1) @ x


@pytest.mark.parametrize("engine", ["auto", "ghost"])
@pytest.mark.parametrize("size", [2, 3, B])
@pytest.mark.parametrize("forward", [summed, filled])
def test_a_mask_for_all_with_as_many_rows_as_examples_hides_nothing_at_first(
    forward: Callable[..., Tensor], size: int, engine: str
) -> None:
    """Whether it has a row for each example does not show in such a batch."""

    class Masked(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return forward(self, x, self.hidden)

    torch.manual_seed(0)
    model = Masked(4, 4).double()
    plain = copy.deepcopy(model)
    clipper = attach(model, engine=engine)
    used = [plain.weight] if forward is summed else [plain.weight, plain.bias]
    for step in range(4):
        model.hidden = plain.hidden = torch.ones(size, size).triu(1 if step > 1 else size).bool()
        x = torch.randn(size, size, 4, dtype=torch.float64)
        each = [torch.autograd.grad(plain(row[None]).square().sum(), used) for row in x]
        norms = torch.stack([torch.cat([g.flatten() for g in gs]).norm() for gs in each])
        torch.testing.assert_close(clipper.backward(model(x).square().sum((1, 2))).norms[0], norms)
