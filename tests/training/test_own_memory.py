"""What a person's own loop remembers of earlier batches: refused where a later batch meets it, however it was kept."""

from collections import deque

import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

from dpexp.errors import UserError
from tests.training.own_loop import losses_of, make, mixed_up, train

cross_entropy = nn.functional.cross_entropy


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


def test_an_example_of_an_earlier_batch_does_not_enter_the_model(tmp_path):
    before = []

    def losses(engine, batch):
        before.append(batch[0])
        # a replay buffer: the first rows of the batch before
        loss = engine.model(batch[0]).square().sum(1)
        return loss if len(before) == 1 else loss + 0 * engine.model(before[-2]).sum()

    with pytest.raises(UserError, match="what enters the model depends on what an earlier batch"):
        train(make(tmp_path), 4, losses=losses)


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
