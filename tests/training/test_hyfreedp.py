"""HyFreeDP: the parabola without noise, what the three losses release, their event, and a run."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dpexp.config import compose
from dpexp.privacy.accountants import epsilon
from dpexp.privacy.events import step_event
from dpexp.privacy.noise import KeyedGenerator
from dpexp.privacy.plan import make_plan
from dpexp.privacy.searches import SearchBudget
from dpexp.schemas import SearchConfig
from dpexp.training.searches import hyfreedp
from dpexp.training.searches.hyfreedp import HyFreeDP
from tests.training.tiny import cut_short, run_to_end, tiny_run, train, weights

SHARE = 0.1


def search_of(parameter, losses, batch, bound=100.0, size=0.1):
    model = torch.nn.Module()
    model.w = parameter
    group = SimpleNamespace(params={"w": parameter})
    plan = make_plan(
        num_examples=100, expected_batch_size=batch, steps=5, delta=1e-4, noise_multiplier=1.5,
        search=SearchBudget("gaussian", SHARE), accountant="pld",
    )  # fmt: skip
    release = SimpleNamespace(plan=plan, clipper=SimpleNamespace(groups=[group]))
    settings = SearchConfig(name="hyfreedp", mechanism="gaussian", share=SHARE, objective_clip=bound)
    return HyFreeDP(settings, release, model, losses, expected_batch=batch, largest=size)


def test_without_noise_it_finds_the_lowest_point_and_moves_by_two_at_most():
    """Mean loss ½·h·w², g̃ = h·w: the best step is 1/h."""
    h, w = 2.5, torch.nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
    search = search_of(w, lambda piece: (0.5 * h * w**2).expand(len(piece)), batch=4)
    sample, sizes = [np.arange(4)], []
    for _ in range(4):
        search.before = [np.zeros(4)]
        sizes.append(search.search([h * w.detach()], sample, KeyedGenerator(bytes(32))))
        w.data.fill_(2.0)
    assert sizes == pytest.approx([0.2, 0.4, 0.4, 0.4])
    assert search.bound == pytest.approx(2 * 0.5 * h * 4.0**2)  # uphill of the third and fourth: w = 4


def test_the_three_losses_are_released_on_the_public_grid_of_their_noise(monkeypatch):
    """As the gradients are: a sum plus floating-point noise would tell by its last bits which sums are possible."""
    released, add = [], hyfreedp.add_gaussian_

    def seen(tensor, std, noise):
        add(tensor, std, noise)
        released.append((tensor.numpy().copy(), std))

    monkeypatch.setattr(hyfreedp, "add_gaussian_", seen)
    w = torch.nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    search = search_of(w, lambda piece: torch.rand(len(piece), dtype=torch.float64), batch=4)
    search.multiplier, search.before = 1.3, [np.zeros(4)]
    search.search([torch.ones(1, dtype=torch.float64)], [np.arange(4)], KeyedGenerator(bytes(32)))
    ((noisy, std),) = released
    assert std == search_of(w, None, batch=4).bound / 2 * math.sqrt(3) * 1.3
    multiples = noisy / (std * (1 + 2**-16) / 2**40)
    np.testing.assert_allclose(multiples, multiples.round(), atol=0.01)


def test_an_example_moves_the_three_sums_by_half_the_bound_each():
    rng, w = np.random.default_rng(0), torch.nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    scale = torch.tensor(rng.exponential(5.0, 8))
    scale[3] = math.nan
    search = search_of(w, lambda piece: scale[piece] * w.sum().abs(), batch=8, bound=4.0)
    gradient, most = [torch.tensor([0.5], dtype=torch.float64)], 0.0
    search.before = [np.zeros(8)]
    whole = search.sums(gradient, [0.0, 0.2, -0.2], [np.arange(8)])
    for i in range(8):
        search.before = [np.zeros(7)]
        moved = whole - search.sums(gradient, [0.0, 0.2, -0.2], [np.delete(np.arange(8), i)])
        assert np.abs(moved).max() <= 2.0 + 1e-12
        most = max(most, float(np.linalg.norm(moved)))
    assert most == pytest.approx(math.sqrt(3) * 2)
    search.multiplier = 7.0
    assert search.noise == pytest.approx(7.0 * most)


def test_the_event_is_two_gaussians_of_one_sample_under_every_accountant():
    plan = search_of(torch.nn.Parameter(torch.zeros(1)), None, batch=10).release.plan
    assert not plan.moves
    by_hand = step_event(0.1, [1.5 / math.sqrt(1 - SHARE), 1.5 / math.sqrt(SHARE)])
    assert plan.step_event(0) == by_hand
    for accountant in ("rdp", "prv", "pld"):
        same = make_plan(num_examples=100, expected_batch_size=10, steps=5, delta=1e-4, noise_multiplier=1.5)
        assert plan.epsilon(accountant=accountant) == pytest.approx(
            epsilon(same.event(), 1e-4, accountant), rel=1e-6
        )


def test_a_run_goes_on_after_a_kill_and_the_learning_rate_moves(tmp_path):
    def run():
        made = tiny_run(steps=5, adaptive=False)
        made.clip.groups, made.clip.rule, made.optim.name, made.optim.lr = "flat", "automatic", "sgd", 0.05
        made.search = SearchConfig(name="hyfreedp", mechanism="gaussian", share=0.5, objective_clip=3.0)
        made.privacy.noise_multiplier = 0.2
        return made

    whole = run_to_end(tmp_path / "whole", run())
    again = cut_short(tmp_path / "killed", run(), steps=2)
    train(again)
    np.testing.assert_array_equal(weights(again), weights(whole))
    assert again.search.size == whole.search.size
    # whether the learning rate moves in so few steps is up to the noise; the bound does
    assert again.search.bound == whole.search.bound != 3.0
    events = [
        json.loads(line)["event"] for line in (tmp_path / "whole" / "ledger.jsonl").read_text().splitlines()
    ]
    multipliers = [one["noise_multiplier"] for one in events[0]["event"]["events"]]
    assert multipliers == pytest.approx([0.2 * math.sqrt(2)] * 2)
    assert len(events) == 5


def test_it_composes_with_any_accountant():
    constant = ["optim.lr_schedule=constant", "optim.warmup_ratio=0"]
    run = compose(["task=sst2", "scale=demo", "search=hyfreedp", "accountant=pld", *constant])
    assert (run.search.name, run.clip.rule, run.optim.name) == ("hyfreedp", "automatic", "sgd")
