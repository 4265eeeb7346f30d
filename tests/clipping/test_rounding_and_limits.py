"""Numbers of the whole batch that decide within a model are seen; rounding is not taken for mixing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpexp.clipping import attach
from dpexp.errors import UserError
from tests.clipping.stepping import D, Net, step, x


class Solver(nn.Module):
    """Steps as long as the error of the whole batch allows, or until all of it has come to rest."""

    def __init__(self, by: str, each: bool) -> None:
        super().__init__()
        self.by, self.each = by, each

    def forward(self, h: Tensor) -> Tensor:
        if self.each:
            return torch.cat([self.solved(row) for row in h.split(1)])
        return self.solved(h)

    def solved(self, h: Tensor) -> Tensor:
        if self.by == "rest":
            start = h
            for _ in range(50):
                before, h = h, torch.tanh(0.5 * h + start)
                if (h - before).norm() < 0.1:
                    break
            return h
        time, size = 0.0, 0.5
        while time < 1.0:
            size = min(size, 1.0 - time)
            slope, ahead = -h * h.abs(), h - size * h * h.abs()
            error = float((ahead * ahead.abs() + slope).mul(size).detach().abs().mean())
            if error < 0.2 or size < 1e-3:
                h, time = h + size * slope, time + size
            else:
                size *= 0.5
        return h


@pytest.mark.parametrize("by", ["error", "rest"])
def test_what_is_decided_by_numbers_of_the_whole_batch_is_seen_within_four_steps(by: str) -> None:
    batches = [x(3, D) * size for size in (0.01, 0.02, 1.0, 0.5)]

    def trained(each: bool) -> Any:
        torch.manual_seed(0)
        model = Net(Solver(by, each))
        clipper = attach(model)
        for batch in batches:
            clipper.backward(model(batch).square().sum(1))
        return clipper

    with pytest.raises(UserError, match="mixes examples"):
        trained(each=False)
    assert trained(each=True).notes == []


def test_a_part_in_32_bits_of_a_model_of_64_is_not_taken_for_mixing() -> None:
    """A product rounds otherwise in a batch of another size; as routers of experts and scans have it in transformers."""

    def in_32_bits(h: Tensor) -> Tensor:
        return h + 0.1 * (h.float().repeat(1, 20) @ rounding).to(h)

    torch.manual_seed(0)
    rounding = torch.randn(20 * D, D) / 5
    assert step(Net(in_32_bits).double(), x().double()).notes == []


class Sensitive(nn.Module):
    """What it computes doubles a difference sixteen times, as of rounding."""

    def __init__(self, mix: float) -> None:
        super().__init__()
        self.first, self.last, self.mix = nn.Linear(64, 64), nn.Linear(64, 3), mix

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).sigmoid()
        h = h + self.mix * h.detach().mean(0)
        for _ in range(16):
            h = 3.99 * h * (1 - h)
        return self.last(h)


def test_rounding_that_grows_is_not_taken_for_mixing_and_hides_none() -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 64)
    clipper = attach(model := Sensitive(0.0))
    clipper.backward(model(x).square().sum(1))
    assert clipper.notes == []
    assert {p.dtype for p in model.parameters()} == {torch.get_default_dtype()} == {torch.float32}
    with pytest.raises(UserError, match="mixes examples"):
        attach(model := Sensitive(1e-6)).backward(model(x).square().sum(1))


def test_rounding_that_grows_in_a_transformer_is_not_taken_for_padding() -> None:
    from transformers import MPNetConfig, MPNetForSequenceClassification

    torch.manual_seed(0)
    config = MPNetConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=8, num_attention_heads=4, intermediate_size=64,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = MPNetForSequenceClassification(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1 and "embeddings" not in name:
                # as a training that diverges makes them
                p.mul_(60)
    ids, mask = torch.randint(5, 100, (8, 20)), torch.ones(8, 20, dtype=torch.long)
    mask[3:, 12:], ids[3:, 12:] = 0, 1
    clipper = attach(model)
    clipper.backward(model(input_ids=ids, attention_mask=mask).logits.square().sum(1))
    assert clipper.notes == []
