"""Rows of the data set that a person's own loop reads beside its batch are refused."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dpexp.errors import UserError
from tests.training.own_loop import data, losses_of, make, train

cross_entropy = nn.functional.cross_entropy


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
