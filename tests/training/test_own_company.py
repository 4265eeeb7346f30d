"""Outputs and losses of a loop of one's own that go by the other examples of a batch are refused; several rows of one are not."""

import pytest
import torch
from torch import nn

from dpexp.errors import UserError
from tests.training.own_loop import first_batch, losses_of, make, train

cross_entropy = nn.functional.cross_entropy


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


def test_what_was_refused_is_refused_again_in_the_same_batch(tmp_path):
    engine = make(tmp_path)
    batch, _loop = first_batch(engine)
    losses = losses_of(engine, batch)
    for _ in range(2):
        with pytest.raises(UserError, match="mixes examples"):
            engine.step(losses / losses.detach().mean())
    assert engine.ledger.steps_charged == 0
