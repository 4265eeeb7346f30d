"""`PrivacyEngine` with optimizers of other libraries, and what a loop does to weights and optimizer behind a step."""

import collections

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import OneCycleLR

from dpexp.errors import UserError
from tests.training.own_loop import flat, losses_of, make, network, train


def clamp(engine, _):
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.data.clamp_(-0.2, 0.2)


def lower(name):
    def change(_, optimizer):
        optimizer.param_groups[0][name] *= 0.8

    return change


@pytest.mark.parametrize(
    "change",
    [clamp, lower("lr"), lower("momentum"), lambda _, optimizer: optimizer.state.clear()],
    ids=["weights", "lr", "momentum", "state"],
)
@pytest.mark.parametrize("stop", ["between loops", "in a batch"])
def test_what_the_loop_does_behind_a_step_is_in_the_checkpoint_of_that_step(tmp_path, change, stop):
    """A learning rate that falls by hand would begin again higher, without a word."""

    def session(folder, until=None):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        engine = make(folder, model, optimizer, checkpoint_every=2)
        steps = until if stop == "between loops" else None
        for batch in engine.batches(physical_batch_size=8, steps=steps):
            if engine.steps_taken == until:
                break
            if engine.step(losses_of(engine, batch)):
                change(engine, optimizer)
        engine.close()
        return flat(engine), engine.ledger.steps_charged

    whole, charged = session(tmp_path / "whole")
    session(tmp_path / "cut", until=4)
    resumed, again = session(tmp_path / "cut")
    assert np.array_equal(whole, resumed)
    assert charged == again == 6


# torch will drop the quantised ones of its own
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_checkpoint_that_nothing_has_changed_is_written_once(tmp_path):
    """Whatever the kinds of tensors in it."""
    model, made = network(), []
    kinds = [
        torch.ones(2, dtype=torch.complex128),
        torch.ones(2, dtype=torch.bool),
        torch.zeros(0),
        torch.eye(3).to_sparse(),
        torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    ]
    for number, kind in enumerate(kinds):
        model.register_buffer(f"kind{number}", kind)
    engine = make(tmp_path, model)
    for batch in engine.batches(physical_batch_size=8):
        engine.step(losses_of(engine, batch))
        made += [path.name for path in (tmp_path / "checkpoint").glob("state-*-again.pt")]
    assert not made


def dense(model):
    return torch.optim.SparseAdam(model.parameters()), None


def short(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return optimizer, OneCycleLR(optimizer, 0.1, total_steps=1)


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (
            dense,
            r"step\(\) of SparseAdam failed \(SparseAdam does not support dense gradients.*not charged twice",
        ),
        (short, r"step\(\) of OneCycleLR failed \(Tried to step 2 times"),
    ],
)
def test_an_optimizer_or_a_scheduler_that_fails_is_named(tmp_path, made, says):
    model = network()
    optimizer, scheduler = made(model)
    engine = make(tmp_path, model, optimizer, scheduler=scheduler)
    with pytest.raises(UserError, match=says):
        train(engine)


class OwnRate(torch.optim.SGD):
    """Finds its learning rate itself, as Adafactor does."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.param_groups[0]["lr"] = None

    def step(self, closure=None):
        self.param_groups[0]["lr"] = 0.1
        super().step(closure)
        self.param_groups[0]["lr"] = None


def test_an_optimizer_may_find_its_own_learning_rate(tmp_path):
    def session(steps):
        model = network()
        engine = train(make(tmp_path, model, OwnRate(model.parameters())), steps=steps)
        engine.close()
        return engine.steps_taken

    assert session(2) == 2
    assert session(None) == 6


class Remembering(torch.optim.SGD):
    """Keeps the last gradients in what no checkpoint gives back."""

    def step(self, closure=None):
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["last"] = collections.deque([1.0])


def test_a_state_that_cannot_be_kept_is_refused_behind_the_first_step(tmp_path):
    """Not at the first checkpoint, when a hundred steps are lost."""
    model = network()
    engine = make(tmp_path, model, Remembering(model.parameters(), lr=0.1), checkpoint_every=5)
    with pytest.raises(UserError, match="the state of optimizer holds what a checkpoint could not give back"):
        train(engine)
    assert engine.steps_taken == 1
