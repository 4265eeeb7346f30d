"""What a model is given beside its rows, and what the loop sets in it, is the same for all physical batches of a step."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from dpexp.errors import UserError
from tests.training.own_loop import TASK, losses_of, make, network, train

cross_entropy = nn.functional.cross_entropy
NUM_EXAMPLES = len(TASK.train)


class Timed(nn.Module):
    """A model of rows and of what else it is given: a number, or one for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()
        self.register_buffer("times", torch.linspace(0, 1, 100).view(10, 10))

    def forward(self, x: Tensor, time: Any, scale: float = 1.0) -> Tensor:
        if not isinstance(time, Tensor):
            return self.inner(scale * x + time)
        return self.inner(x + (time if time.is_floating_point() else self.times[time]))


def timed(*others: Callable[[int], Any], **named: Callable[[int], Any]) -> Callable[[Any, Any], Tensor]:
    def losses(engine: Any, batch: Any) -> Tensor:
        given = [of(len(batch[0])) for of in others]
        outputs = engine.model(batch[0], *given, **{name: of(len(batch[0])) for name, of in named.items()})
        return cross_entropy(outputs, batch[1], reduction="none")

    return losses


DRAWN_ONCE: dict[str, Callable[[Any, Any], Tensor]] = {
    "a time": timed(lambda n: torch.full((n,), random.randrange(10))),
    "a time that is expanded": timed(lambda n: torch.randint(10, (1,)).expand(n)),
    "a level": timed(lambda n: torch.rand(1, 1)),
    "a level that is repeated": timed(lambda n: torch.rand(1).repeat(n, 1)),
    "a number": timed(lambda n: random.random()),
    "a number by name": timed(lambda n: 0.5, scale=lambda n: random.random()),
}
OWN_TIMES: dict[str, Callable[[Any, Any], Tensor]] = {
    "times": timed(lambda n: torch.randint(10, (n,))),
    "one of three times": timed(lambda n: torch.randint(3, (n,))),
    "levels": timed(lambda n: torch.rand(n, 1)),
    "one time": timed(lambda n: torch.full((n,), 3)),
    "places": timed(lambda n: torch.arange(n) % 10 * 0),
    "a level for each call with one row": lambda engine, batch: cross_entropy(
        torch.cat([engine.model(x[None], torch.rand(1, 1)) for x in batch[0]]), batch[1], reduction="none"
    ),
    "a number for each call with one row": lambda engine, batch: cross_entropy(
        torch.cat([engine.model(x[None], random.random()) for x in batch[0]]), batch[1], reduction="none"
    ),
    "levels of a few rows at a time": lambda engine, batch: cross_entropy(
        torch.cat([engine.model(x, torch.rand(len(x), 1)) for x in batch[0].split(3)]),
        batch[1],
        reduction="none",
    ),
    "one number": timed(lambda n: 0.5, scale=lambda n: 2.0),
}


@pytest.mark.parametrize("name", DRAWN_ONCE)
def test_what_enters_the_model_beside_its_rows_is_the_same_in_all_pieces_of_a_step(tmp_path, name):
    with pytest.raises(UserError, match="what the model is given beside it"):
        train(make(tmp_path, Timed(), steps=12), losses=DRAWN_ONCE[name])


@pytest.mark.parametrize("name", OWN_TIMES)
def test_what_each_example_draws_may_enter_the_model(tmp_path, name):
    assert train(make(tmp_path, Timed()), losses=OWN_TIMES[name]).finished


def set_in_the_model(name: str, of: Callable[[Any], Any]) -> Callable[[Any, Any], Tensor]:
    def losses(engine: Any, batch: Any) -> Tensor:
        setattr(engine.model[2], name, of(engine))
        return losses_of(engine, batch)

    return losses


class Noting(nn.Dropout):
    """A layer that notes what it does, also by numbers of its batch."""

    calls, mean, wide = 0, 0.0, False

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean = float(x.detach().mean())
        self.wide = bool(x.detach().abs().max() > 0.9)
        return super().forward(x)


SET = {
    "a rate of dropout": ("p", lambda engine: 0.5 * random.random()),
    "a coin for dropout": ("training", lambda engine: random.random() < 0.5),
    "a rate that falls": ("p", lambda engine: 0.9 * engine.model[2].p),
}


@pytest.mark.parametrize("name", SET)
def test_what_the_loop_sets_in_the_model_is_the_same_in_all_pieces_of_a_step(tmp_path, name):
    with pytest.raises(UserError, match=rf"2\.{SET[name][0]} of the model has changed"):
        train(make(tmp_path, network(0.5)), losses=set_in_the_model(*SET[name]))


def test_what_the_loop_sets_by_the_step_and_what_a_layer_notes_is_taken(tmp_path):
    by_step = set_in_the_model("p", lambda engine: 0.5 / (1 + engine.steps_taken))
    assert train(make(tmp_path / "step", network(0.5)), losses=by_step).finished
    model = network()
    model[2] = Noting(0.0)
    assert train(make(tmp_path / "notes", model)).finished


class Titled(Dataset[Any]):
    """Rows with words: what the loop makes of these is as long as the longest."""

    def __len__(self) -> int:
        return NUM_EXAMPLES

    def __getitem__(self, number: int) -> tuple[str, Tensor, int]:
        return "a" * (1 + number % 31), TASK.train[number][0], number % 3


def tokenised(engine: Any, batch: Any, dtype: torch.dtype) -> Tensor:
    words, x, labels = batch
    longest = max(map(len, words))
    letters = torch.tensor([[1.0] * len(word) + [0.0] * (longest - len(word)) for word in words])
    lengths = torch.full((len(words),), longest)
    return cross_entropy(engine.model(x, letters, lengths.to(dtype)), labels, reduction="none")


class Lengths(nn.Module):
    """A model that is told how long its rows are with their padding."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.letter = network(), nn.Linear(1, 3)

    def forward(self, x: Tensor, letters: Tensor, longest: Tensor) -> Tensor:
        within = letters * (torch.arange(letters.shape[1]) < longest[:, None])
        return self.inner(x) + (self.letter(letters[:, :, None]) * within[:, :, None]).sum(1)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_lengths_of_padded_rows_that_the_loop_has_made_may_enter_the_model(tmp_path, dtype):
    engine = make(tmp_path, Lengths(), dataset=Titled(), data_name="words", steps=12)
    assert train(engine, losses=partial(tokenised, dtype=dtype)).finished
