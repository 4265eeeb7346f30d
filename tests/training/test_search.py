"""Step-size searches in a run: bounded sums, averaged gradients, budgets that rise, and the same end after a crash."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from dpexp.config import compose
from dpexp.errors import UserError
from dpexp.schemas import ScheduleConfig
from dpexp.training.searches.noisybtls import angle
from tests.training.tiny import TinyTask, cut_short, make_trainer, run_to_end, tiny_run, train, weights


def searching(name="noisymax", steps=12, **changes):
    run = tiny_run(steps=steps, adaptive=False)
    run.optim.name, run.optim.lr, run.engine.name = "sgd", 0.5, "auto"
    run.search.name, run.search.share, run.search.objective_clip = name, 0.5, 2.0
    run.search.mechanism = "laplace" if name == "noisymax" else "above_threshold"
    run.search.raise_by = 0.5
    for key, value in changes.items():
        setattr(run.search, key, value)
    return run


@pytest.mark.parametrize("name", ["noisymax", "noisybtls"])
def test_one_example_moves_each_sum_by_at_most_its_bound(tmp_path, name):
    """Leave one out, for every example; one of them has a loss that is no number."""
    trainer = make_trainer(tmp_path, searching(name, objective_clip=0.9))
    search = trainer.search
    gradient = [torch.ones_like(p) for p in search.parameters]
    losses, whole = search.losses, np.arange(20)

    def with_a_nan(piece):
        found = losses(piece)
        found[torch.from_numpy(piece == 3)] = math.nan
        return found

    search.losses = with_a_nan

    def sums(members):
        with torch.no_grad():
            search.model.eval()
            search.before = [search._bounded(members)]
            return search.sums(gradient, [0.0, 0.1, -0.2], [members])

    everyone = sums(whole)
    assert np.isfinite(everyone).all()
    for one in whole:
        moved = everyone - sums(whole[whole != one])
        assert (np.abs(moved) <= 0.9 + 1e-9).all()
        if name == "noisymax":
            assert (moved >= -1e-9).all()


@pytest.mark.parametrize(
    ("name", "mechanism"), [("noisymax", "exponential"), ("noisybtls", "above_threshold")]
)
def test_killed_in_the_middle_it_ends_the_same(tmp_path, name, mechanism):
    whole = run_to_end(tmp_path / "whole", searching(name, mechanism=mechanism))
    resumed = cut_short(tmp_path / "cut", searching(name, mechanism=mechanism), steps=5)
    assert resumed.step == 5
    train(resumed)
    assert np.array_equal(weights(resumed), weights(whole))
    assert resumed.search.state_dict().keys() == whole.search.state_dict().keys()
    assert resumed.ledger.steps_charged == whole.ledger.steps_charged


@pytest.mark.parametrize("name", ["noisymax", "noisybtls"])
def test_raises_shorten_the_run_and_epsilon_is_kept(tmp_path, name):
    """A search that never finds a step size raises the budget of gradients at every failure that it may."""
    run = searching(name, steps=12, angle_high=1e-6)
    trainer = make_trainer(tmp_path, run)
    trainer.search.search = lambda *_: 0.0
    before = weights(trainer).copy()
    assert train(trainer).status == "finished"
    assert 1 < trainer.step < 12
    assert trainer.search.gradient_level > 1.5
    assert np.array_equal(weights(trainer), before)
    planned = trainer.plan.epsilon()
    assert trainer.ledger.epsilon(1e-3) <= planned * (1 + 1e-9)
    assert trainer.plan.guaranteed(trainer.ledger.epsilons(1e-3)) == {
        "rdp": planned, "gdp": None, "prv": None, "pld": None
    }  # fmt: skip
    events = {float(e.event.events[0].noise_multiplier) for e in _steps(trainer.ledger.event())}
    assert len(events) > 1
    if name == "noisybtls":
        shrunk = 1 - run.search.shrink
        assert trainer.search.bound == pytest.approx(2.0 * shrunk)
        assert trainer.policy.values.tolist() == pytest.approx([shrunk / 2**0.5] * 2)


def _steps(event):
    parts = getattr(event, "events", [event])
    return [getattr(part, "event", part) if hasattr(part, "count") else part for part in parts]


@pytest.mark.parametrize("noise", [(1.0, 1.0, 1.0), (1.0, 2.0, 0.5)])
def test_gradients_at_the_same_weights_are_averaged_by_their_information(tmp_path, noise):
    run = searching(raise_by=0.5)
    run.schedule = ScheduleConfig("given", factors=[*noise, *[1.0] * 9], updates_per_epoch=3)
    trainer = make_trainer(tmp_path, run)
    search, seen = trainer.search, []
    search.search = lambda gradient, *_: (seen.append(gradient), 0.0)[1]
    measured, levels = [], []
    move = search.move

    def watched(*arguments):
        measured.append([p.grad.clone() for p in search.parameters])
        levels.append(search.release.plan.search.gradient_level)
        move(*arguments)

    trainer.stepper.search = type("Watched", (), {"facts": search.facts, "move": staticmethod(watched)})()
    trainer.steps = 3
    train(trainer)
    # level 1, then what is missing to 1.5 and to 2.25
    assert levels == pytest.approx([1.0, 0.5, 0.75])
    for got, *parts in zip(seen[2], *measured, strict=True):
        information = [level / sigma**2 for level, sigma in zip(levels, noise, strict=True)]
        expected = sum(own * part for own, part in zip(information, parts, strict=True)) / sum(information)
        assert torch.allclose(got, expected, atol=1e-6)


def test_the_angle_test_tells_noise_from_a_search_that_cannot_see(tmp_path):
    search = make_trainer(tmp_path, searching("noisybtls")).search
    zeros = [torch.zeros_like(p) for p in search.parameters]
    along, across = [z.clone() for z in zeros], [z.clone() for z in zeros]
    along[0].view(-1)[0], across[0].view(-1)[1] = 1.0, 1.0
    assert angle(along, along) == 0
    assert angle(along, across) == pytest.approx(math.pi / 2)
    search.kept, search.mean_angle = along, 0.5
    search.failed(along)
    assert (search.gradient_level, search.search_level) == (1.0, 1.5)
    search.failed(across)
    assert (search.gradient_level, search.search_level) == (1.5, 1.5)


def test_without_noise_to_speak_of_the_searches_descend(tmp_path):
    for name in ("noisymax", "noisybtls"):
        run = searching(name, steps=15, armijo=1e-6, objective_clip=5.0)
        run.privacy.noise_multiplier, run.clip.clip_norm = 0.05, 5.0
        task = TinyTask()
        trainer = make_trainer(tmp_path / name, run, task=task)
        batch = task.collate(task.train)

        def loss(trainer=trainer, task=task, batch=batch):
            trainer.model.eval()
            return float(task.losses(trainer.model, batch).mean().detach())

        before = loss()
        train(trainer)
        assert loss() < 0.9 * before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["search.share=0"], r"search\.share=0.* must be in \(0, 1\)"),
        (["clip=nonprivate"], "spends privacy budget, and clip=nonprivate has none"),
        (["search.mechanism=above_threshold"], "choose laplace or exponential"),
        (["optim.momentum=0.9"], "finds the step size along the gradient itself"),
        (["accountant=prv"], "use accountant=rdp"),
        (["clip=adaptive_flat"], "take clip=flat"),
        (["search.candidates=0"], r"search\.candidates=0 must be above 0"),
    ],
)
def test_bad_settings(changes, message):
    with pytest.raises(UserError, match=message):
        compose(["task=mnist", "scale=demo", "search=noisymax", *changes])


def test_presets_compose_and_none_leaves_no_trace():
    assert compose(["task=mnist", "search=noisybtls"]).search.mechanism == "above_threshold"
    assert compose(["task=mnist", "search=none"]) == compose(["task=mnist"])


class CoupledInEvaluation(nn.Module):
    """Each row for itself in training; in evaluation mode every row is scaled by all."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(10, 3)

    def forward(self, x):
        y = self.layer(x)
        return y if self.training else y * x.detach().sum()


def test_losses_that_go_by_the_batch_in_evaluation_mode_are_refused(tmp_path):
    """A search asks for losses there, and one example would move everybody's: its price is that of one bounded loss."""
    make_trainer(tmp_path / "plain", tiny_run(adaptive=False), model=CoupledInEvaluation())
    model = CoupledInEvaluation()
    with pytest.raises(UserError, match=r"TinyTask.losses: .* mixes examples"):
        make_trainer(tmp_path / "searched", searching(), model=model)
    assert model.training
