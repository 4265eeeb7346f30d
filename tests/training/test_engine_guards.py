"""`PrivacyEngine`: mistakes in the loop are noticed, and nothing of them is released."""

import copy
import os
import shutil
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

from dpexp.errors import UserError
from dpexp.training.sums import Sums
from tests.training.own_loop import first_batch, flat, losses_of, make, train
from tests.training.tiny import run_to_end, tiny_run


def test_leaving_the_loop_releases_nothing_and_the_step_begins_again(tmp_path):
    engine = make(tmp_path / "left")
    for number, batch in enumerate(engine.batches(physical_batch_size=4)):
        if number == 2:
            break
        engine.step(losses_of(engine, batch))
    assert engine.steps_taken == engine.ledger.steps_charged == 0
    assert all(p.grad is None for p in engine.model.parameters())
    with pytest.raises(ZeroDivisionError):
        train(engine, 4, losses=lambda engine, batch: losses_of(engine, batch) * (1 / 0))
    assert np.array_equal(flat(train(engine)), flat(train(make(tmp_path / "whole"))))


def test_a_batch_without_a_step_is_noticed(tmp_path):
    engine = make(tmp_path)
    with pytest.raises(UserError, match="was not called for the last batch"):
        for _ in engine.batches():
            pass


def test_a_step_without_a_batch_is_noticed(tmp_path):
    engine = make(tmp_path)
    batch, loop = first_batch(engine)
    engine.step(losses_of(engine, batch))
    with pytest.raises(
        UserError, match=r"called again for the same batch.*engine.step\(first_losses \+ second_losses\)"
    ):
        engine.step(losses_of(engine, batch))
    loop.close()
    with pytest.raises(UserError, match="no batch to go with"):
        make(tmp_path / "other").step(losses_of(engine, batch))


def test_a_checkpoint_that_is_loaded_in_the_middle_of_a_batch_begins_the_step_again(tmp_path):
    engine, loaded = make(tmp_path / "loaded"), 0
    for batch in engine.batches(physical_batch_size=4):
        losses = losses_of(engine, batch)
        if loaded < 2 and engine.steps_taken == 3:
            # the checkpoint is of step 2; once before a step and once behind one
            loaded += 1
            if loaded == 2:
                engine.step(losses)
            engine.load()
            assert engine.steps_taken == 2
            if loaded == 1:
                with pytest.raises(UserError, match=r"After engine.load\(\) the next batch"):
                    engine.step(losses)
        else:
            engine.step(losses)
    assert loaded == 2
    assert engine.ledger.steps_charged == engine.steps
    assert np.array_equal(flat(engine), flat(train(make(tmp_path / "whole"), 4)))


def test_a_copy_of_the_model_may_be_made_at_any_place_of_the_loop(tmp_path):
    engine = make(tmp_path / "copied")
    for batch in engine.batches(physical_batch_size=8):
        copies = [copy.deepcopy(engine.model)]
        losses = losses_of(engine, batch)
        copies += [copy.deepcopy(engine.model, made := {})]
        # neither the run's key nor its data go with it
        assert not [
            one
            for one in made.values()
            if type(one).__module__.startswith(("dpexp.training", "dpexp.privacy"))
        ]
        engine.step(losses)
        assert torch.equal(*(twin(batch[0]) for twin in copies))
    assert np.array_equal(flat(engine), flat(train(make(tmp_path / "whole"))))


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("what", ["folder", "ledger"])
def test_nothing_is_charged_or_released_in_a_folder_that_is_gone(tmp_path, what, steps):
    engine = make(tmp_path / "run")
    if steps:
        train(engine, steps=steps)
    before = flat(engine)
    if what == "ledger":
        engine.ledger.path.unlink(missing_ok=True)
    else:
        shutil.move(engine.folder, tmp_path / "elsewhere")
    if what == "ledger" and not steps:
        # as it was
        assert train(engine).finished
        return
    with pytest.raises(UserError, match="deleted or moved while its run was going on"):
        train(engine)
    assert np.array_equal(flat(engine), before)
    assert engine.ledger.steps_charged == steps
    assert engine.folder.exists() == (what != "folder")


def test_noise_that_cannot_be_added_is_refused_before_it_is_charged(tmp_path):
    engine = make(tmp_path, noise_multiplier=1e-300)
    with pytest.raises(UserError, match="choose another noise multiplier"):
        train(engine)
    assert engine.ledger.steps_charged == 0


def test_outputs_of_an_earlier_batch_do_not_count_again(tmp_path):
    """The examples of that batch would be in the sum twice, each time with a clipped gradient."""
    engine = make(tmp_path)
    loop = engine.batches(physical_batch_size=4)
    first = next(loop)
    kept = engine.model(first[0])
    engine.step(losses_of(engine, first))
    second = next(loop)
    engine.model(second[0])
    with pytest.raises(UserError, match="from a forward of an earlier batch"):
        engine.step(nn.functional.cross_entropy(kept, first[1], reduction="none"))
    loop.close()
    assert engine.ledger.steps_charged == 0


def test_two_loops_at_once_are_noticed(tmp_path):
    engine = make(tmp_path)
    _, one = first_batch(engine)
    batch, _other = first_batch(engine)
    engine.step(losses_of(engine, batch))
    with pytest.raises(UserError, match="another loop"):
        next(one)


def test_a_batch_whose_step_was_cut_off_is_not_added_a_second_time(tmp_path, monkeypatch):
    """By Ctrl-C or for lack of memory: who runs the cell again would count each of its examples twice."""
    engine, real, cut = make(tmp_path / "cut"), Sums.add, [4]

    def add(*arguments):
        cut[0] -= 1
        if not cut[0]:
            raise KeyboardInterrupt
        real(*arguments)

    monkeypatch.setattr(Sums, "add", add)
    loop = engine.batches(physical_batch_size=4)
    for _ in range(3):
        batch = next(loop)
        engine.step(losses_of(engine, batch))
    batch = next(loop)
    losses = losses_of(engine, batch)
    with pytest.raises(KeyboardInterrupt):
        engine.step(losses)
    with pytest.raises(UserError, match="begin a new loop"):
        engine.step(losses_of(engine, batch))
    assert np.array_equal(flat(train(engine, 4)), flat(train(make(tmp_path / "whole"), 4)))


@pytest.mark.parametrize(
    "normed", [lambda losses: losses / losses.mean(), lambda losses: losses * losses.softmax(0)]
)
def test_losses_that_mix_examples_are_noticed(tmp_path, normed):
    engine = make(tmp_path)
    with pytest.raises(UserError, match="mixes examples"):
        train(engine, losses=lambda engine, batch: normed(losses_of(engine, batch)))
    assert engine.ledger.steps_charged == 0


@pytest.mark.parametrize(
    "spoil",
    [
        torch.mean,
        lambda losses: losses[1:],
        lambda losses: losses[:, None],
        lambda losses: losses.tolist(),
        lambda losses: None,
    ],
)
def test_one_loss_per_example_is_needed(tmp_path, spoil):
    engine = make(tmp_path)
    losses = losses_of(engine, first_batch(engine)[0])
    with pytest.raises(UserError, match=r"one loss per example|losses"):
        engine.step(spoil(losses))


def test_several_processes_that_do_not_share_a_batch_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(UserError, match="2 processes"):
        run_to_end(tmp_path / "loop", tiny_run())


def in_another_thread(action):
    """Returns what is said of it there."""
    said = []

    def act():
        try:
            action()
        except Exception as error:
            said.append(str(error))

    thread = threading.Thread(target=act)
    thread.start()
    thread.join()
    return said


def test_two_threads_do_not_take_one_step(tmp_path):
    """Both would add the same examples."""
    engine, said = make(tmp_path), []
    batch, _loop = first_batch(engine)
    losses, others = losses_of(engine, batch), losses_of(engine, batch)

    def meanwhile(gradient):
        if not said:
            said.extend(in_another_thread(lambda: engine.step(others)))

    losses.register_hook(meanwhile)
    engine.step(losses)
    assert "two threads" in said[0]


def test_two_threads_do_not_take_one_batch(tmp_path):
    engine, said = make(tmp_path), []

    def collate(rows):
        said.extend(in_another_thread(lambda: next(loop)))
        return default_collate(rows)

    loop = engine.batches(collate)
    engine.step(losses_of(engine, next(loop)))
    assert "two threads" in said[0]


def test_a_forked_process_takes_no_step(tmp_path):
    """Both would take the same; of several, the others do not hear it."""
    loop = make(tmp_path).batches()
    if not (child := os.fork()):
        said = ""
        try:
            next(loop)
        except UserError as error:
            said = str(error)
        os._exit(0 if "was forked after PrivacyEngine" in said else 1)
    assert os.waitpid(child, 0)[1] == 0
