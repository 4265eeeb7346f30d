"""What begins after the first look is looked at when it begins; what a look has made is gone before the next one."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor, nn

from dpexp.clipping import attach
from dpexp.errors import UserError
from tests.clipping.stepping import D, Net, step, x


def test_one_example_alone_is_looked_at_beside_another() -> None:
    with pytest.raises(UserError, match="when another example stands beside it"):
        step(Net(lambda h: h - h.mean(0).detach()), x(1, D))


def test_a_batch_of_one_example_is_looked_at_where_others_were_before() -> None:
    """What is left of a logical batch: a model that takes it in another way gives its example another share of the sum."""
    model = Net(lambda h: h if len(h) > 1 else 2 * h)
    clipper = attach(model)
    for _ in range(2):
        clipper.backward(model(x(8, D)).square().sum(1))
    with pytest.raises(UserError, match="when another example stands beside it"):
        clipper.backward(model(x(1, D)).square().sum(1))
    clipper.detach()
    model.between = lambda h: h
    clipper = attach(model)
    for rows in (8, 1):
        clipper.backward(model(x(rows, D)).square().sum(1))
    # one look is enough
    assert not clipper._independence.due


def test_a_model_that_begins_later_is_noticed_at_the_sixteenth_step() -> None:
    model = Net(lambda h: h)
    clipper = attach(model)
    for _ in range(15):
        clipper.backward(model(x()).square().sum(1))
        model.between = lambda h: h - h.mean(0).detach()
    model.zero_grad()
    # also of who tries again
    for _ in range(3):
        with pytest.raises(UserError, match="mixes examples"):
            clipper.backward(model(x()).square().sum(1))
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("microbatches", [2, 8])
def test_it_is_noticed_where_several_forwards_wait_for_their_backward(microbatches: int) -> None:
    """As in a pipeline: no forward comes between the fifteenth backward pass and the sixteenth."""
    model = Net(lambda h: h)
    clipper = attach(model)

    def schedule() -> None:
        waiting = [model(x()).square().sum(1) for _ in range(microbatches)]
        for losses in waiting:
            clipper.backward(losses)

    for _ in range(16 // microbatches):
        schedule()
        model.between = lambda h: h - h.mean(0).detach()
    with pytest.raises(UserError, match="mixes examples"):
        schedule()
    assert not clipper.notes


class InModes(Net):
    """Centred where it is asked for, by an argument or by a switch."""

    centred = False

    def forward(self, x: Tensor, centred: bool = False) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.last(self.between(h) if centred or self.centred else h)


@pytest.mark.parametrize("forwards", [1, 3, 4, 12])
@pytest.mark.parametrize("by", ["argument", "switch"])
def test_one_of_many_forwards_of_a_step_is_looked_at_where_it_differs(by: str, forwards: int) -> None:
    model = InModes(lambda h: h - h.detach().mean(0))
    clipper = attach(model)
    model.centred = by == "switch"
    losses = model(x(), centred=by == "argument").square().sum(1)
    model.centred = False
    for _ in range(forwards):
        losses = losses + model(x()).square().sum(1)
    with pytest.raises(UserError, match="mixes examples"):
        clipper.backward(losses)


class Gated(Net):
    """A factor that no training moves stands where a look sees nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return self.gate * super().forward(x)


def test_behind_a_gate_that_is_closed_the_next_step_is_looked_at() -> None:
    model = Gated(lambda h: h - h.mean(0).detach())
    model.gate = 0.0
    clipper = attach(model)
    clipper.backward((model(x()) - 1).square().sum(1))
    model.gate = 0.1
    with pytest.raises(UserError, match="mixes examples"):
        clipper.backward((model(x()) - 1).square().sum(1))


def test_modules_that_begin_to_train_later_are_looked_at() -> None:
    """A part that looks at the batch in training mode alone, like batch norm; and somebody calls model.train()."""

    class Centres(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            return h - h.detach().mean(0) if self.training else h

    model = Net(Centres()).eval()
    clipper = attach(model)
    for _ in range(2):
        clipper.backward(model(x()).square().sum(1))
    model.train()
    with pytest.raises(UserError, match=r"between .* mixes examples"):
        clipper.backward(model(x()).square().sum(1))
    model.eval()
    clipper.backward(model(x()).square().sum(1))


def test_a_frozen_batch_norm_in_training_mode_again_is_told_as_such() -> None:
    norm = nn.BatchNorm1d(D, affine=False, track_running_stats=True).eval()
    norm.track_running_stats = False
    model = nn.Sequential(norm, nn.Linear(D, D))
    clipper = attach(model)
    values = torch.randn(4, D)
    clipper.backward(model(values).square().sum(1))
    model.train()
    with pytest.raises(
        UserError, match=r"0 \(BatchNorm1d\): it normalises .* behind each model.train\(\) too"
    ):
        clipper.backward(model(values).square().sum(1))


@pytest.mark.parametrize("engine", ["auto", "opacus"])
def test_an_input_that_was_empty_is_looked_at_once_it_is_not(engine: str) -> None:
    """Nodes of one graph as examples, of which those of the first batches are no neighbours."""

    class Nodes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(4, 3)

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            return self.out(x.index_add(0, edges[1], x[edges[0]]))

    model, none, some = Nodes(), torch.zeros(2, 0, dtype=torch.long), torch.tensor([[1, 2], [2, 1]])
    clipper = attach(model, engine=engine)
    for _ in range(2):
        clipper.backward(model(torch.randn(5, 4), none).square().sum(1))
    with pytest.raises(UserError, match="mixes examples"):
        clipper.backward(model(torch.randn(5, 4), some).square().sum(1))


def test_what_one_look_made_is_gone_before_the_next_one() -> None:
    """Logits are the largest tensors of a language model: beside those of the step there is room for one more."""
    made: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    class Noting(Net):
        def forward(self, x: Tensor) -> Tensor:
            alive.append(sum(output() is not None for output in made))
            output = super().forward(x)
            made.append(weakref.ref(output))
            return output

    model = Noting(nn.Identity())
    clipper = attach(model)
    output = model(x())
    clipper.backward(output.square().sum(1))
    assert len(alive) > 5
    assert max(alive) == 1
