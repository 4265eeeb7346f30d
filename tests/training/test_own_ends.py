"""Loops of one's own that are given the rows of all examples end to end, and split them by their lengths."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from dpexp.errors import UserError
from dpexp.training.watching.layout import layout_of
from dpexp.training.watching.places import EndToEnd
from tests.training.own_loop import make, train


def end_to_end(rows):
    return {
        "x": torch.cat([row for row, _ in rows]),
        "lengths": torch.tensor([len(row) for row, _ in rows]),
        "y": torch.tensor([y for _, y in rows]),
    }


def trained(folder, losses, steps=3, size=6, longest=8):
    torch.manual_seed(0)
    rows = [(torch.randn(int(torch.randint(2, longest, ())), 10), i % 3) for i in range(60)]
    engine = make(folder, dataset=rows, data_name="rows", steps=steps)
    return train(
        engine, size, losses=lambda engine, batch: losses(engine.model, batch), collate_fn=end_to_end
    )


def of_parts(change=lambda parts: parts, besides=lambda out: 0.0):
    """A loss of the mean of each part; ``change``: of the parts; ``besides``: what is added to the losses."""

    def losses(model, batch):
        parts = change(batch["x"].split(batch["lengths"].tolist()))
        out = model(torch.stack([part.mean(0) for part in parts]))
        return cross_entropy(out, batch["y"], reduction="none") + besides(out)

    return losses


def owners(batch):
    return torch.arange(len(batch["y"])).repeat_interleave(batch["lengths"])


def of_rows(change=lambda x: x, afterwards=lambda out: out, weigh=lambda lengths: 1.0):
    """The mean loss of the rows of each example; ``change``: of all that enters; ``afterwards``: of all that comes out."""

    def losses(model, batch):
        out, whose = afterwards(model(change(batch["x"]))), owners(batch)
        each = cross_entropy(out, batch["y"][whose], reduction="none")
        return (
            each.new_zeros(len(batch["y"])).index_add(0, whose, each)
            / batch["lengths"]
            * weigh(batch["lengths"])
        )

    return losses


def padded(model, batch):
    x = nn.utils.rnn.pad_sequence(batch["x"].split(batch["lengths"].tolist()), batch_first=True)
    own = torch.arange(x.shape[1]) < batch["lengths"][:, None]
    out = (model(x) * own[..., None]).sum(1) / batch["lengths"][:, None]
    return cross_entropy(out, batch["y"], reduction="none")


SOUND = {
    "means of parts": of_parts(),
    "parts beside their own means": of_parts(lambda parts: [part - part.mean(0) for part in parts]),
    "parts by their own norms": of_parts(lambda parts: [part / part.norm() for part in parts]),
    "rows by themselves": of_rows(lambda x: -x.tanh()),
    "outputs by themselves": of_rows(afterwards=torch.tanh),
    "padded": padded,
}


@pytest.mark.parametrize(("size", "longest"), [(64, 8), (3, 3), (5, 20)])
@pytest.mark.parametrize("losses", SOUND.values(), ids=SOUND)
def test_rows_end_to_end_are_looked_at(tmp_path, losses, size, longest):
    """Of as many rows each, too; and three examples may look like three tensors."""
    engine = trained(tmp_path, losses, size=size, longest=longest)
    assert engine.finished
    assert not any("not looked at" in note for note in engine.clipper.notes)


ENTERS_MIXED = {
    "a mean over all": of_rows(lambda x: x - x.mean(0)),
    "the row before": of_rows(lambda x: x + 0.1 * x.roll(1, 0)),
    "sums of all before": of_rows(lambda x: x.cumsum(0)),
    "statistics of a batch norm": of_rows(lambda x: nn.functional.batch_norm(x, None, None, training=True)),
    "a norm that is seldom too large": of_rows(lambda x: x * (1e6 / x.norm()).clamp(max=1.0)),
    "the part before": of_parts(
        lambda parts: [part + 0.1 * parts[i - 1].mean(0) for i, part in enumerate(parts)]
    ),
    "a mean over all parts": of_parts(lambda parts: [part - torch.cat(parts).mean(0) for part in parts]),
}


@pytest.mark.parametrize("losses", ENTERS_MIXED.values(), ids=ENTERS_MIXED)
def test_rows_end_to_end_are_not_mixed_before_they_enter_the_model(tmp_path, losses):
    with pytest.raises(UserError, match="mixes examples before they enter the model"):
        trained(tmp_path, losses)


OUTPUTS_MIXED = {
    "distances to others": of_parts(
        besides=lambda out: torch.cdist(out.detach(), out.detach()).sum(1),
    ),
    "the load of all": of_parts(besides=lambda out: (out * out.detach().softmax(1).mean(0)).sum(1)),
    "a mean over all, detached": of_rows(afterwards=lambda out: out - out.detach().mean(0)),
    "the row before, detached": of_rows(afterwards=lambda out: out + out.detach().roll(1, 0)),
    "a share of all lengths": of_rows(weigh=lambda lengths: lengths / lengths.sum()),
    "a share of the longest": of_rows(weigh=lambda lengths: lengths / lengths.max()),
}


@pytest.mark.parametrize("losses", OUTPUTS_MIXED.values(), ids=OUTPUTS_MIXED)
def test_outputs_of_rows_end_to_end_are_not_mixed(tmp_path, losses):
    with pytest.raises(UserError, match="mixes examples: the loss of one changes when the others"):
        trained(tmp_path, losses)


def of_kept_rows(afterwards=lambda each: each):
    """Losses of the rows that have a large first number, of which other rows have more or fewer."""

    def losses(model, batch):
        kept = batch["x"][:, 0] > -1.0
        whose = owners(batch)[kept]
        each = cross_entropy(model(batch["x"][kept]), batch["y"][whose], reduction="none")
        return afterwards(each.new_zeros(len(batch["y"])).index_add(0, whose, each))

    return losses


def test_rows_of_which_others_have_more_or_fewer_are_said_not_to_be_looked_at(tmp_path):
    notes = trained(tmp_path, of_kept_rows()).clipper.notes
    assert any("nothing tells whose they are; what it returned was looked at" in note for note in notes)


def test_means_of_rows_end_to_end_are_of_their_own_lengths(tmp_path):
    """Which may be as many as there are examples, in one batch and in another."""
    assert trained(tmp_path, of_parts(), steps=16).finished


@pytest.mark.parametrize("sizes", [[2, 1, 3], [0, 2, 1], [2, 2, 2], [4, 0, 0]])
def test_where_rows_lie_end_to_end_is_seen_by_collating_each_alone(sizes):
    rows = [(torch.arange(10.0 * size).reshape(size, 10) + 100 * i, i) for i, size in enumerate(sizes)]
    batch = end_to_end(rows)
    ends = layout_of(end_to_end, rows, 3, batch).ends
    assert list(ends.items()) == [(batch["x"], EndToEnd(tuple(sizes)))]


def test_rows_of_others_stand_in_their_places_over_and_over():
    x = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    place = EndToEnd((1, 3, 2, 0))
    assert place.replaced(x, [2, 1, 1, 0], 10.0).tolist() == [50.0, 2.0, 3.0, 4.0, 20.0, 30.0]
    assert place.replaced(x, [3, 0, 2, 0], 10.0).tolist() == [10.0, 10.0, 10.0, 10.0, 5.0, 6.0]
