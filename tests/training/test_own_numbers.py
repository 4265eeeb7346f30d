"""One number that a loop of one's own makes of its whole batch: refused in losses, also where other rows would not change it."""

from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from dpexp.errors import UserError
from tests.training.own_loop import data, losses_of, make, network, train

cross_entropy = nn.functional.cross_entropy


def squared(engine, batch):
    """All above one."""
    return (engine.model(batch[0])[:, 0] - batch[1] - 7).square()


def of_rows_end_to_end(engine, batch):
    rows = engine.model(batch[0]).flatten().split(3)
    values = [row.square().sum() / row.detach().norm().clamp(min=100) for row in rows]
    return torch.stack(values)


ONE_NUMBER_ASLEEP = {
    "a count of large losses": lambda f: f / (f.detach() > 1).sum(),
    "a maximum with a floor": lambda f: f / f.detach().max().clamp(min=1e9),
    "a minimum in what saturates": lambda f: f * torch.sigmoid(f.detach().min() + 50),
    "a norm that is seldom too large": lambda f: f * (1e6 / f.detach().norm()).clamp(max=1.0),
    "losses that all count if one does": lambda f: f * torch.where((f.detach() > 1e12).any(), 0.5, 1.0),
    "one that is no number ends all": lambda f: torch.where(f.isfinite().all(), f, 0.0),
    "a count that is not nothing": lambda f: f * torch.where((f.detach() > 1e12).sum() > 0, 0.5, 1.0),
}


@pytest.mark.parametrize("weigh", ONE_NUMBER_ASLEEP.values(), ids=ONE_NUMBER_ASLEEP)
def test_one_number_of_the_batch_is_seen_where_other_rows_would_not_change_it(tmp_path, weigh):
    engine = make(tmp_path)
    with pytest.raises(UserError, match="mixes examples: the loss of one changes when the others"):
        train(engine, 20, losses=lambda engine, batch: weigh(squared(engine, batch)))
    assert engine.ledger.steps_charged == 0


def test_one_number_of_the_batch_is_seen_before_the_model_too(tmp_path):
    def losses(engine, batch):
        x = batch[0]
        return losses_of(engine, [x * (1e6 / x.norm()).clamp(max=1.0), batch[1]])

    with pytest.raises(UserError, match="mixes examples before they enter the model"):
        train(make(tmp_path), 20, losses=losses)


ONE_NUMBER_APART = {
    "no loss goes by it": lambda e, b: losses_of(e, b) + 0.0 * e.model(b[0]).sum(),
    "nor by its product with zero": lambda e, b: losses_of(e, b) + (e.model(b[0]) * 0.0).sum(),
    "of rows end to end": of_rows_end_to_end,
    "of public rows": lambda e, b: losses_of(e, b) / torch.arange(9.0).max().clamp(min=1.0),
    "columns that the longest row has": lambda e, b: losses_of(
        e, [b[0] * (torch.arange(10) < (b[1] + 12).max()), b[1]]
    ),
}


@pytest.mark.parametrize("losses", ONE_NUMBER_APART.values(), ids=ONE_NUMBER_APART)
def test_one_number_of_the_batch_may_stand_where_no_example_goes_by_it(tmp_path, losses):
    engine = make(tmp_path)
    assert train(engine, 20, losses=losses).finished
    assert engine.clipper.notes == []


def test_one_example_at_a_time_may_go_by_its_own_numbers(tmp_path, caplog):
    def losses(engine, batch):
        x, y = batch
        scale = 1 / (1 + x.abs().mean().item()) / len(x)
        return cross_entropy(engine.model(x - x.mean()), y, reduction="none") * scale

    assert train(make(tmp_path, steps=3), 1, losses=losses).finished
    assert "not looked at" not in caplog.text


@pytest.mark.parametrize("size", [8, 64])
def test_losses_that_are_written_down_one_by_one_are_looked_at(tmp_path, size):
    """A list of all losses, for a plot: what the loop has made of them before and behind is seen all the same."""
    history = []

    def mixed(engine, batch):
        history.extend(batch[1].tolist())
        found = losses_of(engine, batch)
        history.extend(found.tolist())
        return found / found.detach().mean()

    with pytest.raises(UserError, match="the loop mixes examples"):
        train(make(tmp_path), size, losses=mixed)


def test_weights_that_python_counts_in_each_physical_batch_are_refused(tmp_path):
    def weighted(engine, batch):
        counts = Counter(batch[1].tolist())
        weight = torch.tensor([1 / (1 + counts[kind]) for kind in range(3)])
        return nn.functional.cross_entropy(engine.model(batch[0]), batch[1], weight, reduction="none")

    with pytest.raises(UserError, match="something else of one physical batch than of another one"):
        train(make(tmp_path), losses=weighted)


@pytest.mark.parametrize("number", [Tensor.item, float, lambda mean: 1 / mean.item()])
def test_numbers_that_are_made_of_a_batch_are_refused_in_its_losses(tmp_path, number):
    engine = make(tmp_path)

    def losses(engine, batch):
        found = losses_of(engine, batch)
        return found / number(found.detach().mean())

    with pytest.raises(UserError, match="losses depend on a number that the loop has made of its batch"):
        train(engine, losses=losses)
    assert engine.ledger.steps_charged == 0


def test_a_number_of_an_example_stays_its_own_where_the_batch_before_had_that_example_too(tmp_path):
    def losses(engine, batch):
        x = torch.stack([row / float(row.abs().max()) for row in batch[0]])
        return losses_of(engine, [x, batch[1]])

    # half of all examples in each batch
    engine = make(tmp_path, batch_size=len(data()) // 2)
    assert train(engine, 64, losses=losses).finished


class Keeping(nn.Module):
    """Keeps what it has seen of a batch, as experts keep their load."""

    def __init__(self, kept):
        super().__init__()
        self.body, self.kept = network(), kept

    def forward(self, x):
        outputs = self.body(x)
        self.load, self.own = self.kept(outputs.detach().square()), outputs.square().mean(1)
        return outputs


@pytest.mark.parametrize(
    ("kept", "refused"),
    [
        (Tensor.mean, "the loop mixes examples"),
        (lambda h: h.mean().item(), "losses depend on a number that the loop has made of its batch"),
        (lambda h: h.new_ones(()), None),
    ],
)
def test_losses_do_not_go_by_what_the_model_has_kept_of_its_batch(tmp_path, kept, refused):
    engine = make(tmp_path, model := Keeping(kept))

    def losses(engine, batch):
        return losses_of(engine, batch) * model.load + model.own

    if refused is None:
        assert train(engine, losses=losses).finished
        return
    with pytest.raises(UserError, match=refused):
        train(engine, losses=losses)
    assert engine.ledger.steps_charged == 0


def test_numbers_that_are_written_down_or_only_printed_are_not_refused(tmp_path):
    constant = torch.tensor(0.07)

    def collate(rows):
        return *default_collate(rows), constant

    engine = make(tmp_path)
    for x, y, temperature in engine.batches(collate, 8):
        found = cross_entropy(engine.model(x) / temperature.item(), y, reduction="none")
        print(found.detach().mean().item())
        engine.step(0.5 * found)
    assert engine.finished


def weighted_by_counts(engine, batch):
    x, y = batch
    told = nn.functional.one_hot(y, 3).float()
    weights = (1 + told).mean(0)
    losses = nn.functional.binary_cross_entropy_with_logits(
        engine.model(x), told, pos_weight=weights, reduction="none"
    )
    return losses.sum(1)


def test_where_there_are_as_many_classes_as_examples_batches_of_other_sizes_tell(tmp_path):
    """Weights ``[3]`` of a batch of 3 may be one for each example; a batch of 2 is not always of two classes."""
    with pytest.raises(UserError, match="mixes examples"):
        train(make(tmp_path / "long", steps=20), 3, losses=weighted_by_counts)
    short = train(make(tmp_path / "short", steps=1, batch_size=6, noise_seed=2), 3, losses=weighted_by_counts)
    assert any("seems to mix examples" in note for note in short.clipper.notes)
    sound = train(make(tmp_path / "sound", steps=2), 3)
    assert not sound.clipper.notes
