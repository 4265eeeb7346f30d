"""A data set that makes one example of several rows, or remembers rows that it has read, is refused."""

import random

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch.utils.data import TensorDataset, default_collate

from dpexp.errors import UserError
from dpexp.training.watching.reading import refuse_other_rows
from tests.training.own_loop import data, make, train


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


class AllTogether(ReadTogether):
    """Gives a batch where examples are asked for."""

    def __getitems__(self, numbers):
        return default_collate([self.rows[i] for i in numbers])


def test_a_data_set_that_makes_batches_by_itself_is_told_to_give_examples(tmp_path):
    engine = make(tmp_path, dataset=AllTogether(False), data_name="batches")
    with pytest.raises(UserError, match=r"__getitems__ .* one example for each number"):
        train(engine, collate_fn=lambda batch: batch)


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


@pytest.mark.parametrize(
    "make",
    [
        lambda rows, i: rows.x[i % 20],
        lambda rows, i: rows.x[i // 2],
        lambda rows, i: rows.x[int(torch.randint(20, ()))],
        lambda rows, i: rows.x[2 * int(torch.randint(10, ())) + i % 2],
    ],
)
def test_a_row_that_stands_under_several_numbers_is_refused(make):
    rows = OneByOne(make)
    rows.x = rows.x[:20]
    for attribute in ("pictures", "frame", "order", "offsets", "base", "columns"):
        delattr(rows, attribute)
    if "randint" in make.__code__.co_names:
        rows.size = 20
    with pytest.raises(UserError, match="one row under several numbers"):
        refuse_other_rows(rows)
    refuse_other_rows(rows, users=["one"] * rows.size)


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


def test_a_data_set_of_one_picture_is_no_mixture(tmp_path):
    engine = make(tmp_path, dataset=TensorDataset(torch.ones(60, 10), torch.zeros(60, dtype=torch.long)))
    assert train(engine, 20).finished
