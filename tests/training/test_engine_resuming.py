"""`PrivacyEngine`: what becomes of a run that is cut off, and of a folder that is used."""

import contextlib
import errno
import gc
import hashlib
import itertools
import math
import os
import shutil
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import Subset, TensorDataset

from dpexp import durable
from dpexp.errors import UserError
from dpexp.privacy.shown import upwards
from tests.killing import in_child
from tests.training.own_loop import (
    crash_at,
    data,
    flat,
    losses_of,
    make,
    network,
    train,
)
from tests.training.tiny import crashing, run_to_end, tiny_run


@pytest.mark.parametrize("step", [0, 3])
def test_a_run_that_was_cut_off_goes_on_bit_for_bit_and_pays_once(tmp_path, monkeypatch, step):
    """Charged, and killed before its noise; the second session builds another random model and gets the first one's weights."""
    whole = train(make(tmp_path / "whole", network(0.3), target_quantile=0.6, groups="layer"))
    crash_at(monkeypatch, make(tmp_path / "cut", network(0.3), target_quantile=0.6, groups="layer"), 2 * step)
    other = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 3))
    resumed = make(tmp_path / "cut", other, target_quantile=0.6, groups="layer")
    assert resumed.steps_taken == step // 2 * 2
    assert resumed.ledger.steps_charged == step + 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(resumed)
    assert np.array_equal(flat(resumed), flat(whole))
    assert resumed.ledger.steps_charged == 6


def test_killed_anywhere_it_ends_with_the_same_weights(tmp_path):
    def session(folder, at=None):
        def work():
            model = network(0.3)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
            engine = train(make(folder, model, optimizer, steps=40, scheduler=scheduler))
            (folder / "weights").write_text(hashlib.sha256(flat(engine).tobytes()).hexdigest())

        return in_child(work, at)

    make(tmp_path / "warm").close()  # imports, before the forks
    status, calls = session(tmp_path / "whole")
    assert status == 0
    for share in (0.3, 0.25, 0.2, 0.25):
        assert os.WIFSIGNALED(session(tmp_path / "cut", int(calls * share))[0])
    assert session(tmp_path / "cut")[0] == 0
    assert (tmp_path / "cut/weights").read_text() == (tmp_path / "whole/weights").read_text()
    lines = (tmp_path / "cut/ledger.jsonl").read_text().splitlines()
    assert sum('"step"' in line for line in lines) == 40


def test_what_a_loop_keeps_of_its_own_goes_on_with_the_run(tmp_path, monkeypatch):
    """Although the loop changes it behind the step: the checkpoint of a step is written when the next batch is asked for."""

    def session(folder, cut=None):
        model = network()
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        mine = {"best": math.inf, "steps": []}
        engine = make(folder, model, keep={"average": average, "mine": mine})
        with contextlib.nullcontext() if cut is None else crashing(monkeypatch, cut):
            while not engine.finished:
                for batch in engine.batches(physical_batch_size=8, steps=3):
                    if engine.step(losses_of(engine, batch)):
                        average.update_parameters(model)
                        mine["steps"].append(engine.steps_taken)
                        mine["best"] = min(mine["best"], model[0].weight.norm().item())
        engine.close()
        return mine, average.state_dict()

    mine, average = session(tmp_path / "whole")
    assert mine["steps"] == [1, 2, 3, 4, 5, 6]
    for cut in (1, 3, 4):
        session(tmp_path / str(cut), cut)
        # the second session ends the run, and the third has nothing left to do
        for again, state in (session(tmp_path / str(cut)), session(tmp_path / str(cut))):
            assert again == mine
            assert all(torch.equal(state[name], value) for name, value in average.items())


def test_what_cannot_be_put_back_is_not_kept(tmp_path):
    with pytest.raises(UserError, match=r"keep\['best'\] is float, .*put it into a dictionary"):
        make(tmp_path, keep={"best": 0.5})
    with pytest.raises(UserError, match="give a dictionary with names"):
        make(tmp_path, keep=[network()])
    with pytest.raises(UserError, match="the state of keep= holds what a checkpoint"):
        make(tmp_path, keep={"mine": {"folder": tmp_path}})


def test_changed_code_of_the_loop_gets_fresh_noise_is_charged_again_and_says_so(tmp_path, monkeypatch):
    crash_at(monkeypatch, make(tmp_path), 3)
    engine = make(tmp_path)
    assert engine.steps_taken == 2

    def other(engine, batch):
        return nn.functional.mse_loss(engine.model(batch[0]), batch[0][:, :3], reduction="none").sum(1)

    with pytest.warns(UserWarning, match="second time"):
        train(engine, losses=other, steps=3)
    engine.write_card(tmp_path / "early")
    train(engine, losses=other)
    assert engine.ledger.steps_charged == 6 + 2  # steps 2 and 3 were charged before
    assert engine.epsilon() > engine.plan.epsilon()
    # of the run that is not whole yet, the steps that are left and those that were charged twice
    card = (tmp_path / "early/PRIVACY.md").read_text()
    assert "2 steps were charged twice" in card
    assert "after 5 of 6 planned steps" in card
    assert f"that of the whole plan: ε = {upwards(engine.epsilon())}" in card


@pytest.mark.parametrize(("edited", "again"), [("loss = 1", 0), ("loss = 1  # a word", 0), ("loss = 2", 2)])
def test_an_edited_script_is_another_computation_also_where_its_sums_are_the_same(
    tmp_path, monkeypatch, edited, again
):
    """As where it does something else with examples that nobody has drawn: the ledger would tell that nobody has."""
    script = tmp_path / "script.py"
    script.write_text("loss = 1")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
    crash_at(monkeypatch, make(tmp_path / "run"), 3)
    script.write_text(edited)
    with pytest.warns(UserWarning, match="second time") if again else contextlib.nullcontext():
        engine = train(make(tmp_path / "run"))
    assert engine.ledger.charged_again == again


def test_a_second_attempt_is_repeated_and_paid_once_too(tmp_path, monkeypatch):
    """The losses changed between the two, which no fact tells where no file has changed."""

    def other(engine, batch):
        return nn.functional.mse_loss(engine.model(batch[0]), batch[0][:, :3], reduction="none").sum(1)

    crash_at(monkeypatch, make(tmp_path), 3)
    with pytest.warns(UserWarning, match="second time"):
        train(make(tmp_path, checkpoint_every=0), losses=other, steps=2).close()
    engine = make(tmp_path)
    assert (engine.steps_taken, engine.ledger.steps_charged) == (2, 4 + 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(engine, losses=other)
    assert engine.ledger.steps_charged == 6 + 2
    # and whoever goes back to the first code pays nothing for what it has released
    engine.close()
    shutil.rmtree(tmp_path / "checkpoint")
    engine = train(make(tmp_path), steps=4)
    assert engine.ledger.steps_charged == 6 + 2


def test_other_weights_are_another_step_also_where_their_sums_are_the_same(tmp_path):
    """Nobody has a gradient. Whether noise is drawn anew would tell of somebody who has one whether he was drawn."""

    def session(lr):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        engine = make(tmp_path, model, optimizer, checkpoint_every=0)
        optimizer.param_groups[0]["lr"] = lr
        train(engine, losses=lambda engine, batch: engine.model(batch[0]).sum(1) * 0, steps=3).close()
        return engine.ledger.steps_charged

    assert session(0.5) == session(0.5) == 3
    with pytest.warns(UserWarning, match="second time"):
        # the first step began with the same weights
        assert session(0.25) == 3 + 2


def test_a_finished_run_trains_nothing_more(tmp_path):
    first = train(make(tmp_path))
    first.close()
    again = make(tmp_path)
    assert again.finished
    assert list(again.batches()) == []
    assert np.array_equal(flat(again), flat(first))
    assert again.epsilon() == first.epsilon()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"clip_norm": 2.0}, "clip_norm was 1.0 there and is 2.0 here"),
        ({"steps": 7}, "steps was 6"),
        ({"noise_multiplier": 2.0}, "noise_multiplier was 1.0"),
        ({"batch_size": 10}, "batch_size was 20 there and is 10 here"),
        ({"users": [i // 2 for i in range(60)]}, "one of the two protects users"),
        ({"dataset": Subset(data(), range(59))}, "num_examples"),
        ({"dataset": TensorDataset(data().tensors[0] + 1e-6, data().tensors[1])}, "the data differ"),
        ({"dataset": Subset(data(), [1, 0, *range(2, 60)])}, "the data differ"),
        ({"model": nn.Sequential(nn.Linear(10, 3))}, "the trained parameters differ"),
        ({"noise_seed": 12345}, "noise_seed is not what it was"),
        ({"noise_seed": 12345, "clip_norm": 2.0}, "clip_norm was 1.0"),
    ],
)
def test_a_used_folder_is_refused(tmp_path, changes, named):
    train(make(tmp_path), steps=2).close()
    with pytest.raises(UserError, match=named):
        make(tmp_path, **changes)
    assert make(tmp_path).steps_taken == 2  # nothing was changed by it


def test_other_frozen_weights_are_another_model(tmp_path):
    def half_frozen(shift):
        model = network()
        model[0].requires_grad_(False)
        with torch.no_grad():
            model[0].weight += shift
        return model

    def begin(shift):
        model = half_frozen(shift)
        return make(
            tmp_path, model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
        )

    begin(0.0).close()
    with pytest.raises(UserError, match="the frozen weights differ"):
        begin(1e-6)


def test_the_folder_of_a_configured_run_is_refused(tmp_path):
    run_to_end(tmp_path, tiny_run(steps=1))
    with pytest.raises(UserError, match="another run"):
        make(tmp_path)


@pytest.mark.parametrize("use", ["load", "save", "step", "batches"])
def test_a_closed_engine_neither_trains_nor_takes_the_folder_again(tmp_path, use):
    engine = train(make(tmp_path), steps=2)
    engine.close()
    calls = {"step": lambda: engine.step(torch.zeros(1)), "batches": lambda: next(engine.batches())}
    with pytest.raises(UserError, match="this engine is closed"):
        calls.get(use, lambda: getattr(engine, use)())()
    assert engine.epsilon() > 0
    make(tmp_path).close()  # nobody holds it


def test_a_folder_is_held_until_the_engine_is_closed_or_dropped(tmp_path):
    engine = make(tmp_path)
    with pytest.raises(UserError, match="in use"):
        make(tmp_path)
    model = engine.model
    del engine
    gc.collect()
    assert type(model[0]) is nn.Linear
    with make(tmp_path):
        pass
    make(tmp_path).close()


def test_a_finished_run_leaves_its_folder_to_the_next(tmp_path):
    engine = train(make(tmp_path / "run"), steps=2)
    engine.save(tmp_path / "early")
    train(engine)
    again = make(tmp_path / "run")
    assert again.finished
    assert np.array_equal(flat(again), flat(engine))
    again.load(tmp_path / "early")
    with pytest.raises(UserError, match="in use"):
        make(tmp_path / "run")
    train(again)
    assert np.array_equal(flat(again), flat(engine))
    assert again.ledger.steps_charged == engine.steps


def test_the_data_says_what_it_is_where_it_cannot_be_hashed(tmp_path):
    class Files:
        def __len__(self):
            return 60

        def __getitem__(self, i):
            return data()[i]

    with pytest.raises(UserError, match="data_name"):
        make(tmp_path, dataset=Files())
    train(make(tmp_path, dataset=Files(), data_name="faces, 2nd edition"), steps=1).close()
    with pytest.raises(UserError, match="the data differ"):
        make(tmp_path, dataset=Files(), data_name="faces, 3rd edition")


def test_another_learning_rate_on_resuming_is_said(tmp_path):
    def again(lr):
        model = network()
        return make(tmp_path, model, torch.optim.SGD(model.parameters(), lr=lr))

    train(again(0.5), steps=2).close()
    with pytest.warns(
        UserWarning, match=r"goes on with the learning rate 0\.5 of its checkpoint, and not with 0\.1"
    ):
        engine = again(0.1)
    engine.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again(0.5).close()


def test_the_key_is_the_owners_alone(tmp_path):
    make(tmp_path, noise_seed=None)
    assert (tmp_path / "secret.key").stat().st_mode & 0o777 == 0o600
    assert math.isclose(os.path.getsize(tmp_path / "secret.key"), 32)


def test_a_ledger_that_lost_its_end_and_a_copy_of_the_folder_are_noticed(tmp_path):
    train(make(tmp_path / "run", noise_seed=None), steps=4).close()
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    copy = make(tmp_path / "copy", noise_seed=None)
    assert copy._run.keys.copied
    copy.close()
    ledger = tmp_path / "run/ledger.jsonl"
    ledger.write_text("".join(ledger.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(UserError, match="lost entries"):
        make(tmp_path / "run", noise_seed=None)


class Halving:
    """A scheduler of a person's own."""

    def __init__(self, optimizer, kept=0.5):
        self.optimizer, self.kept = optimizer, kept

    def step(self):
        self.optimizer.param_groups[0]["lr"] *= 0.5

    def state_dict(self):
        return {"kept": self.kept}

    def load_state_dict(self, state):
        self.kept = state["kept"]


def test_numbers_of_numpy_come_back_from_a_checkpoint(tmp_path):
    """They could be written, and no restart could read them."""
    for _ in range(2):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=np.float64(0.5), momentum=np.float32(0.5))
        kept = Halving(optimizer, [np.int64(3), np.arange(3), np.float16(0.5)])
        engine = train(make(tmp_path, model, optimizer, scheduler=kept), steps=2)
        engine.close()
    assert engine.steps_taken == 4
    assert optimizer.param_groups[0]["lr"] == 0.5**5
    assert kept.kept[1].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (
            lambda o: Halving(o, network()),
            "the state of a scheduler holds what a checkpoint could not give back",
        ),
        (
            lambda o: Halving(o, lambda: 0),
            "the state of a scheduler holds what a checkpoint could not give back",
        ),
        (lambda o: type("Plain", (), {"step": lambda self: None})(), r"Plain has no state_dict\(\)"),
    ],
)
def test_a_scheduler_that_no_restart_could_put_back_is_refused_at_once(tmp_path, made, says):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with pytest.raises(UserError, match=says):
        make(tmp_path, model, optimizer, scheduler=made(optimizer))


def test_other_groups_of_the_optimizer_get_one_sentence(tmp_path):
    train(make(tmp_path), steps=2).close()
    model = network()
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[3].parameters(), "lr": 0.2}]
    with pytest.raises(UserError, match=r"groups of \[4\] parameters, and this one of \[2, 2\]"):
        make(tmp_path, model, torch.optim.SGD(groups))


@pytest.mark.parametrize("number", range(5))
def test_a_full_disk_is_one_sentence_wherever_it_is_met(tmp_path, monkeypatch, number):
    """The key and its place, the settings, the pointer of the first checkpoint, what the engine has found out."""
    calls = itertools.count()

    def full(file):
        if next(calls) == number:
            raise OSError(errno.ENOSPC, "No space left on device")
        os.fsync(file.fileno())

    with monkeypatch.context() as patch:
        patch.setattr(durable, "flush_file", full)
        said = "the disk is full" if number else r"cannot keep the noise key in .*: No space left on device"
        with pytest.raises(UserError, match=said):
            train(make(tmp_path, noise_seed=None))
    engine = train(make(tmp_path, noise_seed=None))
    assert engine.ledger.steps_charged == 6


def test_a_model_that_could_not_be_clipped_leaves_its_folder_to_the_mended_one(tmp_path):
    def of(norm):
        return nn.Sequential(nn.Linear(10, 16), norm, nn.Linear(16, 3))

    with pytest.raises(UserError, match="BatchNorm1d"):
        make(tmp_path, of(nn.BatchNorm1d(16)))
    assert train(make(tmp_path, of(nn.Tanh()))).finished


@pytest.mark.parametrize("lost", [Path.unlink, lambda file: file.write_text("")])
def test_a_ledger_that_is_gone_before_the_first_checkpoint_is_missed(tmp_path, lost):
    train(engine := make(tmp_path, noise_seed=None, checkpoint_every=0), steps=1)
    engine.close()
    lost(engine.ledger.path)
    with pytest.raises(UserError, match="is gone or empty, and steps of this run were charged there"):
        make(tmp_path, noise_seed=None, checkpoint_every=0)
