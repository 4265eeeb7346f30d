"""Examples are told apart in all that a collate function may return: time first, lists, rows end to end, arrays, pictures."""

import random

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from dpexp.errors import UserError
from dpexp.training.watching.collating import leaves_of, refuse_company, refuse_mixing
from tests.training.own_loop import make, train


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


class Named:
    """Tensors by name and rows by number, as a tensorclass of TensorDict."""

    def __init__(self, **parts):
        self.parts, self.keys = parts, parts.keys

    def __getitem__(self, number):
        return Named(**{name: part[range(len(part))[number]] for name, part in self.parts.items()})

    def items(self):
        return self.parts.items()


def test_what_has_names_and_rows_by_number_is_looked_through_by_its_names():
    rows = torch.tensor([[1, 2, 3], [4, 5, 6]])
    assert torch.equal(leaves_of(Named(x=rows))[0], rows)


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


class Sized(torch.Tensor):
    """Takes sizes as one argument, as MONAI's MetaTensor."""

    def new_empty(self, size, dtype=None, device=None):
        return super().new_empty(size, dtype=dtype, device=device)


def test_pictures_of_a_class_of_their_own_go_through_convolutions(tmp_path):
    pictures = [(torch.rand(1, 6, 6).as_subclass(Sized), i % 3) for i in range(60)]
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(32, 3))
    assert train(make(tmp_path, model=model, dataset=pictures, data_name="pictures", steps=1)).finished
