"""A loop of one's own may sort and shuffle its examples; each of them has one place, one loss, and no rank among the others."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dpexp.errors import UserError
from tests.training.own_loop import losses_of, make, train

cross_entropy = nn.functional.cross_entropy


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
