"""What a person's own loop does with its batches besides the losses: what it mixes, keeps and writes without noise is refused."""

import copy
import pickle
import random
from collections import Counter, deque
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset, default_collate

from dpexp.errors import UserError
from dpexp.training.watching.collating import copies, refuse_company, refuse_mixing
from dpexp.training.watching.reading import refuse_other_rows
from dpexp.training.watching.tape import Tape
from tests.training.own_loop import TASK, data, first_batch, losses_of, make, network, train

cross_entropy = nn.functional.cross_entropy


def standardised(x):
    return (x - x.mean(0)) / x.std(0)


def mixed_up(x):
    return 0.7 * x + 0.3 * x[torch.randperm(len(x))]


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


def of_both(engine, batch):
    one, other = engine.model(torch.cat([batch[0], batch[0].flip(1)])).chunk(2)
    return cross_entropy(one, batch[1], reduction="none") + (one - other).square().sum(1)


@pytest.mark.parametrize("size", [3, 4])
def test_features_are_not_taken_for_examples_because_they_are_as_many(tmp_path, size):
    """Three outputs, and batches of three."""
    assert train(make(tmp_path), size, losses=of_both).finished


def side_by_side(engine, batch):
    found = engine.model(torch.stack([batch[0], batch[0].flip(1)], 1).flatten(0, 1))
    return cross_entropy(found, batch[1].repeat_interleave(2), reduction="none").view(-1, 2).mean(1)


@pytest.mark.parametrize("losses", [of_both, side_by_side])
def test_several_views_of_each_example_are_looked_at(tmp_path, caplog, losses):
    """In batches of any size, of as many examples as outputs or views too."""
    engine = make(tmp_path)
    assert train(engine, 5, losses=losses).finished
    assert engine.clipper.notes == []


def contrasted(engine, batch):
    """SimCLR, and what is not one's own has no gradient."""
    found = engine.model(torch.cat([batch[0], batch[0].flip(1)]))
    table = found @ found.detach().T - 1e9 * torch.eye(len(found))
    return (
        cross_entropy(table, torch.arange(len(found)).roll(len(batch[0])), reduction="none")
        .view(2, -1)
        .mean(0)
    )


def balanced_over_the_batch(engine, batch):
    """SwAV, half of it."""
    found = engine.model(torch.cat([batch[0], batch[0].flip(1)]))
    with torch.no_grad():
        codes = nn.functional.normalize(found.exp() / found.exp().sum(0), p=1, dim=1)
    return -(codes * found.log_softmax(1)).sum(1).view(2, -1).mean(0)


@pytest.mark.parametrize("losses", [contrasted, balanced_over_the_batch])
def test_views_of_an_example_are_not_compared_with_those_of_others(tmp_path, losses):
    engine = make(tmp_path)
    with pytest.raises(UserError, match="mixes examples: the loss of one changes when the others"):
        train(engine, 20, losses=losses)
    assert engine.ledger.steps_charged == 0


def of_neighbours(engine, batch):
    """Pairs, and all of a pair in one half."""
    found = engine.model(batch[0])
    other = torch.arange(len(found)) ^ 1
    return (found - found.detach()[other.clamp(max=len(found) - 1)]).square().sum(1)


def of_the_largest_label(engine, batch):
    """The same in both halves, each of which has all labels."""
    return losses_of(engine, batch) * (1 + batch[1].max())


def by_gradients_alone(engine, batch):
    """As in a score function: no loss tells the factor of its gradient."""
    values = losses_of(engine, batch)
    weighted = values / torch.bincount(batch[1], minlength=3)[batch[1]]
    return weighted + (values - weighted).detach()


def moved_alike(engine, batch):
    """One perturbation for all."""
    moved = torch.zeros(10, requires_grad=True)
    gradient = torch.autograd.grad(cross_entropy(engine.model(batch[0] + moved), batch[1]), moved)[0]
    return cross_entropy(engine.model(batch[0] + 0.1 * gradient.sign()), batch[1], reduction="none")


def by_a_number_of_before(engine, batch):
    values = losses_of(engine, batch) / getattr(engine.model, "seen", 1.0)
    engine.model.seen = values.mean().item()
    return values


@pytest.mark.parametrize(
    ("losses", "size"),
    [(of_neighbours, 4), (of_neighbours, 8), (of_the_largest_label, 20), (by_gradients_alone, 20), (moved_alike, 20),
     (by_a_number_of_before, 4)],
)  # fmt: skip
def test_what_goes_by_others_in_a_way_of_its_own_is_refused(tmp_path, losses, size):
    engine = make(tmp_path)
    with pytest.raises(
        UserError, match=r"mixes examples|a number that the loop has made of its batch or of the one before"
    ):
        train(engine, size, losses=losses)
    assert engine.ledger.steps_charged == 0


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


def test_what_a_loop_computes_by_transforms_is_not_believed(tmp_path):
    engine = make(tmp_path, steps=30)
    seen = []

    def losses(engine, batch):
        seen.append(list(engine.clipper.notes))
        return (
            losses_of(engine, batch)
            * torch.vmap(lambda column: column.abs().mean(), in_dims=1)(batch[0]).sum()
        )

    train(engine, losses=losses)
    # at once, and once
    assert "torch.func (vmap, grad) is not looked into" in "".join(seen[1])
    assert engine.clipper.notes == seen[1]


def in_parts(engine, batch):
    outputs = [engine.model(part) for part in batch[0].split(2)]
    return cross_entropy(torch.cat(outputs), batch[1], reduction="none")


def one_by_one(engine, batch):
    outputs = [engine.model(x[None]) for x in batch[0]]
    return torch.stack([cross_entropy(o[0], y) for o, y in zip(outputs, batch[1], strict=True)])


@pytest.mark.parametrize("losses", [in_parts, one_by_one])
def test_rows_enter_the_model_in_any_number_where_each_is_of_one_example(tmp_path, losses):
    engine = make(tmp_path)
    assert train(engine, 5, losses=losses).finished
    assert engine.clipper.notes == []
    engine = make(tmp_path / "mixing")

    def mixing(engine, batch):
        found = losses(engine, batch)
        return found * found.detach().mean()

    with pytest.raises(UserError, match="the loop mixes examples: the loss of one changes"):
        train(engine, 20, losses=mixing)


@pytest.mark.parametrize("size", [3, 20])
def test_public_rows_have_a_part_in_every_loss(tmp_path, size):
    engine, rows = make(tmp_path / "public"), torch.rand(3, 10)

    def losses(engine, batch):
        with engine.public():
            rehearsal = engine.model(rows).square().mean()
        return losses_of(engine, batch) + rehearsal

    assert train(engine, size, losses=losses).finished
    assert engine.clipper.notes == []

    def of_private_rows(engine, batch):
        with engine.public():
            mean = engine.model(batch[0]).square().mean()
        return losses_of(engine, batch) + mean

    engine = make(tmp_path / "private")
    with pytest.raises(UserError, match="give it public rows alone there"):
        train(engine, size, losses=of_private_rows)
    assert engine.ledger.steps_charged == 0


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


def test_examples_behind_the_first_dimension_are_not_mixed(tmp_path):
    class TimeFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(1, 1)

        def forward(self, x):
            return self.body(x.T[..., None])[..., 0]

    engine = make(tmp_path, TimeFirst())
    with pytest.raises(UserError, match="the loop mixes examples"):
        train(engine, losses=lambda engine, batch: (o := engine.model(batch[0])).sum(0) / o.detach().mean())


def test_rows_that_are_sorted_are_no_mixture(tmp_path):
    """As recurrent networks want it: the longest first."""

    def losses(engine, batch):
        order = batch[0].sum(1).argsort()
        return cross_entropy(engine.model(batch[0][order]), batch[1][order], reduction="none")

    assert train(make(tmp_path), 20, losses=losses).finished


@pytest.mark.parametrize("size", [5, 6, 7])
def test_rows_that_are_sorted_more_than_once_are_no_mixture(tmp_path, size):
    """By what is seldom unlike: with other rows beside, the order of equal ones would be another one."""

    def losses(engine, batch):
        x, y = batch
        for column in (0, 1):
            order = (x[:, column] > 0).long().argsort(descending=True)
            x, y = x[order], y[order]
        return cross_entropy(engine.model(x), y, reduction="none")

    assert train(make(tmp_path), size, losses=losses).finished


def weighed_by_rank(x, key):
    return x * (1 + 0.1 * key.argsort().argsort()[:, None])


def weighed_by_half(x, key):
    weights = torch.ones(len(x))
    weights[key.argsort()[: len(x) // 2]] = 2.0
    return x * weights[:, None]


@pytest.mark.parametrize("weigh", [weighed_by_rank, weighed_by_half])
@pytest.mark.parametrize("key", [lambda x, y: x[:, 0], lambda x, y: y])
def test_the_place_of_an_example_among_others_is_not_its_own(tmp_path, weigh, key):
    with pytest.raises(UserError, match="mixes examples before they enter the model"):
        train(make(tmp_path), 20, losses=lambda e, b: losses_of(e, [weigh(b[0], key(*b)), b[1]]))


def test_rows_that_are_shuffled_are_no_mixture_in_small_batches_either(tmp_path):
    """Two of them may have changed places, and both be in one half."""

    def losses(engine, batch):
        order = torch.arange(len(batch[0]))
        order[:2] = order[:2].flip(0)
        return cross_entropy(engine.model(batch[0][order]), batch[1][order], reduction="none")

    assert train(make(tmp_path), 3, losses=losses).finished


def test_means_of_entries_of_a_list_are_of_their_own_lengths(tmp_path):
    torch.manual_seed(0)
    rows = [(torch.randn(int(torch.randint(2, 8, ())), 10), i % 3) for i in range(60)]

    def collate(rows):
        return {"x": [x for x, _ in rows], "y": torch.tensor([y for _, y in rows])}

    def losses(engine, batch):
        x = torch.stack([entry.mean(0) for entry in batch["x"]])
        return cross_entropy(engine.model(x), batch["y"], reduction="none")

    engine = make(tmp_path, dataset=rows, data_name="rows", steps=16)
    assert train(engine, 6, losses=losses, collate_fn=collate).finished


@pytest.mark.parametrize("mixed", [False, True])
def test_rows_that_are_sorted_by_whole_numbers_keep_their_targets(tmp_path, mixed):
    """Many texts are equally long, and which of these comes first says nothing."""
    torch.manual_seed(0)
    words = torch.randint(1, 30, (60, 9)) * (torch.arange(9) < torch.randint(3, 10, (60, 1)))
    rows = TensorDataset(words, torch.rand(60) + 0.5)

    def losses(engine, batch):
        words, target = batch
        order = (words > 0).sum(1).argsort(descending=True)
        words, target = words[order], target[order]
        values = (engine.model(words)[:, 0] - target).square()
        return values / values.detach().mean() if mixed else values

    model = nn.Sequential(nn.EmbeddingBag(30, 4, padding_idx=0), nn.Linear(4, 1))
    engine = make(tmp_path, model, dataset=rows)
    if mixed:
        with pytest.raises(UserError, match="mixes examples"):
            train(engine, 5, losses=losses)
    else:
        assert train(engine, 5, losses=losses).finished


class RunningMean:
    """Of earlier batches, in the losses or before the model."""

    def __init__(self, where):
        self.where, self.mean = where, torch.zeros(10)

    def __call__(self, engine, batch):
        x, y = batch
        if self.where == "before":
            found = engine.model(x - self.mean)
        else:
            found = engine.model(x) * (1 + self.mean.square().sum())
        if self.where == "in place":
            self.mean.mul_(0.9).add_(x.mean(0))
        elif self.where == "as .data":
            self.mean.data.mul_(0.9).add_(x.mean(0))
        elif self.where == "as a part of .data":
            self.mean.data[2:].lerp_(x.mean(0)[2:], 0.1)
        elif self.where == "detached":
            self.mean.detach().copy_(0.9 * self.mean + x.mean(0))
        elif self.where == "as new .data":
            self.mean.data = 0.9 * self.mean + x.mean(0)
        else:
            self.mean = 0.9 * self.mean + x.mean(0)
        return cross_entropy(found, y, reduction="none")


@pytest.mark.parametrize("size", [4, 1])
@pytest.mark.parametrize(
    "where",
    ["before", "behind", "in place", "as .data", "as a part of .data", "detached", "as new .data"],
)
def test_what_an_earlier_batch_has_left_behind_is_refused(tmp_path, where, size):
    engine = make(tmp_path)
    with pytest.raises(UserError, match="an earlier batch has left behind"):
        train(engine, size, losses=RunningMean(where))
    assert engine.ledger.steps_charged == 0


@pytest.mark.parametrize("part", [slice(None), slice(1, None)])
def test_what_is_written_by_way_of_another_tensor_is_a_mixture_all_the_same(tmp_path, part):
    """The mean of a batch in its own losses."""
    mean = torch.zeros(3)

    def losses(engine, batch):
        found = engine.model(batch[0])
        mean.data.mul_(0.9)
        mean.data[part] += found.detach().mean(0)[part]
        return cross_entropy(found, batch[1], reduction="none") + (found - mean).square().sum(1)

    engine = make(tmp_path)
    with pytest.raises(UserError, match="the loop mixes examples"):
        train(engine, 60, losses=losses)
    assert engine.ledger.steps_charged == 0


@pytest.mark.parametrize("whole", [True, False])
def test_what_an_earlier_batch_has_left_behind_is_known_where_it_is_written_to(tmp_path, whole):
    """A state that is carried on, of batches of any size."""
    kept = []

    def losses(engine, batch):
        x, y = batch
        state = torch.zeros_like(x)
        for old in kept[-1:]:
            if whole:
                state[: len(old)] = old[: len(x)]
            else:
                state[: len(old)].add_(old[: len(x)])
        kept.append(x.cos())
        return cross_entropy(engine.model(x + state), y, reduction="none")

    with pytest.raises(UserError, match="an earlier batch has left behind"):
        train(make(tmp_path), 4, losses=losses)


def test_a_memory_that_is_used_once_it_is_full_is_refused_at_the_sixteenth_batch(tmp_path):
    memory = deque(maxlen=5)

    def losses(engine, batch):
        found = engine.model(batch[0])
        if len(memory) == 5:
            found = found - torch.stack(tuple(memory)).mean(0)
        memory.append(found.detach().mean(0))
        return cross_entropy(found, batch[1], reduction="none")

    engine = make(tmp_path)
    with pytest.raises(UserError, match="an earlier batch has left behind"):
        train(engine, 8, losses=losses)
    assert 0 < engine.steps_taken < engine.steps


def behind(norm, engine, x, y):
    with torch.no_grad():
        norm.train()(engine.model(x))
    return cross_entropy(norm.eval()(engine.model(x)), y, reduction="none")


def later(norm, engine, x, y):
    losses = cross_entropy(norm.eval()(engine.model(x)), y, reduction="none")
    norm.train()(engine.model(x).detach())
    return losses


def in_front(norm, engine, x, y):
    losses = cross_entropy(engine.model(norm.eval()(x)), y, reduction="none")
    norm.train()(x)
    return losses


@pytest.mark.parametrize(
    ("use", "norm", "words"),
    [
        (behind, nn.BatchNorm1d(3, affine=False), "the loop mixes examples"),
        # whose backward uses the statistics as they are by then
        (later, nn.BatchNorm1d(3, affine=False), "the loop mixes examples"),
        (in_front, nn.BatchNorm1d(10, affine=False), "an earlier batch has left behind"),
        (in_front, nn.BatchNorm1d(10).requires_grad_(False), "an earlier batch has left behind"),
    ],
)
def test_running_statistics_of_a_norm_beside_the_model_are_means_of_batches(tmp_path, use, norm, words):
    engine = make(tmp_path)
    with pytest.raises(UserError, match=words):
        train(engine, 20, losses=lambda engine, batch: use(norm, engine, *batch))
    assert engine.steps_taken <= 1


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


def test_public_statistics_of_a_norm_beside_the_model_are_constants(tmp_path):
    norm = nn.BatchNorm1d(10)
    norm(torch.randn(50, 10))
    norm.requires_grad_(False).eval()
    engine = make(tmp_path)
    train(engine, 20, losses=lambda engine, batch: losses_of(engine, (norm(batch[0]), batch[1])))
    assert engine.finished
    assert not engine.clipper.notes


class MixesLater:
    """A collate function with a switch."""

    mixes = False

    def __call__(self, rows):
        x, y = default_collate(rows)
        return (mixed_up(x) if self.mixes else x), y


@pytest.mark.parametrize("where", ["loop", "collate_fn"])
def test_what_a_second_epoch_begins_is_refused_at_its_first_batch(tmp_path, where):
    engine, collate_fn = make(tmp_path, steps=40), MixesLater()
    train(engine, 4, steps=15, collate_fn=collate_fn)
    collate_fn.mixes = where == "collate_fn"

    def losses(engine, batch):
        x = mixed_up(batch[0]) if where == "loop" else batch[0]
        return cross_entropy(engine.model(x), batch[1], reduction="none")

    with pytest.raises(UserError, match="mixes examples"):
        train(engine, 4, losses=losses, collate_fn=collate_fn)
    assert engine.steps_taken == 15


def test_what_is_left_behind_when_the_step_is_taken_is_refused(tmp_path):
    centres, engine = [torch.zeros(3)], make(tmp_path)

    def losses(engine, batch):
        return cross_entropy(engine.model(batch[0]) - centres[-1], batch[1], reduction="none")

    def after(batch):
        with torch.no_grad():
            centres.append(0.9 * centres[-1] + 0.1 * engine.model(batch[0]).mean(0))

    with pytest.raises(UserError, match="an earlier batch has left behind"):
        train(engine, 4, losses=losses, after=after)
    assert engine.ledger.steps_charged == 0


def test_one_example_at_a_time_may_go_by_its_own_numbers(tmp_path, caplog):
    def losses(engine, batch):
        x, y = batch
        scale = 1 / (1 + x.abs().mean().item()) / len(x)
        return cross_entropy(engine.model(x - x.mean()), y, reduction="none") * scale

    assert train(make(tmp_path, steps=3), 1, losses=losses).finished
    assert "not looked at" not in caplog.text


@pytest.mark.parametrize("size", [1, 20])
def test_losses_of_rows_that_the_loop_takes_by_itself_are_refused(tmp_path, size):
    rows, labels = data().tensors
    everything = TensorDataset(rows.clone(), labels.clone())

    def losses(engine, batch):
        chosen = torch.randint(0, len(rows), (len(batch[0]),))
        return cross_entropy(engine.model(rows[chosen]), labels[chosen], reduction="none")

    engine = make(tmp_path, dataset=everything)
    with pytest.raises(UserError, match="nothing of this batch reaches the model or the losses"):
        train(engine, size, losses=losses)
    assert engine.ledger.steps_charged == 0


def test_rows_may_be_looked_up_by_the_numbers_that_were_drawn(tmp_path):
    rows, labels = data().tensors

    def losses(engine, batch):
        return cross_entropy(engine.model(rows[batch[0]]), labels[batch[0]], reduction="none")

    assert train(make(tmp_path, dataset=TensorDataset(torch.arange(len(rows)))), 20, losses=losses).finished


def from_the_data_set(everything, count):
    return everything.tensors[0][torch.randint(0, len(everything), (count,))]


def read_one_by_one(everything, count):
    return torch.stack([everything[i][0] for i in range(count)])


@pytest.mark.parametrize("take", [from_the_data_set, read_one_by_one])
@pytest.mark.parametrize("frozen", [True, False])
def test_rows_of_the_data_set_beside_the_batch_are_refused(tmp_path, take, frozen):
    everything = data()

    def losses(engine, batch):
        with torch.set_grad_enabled(not frozen):
            negatives = engine.model(take(everything, len(batch[0])))
        return losses_of(engine, batch) - negatives.square().mean(1)

    engine = make(tmp_path, dataset=everything)
    with pytest.raises(UserError, match="rows of the data set that the loop has read beside its batch"):
        train(engine, 20, losses=losses)
    assert engine.ledger.steps_charged == 0


def test_the_data_set_is_evaluated_and_other_rows_of_its_memory_are_public(tmp_path):
    rows, labels = data().tensors
    private, public = TensorDataset(rows[:40], labels[:40]), rows[40:]

    def losses(engine, batch):
        with torch.no_grad():
            print((engine.model(private.tensors[0]).argmax(1) == private.tensors[1]).float().mean())
        return losses_of(engine, batch) + (batch[0] - public[0]).square().mean(1) / len(private.tensors[0])

    assert train(make(tmp_path, dataset=private), 20, losses=losses).finished


def test_an_example_of_an_earlier_batch_does_not_enter_the_model(tmp_path):
    before = []

    def losses(engine, batch):
        before.append(batch[0])
        # a replay buffer: the first rows of the batch before
        loss = engine.model(batch[0]).square().sum(1)
        return loss if len(before) == 1 else loss + 0 * engine.model(before[-2]).sum()

    with pytest.raises(UserError, match="what enters the model depends on what an earlier batch"):
        train(make(tmp_path), 4, losses=losses)


@pytest.mark.parametrize(
    "take",
    [
        lambda t, i: t[i],
        lambda t, i: t.index_select(0, i),
        lambda t, i: torch.index_select(a=t, axis=0, index=i),
    ],
)
def test_a_batch_in_which_an_example_stands_twice_is_refused(tmp_path, take):
    engine = make(tmp_path)

    def losses(engine, batch):
        drawn = torch.randint(len(batch[0]), (len(batch[0]),))
        return cross_entropy(engine.model(take(batch[0], drawn)), take(batch[1], drawn), reduction="none")

    with pytest.raises(UserError, match="some stand twice"):
        train(engine, losses=losses)
    assert engine.ledger.steps_charged == 0


@pytest.mark.parametrize(
    "rows",
    [
        lambda x: x[:1].expand_as(x),
        lambda x: torch.where((torch.arange(len(x)) % 2 == 0)[:, None], x, x.roll(1, 0)),
        lambda x: torch.where(torch.rand(len(x), 1) < 0.5, x, x[torch.randperm(len(x))]),
    ],
)
def test_a_row_in_the_place_of_another_is_a_row_twice(tmp_path, rows):
    """Each loss is of one example, and no index says so."""
    engine = make(tmp_path)

    def losses(engine, batch):
        return engine.model(rows(batch[0])).square().sum(1)

    with pytest.raises(UserError, match="some stand twice"):
        train(engine, losses=losses)
    assert engine.ledger.steps_charged == 0


def test_what_belongs_to_examples_may_be_as_many_as_they_are(tmp_path):
    """Mentions in texts, boxes in pictures: of some two, of others none."""
    engine, alike = make(tmp_path), []

    def losses(engine, batch):
        outputs = engine.model(batch[0])
        counts = torch.tensor([2, 0]).repeat(len(outputs))[: len(outputs)]
        whose = torch.arange(len(outputs)).repeat_interleave(counts)
        alike.append(len(whose) == len(outputs))
        return outputs.new_zeros(len(outputs)).index_add(0, whose, outputs[whose].square().sum(1))

    assert train(engine, losses=losses).finished
    assert any(alike)


def test_losses_in_another_order_than_the_models_rows_are_called_that(tmp_path):
    def losses(engine, batch):
        order = torch.randperm(len(batch[0]))
        found = cross_entropy(engine.model(batch[0][order]), batch[1][order], reduction="none")
        return found[order.argsort()]

    with pytest.raises(UserError, match="give the losses in the model's order"):
        train(make(tmp_path), losses=losses)


def test_what_is_kept_for_the_eye_is_nobodys_business(tmp_path):
    seen, zero = [], None

    def losses(engine, batch):
        nonlocal zero
        # of the first batch, and without its values
        zero = torch.zeros_like(batch[0][0]) if zero is None else zero
        found = cross_entropy(engine.model(batch[0] + zero), batch[1], reduction="none")
        seen.append(found.detach().mean() + (seen[-1] if seen else 0))
        return found

    assert train(make(tmp_path), 4, losses=losses).finished


class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = network()
        self.register_buffer("centre", torch.zeros(3))

    def forward(self, x):
        return self.body(x) - self.centre


def test_a_constant_that_is_put_where_the_batch_is_holds_nothing_of_it(tmp_path):
    """Which gives the constant itself, where it is there already."""
    levels, model = torch.tensor([0.1, 0.5, 0.9]), Centred()

    def losses(engine, batch):
        errors = batch[0][:, :1] - model(batch[0]) / model.centre.mean().exp().to(batch[0])
        return torch.maximum(levels.to(errors) * errors, (levels.type_as(errors) - 1) * errors).mean(1)

    assert train(make(tmp_path, model), losses=losses).finished


@pytest.mark.parametrize("how", ["in place", "anew", "data", "a weight"])
def test_values_of_a_batch_that_are_written_to_the_model_are_refused(tmp_path, how):
    model = Centred()

    def write(batch):
        mean = model(batch[0]).detach().mean(0)
        if how == "in place":
            model.centre.lerp_(mean, 0.1)
        elif how == "anew":
            model.centre = 0.9 * model.centre + 0.1 * mean
        elif how == "data":
            model.centre.data = 0.9 * model.centre.data + 0.1 * mean
        else:
            model.body[3].bias.data += 0.1 * mean

    def losses(engine, batch):
        with torch.no_grad():
            write(batch)
        return losses_of(engine, batch)

    refusal = r"writes values of its batch to (centre|body\.3\.bias) of the model"
    engine = make(tmp_path, model)
    with pytest.raises(UserError, match=refusal):
        train(engine, losses=losses)
    # when the step is taken
    with pytest.raises(UserError, match=refusal), torch.no_grad():
        train(engine, losses=torch.enable_grad()(losses_of), after=write)
    assert engine.ledger.steps_charged == 0


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


def test_what_was_refused_is_refused_again_in_the_same_batch(tmp_path):
    engine = make(tmp_path)
    batch, _loop = first_batch(engine)
    losses = losses_of(engine, batch)
    for _ in range(2):
        with pytest.raises(UserError, match="mixes examples"):
            engine.step(losses / losses.detach().mean())
    assert engine.ledger.steps_charged == 0


def test_a_weight_that_is_kept_in_bounds_is_the_loops_own(tmp_path):
    model = network()

    def losses(engine, batch):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.1, 0.1)
        return cross_entropy(model(batch[0]), batch[1], reduction="none")

    assert train(make(tmp_path, model), losses=losses).finished


def test_a_part_beside_the_model_is_not_trained_on_private_examples(tmp_path):
    engine, probe, public = make(tmp_path), nn.Linear(3, 3), nn.Linear(3, 3)
    own, others = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (probe, public))
    for batch in engine.batches():
        outputs = engine.model(batch[0])
        loss = cross_entropy(probe(outputs.detach()), batch[1])
        loss.backward(inputs=list(probe.parameters()))
        with torch.no_grad():
            public(outputs)
        others.step()
        with pytest.raises(UserError, match="went through a parameter of shape"):
            own.step()
        engine.step(cross_entropy(outputs, batch[1], reduction="none"))
    assert engine.finished
    engine.close()
    own.step()


def beside(batch, outputs, weight, generator):
    return cross_entropy(outputs @ nn.functional.normalize(weight).t(), batch[1])


def transposed(batch, outputs, weight, generator):
    return torch.cdist(outputs, weight.t()).mean()


def matched(batch, outputs, weight, generator):
    return (generator(torch.randn(9, 4)).mean(0) - batch[0].mean(0)).square().sum()


@pytest.mark.parametrize("loss", [beside, transposed, matched])
def test_what_is_made_of_a_part_beside_the_model_trains_it_too(tmp_path, loss):
    engine, weight, generator = make(tmp_path), torch.randn(3, 3, requires_grad=True), nn.Linear(4, 10)
    optimizer = torch.optim.SGD([weight, *generator.parameters()], lr=0.1)
    for batch in engine.batches():
        engine.step(losses_of(engine, batch))
        with torch.no_grad():
            outputs = engine.model(batch[0])
        loss(batch, outputs, weight, generator).backward()
        with pytest.raises(UserError, match="went through a parameter of shape"):
            optimizer.step()
    assert engine.finished


@pytest.mark.parametrize("first", [True, False])
def test_a_generator_learns_from_what_the_model_says_of_its_own_pictures(tmp_path, first):
    engine, generator = make(tmp_path), nn.Linear(4, 10)
    optimizer = torch.optim.SGD(generator.parameters(), lr=0.1)

    def learn(batch):
        optimizer.zero_grad()
        pictures = generator(torch.randn(len(batch[0]), 4))
        loss = nn.functional.softplus(-engine.model(pictures)).mean()
        pictures.backward(torch.autograd.grad(loss, pictures))
        optimizer.step()

    def losses(engine, batch):
        if first:
            learn(batch)
        return losses_of(engine, batch)

    assert train(engine, losses=losses, after=lambda batch: None if first else learn(batch)).finished


@pytest.mark.parametrize("start", [torch.zeros_like, lambda x: torch.zeros(x.shape)])
def test_what_is_added_to_inputs_is_looked_for_by_an_optimizer(tmp_path, start):
    def losses(engine, batch):
        moved = start(batch[0]).requires_grad_()
        optimizer = torch.optim.SGD([moved], lr=0.1)
        cross_entropy(engine.model(batch[0] + moved), batch[1]).backward(inputs=[moved])
        optimizer.step()
        return cross_entropy(engine.model(batch[0] + moved.detach()), batch[1], reduction="none")

    assert train(make(tmp_path), losses=losses).finished


def test_the_optimizer_is_given_no_more_to_move_on_the_way(tmp_path):
    engine, late = make(tmp_path), nn.Linear(3, 3)
    batch, _loop = first_batch(engine)
    engine._run.optimizer.optimizer.add_param_group({"params": list(late.parameters())})
    with pytest.raises(UserError, match="holds other parameters than when the engine was made"):
        engine.step(losses_of(engine, batch))
    assert engine.ledger.steps_charged == 0


def mixing(rows):
    x, y = default_collate(rows)
    return mixed_up(x), y


def sometimes(rows):
    return mixing(rows) if random.random() < 0.4 else default_collate(rows)


def pasted(rows):
    """CutMix."""
    x, y = default_collate(rows)
    x[..., :4] = x[torch.randperm(len(x)), ..., :4]
    return {"x": x, "y": y}


def scaled(rows):
    x, y = default_collate(rows)
    return x / x.abs().max(), y


def with_negatives(rows):
    # of the example before: whole rows, and those of others
    x, y = default_collate(rows)
    return x, y, x.roll(1, 0)


def with_mean(rows):
    x, y = default_collate(rows)
    return x, y, x.mean(0)


def with_scale(rows):
    x, y = default_collate(rows)
    return x, y, x.std()


def balanced(rows):
    rare = [row for row in rows if row[1] == rows[0][1]]
    return default_collate((3 * rare + [row for row in rows if row[1] != rows[0][1]])[: len(rows)])


@pytest.mark.parametrize(
    "collate_fn", [mixing, sometimes, pasted, scaled, with_negatives, with_mean, with_scale, balanced]
)
def test_a_collate_function_that_mixes_is_refused(tmp_path, collate_fn):
    engine = make(tmp_path)
    with pytest.raises(UserError, match="collate_fn mixes examples"):
        next(engine.batches(collate_fn, 20))
    assert engine.ledger.steps_charged == 0


def test_a_row_of_a_large_tensor_is_copied_alone():
    """Torch copies the whole tensor for each of its rows: seconds for each look at a data set of images."""
    data = torch.zeros(1000, 10)
    twin = copies({"x": data[3], "deep": [SimpleNamespace(x=data[4])]})
    for row in (twin["x"], twin["deep"][0].x):
        row.fill_(1)
        assert row.untyped_storage().nbytes() == row.nbytes == 40
    assert not data.any()


class Points(torch.utils.data.Dataset):
    def __len__(self):
        return len(TASK.train)

    def __getitem__(self, i):
        return TASK.train[i]


def points():
    x, y = zip(*TASK.train, strict=True)
    return TensorDataset(torch.stack(x), torch.stack(y))


@pytest.mark.parametrize("dataset", [Points(), points()])
@pytest.mark.parametrize("reads", ["a partner", "its own row"])
def test_a_collate_function_reads_no_other_rows_of_the_data_set(tmp_path, dataset, reads):
    """By public or secret numbers: no other example of the batch has a part in it."""

    def collate_fn(rows):
        numbers = torch.randint(len(dataset), (len(rows),)).tolist()
        if reads == "its own row":
            numbers = [
                next(i for i, (x, _) in enumerate(TASK.train) if torch.equal(x, row)) for row, _ in rows
            ]
        partners = [dataset[i][0] for i in numbers]
        return default_collate(
            [(0.5 * x + 0.5 * other, y) for (x, y), other in zip(rows, partners, strict=True)]
        )

    kind, method = type(dataset), type(dataset).__getitem__
    engine = make(tmp_path, dataset=dataset, data_name="points")
    with (
        nullcontext()
        if reads == "its own row"
        else pytest.raises(UserError, match="collate_fn reads other rows")
    ):
        next(engine.batches(collate_fn, 20))
    assert kind.__getitem__ is method


def tokens(count=24, lengths=(6,)):
    generator = torch.Generator().manual_seed(0)
    made = [
        torch.randint(1, 30, (lengths[i % len(lengths)],), generator=generator).tolist() for i in range(count)
    ]
    return [{"ids": ids, "label": i % 3} for i, ids in enumerate(made)]


def padded(rows, mix=lambda ids: ids):
    ids = nn.utils.rnn.pad_sequence([torch.tensor(row["ids"]) for row in rows], batch_first=True)
    return {"ids": mix(ids), "label": torch.tensor([row["label"] for row in rows])}


def sentence_pairs(rows):
    return padded(rows, lambda ids: torch.cat([ids, ids.roll(1, 0)], 1))


def cut_into_each_other(rows):
    return padded(
        rows,
        lambda ids: torch.where(torch.rand(()) < 0.9, torch.cat([ids[:, :3], ids.roll(1, 0)[:, 3:]], 1), ids),
    )


def weighted_by_counts(rows):
    batch = padded(rows)
    return batch | {"weight": 1 / torch.bincount(batch["label"], minlength=3)[batch["label"]]}


def masked(rows):
    """Draws for each token, and sorts by length."""
    rows = sorted(rows, key=lambda row: -len(row["ids"]))
    return padded(rows, lambda ids: ids.masked_fill(torch.rand(ids.shape) < 0.3, 0))


def masked_by_word(rows):
    rows = [row | {"ids": [0 if random.random() < 0.3 else i for i in row["ids"] if i % 2]} for row in rows]
    return padded(rows)


@pytest.mark.parametrize("lengths", [(6,), (6, 4, 6, 5)])
@pytest.mark.parametrize("collate_fn", [sentence_pairs, cut_into_each_other, weighted_by_counts])
def test_a_collate_function_that_mixes_tokens_or_counts_labels_is_refused(collate_fn, lengths):
    with pytest.raises(UserError, match="collate_fn mixes examples"):
        refuse_company(collate_fn, tokens(lengths=lengths))


@pytest.mark.parametrize("lengths", [(6,), (6, 4, 6, 5), (3, 4, 5, 6, 7, 8, 9, 10)])
@pytest.mark.parametrize("collate_fn", [padded, masked, masked_by_word])
def test_a_collate_function_may_pad_tokens_and_mask_them(collate_fn, lengths):
    refuse_company(collate_fn, tokens(lengths=lengths))


def times(rows):
    """Of each token: 1 is the end of the longest text."""
    batch = padded(rows)
    return batch | {"time": torch.linspace(0, 1, batch["ids"].shape[1]).expand(batch["ids"].shape)}


def scaled_by_the_longest(rows):
    longest = max(len(row["ids"]) for row in rows)
    return padded(rows, lambda ids: ids / longest)


def cut_to_the_median(rows):
    median = sorted(len(row["ids"]) for row in rows)[len(rows) // 2]
    return padded([row | {"ids": row["ids"][:median]} for row in rows])


def cut_to_the_shortest(rows):
    shortest = min(len(row["ids"]) for row in rows)
    return padded([row | {"ids": row["ids"][:shortest]} for row in rows])


# the shortest and the longest in the middle, or at both ends of a batch
@pytest.mark.parametrize("lengths", [(6, 7, 4, 9, 3), (3, 9, 5, 6, 4, 7, 9, 3)])
@pytest.mark.parametrize("collate_fn", [times, scaled_by_the_longest, cut_to_the_median, cut_to_the_shortest])
def test_a_collate_function_that_goes_by_lengths_of_others_is_refused(collate_fn, lengths):
    with pytest.raises(UserError, match="collate_fn mixes examples"):
        refuse_company(collate_fn, tokens(count=8, lengths=lengths))


@pytest.mark.parametrize("where", [0.0, 0.5, 1.0])
def test_a_collate_function_may_pad_on_any_side(where):
    def collate(rows):
        longest = max(len(row["ids"]) for row in rows)
        ids = torch.zeros(len(rows), longest, dtype=torch.long)
        for row, line in zip(rows, ids, strict=True):
            start = int(where * (longest - len(row["ids"])))
            line[start : start + len(row["ids"])] = torch.tensor(row["ids"])
        mask = ids > 0
        return {"ids": ids, "pairs": mask[:, None] & mask[:, :, None], "place": mask.cumsum(1)}

    refuse_company(collate, tokens(lengths=(6, 7, 4, 9, 3)))


class ReadTogether(torch.utils.data.Dataset):
    """Makes several examples at once, each of itself alone or of all of them."""

    def __init__(self, mixes):
        self.mixes, self.rows = mixes, data()

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]

    def __getitems__(self, numbers):
        x, y = default_collate([self.rows[i] for i in numbers])
        return list(zip(x - x.mean(0) if self.mixes else x, y, strict=True))


def test_a_data_set_that_mixes_what_it_reads_together_is_refused(tmp_path):
    train(make(tmp_path / "apart", dataset=ReadTogether(False), data_name="apart"))
    engine = make(tmp_path / "mixed", dataset=ReadTogether(True), data_name="mixed")
    with pytest.raises(UserError, match=r"__getitems__.* mixes examples"):
        train(engine)
    assert engine.ledger.steps_charged == 0


class OneByOne(torch.utils.data.Dataset):
    """Makes an example by what `make` does with the data set and the example's number."""

    def __init__(self, make, count=40):
        self.make, self.size, self.x, self.own = make, count, torch.randn(count, 3), np.random.default_rng(0)
        self.pictures = [Image.fromarray(np.full((4, 4), i, np.uint8)) for i in range(count)]
        self.frame = pd.DataFrame({"text": [f"text {i}" for i in range(count)], "label": range(count)})
        self.order, self.offsets = list(reversed(range(count))), torch.arange(count)
        self.base, self.kept, self.columns = TensorDataset(self.x), {}, {"x": self.x.numpy()}

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        return self.make(self, i)


def read_ahead(rows, i):
    start = i // 5 * 5
    if i not in rows.kept:
        rows.kept |= {j: rows.x[j] for j in range(start, start + 5)}
    return rows.kept[i]


def corrupt(rows, i):
    return rows[(i + 1) % 40] if rows.x[i].sum() < 0 else rows.x[i]


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("x", lambda rows, i: 0.9 * rows.x[i] + 0.1 * rows.x[random.randrange(40)]),
        ("x", lambda rows, i: (rows.x[i], rows.x[int(rows.own.integers(40))])),
        ("x", lambda rows, i: rows.x[i] - rows.x[i - 1, :]),
        ("x", corrupt),
        ("pictures", lambda rows, i: Image.blend(rows.pictures[i], rows.pictures[torch.randint(40, ())], 0.3)),
        ("frame", lambda rows, i: {"text": rows.frame.iloc[i, 0], "pair": rows.frame.iloc[np.random.randint(40)]["text"]}),
        ("base", lambda rows, i: torch.cat([*rows.base[i], *rows.base[39 - i]])),
        (r"columns\['x'\]", lambda rows, i: rows.columns["x"][i] - rows.columns["x"][0]),
        # by slices, lists of numbers, labels and columns
        ("x", lambda rows, i: rows.x[i : i + 3].mean(0)),
        ("x", lambda rows, i: rows.x[[i, i - 1]].mean(0)),
        ("x", lambda rows, i: rows.x[torch.randint(40, (2,))].mean(0) + rows.x[i]),
        ("pictures", lambda rows, i: Image.blend(*rows.pictures[min(i, 38) : i + 2][:2], 0.3)),
        ("frame", lambda rows, i: rows.frame["text"][i] + rows.frame.loc[39 - i, "text"]),
        # the rows are in another order
        ("x", lambda rows, i: rows.x[rows.order[i]] + rows.x[rows.order[i - 1]]),
    ],
)  # fmt: skip
def test_a_data_set_that_mixes_rows_one_by_one_is_refused(tmp_path, name, make):
    rows = OneByOne(make)
    for dataset in (rows, torch.utils.data.Subset(rows, range(10, 30)), rows + TensorDataset(rows.x)):
        with pytest.raises(UserError, match=f"another row of its {name} changes it"):
            refuse_other_rows(dataset)


def blended_with_the_last(rows, i):
    last, rows.last = vars(rows).get("last", rows.x[i]), rows.x[i]
    return 0.7 * rows.x[i] + 0.3 * last


def less_a_running_mean(rows, i):
    return rows.x[i] - rows.mean.lerp_(rows.x[i], 0.1)


def beside_the_first_of_its_class(rows, i):
    return rows.x[i], rows.kept.setdefault(i % 2, rows.x[i])


@pytest.mark.parametrize(
    "make",
    [
        blended_with_the_last,
        less_a_running_mean,
        beside_the_first_of_its_class,
        lambda rows, i: rows.x[i] * len(rows.words.append(i) or rows.words),
    ],
)
def test_a_data_set_that_remembers_what_it_has_read_is_refused(make):
    rows = OneByOne(make)
    rows.mean, rows.words = torch.zeros(3), []
    for dataset in (rows, torch.utils.data.Subset(rows, range(10, 30))):
        with pytest.raises(UserError, match="once it has read others"):
            refuse_other_rows(dataset)
    assert not rows.mean.any()
    assert not rows.words
    refuse_other_rows(rows, users=["one"] * 40)


def counted(rows, i):
    rows.size, rows.kept["reads"] = 40, rows.kept.get("reads", 0) + 1
    return rows.x[i]


@pytest.mark.parametrize(
    "make",
    [
        counted,
        lambda rows, i: rows.x[i] + rows.own.normal(),
        lambda rows, i: rows.x[i] + torch.randn(3),
        lambda rows, i: (rows.x[rows.order[i]], rows.pictures[rows.order[i]], rows.frame["text"][i]),
        # of one length with the data set by chance: a table of words, or of positions
        lambda rows, i: [rows.x[word] for word in (7 * i % 11, 3, i % 2)],
        lambda rows, i: torch.stack([rows.x[place] for place in range(40)]).sum(0),
        lambda rows, i: torch.zeros_like(rows.x[0]) + rows.x[i],
        lambda rows, i: rows.offsets[i].item() + rows.offsets[min(i + 1, 39)].item(),
        lambda rows, i: (
            rows.x[rows.order[i] : rows.order[i] + 1],
            rows.columns["x"][[i]],
            rows.frame[["text"]].iloc[i, 0],
        ),
        lambda rows, i: rows.base[i] if rows.own.random() < 2 else None,
        lambda rows, i: rows.unknown,
        read_ahead,
    ],
)
def test_a_data_set_may_look_up_what_it_likes_for_an_example_of_one_row(make):
    rows = OneByOne(make)
    before = torch.get_rng_state(), random.getstate(), rows.own.bit_generator.state
    refuse_other_rows(rows)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), rows.own.bit_generator.state)
    assert not rows.kept
    # one that is too small to tell
    refuse_other_rows(OneByOne(make, 3))


def test_windows_of_a_longer_series_are_seen_and_rows_that_one_example_has_are_not_refused():
    windows, halves = (
        OneByOne(make) for make in (lambda rows, i: rows.x[i : i + 5], lambda rows, i: rows.x[[i, i + 20]])
    )
    windows.size = halves.size = 20
    refuse_other_rows(halves)
    with pytest.raises(UserError, match="another row of its x changes it"):
        refuse_other_rows(windows)


def test_users_of_the_rows_of_a_data_set_within_another_are_known_there():
    pairs, order = OneByOne(lambda rows, i: rows.x[i] + rows.x[i ^ 1]), torch.randperm(40).tolist()
    part, users = torch.utils.data.Subset(pairs, order[:30]), [i // 2 for i in range(40)]
    refuse_other_rows(part, [users[i] for i in order[:30]])
    refuse_other_rows(pairs + pairs, [*users, *users])
    for dataset, of in ((part, [i - i % 3 for i in order[:30]]), (pairs + pairs, [*users, *range(40, 80)])):
        with pytest.raises(UserError, match="another row of its x changes it"):
            refuse_other_rows(dataset, of)


def test_an_engine_refuses_a_data_set_that_mixes_unless_users_own_the_rows(tmp_path):
    pairs = OneByOne(lambda rows, i: (rows.x[i] + rows.x[i ^ 1], 0))
    with pytest.raises(UserError, match="makes one example of several rows"):
        make(tmp_path / "rows", dataset=pairs, data_name="pairs")
    assert not (tmp_path / "rows").exists()
    users = [i // 2 for i in range(40)]
    make(tmp_path / "users", dataset=pairs, data_name="pairs", users=users, batch_size=5)
    with pytest.raises(UserError, match="makes one example of several rows"):
        make(
            tmp_path / "others",
            dataset=pairs,
            data_name="pairs",
            users=[i // 2 % 19 for i in range(1, 41)],
            batch_size=5,
        )


class Remembering:
    """Keeps rows, or a running mean; or has a generator of its own."""

    def __init__(self, what):
        self.what, self.kept, self.own = what, [], torch.Generator().manual_seed(0)

    def __call__(self, rows):
        if self.what == "buffer":
            self.kept = [*self.kept, *rows][-40:]
            return default_collate(random.sample(self.kept, len(rows)))
        x, y = default_collate(rows)
        if self.what == "own generator":
            return x + torch.randn(x.shape, generator=self.own), y
        found = x - sum(self.kept)
        self.kept.append(0.1 * x.mean(0))
        return found, y


@pytest.mark.parametrize("size", [20, 1])
@pytest.mark.parametrize("what", ["buffer", "mean", "own generator"])
def test_a_collate_function_keeps_nothing_and_draws_in_secret(tmp_path, what, size):
    engine = make(tmp_path)
    with pytest.raises(UserError, match="something else of the same examples and the same random numbers"):
        train(engine, size, losses=losses_of, collate_fn=Remembering(what))
    assert engine.ledger.steps_charged == 0


def augmented(rows):
    """Draws for each example, and sorts them."""
    rows = sorted(rows, key=lambda row: -len(row[0]))
    xs = [x * random.uniform(0.9, 1.1) + 0.1 * torch.randn_like(x) for x, _ in rows]
    return nn.utils.rnn.pad_sequence(xs, batch_first=True), torch.tensor([y for _, y in rows])


def test_a_collate_function_may_draw_and_sort_and_pad():
    rows = [(torch.randn(length), length % 3) for length in (3, 5, 2, 5, 7, 4, 4, 1)]
    state = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert refuse_mixing(augmented, rows)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == state[1:]
    assert torch.equal(torch.get_rng_state(), state[0])
    with pytest.raises(UserError, match="collate_fn mixes"):
        refuse_mixing(lambda rows: augmented([(x + rows[-1][0].sum(), y) for x, y in rows]), rows)


@pytest.mark.parametrize("times", [5, 8, 16])
@pytest.mark.parametrize("words", [False, True])
def test_time_may_come_before_the_batch(times, words):
    """As torch's recurrent networks have it; also where there are as many times as examples."""
    made = [torch.randint(0, 90, (times,)) if words else torch.rand(times, 3) for _ in range(8)]
    rows = [(x, i % 2) for i, x in enumerate(made)]

    def collate(rows, mix=lambda x: x):
        return torch.stack([mix(x) for x, _ in rows], 1), torch.tensor([y for _, y in rows])

    def check(collate_fn):
        refuse_mixing(collate_fn, rows)
        refuse_company(collate_fn, rows)

    check(collate)
    with pytest.raises(UserError, match="collate_fn mixes"):
        check(lambda rows: collate(rows, lambda x: x + rows[0][0]))


def apart(xs):
    return xs


def with_the_one_before(xs):
    return [0.7 * x + 0.3 * xs[i - 1].mean() for i, x in enumerate(xs)]


def boxes(mix):
    """As detectors have it: lists of pictures, and of what is in each."""
    return lambda rows: ([row["x"] for row in rows], [{"boxes": x} for x in mix([row["x"] for row in rows])])


def graphs(mix):
    """Nodes end to end, edges by the numbers that nodes have there."""

    def collate(rows):
        sizes = torch.tensor([len(row["x"]) for row in rows])
        begins = sizes.cumsum(0) - sizes
        return {
            "x": torch.cat(mix([row["x"] for row in rows])),
            "edges": torch.cat([row["edges"] + begin for row, begin in zip(rows, begins, strict=True)], 1),
            "batch": torch.arange(len(rows)).repeat_interleave(sizes),
            "y": torch.tensor([row["y"] for row in rows]),
        }

    return collate


def sparse(mix):
    """One matrix for the edges of all."""

    def collate(rows):
        batch = graphs(apart)(rows)
        weights = torch.cat(mix([torch.ones(row["edges"].shape[1]) * row["x"][0, 0] for row in rows]))
        return torch.sparse_coo_tensor(batch["edges"], weights, (len(batch["x"]),) * 2), batch["y"]

    return collate


def packed(mix):
    return lambda rows: nn.utils.rnn.pack_sequence(mix([row["x"] for row in rows]), enforce_sorted=False)


def bags(mix):
    """As recommenders have it: ids end to end, and where those of each example begin."""

    def collate(rows):
        sizes = torch.tensor([len(row["x"]) for row in rows])
        ids = torch.cat([row["edges"][0] for row in rows])
        return torch.stack(mix([row["x"][0] for row in rows])), ids, sizes.cumsum(0) - sizes

    return collate


@pytest.mark.parametrize("count", [2, 3, 7])
@pytest.mark.parametrize("kind", [boxes, graphs, sparse, packed, bags])
def test_examples_of_any_size_stand_in_lists_or_end_to_end(kind, count):
    generator = torch.Generator().manual_seed(count)
    sizes = [3, 5, 2, 3, 4, 6, 2][:count]
    rows = [
        {
            "x": torch.rand(size, 4, generator=generator),
            "edges": torch.randint(size, (2, size + 1), generator=generator),
            "y": i % 2,
        }
        for i, size in enumerate(sizes)
    ]

    def check(mix):
        refuse_mixing(kind(mix), rows)
        refuse_company(kind(mix), rows)

    check(apart)
    with pytest.raises(UserError, match="collate_fn mixes"):
        check(with_the_one_before)


@pytest.mark.parametrize("mix", [lambda xs: xs[-1:] + xs[:-1], lambda xs: [xs[0], *xs[:-1]]])
def test_lists_are_looked_at_row_by_row(mix):
    """Pictures of others beside one's own, or one that stands there twice."""
    rows = [{"x": torch.rand(size, 4)} for size in (3, 2, 5, 4)]
    with pytest.raises(UserError, match="collate_fn mixes"):
        refuse_mixing(boxes(mix), rows)


@pytest.mark.parametrize("kind", ["array", "picture", "list", "bytes"])
def test_examples_of_all_kinds_are_looked_at(kind):
    made = {
        "array": lambda: np.random.rand(4, 4),
        "picture": lambda: Image.fromarray(np.random.randint(0, 255, (4, 4), dtype=np.uint8)),
        "list": lambda: [random.random() for _ in range(4)],
        "bytes": lambda: torch.randint(0, 255, (4, 4), dtype=torch.uint8),
    }[kind]
    rows = [{"x": made(), "y": i} for i in range(6)]

    def collate(rows, shift=0.0):
        x = torch.stack([torch.as_tensor(np.asarray(row["x"])).float() for row in rows])
        return {"x": x - shift * x.mean(0), "y": torch.tensor([row["y"] for row in rows])}

    assert refuse_mixing(collate, rows)
    with pytest.raises(UserError, match="collate_fn mixes"):
        refuse_mixing(lambda rows: collate(rows, 0.5), rows)


def test_rows_of_one_user_may_be_mixed(tmp_path):
    def average(rows):
        x, y = default_collate(rows)
        return x.unflatten(0, (-1, 2)).mean(1, keepdim=True).expand(-1, 2, -1).flatten(0, 1), y

    names = [i // 2 for i in range(60)]
    settings = {"users": names, "rows_per_example": 2, "batch_size": 10}
    next(make(tmp_path / "users", **settings).batches(average, 10))
    with pytest.raises(UserError, match="collate_fn mixes"):
        next(make(tmp_path / "rows", batch_size=20).batches(lambda rows: average(rows[: len(rows) // 2 * 2])))


def test_texts_and_labels_alone_tell_nothing():
    assert not refuse_mixing(default_collate, [(i, i) for i in range(9)])
    assert not refuse_mixing(default_collate, [(torch.randn(3), 1)])
    assert not refuse_mixing(lambda rows: rows[20], data())


def test_an_engine_is_neither_copied_nor_pickled(tmp_path):
    engine = make(tmp_path)
    for do in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            do(engine)


def test_a_sum_without_noise_is_not_left_behind_by_closing(tmp_path):
    engine = make(tmp_path)
    loop = engine.batches(physical_batch_size=4)
    engine.step(losses_of(engine, next(loop)))
    assert engine.model[0].weight.grad is not None
    engine.close()
    assert all(p.grad is None for p in engine.model.parameters())


@pytest.mark.parametrize("accountant", ["gdp", "RDP", "moments"])
def test_epsilon_is_that_of_an_accountant_that_bounds(tmp_path, accountant):
    with pytest.raises(UserError, match=f"accountant={accountant}"):
        make(tmp_path).epsilon(accountant)


@pytest.mark.parametrize(
    "wrong", [{"steps": -1}, {"steps": 1.5}, {"steps": "3"}, {"physical_batch_size": 1.5}]
)
def test_sizes_of_a_loop_are_whole_numbers(tmp_path, wrong):
    with pytest.raises(UserError, match=r"is not a|must be above 0"):
        next(make(tmp_path).batches(**wrong))


def test_whole_numbers_of_any_type_are_sizes(tmp_path):
    engine = make(tmp_path)
    assert train(engine, 8.0, steps=np.int64(2)).steps_taken == 2
    assert list(engine.batches(steps=0)) == []


def test_a_data_set_of_one_picture_is_no_mixture(tmp_path):
    engine = make(tmp_path, dataset=TensorDataset(torch.ones(60, 10), torch.zeros(60, dtype=torch.long)))
    assert train(engine, 20).finished
