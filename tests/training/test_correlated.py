"""Steps whose noise is correlated: interrupted, repeated, charged again, and told to what moves the weights."""

import json
import math

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn

from dpexp import train as entry
from dpexp.config import compose
from dpexp.errors import UserError
from dpexp.privacy import correlated, plan_checks
from dpexp.privacy.correlated import column_norm, noise_added_up, noise_left
from dpexp.privacy.noise import room_for
from dpexp.training.release import Release
from tests.training.own_loop import flat, losses_of, make, network, train
from tests.training.tiny import Crash, cut_short, make_trainer, run_to_end, tiny_run, weights
from tests.training.tiny import train as train_configured

B = {"bands": 3, "batch_size": 10}


def crash_behind_noise(monkeypatch, engine, step):
    """Charged and noised, and nothing of it is kept."""
    add_noise = Release.add_noise

    def crashing(self, number, attempt, counts):
        found = add_noise(self, number, attempt, counts)
        if number == step:
            raise Crash
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Release, "add_noise", crashing)
        with pytest.raises(Crash):
            train(engine)
    engine.close()


@pytest.mark.parametrize("step", [1, 3, 5])
@pytest.mark.parametrize("groups", ["flat", "layer"])
def test_an_interrupted_run_ends_as_one_that_was_not(tmp_path, monkeypatch, step, groups):
    changes = {**B, "groups": groups, "target_quantile": None if groups == "flat" else 0.5}
    whole = train(make(tmp_path / "whole", **changes))
    assert whole.epsilon() == whole.plan.epsilon()
    crash_behind_noise(monkeypatch, make(tmp_path / "cut", **changes), step)
    again = train(make(tmp_path / "cut", **changes))
    np.testing.assert_array_equal(flat(again), flat(whole))
    assert again.ledger.steps_charged == 6
    assert again.epsilon() == whole.plan.epsilon()


def other(engine, batch):
    return nn.functional.mse_loss(engine.model(batch[0]), batch[0][:, :3], reduction="none").sum(1)


def test_another_attempt_is_dearer_and_later_steps_take_back_its_noise(tmp_path, monkeypatch):
    crash_behind_noise(monkeypatch, make(tmp_path, **B), 3)
    with pytest.warns(UserWarning, match="second time"):
        engine = train(make(tmp_path, **B, checkpoint_every=1), losses=other, steps=2)
    events = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    dear = [line["event"]["event"]["noise_multiplier"] for line in events if line["attempt"]]
    # steps 2 and 3 were charged before
    assert dear == pytest.approx([1 / math.sqrt(2)] * 2)
    assert engine.epsilon() > engine.plan.epsilon()
    engine.save(tmp_path / "kept")
    expected = flat(train(engine, losses=other))
    noise = engine._steps.correlated
    assert noise.attempts == [0, 0, 1, 1, 0, 0]
    engine.load(tmp_path / "kept")
    np.testing.assert_array_equal(flat(train(engine, losses=other)), expected)
    assert engine.ledger.steps_charged == 8


@pytest.mark.filterwarnings("ignore:step")
def test_noise_is_used_again_only_where_it_takes_back_the_same(tmp_path, monkeypatch):
    """A learning rate of 0 leaves the weights of step 1 as they were, whatever step 0 released. Its sum is the same, and its
    noise must not be: with that of another step 0 taken back, four releases would show what the sums of step 0 differ by."""
    sums, releases = [], []
    add_noise = Release.add_noise

    def seen(self, step, attempt, counts):
        sums.append(torch.cat([g.reshape(-1) for g in self._gradients()]))
        found = add_noise(self, step, attempt, counts)
        releases.append(torch.cat([g.reshape(-1) for g in self._gradients()]))
        return found

    monkeypatch.setattr(Release, "add_noise", seen)
    for first in (losses_of, other, losses_of):
        model = network()
        engine = make(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.0), **B, checkpoint_every=0)
        train(engine, losses=first, steps=1)
        train(engine, steps=1)
        engine.close()
    charged = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    # the third one is the first one again
    assert [(line["step"], line["attempt"]) for line in charged] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert torch.equal(releases[4], releases[0])
    assert torch.equal(releases[5], releases[1])
    found = releases[0] - releases[2] + (releases[1] - releases[3]) / 0.5
    assert float((found - (sums[0] - sums[2])).std()) > 1


def test_too_little_memory_for_the_noise_shows_before_anything_is_charged(tmp_path, monkeypatch):
    """A step that ends in the middle of its noise would be charged again with each smaller physical batch."""
    taken, left = [], 2 * 4

    def room(tensors):
        taken.extend(tensors)
        if len(taken) > left:
            raise torch.OutOfMemoryError("there is room for two lists of four tensors")
        return room_for(tensors)

    monkeypatch.setattr(correlated, "room_for", room)
    with pytest.raises(torch.OutOfMemoryError):
        train(engine := make(tmp_path, **B))
    assert engine.ledger.steps_charged == 0


def test_a_configured_run_goes_on_after_a_kill(tmp_path):
    run = tiny_run(steps=6, batch_size=12.0)
    run.privacy.bands = "3"
    whole = run_to_end(tmp_path / "whole", run)
    assert whole.ledger.epsilon(1e-3) == whole.plan.epsilon()
    again = cut_short(tmp_path / "killed", run, steps=4)
    train_configured(again)
    np.testing.assert_array_equal(weights(again), weights(whole))
    run.privacy.bands = "1"
    assert (weights(run_to_end(tmp_path / "other", run)) != weights(whole)).any()


@pytest.mark.parametrize(("bands", "kept"), [("1", False), ("3", True)])
def test_rows_keep_their_places_also_before_the_first_checkpoint(tmp_path, monkeypatch, bands, kept):
    def asked(*arguments, places):
        raise UserError(f"places: {places}")

    monkeypatch.setattr(entry, "refuse_other_data", asked)
    run = compose(["task=mnist", "scale=demo", "clip=flat", f"privacy.bands={bands}", "runtime=cpu"])
    with pytest.raises(UserError, match=f"places: {kept}"):
        entry.train(run, tmp_path, Console(quiet=True))


def test_what_adds_up_in_the_weights_is_what_was_promised(tmp_path):
    """Without a gradient a step of SGD is its noise: the weights go as far as the sums of the noise do."""
    model = nn.Linear(10, 2000, bias=False)
    start = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = make(tmp_path, model, optimizer, **B, clip_norm=0.5)
    told = []

    def nothing(engine, batch):
        return (engine.model(batch[0]) * 0).sum(1)

    for batch in engine.batches(physical_batch_size=16):
        if engine.step(nothing(engine, batch)):
            told.append(engine._steps.stds[id(model.weight)])
    moved = float((model.weight.detach() - start).std())
    assert moved == pytest.approx(0.5 / 10 * noise_added_up(3, 6)[-1], rel=0.03)
    assert told == pytest.approx((0.5 / 10 * column_norm(3, 6) * noise_left(3, 6)).tolist())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["privacy.bands=99"], "from 1 to 64"),
        (["privacy.bands=4", "privacy.sampling=fixed", "accountant=rdp"], "drop privacy.sampling"),
        (["privacy.bands=4", "schedule=time", "schedule.decay_rate=0.5"], "drop privacy.sampling"),
        (["privacy.bands=4", "clip=adaclip"], "coordinates"),
        (["privacy.bands=4", "clip=jl", "accountant=pld"], "coordinates"),
        (["privacy.bands=4", "peft=rgp"], "peft=rgp"),
        (["privacy.bands=4", "analysis.output_specific_every=1"], "one by one"),
    ],
)
def test_what_looks_at_single_steps_is_refused(changes, said):
    with pytest.raises(UserError, match=said):
        compose(["task=mnist", "scale=demo", "clip=flat", *changes])


def test_a_run_keeps_the_bands_that_were_found_for_it(tmp_path, monkeypatch):
    run = tiny_run(steps=8, batch_size=6.0)
    run.privacy.bands, run.privacy.noise_multiplier, run.privacy.epsilon = "auto", None, 8.0
    first = make_trainer(tmp_path, run)
    assert first.plan.bands > 1
    assert make_trainer(tmp_path, run).plan == first.plan
    # as where another version of an accountant finds another number
    monkeypatch.setattr(plan_checks, "BANDS_OF_AUTO", (1,))
    with pytest.raises(UserError, match=f"finds 1 bands now, and this run has begun with {first.plan.bands}"):
        make_trainer(tmp_path, run)
