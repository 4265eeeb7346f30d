"""Killed at any instant, a run ends with the same weights, and its ledger never counts too little."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dpexp import provenance
from dpexp.training import identity, release
from tests.commands import called
from tests.training.tiny import TinyTask, crash_in_step, make_trainer, run_to_end, tiny_run, train, weights

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def killed_runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("killed")
    done = called(ROOT / "tests" / "training" / "crashes.py", str(folder), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_the_scenarios_really_kill(killed_runs):
    for name, result in killed_runs.items():
        assert result["killed"] >= (0 if name == "never" else 1), name


def test_killed_at_any_instant_it_ends_with_the_same_weights_bit_for_bit(killed_runs):
    assert {result["weights"] for result in killed_runs.values()} == {killed_runs["never"]["weights"]}


def test_killed_at_any_instant_every_step_is_charged_once(killed_runs):
    for name, result in killed_runs.items():
        assert sorted(map(tuple, result["charged"])) == [(step, 0) for step in range(6)], name


def crashed(folder, monkeypatch, step=4):
    """A run whose checkpoint is at step 3, and which crashed in `step` after it was charged."""
    run = tiny_run()
    run.runtime.checkpoint_every = 3
    crash_in_step(monkeypatch, make_trainer(folder, run), step)
    return run


def test_the_same_runtime_repeats_the_step_and_pays_once(tmp_path, monkeypatch):
    run = crashed(tmp_path / "cut", monkeypatch)
    resumed = make_trainer(tmp_path / "cut", run)
    assert (resumed.step, resumed.ledger.steps_charged) == (3, 5)
    train(resumed)
    assert resumed.ledger.steps_charged == 6
    assert np.array_equal(weights(resumed), weights(run_to_end(tmp_path / "whole", run)))


class OtherData(TinyTask):
    """One example differs; so does the hash, unless it is forged."""

    def __init__(self, forged: bool):
        super().__init__()
        self.train = [(x + 1e-6, y) for x, y in self.train]
        if not forged:
            self.data = type(self.data)("demo", "tiny", self.data.rows, {"train": "1" * 64}, [])


@pytest.mark.parametrize(
    "change",
    [
        "physical batch",
        "threads",
        "engine",
        "code",
        "own code",
        "libraries",
        "data",
        "data with a forged hash",
    ],
)
def test_with_anything_changed_the_repeated_steps_get_fresh_noise_and_are_charged_again(
    tmp_path, monkeypatch, change
):
    run = crashed(tmp_path, monkeypatch)
    changes, threads = {}, torch.get_num_threads()
    if change == "physical batch":
        run.runtime.physical_batch_size = "5"
    elif change == "threads":
        torch.set_num_threads(threads + 1)
    elif change == "engine":
        run.engine.name = "loop"
    elif change == "code":
        monkeypatch.setattr(provenance, "code_hash", lambda: "edited")
    elif change == "own code":
        # of a network that the settings name; no file has to lie there for this
        monkeypatch.setattr(provenance, "own_code", lambda files: "edited")
    elif change == "libraries":
        monkeypatch.setattr(identity, "_libraries", lambda: {"transformers": "of tomorrow"})
    else:
        changes["task"] = OtherData(forged="forged" in change)
    keys, attempts, drawn = [], {}, {}
    real, real_add = release.KeyedGenerator, release.Release.add_noise

    def spy(key):
        keys.append(key)
        return real(key)

    def add_noise(self, step, attempt, counts):
        attempts[step] = attempt
        return real_add(self, step, attempt, counts)

    monkeypatch.setattr(release, "KeyedGenerator", spy)
    run_to_end(tmp_path / "uninterrupted", tiny_run())
    uninterrupted, keys[:] = set(keys), []
    monkeypatch.setattr(release.Release, "add_noise", add_noise)
    try:
        trainer = make_trainer(tmp_path, run, **changes)
        sampler = trainer.stepper.sampler
        trainer.stepper.sampler = SimpleNamespace(
            draw=lambda step, attempt: drawn.setdefault((step, attempt), sampler.draw(step, attempt))
        )
        train(trainer)
    finally:
        torch.set_num_threads(threads)
    assert trainer.ledger.steps_charged == 6 + 2  # steps 3 and 4 were charged before the crash
    assert attempts == {3: 1, 4: 1, 5: 0}
    # One key for the gradients of a step, one for its counts, and none of them twice.
    assert len(set(keys)) == len(keys) == 2 * 3
    assert len(uninterrupted) == 2 * 6
    assert not uninterrupted & set(keys)
    # The charge of a repeated step is that of an independent sample, so the sample must be one.
    assert not np.array_equal(drawn[3, 1], sampler.draw(3, 0))
    fresh = run_to_end(tmp_path / "whole", tiny_run()).ledger
    assert trainer.ledger.epsilon(1e-3, "rdp") > fresh.epsilon(1e-3, "rdp")


def test_going_back_to_a_runtime_that_was_charged_repeats_its_noise_and_costs_nothing_more(
    tmp_path, monkeypatch
):
    run = crashed(tmp_path, monkeypatch)
    other = tiny_run()
    other.runtime.checkpoint_every, other.runtime.physical_batch_size = 3, "5"
    crash_in_step(monkeypatch, make_trainer(tmp_path, other), 1)  # steps 3 and 4 of the run, once more
    trainer = make_trainer(tmp_path, run)
    assert trainer.ledger.steps_charged == 7
    train(trainer)
    assert trainer.ledger.steps_charged == 8
    assert np.array_equal(weights(trainer), weights(run_to_end(tmp_path / "whole", run)))


@pytest.mark.parametrize("secure", [False, True])
def test_where_no_ledger_knows_of_the_other_sum_the_noise_still_differs(tmp_path, monkeypatch, secure):
    """A copy of the folder, a deleted ledger, one noise_seed for two runs: one key, two first attempts at a step."""
    noise = []

    def alone(tensors, std, generator=None):
        zeros = [torch.zeros_like(tensor) for tensor in tensors]
        real(zeros, std, generator=generator)
        noise.append(torch.cat([zero.reshape(-1).double() for zero in zeros]))

    real = release.add_gaussian_
    monkeypatch.setattr(release, "add_gaussian_", alone)
    for name, changed in (("one", False), ("copy", False), ("other", True)):
        run, task = tiny_run(steps=1), TinyTask()
        run.privacy.secure = secure
        if changed:
            task.train = [(2 * x, y) for x, y in task.train]
        run_to_end(tmp_path / name, run, task=task)
    gradients, counts = noise[::2], noise[1::2]
    assert torch.equal(gradients[0], gradients[1])
    for one, _, other in (gradients, counts):
        assert not (one == other).any()


def test_a_ledger_that_lost_steps_is_refused(tmp_path, monkeypatch):
    run = crashed(tmp_path, monkeypatch)
    ledger = tmp_path / "ledger.jsonl"
    lines = ledger.read_text().splitlines(keepends=True)
    ledger.write_text("".join(lines[:-3]))
    with pytest.raises(ValueError, match="ledger"):
        make_trainer(tmp_path, run)


def test_second_attempts_that_the_ledger_lost_are_noticed(tmp_path, monkeypatch):
    """Each step still has a charge: only the checkpoint knows that some had two."""
    run = crashed(tmp_path, monkeypatch)
    run.runtime.physical_batch_size = "5"
    run_to_end(tmp_path, run)  # steps 3 and 4 again, as other sums
    ledger = tmp_path / "ledger.jsonl"
    lines = ledger.read_text().splitlines(keepends=True)
    assert [(json.loads(line)["step"], json.loads(line)["attempt"]) for line in lines[-3:]] == [
        (3, 1),
        (4, 1),
        (5, 0),
    ]
    ledger.write_text("".join(lines[:-1]))
    with pytest.raises(ValueError, match="lost entries: it holds 7 charges, and the checkpoint rests on 8"):
        make_trainer(tmp_path, run)


def test_a_copy_of_a_folder_goes_on_with_samples_and_noise_of_its_own(tmp_path, monkeypatch):
    run = tiny_run()
    run.runtime.checkpoint_every, run.privacy.noise_seed = 3, None
    crash_in_step(monkeypatch, make_trainer(tmp_path / "one", run), 4)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    one, two = make_trainer(tmp_path / "one", run), make_trainer(tmp_path / "two", run)
    assert (one.keys.copied, two.keys.copied) == (False, True)
    assert not np.array_equal(one.stepper.sampler.draw(3, 0), two.stepper.sampler.draw(3, 0))
    train(one)
    train(two)
    assert one.ledger.steps_charged == 6
    # In the copy steps 3 and 4 are other releases than those that the original made before.
    assert two.ledger.steps_charged == 6 + 2
    again = make_trainer(tmp_path / "two", run)
    assert (again.step, again.keys) == (6, two.keys)
