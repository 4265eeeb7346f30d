"""Weights of 16 bits: their clipped sums have 32 until there is noise in them."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dpexp import PrivacyEngine
from dpexp.errors import UserError
from dpexp.schemas import ClipConfig
from dpexp.training.release import Release, build_policy
from tests.versions import needs_torch

EXAMPLES, SIZE = 1500, 128
LOW = [torch.bfloat16, torch.float16]


class Dot(nn.Module):
    """A model whose gradient is its input."""

    def __init__(self, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SIZE, dtype=dtype))

    def forward(self, x):
        return (x * self.weight).sum(1)


def alike(dtype):
    """Examples that nearly agree, as in the first steps of a training: their sum is as long as it can be."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, SIZE, generator=generator) + 0.3 * torch.randn(EXAMPLES, SIZE, generator=generator)
    return x.to(dtype)


def sums_of_a_step(folder, monkeypatch, x, number):
    """What the noise is added to, of the first `number` examples in an expected batch of all, and the weights afterwards."""
    seen = []

    def look(self, step, attempt, counts):
        seen.extend(p.grad.clone() for p in self.parameters)
        return add_noise(self, step, attempt, counts)

    add_noise = Release.add_noise
    monkeypatch.setattr(Release, "add_noise", look)
    model = Dot(x.dtype)
    engine = PrivacyEngine(
        model, torch.optim.Adam(model.parameters(), lr=0.1), TensorDataset(x[:number]), folder=folder, batch_size=number, steps=1,
        noise_multiplier=1.0, delta=1e-5, noise_seed=0,
    )  # fmt: skip
    for (batch,) in engine.batches(physical_batch_size=500):
        engine.step(model(batch))
    engine.close()
    monkeypatch.setattr(Release, "add_noise", add_noise)
    return seen[0].double(), model.weight


@needs_torch(2, 10)
@pytest.mark.parametrize("dtype", LOW)
def test_one_example_moves_the_sum_that_is_noised_by_its_threshold(tmp_path, monkeypatch, dtype):
    """Rounded to 8 bits, the sum of 1500 examples would move by more than 2 C."""
    x = alike(dtype)
    whole, weight = sums_of_a_step(tmp_path / "whole", monkeypatch, x, EXAMPLES)
    rest, _ = sums_of_a_step(tmp_path / "rest", monkeypatch, x, EXAMPLES - 1)
    assert float((whole - rest).norm()) == pytest.approx(1.0, abs=1e-3)
    wanted = nn.functional.normalize(x.double(), dim=1).sum(0)
    np.testing.assert_allclose(whole, wanted, atol=1e-2)
    assert weight.dtype == dtype
    assert weight.grad is None or weight.grad.dtype == dtype
    assert weight.grad_dtype == dtype
    assert bool((weight != 0).all())


def engine_of(model, folder, **changes):
    settings = {"batch_size": 20, "steps": 1, "noise_multiplier": 1.0, "delta": 1e-3} | changes
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return PrivacyEngine(
        model, optimizer, TensorDataset(alike(torch.bfloat16)[:40]), folder=folder, **settings
    )


def test_what_sums_in_16_bits_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"trained weights of .*bfloat16, whose clipped sums would be"):
        engine_of(nn.Linear(SIZE, 1).bfloat16(), tmp_path / "opacus", engine="opacus")


@needs_torch(2, 10)
def test_weights_that_were_made_16_bits_wide_under_the_engine_are_refused(tmp_path):
    model = Dot(torch.bfloat16)
    engine = engine_of(model, tmp_path / "by hand")
    batches = engine.batches()
    (batch,) = next(batches)
    engine.clipper.backward(model(batch))
    sums = model.weight.grad
    model.weight.grad, model.weight.grad_dtype = None, None
    model.weight.grad = sums.bfloat16()
    with pytest.raises(UserError, match="clipped sums in 16 bits"):
        engine._steps.add(torch.zeros(0))
    assert engine.ledger.steps_charged == 0


@pytest.mark.parametrize("adaptive", [False, True])
def test_thresholds_have_32_bits_whatever_tensors_have_by_default(adaptive):
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        policy = build_policy(ClipConfig(clip_norm=1.0, adaptive=adaptive, quantile_lr=0.3), 3)
        policy.update(torch.full((3,), 0.25))
    finally:
        torch.set_default_dtype(before)
    assert policy.values.dtype == torch.float32


@pytest.mark.parametrize("way", ["autocast", pytest.param("weights", marks=needs_torch(2, 10)), "neither"])
def test_the_card_names_sixteen_bits(tmp_path, way):
    """Their rounding goes by the shape of a physical batch, which goes by who was drawn."""
    dtype = torch.bfloat16 if way == "weights" else torch.float32
    model, x = Dot(dtype), alike(dtype)[:20]
    engine = PrivacyEngine(
        model, torch.optim.SGD(model.parameters(), lr=0.1), TensorDataset(x), folder=tmp_path, batch_size=10, steps=2,
        noise_multiplier=1.0, delta=1e-3, noise_seed=0,
    )  # fmt: skip
    for (batch,) in engine.batches():
        with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
            losses = model(batch)
        engine.step(losses)
    engine.write_card(tmp_path)
    said = (tmp_path / "PRIVACY.md").read_text(encoding="utf-8").count("the network computed in 16 bits")
    assert said == (way != "neither")
