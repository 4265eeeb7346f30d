"""What a person's own loop does with its batch before the model: where it mixes examples there, it is refused."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dpexp.errors import UserError
from dpexp.training.watching.tape import Tape
from tests.training.own_loop import losses_of, make, mixed_up, network, train

cross_entropy = nn.functional.cross_entropy


def standardised(x):
    return (x - x.mean(0)) / x.std(0)


def swapped(x):
    x = x.clone()
    x[:, 3] = x[:, 3].flip(0)
    return x


class Frozen(nn.Module):
    """As torchvision has them: activations in place, statistics of the batch unless they are put to eval()."""

    def __init__(self):
        super().__init__()
        self.norm, self.activation, self.dropout = (
            nn.BatchNorm1d(10),
            nn.ReLU(inplace=True),
            nn.Dropout(0.0, inplace=True),
        )
        self.requires_grad_(False)

    def forward(self, x):
        return self.dropout(self.activation(self.norm(x.clone())))


def behind_a_frozen_model(x):
    return mixed_up(Frozen().eval()(x))


@pytest.mark.parametrize("prepared", [standardised, mixed_up, swapped, Frozen(), behind_a_frozen_model])
def test_batches_that_are_mixed_before_they_enter_the_model_are_refused(tmp_path, prepared):
    engine = make(tmp_path)

    def losses(engine, batch):
        return cross_entropy(engine.model(prepared(batch[0])), batch[1], reduction="none")

    with pytest.raises(UserError, match="before they enter the model"):
        train(engine, 20, losses=losses)
    with pytest.raises(UserError, match="before they enter the model"):
        # again, and not let through
        train(engine, 20, losses=losses)
    assert engine.ledger.steps_charged == 0


def test_a_frozen_model_in_front_may_write_in_place(tmp_path):
    engine, before = make(tmp_path), Frozen().eval()

    def losses(engine, batch):
        values = cross_entropy(engine.model(before(batch[0])), batch[1], reduction="none")
        return nn.functional.relu(values, inplace=True)

    train(engine, 20, losses=losses)
    assert engine.finished
    assert not engine.clipper.notes


MIXED = {
    "mixed": lambda x, axis: 0.7 * x + 0.3 * x.flip(axis),
    "standardised": lambda x, axis: (x - x.mean(axis, keepdim=True)) / (1 + x.std(axis, keepdim=True)),
}


@pytest.mark.parametrize("size", [5, 6])
@pytest.mark.parametrize("mix", [*MIXED, None])
@pytest.mark.parametrize("axis", [0, 1])
def test_examples_are_known_where_several_dimensions_have_their_number(tmp_path, axis, mix, size):
    """Time before the batch, and six lines of pictures in batches of six: the first batch tells, before a step is taken."""
    torch.manual_seed(0)
    shape = (6, 2) if axis else (6, 6)
    rows = [(torch.rand(shape), i % 3) for i in range(60)]
    engine = make(tmp_path, nn.Linear(shape[-1], 3), dataset=rows, batch_size=12)

    def collate(rows):
        return torch.stack([x for x, _ in rows], axis), torch.tensor([y for _, y in rows])

    def losses(engine, batch):
        x = MIXED[mix](batch[0], axis) if mix else 2 * batch[0] - 1
        return cross_entropy(engine.model(x).mean(1 - axis), batch[1], reduction="none")

    if mix is None:
        assert train(engine, size, losses=losses, collate_fn=collate).finished
        return
    with pytest.raises(UserError, match="mixes examples before they enter"):
        train(engine, size, losses=losses, collate_fn=collate)
    assert engine.ledger.steps_charged == 0


class Named(nn.Module):
    """Called by keywords."""

    def __init__(self):
        super().__init__()
        self.body = network()

    def forward(self, *, features):
        return self.body(features)


def test_what_enters_by_a_keyword_is_looked_at(tmp_path):
    engine = make(tmp_path, Named())
    with pytest.raises(UserError, match="before they enter the model"):
        train(
            engine,
            losses=lambda engine, batch: engine.model(features=standardised(batch[0])).square().sum(1),
        )


def test_what_a_loop_may_do_with_its_examples_before_the_model(tmp_path, caplog):
    public = torch.rand(10)

    def losses(engine, batch):
        x = (batch[0] - public) / (1 + public) + 0.1 * torch.randn_like(batch[0])
        x = nn.functional.normalize(x, dim=1) * (torch.rand(len(x), 1) > 0.2)
        x = torch.where(batch[0] > 2, torch.zeros_like(x), x).clone()
        x[:, 0] = 1
        return cross_entropy(engine.model(x), batch[1], reduction="none")

    assert train(make(tmp_path), losses=losses).finished
    assert "not looked at" not in caplog.text


def of_their_mean(engine, batch):
    return (
        engine.model(batch[0]).square().sum(1) - engine.model(batch[0].mean(0, keepdim=True)).detach().sum()
    )


def test_what_enters_is_of_one_example(tmp_path):
    with pytest.raises(UserError, match="one changes with several examples"):
        train(make(tmp_path), losses=of_their_mean)


def negatives_apart(engine, batch):
    return (engine.model(batch[0]) - engine.model(batch[0].roll(1, 0))).square().sum(1)


def negatives_beside(engine, batch):
    one, other = engine.model(torch.cat([batch[0], batch[0].roll(1, 0)])).chunk(2)
    return (one - other).square().sum(1)


@pytest.mark.parametrize("losses", [negatives_apart, negatives_beside])
def test_rows_of_others_do_not_enter_the_model_beside_those_of_an_example(tmp_path, losses):
    engine = make(tmp_path)
    with pytest.raises(UserError, match="before they enter the model"):
        train(engine, losses=losses)


def test_what_enters_the_model_is_done_again_without_the_losses(tmp_path, monkeypatch):
    """Those of a language model cost more than all that is before them."""
    counts, again = [], Tape.again

    class Softmaxes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            counts[-1] += "log_softmax" in func.name()
            return func(*args, **(kwargs or {}))

    def counted(*given, **named):
        counts.append(0)
        with Softmaxes():
            return again(*given, **named)

    monkeypatch.setattr(Tape, "again", counted)
    engine = make(tmp_path)
    train(engine, 20, steps=1, losses=lambda engine, batch: losses_of(engine, (2 * batch[0], batch[1])))
    assert 0 in counts
    assert max(counts) >= 1


@pytest.mark.parametrize("mixed", [True, False])
def test_what_the_loop_hangs_on_the_model_enters_it(tmp_path, mixed):
    """A plain attribute, no buffer; of one example alone it may be."""

    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.shift = network(), None

        def forward(self, x):
            return self.body(x) - self.shift

    engine = make(tmp_path, Shifted())

    def losses(engine, batch):
        engine.model.shift = batch[0].mean(0)[:1] if mixed else batch[0].mean(1, keepdim=True)
        return losses_of(engine, batch)

    if mixed:
        with pytest.raises(UserError, match="the loop gives the model"):
            train(engine, losses=losses)
        assert engine.ledger.steps_charged == 0
    else:
        assert train(engine, losses=losses).finished
