"""A layer that the model begins to use in another way than before: its step begins again, and the run goes on."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dpexp.clipping import attach
from dpexp.errors import UserError
from tests.training.own_loop import flat, make, train


class SortsLater(nn.Module):
    """Puts its rows in order where it is told to, which changes no result."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.first, self.inner, self.last = nn.Linear(10, 16), nn.Linear(16, 16), nn.Linear(16, 3)
        self.sorts = False

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        if not self.sorts:
            return self.last(self.inner(h))
        order = x[:, 0].argsort()
        return self.last(self.inner(h[order])[order.argsort()])


def begins_to_sort_after(engine, steps, size=8):
    def switched(engine, batch):
        engine.model.sorts = engine.steps_taken >= steps
        return nn.functional.cross_entropy(engine.model(batch[0]), batch[1], reduction="none")

    return train(engine, size=size, losses=switched)


@pytest.mark.parametrize("size", [8, 64])
def test_a_step_that_shows_a_use_too_late_begins_again(tmp_path, size):
    engine = begins_to_sort_after(make(tmp_path / "late", SortsLater()), 3, size)
    assert engine.finished
    assert engine.ledger.steps_charged == 6
    model = SortsLater()
    model.sorts = True
    ever = begins_to_sort_after(make(tmp_path / "ever", model), 0, size)
    assert engine.epsilon() == ever.epsilon()


def test_a_restart_right_before_it_goes_on_too(tmp_path):
    """The process before knew of no sorting; the checkpoint is of the step before it begins."""
    model = SortsLater()
    train(make(tmp_path, model, checkpoint_every=1), steps=3).close()
    engine = begins_to_sort_after(make(tmp_path, SortsLater(), checkpoint_every=1), 3)
    assert engine.finished
    assert engine.ledger.steps_charged == 6
    assert np.isfinite(flat(engine)).all()


def test_without_an_engine_the_person_runs_it_again():
    model, x = SortsLater(), torch.randn(6, 10)
    clipper = attach(model)
    for model.sorts in (False, False):
        clipper.backward(model(x).square().sum(1))
    model.sorts = True
    with pytest.raises(UserError, match="run this step again"):
        clipper.backward(model(x).square().sum(1))
    clipper.backward(model(x).square().sum(1))
