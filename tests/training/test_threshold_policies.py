"""Thresholds that follow the mean norm, or a quantile by equal steps: the rules by hand, and what they release."""

import json
import math

import numpy as np
import pytest
import torch
from dp_accounting import ComposedDpEvent, GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.rdp import RdpAccountant

from dpexp.clipping import attach
from dpexp.clipping.given import check_thresholds
from dpexp.clipping.thresholds import NormThresholds, QuantileThresholds
from dpexp.config import compose
from dpexp.errors import UserError
from dpexp.training import release
from dpexp.training.steps import Steps
from tests.training.tiny import cut_short, run_to_end, tiny_run, train, weights


def norm_run(steps=6):
    run = tiny_run(steps=steps)
    run.clip.follows, run.clip.rescale, run.clip.norm_factor, run.clip.norm_bound = "norm", False, 0.9, 3.0
    return run


def test_thresholds_follow_the_mean_norm_by_hand():
    policy = NormThresholds(torch.tensor([1.0, 2.0]), 0.5, 4.0, floor=0.1)
    assert policy.bounds.tolist() == [4.0, 8.0]
    policy.update(torch.tensor([3.0, 100.0]))
    assert policy.values.tolist() == [1.5, 4.0]
    policy.update(torch.tensor([-3.0, 1.0]))
    assert policy.values.tolist() == [pytest.approx(0.1), 0.5]
    both = NormThresholds(torch.tensor([3.0, 4.0]), 1.0, 2.0, floor=0.1, rescale_to=10.0)
    assert both.values.tolist() == pytest.approx([6.0, 8.0])
    with pytest.raises(UserError, match="could only fall"):
        NormThresholds(torch.ones(1), 0.5, 2.0, floor=0.1)


def test_equal_steps_and_equal_factors():
    arithmetic = QuantileThresholds(torch.tensor([1.0, 100.0]), 0.5, 0.4, 1e-3, arithmetic=True)
    arithmetic.update(torch.tensor([0.75, 0.25]))
    assert arithmetic.values.tolist() == pytest.approx([0.9, 100.1])
    for _ in range(20):
        arithmetic.update(torch.tensor([1.0, 1.0]))
    assert arithmetic.values.tolist() == pytest.approx([1e-3, 96.1])
    geometric = QuantileThresholds(torch.tensor([1.0, 100.0]), 0.5, 0.4, 1e-3)
    geometric.update(torch.tensor([0.75, 0.25]))
    assert geometric.values.tolist() == pytest.approx([math.exp(-0.1), 100 * math.exp(0.1)])


@pytest.mark.parametrize("kind", ["quantile", "norm"])
def test_a_group_without_gradients_beside_one_with_huge_ones_has_a_threshold_still(kind):
    estimates = torch.tensor([1e-6, 1e12])
    if kind == "quantile":
        policy = QuantileThresholds(estimates, 0.5, 0.3, 1e-6, rescale_to=0.1)
    else:
        policy = NormThresholds(estimates, 1.0, 2.0, 1e-6, rescale_to=0.1)
    check_thresholds(policy.values.double(), "thresholds")
    assert policy.values.norm() == pytest.approx(0.1)


def test_a_single_group_adapts_though_several_would_be_rescaled():
    clip = compose(["task=sst2", "scale=demo", "clip=adaptive_perlayer", "clip.clip_norm=0.5"]).clip
    assert clip.rescale
    alone, several = (release.build_policy(clip, number) for number in (1, 3))
    for policy in (alone, several):
        policy.update(torch.zeros(len(policy.estimates)))
    assert (
        alone.values.tolist()
        == alone.estimates.tolist()
        == [pytest.approx(math.exp(0.3 * clip.target_quantile))]
    )
    assert several.values.norm() == pytest.approx(0.5)


def test_the_event_is_that_of_the_two_gaussians_and_the_noise_is_what_it_says(tmp_path, monkeypatch):
    """σ_b·D_k on each group, D_k the bound that the step's norms were cut at; ε as from dp_accounting by hand."""
    asked, bounds = [], []
    monkeypatch.setattr(
        release, "add_gaussian_", lambda tensors, std, generator=None: asked.append(list(std))
    )
    begin = Steps.begin

    def watched(self, *arguments):
        bounds.append(self.policy.bounds.tolist())
        return begin(self, *arguments)

    monkeypatch.setattr(Steps, "begin", watched)
    trainer = run_to_end(tmp_path, norm_run())
    r, k = 0.1, 2
    for step in range(6):
        assert asked[2 * step + 1] == pytest.approx([math.sqrt(k / (4 * r)) * d for d in bounds[step]])
    # each D_k/2 is the sensitivity: multiplier sqrt(K)/2 of sigma_b in all
    multiplier = math.sqrt(k / (4 * r)) / (math.sqrt(k) / 2)
    inner = ComposedDpEvent([GaussianDpEvent(1 / math.sqrt(1 - r)), GaussianDpEvent(multiplier)])
    event = SelfComposedDpEvent(PoissonSampledDpEvent(20 / 60, GaussianDpEvent(1.0)), 6)
    assert multiplier == pytest.approx(1 / math.sqrt(r))
    charged = [json.loads(line)["event"] for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    found = [one["noise_multiplier"] for one in charged[0]["event"]["events"]]
    assert found == pytest.approx([one.noise_multiplier for one in inner.events])
    independent = RdpAccountant().compose(event).get_epsilon(1e-3)
    assert trainer.ledger.epsilon(1e-3) == pytest.approx(independent, rel=0.02)


def test_a_killed_run_ends_with_the_same_thresholds(tmp_path):
    whole = run_to_end(tmp_path / "whole", norm_run())
    again = cut_short(tmp_path / "killed", norm_run(), steps=3)
    train(again)
    np.testing.assert_array_equal(weights(again), weights(whole))
    assert again.policy.values.tolist() == whole.policy.values.tolist() != [1 / math.sqrt(2)] * 2


def test_normalised_gradients_have_the_length_of_the_threshold_and_zero_stays_zero():
    model = torch.nn.Linear(3, 1).double()
    clipper = attach(model, clip_norm=0.7, rule="normalized")
    x = torch.tensor([[1e-8, 0, 0], [5.0, 1, 2]], dtype=torch.float64)
    for row in x:
        model.zero_grad()
        clipper.backward(model(row[None]).squeeze(1))
        total = sum(float(p.grad.square().sum()) for p in model.parameters())
        assert math.sqrt(total) == pytest.approx(0.7)
    model.zero_grad()
    clipper.backward(model(x[:1]).squeeze(1) * 0.0)
    assert all(bool((p.grad == 0).all()) for p in model.parameters())
    assert clipper.sensitivity == pytest.approx(0.7)


@pytest.mark.parametrize("clip", ["automatic", "auto_s", "norm_perlayer", "arithmetic_flat"])
def test_the_choices_compose_and_a_mistake_is_one_sentence(clip):
    run = compose(["task=sst2", "scale=demo", f"clip={clip}"])
    assert run.clip.name == clip
    assert run.clip.private
    if clip == "norm_perlayer":
        with pytest.raises(UserError, match=r"norm_bound=0\.5 must be above 1"):
            compose(["task=sst2", "scale=demo", f"clip={clip}", "clip.norm_bound=0.5"])
