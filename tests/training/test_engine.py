"""`PrivacyEngine`: the same steps as `dpexp.train`, in a loop of one's own, and what it refuses."""

import contextlib
import gc
import hashlib
import itertools
import json
import math
import os
import shutil
import warnings
from fractions import Fraction

import numpy as np
import pandas
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

from dpexp import PrivacyEngine
from dpexp.errors import UserError
from dpexp.training import release
from dpexp.training.padding import padding_token
from tests.killing import in_child
from tests.training.tiny import TinyTask, run_to_end, tiny_run, weights

TASK = TinyTask()


def data():
    return TensorDataset(torch.stack([x for x, _ in TASK.train]), torch.stack([y for _, y in TASK.train]))


def network(dropout=0.0):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 3))


def make(folder, model=None, optimizer=None, dataset=None, **changes):
    model = model or network()
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.5)
    settings = dict(
        batch_size=20, steps=6, noise_multiplier=1.0, delta=1e-3, noise_seed=11, checkpoint_every=2
    )
    return PrivacyEngine(
        model, optimizer, data() if dataset is None else dataset, folder=folder, **(settings | changes)
    )


def losses_of(engine, batch):
    return nn.functional.cross_entropy(engine.model(batch[0]), batch[1], reduction="none")


def train(engine, size=8, steps=None, losses=losses_of):
    for batch in engine.batches(physical_batch_size=size, steps=steps):
        engine.step(losses(engine, batch))
    return engine


def flat(engine):
    return torch.cat([p.detach().reshape(-1) for p in engine.model.parameters()]).numpy().copy()


def noise_by_number(monkeypatch):
    """The same noise for the n-th release of every run: sums that differ by rounding would otherwise get other noise."""

    def reset():
        counter = itertools.count()

        def add(tensors, std, generator=None):
            stds = std if isinstance(std, list) else [std] * len(tensors)
            own = torch.Generator().manual_seed(next(counter))
            for tensor, sigma in zip(tensors, stds, strict=True):
                tensor.add_(
                    torch.randn(tensor.shape, generator=own, dtype=torch.float64).to(tensor), alpha=sigma
                )

        monkeypatch.setattr(release, "add_gaussian_", add)

    return reset


@pytest.mark.parametrize("size", [8, 16, 64])
@pytest.mark.parametrize("adaptive", [False, True])
def test_it_takes_the_steps_of_the_training_loop(tmp_path, monkeypatch, size, adaptive):
    again = noise_by_number(monkeypatch)
    run = tiny_run(steps=20, adaptive=adaptive)
    run.optim.name, run.optim.lr = "sgd", 0.5
    run.clip.groups = "layer" if adaptive else "flat"
    settings = {"groups": "layer", "target_quantile": 0.5} if adaptive else {}
    again()
    trainer = run_to_end(tmp_path / "loop", run, model=network())
    again()
    engine = train(make(tmp_path / "engine", steps=20, **settings), size)
    np.testing.assert_allclose(flat(engine), weights(trainer), rtol=0, atol=1e-6)
    torch.testing.assert_close(engine.policy.values, trainer.policy.values)
    for accountant in ("rdp", "pld"):
        assert engine.epsilon(accountant) == trainer.ledger.epsilon(1e-3, accountant)
    assert engine.plan.to_dict() == trainer.plan.to_dict()


def test_epsilon_is_that_of_the_steps_taken_and_never_above_the_target(tmp_path):
    engine = make(tmp_path, noise_multiplier=None, epsilon=2.0)
    assert engine.epsilon() == 0
    train(engine, steps=3)
    assert engine.steps_taken == 3
    assert engine.epsilon() == engine.plan.epsilon(3) < 2.0
    train(engine)
    assert engine.finished
    assert 1.9 < engine.epsilon() <= 2.0


def test_epochs_are_steps_of_the_expected_size(tmp_path):
    assert make(tmp_path, steps=None, epochs=2).steps == 6


def test_empty_batches_are_steps_that_the_loop_does_not_see(tmp_path):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    engine = make(tmp_path, model, optimizer, batch_size=0.2, steps=20, scheduler=scheduler)
    before = flat(engine)
    seen = 0
    for batch in engine.batches():
        seen += 1
        engine.step(losses_of(engine, batch))
    assert 0 < seen < 20
    assert engine.ledger.steps_charged == engine.steps_taken == scheduler.last_epoch == 20
    assert not np.array_equal(flat(engine), before)


class Crash(Exception):
    """Stands for kill -9 where one process is enough."""


def crash_at(monkeypatch, engine, number):
    real, calls = release.add_gaussian_, itertools.count()

    def crashing(*arguments, **named):
        if next(calls) == number:
            raise Crash
        real(*arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(release, "add_gaussian_", crashing)
        with pytest.raises(Crash):
            train(engine)
    engine.close()


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


def test_changed_code_of_the_loop_gets_fresh_noise_is_charged_again_and_says_so(tmp_path, monkeypatch):
    crash_at(monkeypatch, make(tmp_path), 3)
    engine = make(tmp_path)
    assert engine.steps_taken == 2

    def other(engine, batch):
        return nn.functional.mse_loss(engine.model(batch[0]), batch[0][:, :3], reduction="none").sum(1)

    with pytest.warns(UserWarning, match="second time"):
        train(engine, losses=other)
    assert engine.ledger.steps_charged == 6 + 2  # steps 2 and 3 were charged before
    assert engine.epsilon() > engine.plan.epsilon()


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
        ({"batch_size": 10}, "sample_rate"),
        ({"dataset": Subset(data(), range(59))}, "num_examples"),
        ({"dataset": TensorDataset(data().tensors[0] + 1e-6, data().tensors[1])}, "the data differ"),
        ({"dataset": Subset(data(), [1, 0, *range(2, 60)])}, "the data differ"),
        ({"model": nn.Sequential(nn.Linear(10, 3))}, "the trained parameters differ"),
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


def first_batch(engine, size=8):
    return next(iter_ := engine.batches(physical_batch_size=size)), iter_


def test_a_batch_without_a_step_is_noticed(tmp_path):
    engine = make(tmp_path)
    with pytest.raises(UserError, match="was not called for the last batch"):
        for _ in engine.batches():
            pass


def test_a_step_without_a_batch_is_noticed(tmp_path):
    engine = make(tmp_path)
    batch, loop = first_batch(engine)
    engine.step(losses_of(engine, batch))
    with pytest.raises(UserError, match="no batch to go with"):
        engine.step(losses_of(engine, batch))
    loop.close()


def test_two_loops_at_once_are_noticed(tmp_path):
    engine = make(tmp_path)
    _, one = first_batch(engine)
    batch, _other = first_batch(engine)
    engine.step(losses_of(engine, batch))
    with pytest.raises(UserError, match="another loop"):
        next(one)


def test_the_optimizer_moves_for_the_engine_alone(tmp_path):
    engine = make(tmp_path)
    optimizer, before = engine._optimizer.optimizer, flat(engine)
    batch, loop = first_batch(engine)
    engine.step(losses_of(engine, batch))
    with pytest.raises(UserError, match="no noise yet"):
        optimizer.step()
    assert np.array_equal(flat(engine), before)
    loop.close()
    engine.close()
    optimizer.step()  # it is the loop's again


def test_a_gradient_scaler_is_refused(tmp_path):
    engine = make(tmp_path)
    scaler = torch.amp.GradScaler("cpu")
    batch, _loop = first_batch(engine)
    engine.step(scaler.scale(losses_of(engine, batch)))
    with pytest.raises(UserError, match="GradScaler"):
        scaler.step(engine._optimizer.optimizer)


@pytest.mark.parametrize("what", ["zero_grad", "clip", "add"])
def test_gradients_are_the_engines_while_a_batch_is_summed(tmp_path, what):
    engine = make(tmp_path)
    parameters = list(engine.model.parameters())
    loop = engine.batches(physical_batch_size=4)
    engine.step(losses_of(engine, next(loop)))
    if what == "zero_grad":
        engine._optimizer.optimizer.zero_grad()
    elif what == "clip":
        nn.utils.clip_grad_norm_(parameters, 1e-3)
    else:
        parameters[0].grad.add_(1.0)
    with pytest.raises(UserError, match="in the middle of a batch"):
        engine.step(losses_of(engine, next(loop)))


def test_zero_grad_before_every_batch_of_one_piece_does_no_harm(tmp_path):
    engine = make(tmp_path)
    for batch in engine.batches(physical_batch_size=64):
        engine._optimizer.optimizer.zero_grad()
        engine.step(losses_of(engine, batch))
    assert engine.finished


def test_thresholds_are_the_policys(tmp_path):
    engine = make(tmp_path)
    batch, _loop = first_batch(engine, 64)
    engine.clipper.thresholds = [100.0]
    with pytest.raises(UserError, match="thresholds were changed in the middle of a step"):
        engine.step(losses_of(engine, batch))
    assert engine.ledger.steps_charged == 0


@pytest.mark.parametrize(
    "normed", [lambda losses: losses / losses.mean(), lambda losses: losses * losses.softmax(0)]
)
def test_losses_that_mix_examples_are_noticed(tmp_path, normed):
    engine = make(tmp_path)
    with pytest.raises(UserError, match="mixes examples"):
        train(engine, losses=lambda engine, batch: normed(losses_of(engine, batch)))
    assert engine.ledger.steps_charged == 0


def test_a_backward_of_the_loops_own_is_noticed(tmp_path):
    engine = make(tmp_path)
    losses = losses_of(engine, first_batch(engine)[0])
    with pytest.raises(RuntimeError, match=r"loss.backward\(\) reached a model"):
        losses.mean().backward()


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


class Stream(IterableDataset):
    def __iter__(self):
        return iter(data())


class StreamOfKnownLength(Stream):
    def __len__(self):
        return 60


def adam_of(*parameters):
    return torch.optim.Adam(parameters)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (
            lambda model: {"optimizer": adam_of(model[0].weight)},
            "0.bias is trainable, and not in the optimizer",
        ),
        (
            lambda model: {"optimizer": adam_of(*model.parameters(), nn.Parameter(torch.zeros(1)))},
            "not in the model",
        ),
        (lambda model: {"optimizer": torch.optim.LBFGS(model.parameters())}, "LBFGS"),
        (lambda model: {"optimizer": adam_of(*model.requires_grad_(False).parameters())}, "nothing to train"),
        (lambda model: {"rule": "none"}, "clips nothing"),
        (lambda model: {"epochs": 1}, "either epochs or steps"),
        (lambda model: {"epsilon": 1.0}, "either epsilon or noise_multiplier"),
        (lambda model: {"batch_size": 61}, "at most N"),
        (lambda model: {"dataset": Stream()}, "map-style"),
        (lambda model: {"target_quantile": 1.5}, "give a number below 1"),
        (lambda model: {"dataset": StreamOfKnownLength(), "data_name": "s"}, "map-style"),
        (lambda model: {"clip_norm": 1e-20}, "no threshold below 1e-12"),
        (lambda model: {"scheduler": "cosine"}, "scheduler='cosine' is none"),
        (
            lambda model: {"scheduler": torch.optim.lr_scheduler.StepLR(adam_of(*model.parameters()), 1)},
            "learning rate of another optimizer",
        ),
    ],
)
def test_what_does_not_fit_is_refused_at_once(tmp_path, wrong, named):
    model = network()
    with pytest.raises(UserError, match=named):
        make(tmp_path, model, **wrong(model))
    assert not (tmp_path / "ledger.jsonl").exists()
    assert type(model[0]) is nn.Linear


def test_another_optimizer_may_not_move_the_weights_between_two_batches(tmp_path):
    engine = make(tmp_path)
    own, others = adam_of(*engine.model.parameters()), adam_of(nn.Parameter(torch.zeros(1)))
    for batch in engine.batches(physical_batch_size=3):
        engine.step(losses_of(engine, batch))
        others.step()
        with pytest.raises(UserError, match="hold no noise yet"):
            own.step()
        break
    engine.close()
    own.step()


def test_a_plateau_scheduler_is_refused(tmp_path):
    model = network()
    optimizer = adam_of(*model.parameters())
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(UserError, match="ReduceLROnPlateau"):
        make(tmp_path, model, optimizer, scheduler=scheduler)


def test_a_scheduler_that_the_loop_steps_too_is_refused(tmp_path):
    model = network()
    optimizer = adam_of(*model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    engine = make(tmp_path, model, optimizer, scheduler=scheduler)
    train(engine, steps=1)
    scheduler.step()
    with pytest.raises(UserError, match="called by the loop"):
        train(engine)
    assert engine.steps_taken == engine.ledger.steps_charged == 1


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


def test_a_schedule_of_the_learning_rate_is_none_of_the_noise(tmp_path):
    scheduler = torch.optim.lr_scheduler.StepLR(adam_of(nn.Parameter(torch.zeros(1))), 1)
    for wrong in (scheduler, {"name": "exponential", "gamma": 0.1}):
        with pytest.raises(UserError, match="is of the noise, a name or its settings"):
            make(tmp_path, schedule=wrong)


def test_several_processes_that_do_not_share_a_batch_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(UserError, match="2 processes"):
        run_to_end(tmp_path / "loop", tiny_run())


def test_what_a_collate_function_draws_is_secret_and_repeatable(tmp_path):
    def drawn(folder, noise_seed=11, seed=0):
        torch.manual_seed(seed)
        np.random.seed(seed)
        found = []

        def masking(examples):
            found.append((torch.rand(1).item(), np.random.rand(), __import__("random").random()))
            return torch.utils.data.default_collate(examples)

        engine = make(tmp_path / folder, noise_seed=noise_seed)
        for batch in engine.batches(masking, 8):
            engine.step(losses_of(engine, batch))
        return found

    one = drawn("one")
    assert len(set(one)) == len(one)
    assert drawn("other public seed", seed=1) == one
    assert not set(drawn("other key", noise_seed=12)) & set(one)


def test_the_card_says_what_is_guaranteed(tmp_path):
    engine = train(make(tmp_path / "run"))
    engine.write_card(tmp_path / "model")
    card = (tmp_path / "model/PRIVACY.md").read_text()
    assert f"({engine.epsilon():.4f}, 0.001)-differential privacy" in card
    assert "fixed seed" in card
    assert json.loads((tmp_path / "run/run.json").read_text())["data"] not in card


def test_the_key_is_the_owners_alone(tmp_path):
    make(tmp_path, noise_seed=None)
    assert (tmp_path / "secret.key").stat().st_mode & 0o777 == 0o600
    assert math.isclose(os.path.getsize(tmp_path / "secret.key"), 32)


def test_a_ledger_that_lost_its_end_and_a_copy_of_the_folder_are_noticed(tmp_path):
    train(make(tmp_path / "run", noise_seed=None), steps=4).close()
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    copy = make(tmp_path / "copy", noise_seed=None)
    assert copy._keys.copied
    copy.close()
    ledger = tmp_path / "run/ledger.jsonl"
    ledger.write_text("".join(ledger.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(UserError, match="lost entries"):
        make(tmp_path / "run", noise_seed=None)


@pytest.mark.parametrize("fixed", [True, False])
def test_the_promise_of_one_length_is_kept_or_refused(tmp_path, fixed):
    texts = [torch.arange(1, 3 + i % 2) for i in range(60)]  # of 2 or 3 tokens

    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(8, 3, padding_idx=0)

        def forward(self, input_ids):
            return self.embedding(input_ids).sum(1)

    engine = make(tmp_path, Mean(), dataset=list(texts), fixed_length=fixed)

    def run():
        longest_of = nn.utils.rnn.pad_sequence
        for batch in engine.batches(lambda rows: longest_of(rows, True), 1, length=lambda i: len(texts[i])):
            engine.step(engine.model(batch).square().sum(1))

    if fixed:
        with pytest.raises(UserError, match="fixed_length=True promises batches of one length"):
            run()
    else:
        run()
        assert engine.finished


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"batch_size": "20"}, "batch_size='20' is not a number"),
        ({"batch_size": 0}, "batch_size=0 must be above 0"),
        ({"steps": 2.5}, "steps=2.5 is not a whole number"),
        ({"steps": None, "epochs": -1}, "epochs=-1 must be above 0"),
        ({"noise_multiplier": None, "epsilon": "8"}, "epsilon='8' is not a number"),
        ({"noise_multiplier": None, "epsilon": float("nan")}, "epsilon=nan is not a finite number"),
        ({"clip_norm": True}, "clip_norm=True is not a number"),
        ({"clip_norm": 0.0}, "clip_norm=0.0 must be above 0"),
        ({"target_quantile": 1.0}, "target_quantile=1.0 is a share"),
        ({"checkpoint_every": -1}, "checkpoint_every=-1 must be 0 or larger"),
        ({"clip_norm": None}, "clip_norm=None is not a number"),
        ({"clip_norm": 1e300}, r"clip_norm=1e\+300 must be at most 1e\+18"),
        ({"loss_scale": 1e300}, r"loss_scale=1e\+300 must be at most"),
        ({"users": 5}, "users=5 names nobody"),
        ({"scheduler": 3}, "scheduler=3 is none"),
    ],
    ids=lambda case: next(iter(case)) if isinstance(case, dict) else "",
)
def test_a_number_that_cannot_be_meant_gets_one_sentence(tmp_path, changes, says):
    with pytest.raises(UserError, match=says):
        make(tmp_path / "run", **changes)
    assert not (tmp_path / "run").exists()


def test_numbers_may_be_those_of_other_libraries(tmp_path):
    numbers = {
        "batch_size": np.float32(20),
        "steps": np.int64(2),
        "clip_norm": np.float32(0.5),
        "noise_multiplier": Fraction(3, 2),
        "target_quantile": np.float16(0.5),
        "checkpoint_every": np.int8(1),
    }
    engine = train(make(tmp_path, **numbers))
    assert engine.finished
    assert (
        engine.plan.to_dict()
        == make(tmp_path / "own", steps=2, noise_multiplier=1.5, target_quantile=0.5).plan.to_dict()
    )


@pytest.mark.parametrize("folder", [None, "", 3])
def test_a_folder_that_is_none_is_refused(folder):
    with pytest.raises(UserError, match="is not the name of a folder"):
        make(folder)


def test_a_file_in_the_folders_place_is_refused(tmp_path):
    (tmp_path / "run").write_text("mine")
    with pytest.raises(UserError, match="is a file"):
        make(tmp_path / "run")
    assert (tmp_path / "run").read_text() == "mine"


def test_a_guarantee_that_protects_nobody_is_said_at_once(tmp_path):
    with pytest.warns(UserWarning, match="not below 1/N"):
        make(tmp_path / "a", delta=0.5)
    with pytest.warns(UserWarning, match="bounds next to nothing"):
        make(tmp_path / "b", noise_multiplier=None, epsilon=1e6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(tmp_path / "c")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: DataLoader(data(), batch_size=4), "give loader.dataset here"),
        (lambda: data().tensors, r"TensorDataset\(\*tensors\) makes one"),
        (lambda: {"train": data()}, "a dict has names and not examples by number"),
        (lambda: pandas.DataFrame({"x": [1.0, 2.0]}), "a DataFrame gives columns and not examples"),
        (lambda: pandas.Series([1.0, 2.0]), "a Series gives columns and not examples"),
        (lambda: zip(*data().tensors, strict=True), "map-style"),
    ],
    ids=["loader", "tuple", "dict", "frame", "series", "zip"],
)
def test_what_has_no_examples_by_number_is_no_data_set(tmp_path, wrong, says):
    model = network()
    with pytest.raises(UserError, match=says):
        PrivacyEngine(
            model, adam_of(*model.parameters()), wrong(), folder=tmp_path, batch_size=1, steps=1, epsilon=1
        )


def test_arguments_in_another_order_are_told(tmp_path):
    model = network()
    settings = {"folder": tmp_path, "batch_size": 1, "steps": 1, "epsilon": 1}
    with pytest.raises(UserError, match="optimizer: this is of type TensorDataset and no torch Optimizer"):
        PrivacyEngine(model, data(), adam_of(*model.parameters()), **settings)
    with pytest.raises(UserError, match="model: this is of type Adam and no torch Module"):
        PrivacyEngine(adam_of(*model.parameters()), model, data(), **settings)


def test_a_bare_tensor_or_array_is_hashed(tmp_path):
    x = torch.stack([x for x, _ in TASK.train])
    for number, plain in enumerate((x, x.numpy())):
        engine = make(tmp_path / str(number), dataset=plain)
        train(engine, losses=lambda engine, batch: engine.model(batch).square().sum(1))
        engine.close()
        with pytest.raises(UserError, match="the data differ"):
            make(tmp_path / str(number), dataset=plain + 1)


def test_a_size_in_the_place_of_the_collate_function_is_named(tmp_path):
    engine = make(tmp_path)
    with pytest.raises(UserError, match="physical_batch_size=64"):
        next(engine.batches(64))
    with pytest.raises(UserError, match="physical_batch_size='64' is not a number"):
        next(engine.batches(physical_batch_size="64"))


TEXTS = [(torch.arange(1, 2 + i % 7), torch.tensor(i % 3)) for i in range(60)]


def padded(rows):
    return nn.utils.rnn.pad_sequence([text for text, _ in rows], batch_first=True), torch.stack(
        [y for _, y in rows]
    )


class Mean(nn.Module):
    """The mean of embedded tokens: of all columns, or of those that are no padding."""

    def __init__(self, masked):
        super().__init__()
        self.masked, self.embedding, self.head = masked, nn.Embedding(8, 5), nn.Linear(5, 3)

    def forward(self, ids):
        kept = (ids > 0) if self.masked else torch.ones_like(ids)
        return self.head((self.embedding(ids) * kept[..., None]).sum(1) / kept.sum(1, keepdim=True))


@pytest.mark.parametrize("masked", [False, True])
def test_padding_that_moves_an_example_is_seen_where_no_model_says_what_padding_is(tmp_path, masked):
    engine = make(tmp_path, Mean(masked), dataset=TEXTS, batch_size=30, steps=2)
    refused = pytest.raises(UserError, match="when its batch is padded further")
    with contextlib.nullcontext() if masked else refused:
        for ids, labels in engine.batches(padded):
            engine.step(nn.functional.cross_entropy(engine.model(ids), labels, reduction="none"))


def test_what_a_collate_function_pads_with():
    rows = [TEXTS[i] for i in (0, 3, 6)]
    before = torch.get_rng_state()

    def found(collate, rows=rows):
        return padding_token(collate, rows, collate(rows))

    assert found(padded) == 0
    nines = lambda rows: nn.utils.rnn.pad_sequence([text for text, _ in rows], True, padding_value=9)  # noqa: E731
    assert found(lambda rows: {"labels": -nines(rows), "input_ids": nines(rows), "n": len(rows)}) == 9
    assert found(padded, [TEXTS[3]] * 3) is None
    assert padding_token(lambda rows: 1 / 0, rows, padded(rows)) is None
    assert padding_token(lambda rows: 1 / 0, rows, torch.ones(3, 4)) is None

    def drawing(rows):
        torch.rand(1)
        return padded(rows)

    assert padding_token(drawing, rows, padded(rows)) == 0
    assert torch.equal(torch.get_rng_state(), before)


def test_losses_that_are_no_numbers_are_said_once(tmp_path):
    engine = make(tmp_path)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for batch in engine.batches():
            engine.step(losses_of(engine, batch) * torch.tensor(float("nan")))
    assert engine.finished
    assert [str(one.message).startswith("step 1: losses are NaN") for one in said] == [True]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"schedule": {"name": "privacy_utility_released", "start": 1.5, "window": 1}}, "follows"),
        ({"schedule": 3}, "is no schedule"),
        ({"schedule": {"name": "time", "rate": 1.0}}, "is no schedule"),
        ({"schedule": {"name": "time", "decay_rate": "fast"}}, "is no schedule"),
        ({"schedule": {"name": "influence", "influences": ["a"]}}, "is no schedule"),
        ({"delta": None}, "neither a number nor a rule"),
        ({"delta": [1e-5]}, "neither a number nor a rule"),
    ],
)  # fmt: skip
def test_a_schedule_or_a_delta_that_is_none_gets_one_sentence(tmp_path, changes, says):
    with pytest.raises(UserError, match=says) as caught:
        make(tmp_path / "run", **changes)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()
