"""What a loop of one's own does with lists that have an entry for each example, each as long as it likes, and with tensors that
have no row for any: examples are kept apart there, too, and no length that equals the size of the batch by chance is a row."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset, default_collate

from dpexp.errors import UserError
from tests.training.own_loop import data, make, train

cross_entropy = nn.functional.cross_entropy


def rows(count=60):
    generator = torch.Generator().manual_seed(0)
    lengths = [1 + i % 7 for i in range(count)]
    return [
        (torch.randn(n, 4, generator=generator), torch.randint(3, (n,), generator=generator)) for n in lengths
    ]


def collate(examples):
    return [x for x, _ in examples], [labels for _, labels in examples]


class Taggers(nn.Module):
    """Returns an entry for each example."""

    def __init__(self, outside=lambda entries: entries):
        super().__init__()
        self.body, self.outside = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), outside

    def forward(self, entries):
        return self.outside(list(self.body(torch.cat(entries)).split([len(entry) for entry in entries])))


def each(entries, labels):
    return torch.stack([cross_entropy(z, y) for z, y in zip(entries, labels, strict=True)])


def run(tmp_path, losses, model=None, **settings):
    torch.manual_seed(0)
    engine = make(tmp_path, model or Taggers(), dataset=rows(), steps=20, **settings)
    return train(engine, 20, losses=losses, collate_fn=collate)


def divided(engine, batch):
    pairs = zip(engine.model(batch[0]), batch[1], strict=True)
    return torch.stack([cross_entropy(z, y, reduction="sum") / len(y) for z, y in pairs])


@pytest.mark.parametrize("losses", [lambda engine, batch: each(engine.model(batch[0]), batch[1]), divided])
def test_an_entry_as_long_as_the_batch_has_examples_is_that_of_one_example(tmp_path, losses):
    assert run(tmp_path, losses, batch_size=6).finished


def test_sizes_of_entries_are_no_sizes_of_their_batch(tmp_path):
    """A mean over the boxes of one picture, four numbers each; what the model returns has 16, so four boxes have as many."""
    generator = torch.Generator().manual_seed(0)
    boxes = [(torch.randn(10, generator=generator), torch.rand(1 + i % 4, 4)) for i in range(60)]
    model = nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 16))

    def losses(engine, batch):
        found = engine.model(batch[0]).view(-1, 4, 4)
        return torch.stack(
            [(own[: t.shape[0]] - t).abs().mean() for own, t in zip(found, batch[1], strict=True)]
        )

    engine = make(tmp_path, model, dataset=boxes)
    apart = {"collate_fn": lambda rows: (torch.stack([x for x, _ in rows]), [t for _, t in rows])}
    assert train(engine, 40, losses=losses, **apart).finished


def next_labels(engine, batch):
    return each(engine.model(batch[0]), batch[1]) * torch.stack(
        [y.sum() for y in batch[1][1:] + batch[1][:1]]
    )


def centred(engine, batch):
    mean = torch.cat(batch[0]).mean(0)
    return each(engine.model([x - mean for x in batch[0]]), batch[1])


def centred_outputs(engine, batch):
    entries = engine.model(batch[0])
    mean = torch.cat(entries).detach().mean(0)
    return each([z - mean for z in entries], batch[1])


def by_the_batch(engine, batch):
    return torch.stack([z.square().sum() / len(batch[0]) for z in engine.model(batch[0])])


@pytest.mark.parametrize("losses", [next_labels, centred, centred_outputs, by_the_batch])
def test_entries_are_not_mixed_with_each_other(tmp_path, losses):
    # none is as long as there are examples
    with pytest.raises(UserError, match=r"mixes examples|rows are whose|goes by their batch"):
        run(tmp_path, losses, batch_size=20)


def test_a_model_does_not_mix_entries(tmp_path):
    def outside(entries):
        mean = torch.cat(entries).detach().mean(0)
        return [z - mean for z in entries]

    with pytest.raises(UserError, match=r"mixes examples: what an example gets out of it"):
        run(
            tmp_path,
            lambda engine, batch: each(engine.model(batch[0]), batch[1]),
            Taggers(outside),
            batch_size=20,
        )


class Keeps(nn.Module):
    """Returns, or keeps, something beside its outputs."""

    def __init__(self, made, returns=True):
        super().__init__()
        self.body, self.made, self.returns = nn.Linear(10, 3), made, returns
        self.table, self.kept = nn.Parameter(torch.ones(3)), None

    def forward(self, x):
        outputs = self.body(x)
        self.kept = self.made(self, outputs)
        return outputs, self.kept if self.returns else None


MEANS = [
    lambda model, outputs: outputs.mean(0),
    lambda model, outputs: outputs.detach().mean(0),
    lambda model, outputs: outputs.detach().T @ outputs.detach() / 100,
]


def kept(engine, batch):
    outputs = engine.model(batch[0])[0]
    return cross_entropy(outputs - engine.model.kept.detach().flatten()[:3], batch[1], reduction="none")


def returned(engine, batch):
    outputs, beside = engine.model(batch[0])
    return cross_entropy(outputs - beside.detach().flatten()[:3], batch[1], reduction="none")


def from_before(engine, batch):
    before = engine.model.kept
    outputs = engine.model(batch[0])[0]
    shift = 0 if before is None else before.detach().flatten()[:3]
    return cross_entropy(outputs - shift, batch[1], reduction="none")


@pytest.mark.parametrize("losses", [kept, returned, from_before])
@pytest.mark.parametrize("made", MEANS)
def test_losses_do_not_go_by_a_mean_without_rows_that_the_model_returns_or_keeps(tmp_path, losses, made):
    model = Keeps(made, returns=losses is returned)
    with pytest.raises(UserError, match=r"mixes examples|an earlier batch has left behind"):
        train(make(tmp_path, model), 8, losses=losses)


def test_a_table_of_weights_that_the_model_returns_is_nothing_of_the_batch(tmp_path):
    def losses(engine, batch):
        outputs, table = engine.model(batch[0])
        return cross_entropy(outputs * table, batch[1], reduction="none")

    assert train(make(tmp_path, Keeps(lambda model, outputs: 2 * model.table)), 8, losses=losses).finished


def test_nested_batches_are_no_padded_ones(tmp_path):
    def nested(examples):
        return torch.nested.nested_tensor([x for x, _ in examples], layout=torch.jagged), collate(examples)[1]

    def losses(engine, batch):
        return each(engine.model(list(batch[0].unbind())), batch[1])

    engine = make(tmp_path, Taggers(), dataset=rows(), batch_size=20)
    assert train(engine, 20, losses=losses, collate_fn=nested).finished


def test_hidden_states_of_many_layers_are_no_list_of_examples(tmp_path):
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(10, 10) for _ in range(9))

        def forward(self, x):
            states = [x]
            for layer in self.layers:
                states.append(torch.tanh(layer(states[-1])))
            return states

    def losses(engine, batch):
        states = engine.model(batch[0])
        return cross_entropy(states[-1], batch[1], reduction="none") + sum(s.square().sum(1) for s in states)

    assert train(make(tmp_path, Deep(), dataset=TensorDataset(*data().tensors)), 8, losses=losses).finished


def test_as_many_layers_as_examples_by_chance_are_no_rows(tmp_path):
    class States(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.head = nn.LSTM(10, 6, 2, bidirectional=True), nn.Linear(12, 3)

        def forward(self, x):
            outputs, (states, _) = self.lstm(x[None])
            return self.head(outputs[-1]), states

    def losses(engine, batch):
        outputs, states = engine.model(batch[0])
        return cross_entropy(outputs, batch[1], reduction="none") + states.square().sum((0, 2))

    # four states of each example, and pieces of four
    assert train(make(tmp_path, States()), 4, losses=losses).finished


def with_tokens(losses):
    def of(engine, batch):
        x, mask = batch
        return losses(engine.model(x).square().mean(-1), mask)

    return of


def by_its_own(found, mask):
    return torch.stack([(nll * m).sum() / int(m.sum()) for nll, m in zip(found, mask, strict=True)])


def by_its_own_spread(found, mask):
    return torch.stack([found[i, 0] / found[i, :2].detach().mean().item() for i in range(len(found))])


def sliced(found, mask):
    return torch.stack([found[i, : int(mask[i].sum())].mean() for i in range(len(found))])


def by_the_first(found, mask):
    return (found * mask).sum(1) / int(mask[0].sum())


def by_the_next(found, mask):
    return torch.stack([found[i, 0] / int(mask[i - 1].sum()) for i in range(len(found))])


def by_the_next_spread(found, mask):
    return torch.stack([found[i, 0] / found[i - 1, :2].detach().mean().item() for i in range(len(found))])


def by_two(found, mask):
    return torch.stack([found[i, 0] / int((mask[i] + mask[i - 1]).sum()) for i in range(len(found))])


def by_sum_in_place(found, mask):
    def tokens(i):
        count = mask[i].sum()
        count += mask[i - 1].sum()
        return int(count)

    return torch.stack([found[i, 0] / tokens(i) for i in range(len(found))])


def by_what_was_written_below(found, mask):
    mask = mask.clone()
    rows = [mask[i] for i in range(len(mask))]
    mask += mask.roll(1, 0)
    return torch.stack([found[i, 0] / int(row.sum()) for i, row in enumerate(rows)])


def tokens_of(tmp_path, losses):
    generator = torch.Generator().manual_seed(0)
    mask = (torch.arange(12) <= torch.arange(60)[:, None] % 11).float()
    dataset = TensorDataset(torch.randn(60, 12, 10, generator=generator), mask)

    def trimmed(rows):
        x, mask = default_collate(rows)
        longest = int(mask.sum(1).max())
        return x[:, :longest], mask[:, :longest]

    return train(make(tmp_path, dataset=dataset), 9, losses=with_tokens(losses), collate_fn=trimmed)


@pytest.mark.parametrize("losses", [by_its_own, by_its_own_spread, sliced])
def test_numbers_of_an_example_scale_its_own_loss(tmp_path, losses):
    assert tokens_of(tmp_path, losses).finished


@pytest.mark.parametrize(
    "losses",
    [by_the_first, by_the_next, by_the_next_spread, by_two, by_sum_in_place, by_what_was_written_below],
)
def test_numbers_of_an_example_do_not_scale_losses_of_others(tmp_path, losses):
    with pytest.raises(UserError, match=r"scales losses by a number|depend on a number"):
        tokens_of(tmp_path, losses)
