"""`PrivacyEngine`: random numbers that the loop, its data or its model draws are not known to others, nor shared by a batch."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

from dpexp.errors import UserError
from dpexp.training import generators
from dpexp.training.refusals import goes_together
from tests.training.own_loop import TASK, losses_of, make, network, train
from tests.training.tiny import NUM_EXAMPLES


def seeded_where(engine, place):
    for batch in engine.batches(physical_batch_size=8):
        if place == "before the forward":
            torch.manual_seed(0)
        elif place == "for public rows alone":
            with torch.random.fork_rng():
                torch.manual_seed(0)
                torch.rand(3)
        with torch.random.fork_rng(enabled=place == "around the forward"):
            if place == "around the forward":
                torch.manual_seed(0)
            losses = losses_of(engine, batch)
        if place == "behind the forward":
            torch.manual_seed(0)
        engine.step(losses)
        if place == "behind the step":
            torch.manual_seed(0)
            torch.rand(3)
    return engine


@pytest.mark.parametrize("place", ["before the forward", "around the forward"])
def test_dropout_does_not_draw_from_a_seed_that_others_may_know(tmp_path, place):
    engine = make(tmp_path, network(0.3))
    with pytest.raises(UserError, match=r"torch\.manual_seed\(0\) was called between a batch and its losses"):
        seeded_where(engine, place)
    assert engine.ledger.steps_charged == 0


@pytest.mark.parametrize(
    ("place", "dropout"),
    [
        ("before the forward", 0.0),
        ("behind the forward", 0.3),
        ("behind the step", 0.3),
        ("for public rows alone", 0.3),
    ],
)
def test_a_seed_from_which_no_forward_draws_does_no_harm(tmp_path, place, dropout):
    assert seeded_where(make(tmp_path, network(dropout)), place).finished


class Seeding(torch.utils.data.Dataset):
    """Seeds where a row is read, so that each has one augmentation for ever."""

    def __len__(self):
        return NUM_EXAMPLES

    def __getitem__(self, i):
        for seeded in (torch.manual_seed, random.seed, np.random.seed):
            seeded(0)
        x, y = TASK.train[i]
        return x + 0.01 * torch.randn(10), y


def seeding_collate(rows):
    torch.manual_seed(0)
    return default_collate(rows)


@pytest.mark.parametrize(("dataset", "collate"), [(Seeding(), default_collate), (None, seeding_collate)])
def test_dropout_does_not_draw_from_a_seed_that_making_a_batch_has_left(tmp_path, dataset, collate):
    def drawn(folder, key):
        found = []
        engine = make(tmp_path / folder, dataset=dataset, data_name="rows", noise_seed=key, steps=2)
        for batch in engine.batches(collate, 8):
            found += [torch.rand(1).item(), random.random(), np.random.randn()]
            engine.step(losses_of(engine, batch))
        return found

    one = drawn("one", 11)
    assert len(set(one)) == len(one)
    assert drawn("again", 11) == one
    assert not set(drawn("another key", 12)) & set(one)


def test_where_generators_stand_behind_a_step_gives_no_dropout_away(tmp_path):
    """Many a loop saves their states with a checkpoint, as accelerate's save_state does."""
    engine = make(tmp_path, network(dropout=0.5), steps=2)
    for batch in engine.batches(physical_batch_size=NUM_EXAMPLES):
        losses = losses_of(engine, batch)
        drawn = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        assert engine.step(losses)
        behind = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        assert not torch.equal(behind[0], drawn[0])
        assert behind[1] != drawn[1]
        assert behind[2] != drawn[2]


class Jittered(torch.utils.data.Dataset):
    """Draws from generators of its own, of every kind, and of a transform's."""

    def __init__(self, seed):
        self.rows, self.drawn = [x for x, _ in TASK.train], []
        self.own = np.random.default_rng(seed), random.Random(seed)
        transforms = [torch.Generator().manual_seed(seed)], {"old": np.random.RandomState(seed)}
        self.transform = lambda: (
            float(torch.rand(1, generator=transforms[0][0])),
            transforms[1]["old"].rand(),
        )

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        drawn = self.own[0].random(), self.own[1].random(), *self.transform()
        self.drawn.append(drawn)
        return self.rows[i] + sum(drawn), TASK.train[i][1]


def test_what_a_data_set_draws_from_generators_of_its_own_follows_from_the_key(tmp_path):
    """Under a seed that others know, an example more would change what is drawn for all that are read after it."""
    found = []
    for number, (seed, key) in enumerate([(0, 11), (1, 11), (0, 12)]):
        engine = make(tmp_path / str(number), dataset=Jittered(seed), data_name="jittered", noise_seed=key)
        found.append(np.asarray(train(engine, steps=2)._run.dataset.drawn))
    assert np.array_equal(found[0], found[1])
    # and each piece, whatever it has been read after, has its own
    assert all(len(np.unique(column)) == len(column) for column in np.concatenate([found[0], found[2]]).T)


class OwnMasks(nn.Module):
    """Masks that are drawn from a generator of the module's own."""

    def __init__(self, seed):
        super().__init__()
        self.generator, self.drawn = torch.Generator().manual_seed(seed), []

    def forward(self, x):
        mask = torch.bernoulli(torch.full_like(x, 0.5), generator=self.generator)
        self.drawn.append(mask)
        return x * mask


def test_what_a_model_draws_from_a_generator_of_its_own_follows_from_the_key(tmp_path):
    """As what a data set draws: an example more would change the masks of all behind it."""
    found = []
    for number, (seed, key) in enumerate([(0, 11), (1, 11), (0, 12)]):
        masks = OwnMasks(seed)
        model = nn.Sequential(nn.Linear(10, 16), masks, nn.Linear(16, 3))
        train(make(tmp_path / str(number), model=model, noise_seed=key), steps=1)
        found.append(masks.drawn[0])
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0][:2], found[2][:2])


@pytest.mark.parametrize(
    ("rows", "place", "told"),
    [
        (None, "loop", True),
        # as many for each batch
        (5, "loop", False),
        (None, "torch", False),
        (None, "data", False),
    ],
)
def test_a_loop_that_draws_for_its_rows_from_a_generator_of_its_own_is_told(tmp_path, rows, place, told):
    own = torch.default_generator if place == "torch" else torch.Generator().manual_seed(0)
    dataset = Jittered(0)
    dataset.generator = own if place == "data" else None

    def losses(engine, batch):
        drawn = torch.rand(rows or len(batch[0]), 1, generator=own)
        return losses_of(engine, (batch[0] + drawn.mean() if rows else batch[0] * drawn, batch[1]))

    # what all of a physical batch share is refused where it is not the whole sample
    size = NUM_EXAMPLES if rows else 8
    engine = train(make(tmp_path, dataset=dataset, data_name="jittered"), size, losses=losses, steps=3)
    assert any("from a random generator of its own" in note for note in engine.clipper.notes) is told


class Lazy(list):
    """Reads its rows when it is asked for them."""

    def __iter__(self):
        raise AssertionError("rows were read")


class Counting(np.random.PCG64):
    """A source of bits that asks for no number."""

    def __init__(self):
        super().__init__(0)


def test_generators_of_any_source_are_found_on_the_shortest_way_and_seeded():
    sources = np.random.RandomState(np.random.PCG64(0)), np.random.Generator(Counting())
    # what is met first on a way that ends there has a short one, too
    deep = SimpleNamespace(a=SimpleNamespace(b=[*sources]))
    data = SimpleNamespace(far=[[[SimpleNamespace(deep=deep)]]], near=deep, rows=Lazy([1]))
    found = generators.of(data)
    assert {id(generator) for generator in found} == {id(source) for source in sources}

    def drawn(number):
        for generator in found:
            generators.seed(generator, number)
        return [source.standard_normal() for source in sources]

    assert drawn(1) == drawn(1) != drawn(2)


class SkipsALayer(nn.Module):
    """LayerDrop: one coin for all that go through it together."""

    def __init__(self):
        super().__init__()
        self.first, self.skipped, self.last = nn.Linear(10, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x):
        h = torch.tanh(self.first(x))
        return self.last(h if self.training and torch.rand([]) < 0.5 else h + self.skipped(h))


def test_chance_that_a_physical_batch_shares_moves_a_sum_by_more_than_one_example_may(tmp_path):
    # with one example more, others go into the next physical batch, and the sum moves by up to 2C for each of them
    with pytest.raises(UserError, match=r"share what rand draws, 1 number .* physical batch size of 1"):
        train(engine := make(tmp_path / "pieces", SkipsALayer()), 8)
    assert engine.ledger.steps_charged == 0
    for size in (1, NUM_EXAMPLES):
        train(make(tmp_path / f"{size}", SkipsALayer()), size, steps=2)
    model = SkipsALayer()
    model.training = False
    train(make(tmp_path / "off", model), 8, steps=2)


def test_a_physical_batch_that_holds_nearly_every_sample_is_no_piece_of_one():
    assert goes_together(60, 20, 60)
    assert goes_together(90, 20, 10**6)
    assert not goes_together(60, 20, 61)
    assert not goes_together(19, 20, 10**6)


def test_the_usual_attributes_of_modules_are_not_asked_whether_they_are_generators(monkeypatch):
    """For `torch.Generator` each answer runs Python; there are some 25 of them for each module, in every step."""
    asked = []

    class Asking(type):
        def __instancecheck__(cls, value):
            asked.append(value)
            return False

    monkeypatch.setattr(generators, "Generator", Asking("Generator", (), {}))
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Dropout())
    model.drawn = random.Random(0)
    generators.of_modules(model)
    assert asked == [model.drawn]
