"""What stands beside a batch is the same for all physical batches of a step: one example more moves others into the next one."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from dpexp.errors import UserError
from dpexp.training.generators import Drawn
from tests.training.own_loop import TASK, losses_of, make, network, train

cross_entropy = nn.functional.cross_entropy
PUBLIC = torch.randn(50, 10, generator=torch.Generator().manual_seed(5))
NUM_EXAMPLES = len(TASK.train)


def by(function: Callable[[Tensor], Tensor]) -> Callable[[Any, Any], Tensor]:
    return lambda engine, batch: losses_of(engine, (function(batch[0]), batch[1]))


def cropped(x: Tensor) -> Tensor:
    place = int(torch.randint(3, (1,)))
    return nn.functional.pad(x[:, place : place + 6], (0, 4))


def mixed_with_public(x: Tensor) -> Tensor:
    share = float(np.random.beta(0.4, 0.4))
    return share * x + (1 - share) * PUBLIC[torch.randint(50, (len(x),))]


def noised(x: Tensor) -> Tensor:
    level = torch.rand(())
    return (1 - level).sqrt() * x + level.sqrt() * torch.randn_like(x)


def resized(x: Tensor) -> Tensor:
    return nn.functional.interpolate(x[:, None], random.randint(5, 20))[:, 0, :5].repeat(1, 2)


def rehearsing(engine: Any, batch: Any) -> Tensor:
    with engine.public():
        rehearsal = engine.model(PUBLIC[torch.randint(50, (5,))]).square().mean()
    return losses_of(engine, batch) + rehearsal


def with_dropout_on_public_rows(engine: Any, batch: Any) -> Tensor:
    with engine.public():
        rehearsal = nn.functional.dropout(engine.model(PUBLIC[:5]), 0.5).square().mean()
    return losses_of(engine, batch) + rehearsal


def cut_out(x: Tensor) -> Tensor:
    x, place = x.clone(), random.randrange(7)
    x[:, place : place + 3] = 0
    return x


def cut_out_each(x: Tensor) -> Tensor:
    x = x.clone()
    for row in range(len(x)):
        place = random.randrange(7)
        x[row, place : place + 3] = 0
    return x


def in_noise_now_and_then(x: Tensor) -> Tensor:
    return x + 0.1 * torch.randn_like(x) if random.random() < 0.5 else x


def in_some_order(x: Tensor) -> Tensor:
    for function in random.sample([torch.tanh, torch.sin, torch.exp], 3):
        x = function(x)
    return torch.rand(len(x), 1) * x


def filled_up(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, torch.rand(1).repeat(len(x), 1))


class Counting:
    """A factor that falls with each physical batch."""

    calls = 0

    def __call__(self, engine: Any, batch: Any) -> Tensor:
        self.calls += 1
        return losses_of(engine, batch) / (1.5 + self.calls)


class Averaging:
    """A mean of earlier losses, computed by Python."""

    mean = 1.0

    def __call__(self, engine: Any, batch: Any) -> Tensor:
        losses = losses_of(engine, batch)
        kept, self.mean = self.mean, 0.9 * self.mean + 0.1 * losses.mean().item()
        return losses / kept


class Taught:
    """A teacher beside the model that follows it, or anything else, after each batch."""

    def __init__(self) -> None:
        self.teacher = network().requires_grad_(False)

    def __call__(self, engine: Any, batch: Any) -> Tensor:
        told = self.teacher(batch[0]).softmax(1)
        for weight in self.teacher.parameters():
            weight.mul_(0.9)
        return -(told * engine.model(batch[0]).log_softmax(1)).sum(1)


SHARED: dict[str, Callable[[], Callable[[Any, Any], Tensor]]] = {
    "a coin of torch": lambda: by(lambda x: x.flip(-1) if torch.rand(1) < 0.5 else x),
    "a coin of Python": lambda: by(lambda x: x.flip(-1) if random.random() < 0.5 else x),
    "a coin of numpy": lambda: by(lambda x: x.flip(-1) if np.random.rand() < 0.5 else x),
    "a place": lambda: by(cropped),
    "a size": lambda: by(resized),
    "a share of public rows": lambda: by(mixed_with_public),
    "a level of noise": lambda: by(noised),
    "a mask": lambda: by(lambda x: x * (torch.rand(10) < 0.5)),
    "a part that is cut out": lambda: by(cut_out),
    "a coin for noise": lambda: by(in_noise_now_and_then),
    "how much noise": lambda: by(lambda x: x + random.random() * torch.randn_like(x)),
    "a number of numpy": lambda: by(lambda x: x * np.exp(np.random.rand())),
    "dropout of columns": lambda: by(lambda x: x * nn.functional.dropout(torch.ones(1, 10), 0.5)),
    "a factor that is repeated": lambda: by(lambda x: x * torch.rand(1).repeat(len(x), 1)),
    "a mask that is repeated": lambda: by(lambda x: x * torch.rand(10).round(decimals=1).repeat(len(x), 1)),
    "a number that is repeated where a row has none": lambda: by(filled_up),
    "an order": lambda: by(in_some_order),
    "a projection": lambda: by(lambda x: x @ torch.randn(10, 10)),
    "public rows": lambda: rehearsing,
    "dropout on public rows": lambda: with_dropout_on_public_rows,
    "a counter": Counting,
    "a mean of losses": Averaging,
    "a teacher": Taught,
}


@pytest.mark.parametrize("name", SHARED)
def test_what_is_drawn_for_a_physical_batch_or_follows_each_of_them_is_refused(tmp_path, name):
    with pytest.raises(
        UserError, match="something else of one physical batch than of another one of the same step"
    ):
        train(make(tmp_path), losses=SHARED[name]())


def each_row(x: Tensor) -> Tensor:
    return torch.stack([random.uniform(0.5, 1.5) * row.roll(random.randrange(10)) for row in x])


def each_in_place(x: Tensor) -> Tensor:
    x = x.clone()
    for i in range(len(x)):
        if torch.rand(1) < 0.5:
            x[i] = x[i].flip(-1)
    return x


def some(x: Tensor) -> Tensor:
    chosen = torch.rand(len(x)) < 0.1
    if chosen.any():
        x = torch.where(chosen[:, None], x.flip(-1), x)
        x[chosen] = x[chosen] + torch.randn(int(chosen.sum()), 10)
    return x


def where_a_row_asks_for_it(engine: Any, batch: Any) -> Tensor:
    losses = losses_of(engine, batch)
    return torch.where(batch[1] == 2, 2 * losses, losses) if (batch[1] == 2).any() else losses


def one_of_three(x: Tensor) -> Tensor:
    factor, place = torch.tensor([0.5, 1.5, 2.5]), torch.randint(3, (len(x), 1))
    return factor[place] * x


def one_of_three_functions(x: Tensor) -> Tensor:
    chosen = torch.randint(3, (len(x), 1))
    for number in chosen.unique().tolist():
        x = torch.where(chosen == number, (torch.tanh, torch.sin, torch.exp)[number](x), x)
    return x


def told_now_and_then(x: Tensor) -> Tensor:
    if random.random() < 0.5:
        str(x.abs().mean() * random.random())
    return x


def by_the_step(engine: Any, batch: Any) -> Tensor:
    coin = random.Random(engine.steps_taken)
    x = batch[0].flip(-1) if coin.random() < 0.5 else batch[0]
    return losses_of(engine, (coin.random() * x, batch[1])) / (1 + engine.steps_taken)


def rehearsed(engine: Any, batch: Any) -> Tensor:
    with engine.public():
        rehearsal = engine.model(PUBLIC[5 * engine.steps_taken :][:5]).square().mean()
    return losses_of(engine, batch) + rehearsal


OWN: dict[str, Callable[[Any, Any], Tensor]] = {
    "a coin, a factor and a place for each": by(each_row),
    "a coin for each, in place": by(each_in_place),
    "a part that is cut out of each": by(cut_out_each),
    "noise for some": by(some),
    "a level of noise for each": by(lambda x: x + torch.rand(len(x), 1) * torch.randn_like(x)),
    "dropout": by(lambda x: nn.functional.dropout(x, 0.1)),
    "partners and shares of public rows": by(
        lambda x: x + torch.rand(len(x), 1) * PUBLIC[torch.randint(50, (len(x),))]
    ),
    "one factor of three": by(one_of_three),
    "one function of three": by(one_of_three_functions),
    "factors of columns": by(lambda x: x * torch.arange(0.5, 10).repeat(len(x), 1)),
    "complex numbers": by(lambda x: (x * torch.full((len(x), 1), 1j).repeat(1, 10)).abs()),
    "a coin of no use": by(told_now_and_then),
    "what rows of one class ask for": where_a_row_asks_for_it,
    "what follows from the step": by_the_step,
    "public rows of the step": rehearsed,
}


def test_a_coin_is_taken_for_one_of_all_examples_where_many_have_the_same(tmp_path):
    def flipped(x: Tensor) -> Tensor:
        return torch.where((torch.rand(1) < 0.5).repeat(len(x), 1), x.flip(-1), x)

    with pytest.raises(UserError, match="what where is given beside it"):
        train(make(tmp_path / "one", batch_size=40), 17, losses=by(flipped))

    def flipped_each(x: Tensor) -> Tensor:
        return torch.where(torch.rand(len(x), 1) < 0.5, x.flip(-1), x)

    assert train(make(tmp_path / "each", batch_size=40), 17, losses=by(flipped_each)).finished


@pytest.mark.parametrize("name", OWN)
def test_what_each_example_draws_and_what_goes_by_the_step_is_taken(tmp_path, name):
    assert train(make(tmp_path), losses=OWN[name]).finished


def test_a_step_that_was_cut_off_may_begin_again_with_another_factor(tmp_path):
    engine, factor = make(tmp_path), 0.5
    for batch in engine.batches(physical_batch_size=8):
        engine.step(factor * losses_of(engine, batch))
        break
    factor = 0.25
    assert train(engine, losses=lambda engine, batch: factor * losses_of(engine, batch)).finished


@pytest.mark.parametrize("size", [1, NUM_EXAMPLES])
def test_chance_of_a_batch_is_taken_where_each_is_alone_or_all_are_together(tmp_path, size):
    assert train(make(tmp_path), size, losses=by(mixed_with_public), steps=3)


def flipped_together(rows: list[Any]) -> Any:
    x, y = default_collate(rows)
    return (x.flip(-1) if torch.rand(1) < 0.5 else x), y


def scaled_together(rows: list[Any]) -> Any:
    x, y = default_collate(rows)
    return x * random.uniform(0.5, 1.5), y


def flipped_one_by_one(rows: list[Any]) -> Any:
    return default_collate([(x.flip(-1) if random.random() < 0.5 else x, y) for x, y in rows])


def shuffled(rows: list[Any]) -> Any:
    random.shuffle(rows)
    return default_collate(rows)


def masked(rows: list[Any]) -> Any:
    x, y = default_collate(rows)
    return x * torch.empty_like(x).bernoulli_(0.85), y


@pytest.mark.parametrize("collate", [flipped_together, scaled_together])
def test_what_a_collate_function_draws_for_all_of_a_batch_is_refused_where_a_sample_is_cut(tmp_path, collate):
    with pytest.raises(UserError, match=r"share what collate_fn, .* draws once for the batch"):
        train(make(tmp_path / "pieces"), collate_fn=collate)
    for size in (1, NUM_EXAMPLES):
        assert train(make(tmp_path / f"{size}"), size, steps=2, collate_fn=collate)


def test_who_draws_for_each_example_after_a_refusal_goes_on(tmp_path):
    engine = make(tmp_path)
    with pytest.raises(UserError, match="share what collate_fn"):
        train(engine, collate_fn=flipped_together)
    assert train(engine, collate_fn=flipped_one_by_one).finished


@pytest.mark.parametrize("collate", [flipped_one_by_one, shuffled, masked])
def test_what_a_collate_function_draws_for_each_example_is_taken(tmp_path, collate):
    assert train(make(tmp_path), steps=2, collate_fn=collate)


def test_words_that_were_drawn_from_python_and_numpy_are_counted():
    counting = Drawn()
    assert counting.count(8) == 0
    random.random(), np.random.rand(), random.getrandbits(32)
    assert counting.count(8) == 5
    [random.random() for _ in range(400)]
    assert counting.count(8) == 8 + 2
