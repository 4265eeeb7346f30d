"""Losses may not be divided or scaled by what follows from how many examples were drawn, or from the tokens of their batch."""

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpexp import PrivacyEngine
from dpexp.errors import UserError
from tests.training.mixing_tasks import own_loop
from tests.training.tiny import TinyTask, tiny_model


class Counted(TinyTask):
    """As many as there are: whoever joins makes the others weigh less."""

    def losses(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        found = super().losses(model, batch)
        return found / len(found)


class Texts(TinyTask):
    """As many tokens as their length says; the others of a row are padding, and so is a token of losses there."""

    def __init__(self, weigh: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weigh = weigh
        self.train = [(x, y, 1 + i % 10) for i, (x, y) in enumerate(self.train)]

    def collate(self, examples: list[Any]) -> dict[str, Tensor]:
        lengths = torch.tensor([length for _, _, length in examples])
        real = torch.arange(int(lengths.max())) < lengths[:, None]
        return super().collate([(x, y) for x, y, _ in examples]) | {"real": real}

    def losses(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        tokens = super().losses(model, batch)[:, None] * batch["real"]
        return self.weigh(tokens, batch["real"])


def test_losses_are_not_divided_by_how_many_were_drawn(tmp_path) -> None:
    with pytest.raises(UserError, match="scales losses by a number that goes by their batch"):
        own_loop(tmp_path, Counted(), tiny_model())


BY_ITS_SIZE = {
    "a tensor": lambda found: found / torch.tensor(float(len(found))),
    "of its kind": lambda found: found / found.new_tensor(len(found)),
    "in front": lambda found: torch.tensor(1 / len(found)) * found,
    "16 bits": lambda found: found * torch.tensor(1 / len(found), dtype=torch.bfloat16),
    "one for each": lambda found: found / torch.full_like(found, len(found)),
    "anew for each": lambda found: found / torch.full((len(found),), len(found)),
    "ones": lambda found: found / torch.ones_like(found).sum(),
    "shape": lambda found: found / torch.tensor(found.shape).prod(),
}


@pytest.mark.parametrize("scale", BY_ITS_SIZE.values(), ids=BY_ITS_SIZE)
def test_losses_are_not_divided_by_a_tensor_of_how_many_were_drawn(tmp_path, scale) -> None:
    class Scaled(TinyTask):
        def losses(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            return scale(super().losses(model, batch))

    with pytest.raises(UserError, match="scales losses by a number that goes by their batch"):
        own_loop(tmp_path, Scaled(), tiny_model())


def scaled_loop(folder: Path, scale: Callable[[Tensor, int], Tensor]) -> PrivacyEngine:
    """Of one physical batch for each step: what differs within a step is seen by it."""

    class Scaled(TinyTask):
        calls = 0

        def losses(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            self.calls += 1
            return scale(super().losses(model, batch), self.calls)

    return own_loop(folder, Scaled(), tiny_model(), steps=16, size=64)


BY_A_FUNCTION_OF_ITS_SIZE: dict[str, Callable[[Tensor, int], Tensor]] = {
    "the expected size": lambda found, step: found * (20 / len(found)),
    "a root": lambda found, step: found / math.sqrt(len(found)),
    "a root of a tensor": lambda found, step: found / torch.tensor(float(len(found))).sqrt(),
    "a logarithm, annealed": lambda found, step: 0.5 * found / math.log(1 + len(found)),
}
BY_THE_STEP: dict[str, Callable[[Tensor, int], Tensor]] = {
    "annealed": lambda found, step: found * 0.9**step,
    "a cycle": lambda found, step: found * (1 + step % 3),
    "drawn": lambda found, step: found * random.Random(step).random(),
    "a constant": lambda found, step: found * 20.0,
    "a log beside it": lambda found, step: (found.detach() / math.sqrt(len(found)), found)[1],
}


@pytest.mark.parametrize("scale", BY_A_FUNCTION_OF_ITS_SIZE.values(), ids=BY_A_FUNCTION_OF_ITS_SIZE)
def test_losses_are_not_scaled_by_what_follows_from_how_many_were_drawn(tmp_path, scale) -> None:
    with pytest.raises(UserError, match="scales losses by a number that goes by their batch"):
        scaled_loop(tmp_path, scale)


@pytest.mark.parametrize("scale", BY_THE_STEP.values(), ids=BY_THE_STEP)
def test_losses_may_be_scaled_by_what_follows_from_the_step(tmp_path, scale) -> None:
    assert scaled_loop(tmp_path, scale).finished


BY_ITSELF = {
    "its own tokens": lambda tokens, real: tokens.sum(1) / real.sum(1),
    "a public number": lambda tokens, real: tokens.sum(1) / 10,
    "counted for a log": lambda tokens, real: (
        tokens.sum(1),
        tokens.mean() / int(real.sum()),
        tokens.mean(1),
    )[0],
}


def test_losses_are_not_divided_by_what_a_collate_function_has_counted(tmp_path) -> None:
    class Tokens(Texts):
        def collate(self, examples: list[Any]) -> dict[str, Tensor]:
            batch = super().collate(examples)
            return batch | {"tokens": batch["real"].sum()}

        def losses(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            return super().losses(model, batch) / batch["tokens"]

    with pytest.raises(UserError, match="scales losses by a number that goes by their batch"):
        own_loop(tmp_path, Tokens(BY_ITSELF["its own tokens"]), tiny_model())


def test_losses_may_be_divided_by_constants_and_by_lengths_that_are_alike(tmp_path) -> None:
    class Alike(TinyTask):
        lengths = iter((4, 4, 5, 5, 6, 6, 7, 7))

        def losses(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            length = next(self.lengths)
            tokens = super().losses(model, batch)[:, None].expand(-1, length)
            # as of a tokenizer that the loop calls, of texts that are sorted by length
            own = torch.tensor([float(length)] * len(tokens))
            return tokens.sum(1) / own / torch.tensor(9.0) * torch.full((len(own),), 0.1)

    assert own_loop(tmp_path, Alike(), tiny_model()).finished


def test_a_number_that_is_drawn_for_a_batch_may_be_its_size_by_chance(tmp_path) -> None:
    class Timestep(TinyTask):
        calls = 0

        def losses(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            self.calls += 1
            found = super().losses(model, batch)
            return found * (100 + self.calls if self.calls < 5 else len(found)) / 1000

    # in a physical batch for each sample: what is drawn for one of several is refused
    assert own_loop(tmp_path, Timestep(), tiny_model(), steps=8, size=len(TinyTask().train)).finished


BY_THE_BATCH = {
    "a mean over padded rows": lambda tokens, real: tokens.mean(1),
    "padded rows, flattened": lambda tokens, real: tokens.unflatten(1, (-1, 1)).flatten(1).mean(-1),
    "a mean over shifted rows": lambda tokens, real: tokens[:, 1:].mean(1),
    "how long shifted rows are padded": lambda tokens, real: tokens[:, 1:].sum(1) / (real.shape[1] - 1),
    "how long rows are padded": lambda tokens, real: tokens.sum(1) / real.shape[1],
    "a share of how long rows are padded": lambda tokens, real: tokens.sum(1) * (real.sum(1) / real.shape[1]),
    "its tokens, counted": lambda tokens, real: tokens.sum(1) / int(real.sum()),
    "its tokens, as item": lambda tokens, real: tokens.sum(1) * (1 / real.sum().item()),
    "the longest": lambda tokens, real: tokens.sum(1) / float(real.sum(1).max()),
}


@pytest.mark.parametrize("weigh", BY_THE_BATCH.values(), ids=BY_THE_BATCH)
def test_losses_do_not_go_by_padding_nor_by_the_tokens_of_their_batch(tmp_path, weigh) -> None:
    with pytest.raises(UserError, match="scales losses by a number that goes by their batch"):
        own_loop(tmp_path, Texts(weigh), tiny_model())


@pytest.mark.parametrize("weigh", BY_ITSELF.values(), ids=BY_ITSELF)
def test_losses_may_go_by_their_own_tokens(tmp_path, weigh) -> None:
    assert own_loop(tmp_path, Texts(weigh), tiny_model()).finished
