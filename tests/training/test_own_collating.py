"""A collate function of one's own may draw, sort and pad; one that mixes examples, remembers them or reads others is refused."""

import random
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset, default_collate

from dpexp.errors import UserError
from dpexp.training.watching.collating import copies, refuse_company, refuse_mixing
from tests.training.own_loop import TASK, data, losses_of, make, mixed_up, train


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
