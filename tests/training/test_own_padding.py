"""Losses and inputs of words may not go by the padding that the longest text of a batch has brought."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from dpexp import PrivacyEngine
from dpexp.errors import UserError


class Words(nn.Module):
    """Scores of each word, ``[B, T, 3]``."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.scores = nn.Embedding(20, 4), nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.scores(self.table(ids).tanh())


def of_words(
    folder: Path, losses: Callable[[Tensor, Tensor, Tensor], Tensor], longest: int = 0, left: bool = False
) -> PrivacyEngine:
    """Train on texts of 2 to 7 words, padded by 0 to the longest of a batch, or to one length for all."""
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(1, 20, (2 + i % 6,), generator=generator) for i in range(60)]

    def collate(examples: list[Tensor]) -> Tensor:
        length = longest or max(map(len, examples))
        more = [length - len(ids) for ids in examples]
        return torch.stack(
            [
                nn.functional.pad(ids, (m, 0) if left else (0, m))
                for ids, m in zip(examples, more, strict=True)
            ]
        )

    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = Words()
    engine = PrivacyEngine(
        model, torch.optim.SGD(model.parameters(), lr=0.1), texts, folder=folder, batch_size=20, steps=4,
        noise_multiplier=1.0, delta=1e-3, clip_norm=1.0, noise_seed=3,
    )  # fmt: skip
    for ids in engine.batches(collate, physical_batch_size=3):
        engine.step(losses(model(ids), ids, ids > 0))
    return engine


FEELING_PADDING = {
    "an answer anywhere": lambda scores, ids, real: nn.functional.cross_entropy(
        scores[..., 0], ids[:, 0] % 2, reduction="none"
    ),
    "the largest": lambda scores, ids, real: scores.amax(1).square().sum(1),
    "the last one": lambda scores, ids, real: scores[:, -1].square().sum(1),
    "losses of padding": lambda scores, ids, real: (
        nn.functional.cross_entropy(scores.transpose(1, 2), ids % 3, reduction="none").sum(1) / real.sum(1)
    ),
}
LEAVING_IT_OUT = {
    "an answer in the text": lambda scores, ids, real: nn.functional.cross_entropy(
        scores[..., 0].masked_fill(~real, -torch.inf), ids[:, 0] % 2, reduction="none"
    ),
    "the largest of its own": lambda scores, ids, real: (
        scores.masked_fill(~real[..., None], -torch.inf).amax(1).square().sum(1)
    ),
    "its last one": lambda scores, ids, real: scores[torch.arange(len(ids)), real.sum(1) - 1].square().sum(1),
    "losses of its own": lambda scores, ids, real: (
        nn.functional.cross_entropy(
            scores.transpose(1, 2), (ids % 3).masked_fill(~real, -100), reduction="none"
        ).sum(1)
        / real.sum(1)
    ),
    # as many classes as some batches have columns
    "classes": lambda scores, ids, real: nn.functional.cross_entropy(
        (scores * real[..., None]).sum(1), ids[:, 0] % 3, reduction="none"
    ),
}


@pytest.mark.parametrize("losses", FEELING_PADDING.values(), ids=FEELING_PADDING)
def test_losses_do_not_go_by_what_the_model_returns_for_padding(tmp_path, losses) -> None:
    with pytest.raises(UserError, match="go by padding"):
        of_words(tmp_path / "own", losses)
    assert of_words(tmp_path / "padded alike", losses, longest=7).finished
    if losses is FEELING_PADDING["the last one"]:
        assert of_words(tmp_path / "padded in front", losses, left=True).finished
    else:
        with pytest.raises(UserError, match="go by padding"):
            of_words(tmp_path / "padded in front", losses, left=True)


@pytest.mark.parametrize("losses", LEAVING_IT_OUT.values(), ids=LEAVING_IT_OUT)
def test_losses_of_what_stands_within_a_row_pass(tmp_path, losses) -> None:
    assert of_words(tmp_path, losses).finished


def of_rows_made_of_words(folder, made):
    """A loop that makes one row of features of each text, and gives that to the model."""
    draw = torch.Generator().manual_seed(2)
    texts = [torch.randint(1, 20, (length,), generator=draw) for length in [2, 5, 3, 4, 6, 2, 7, 3, 4, 5] * 8]
    table = torch.randn(20, 4, generator=draw)
    model = nn.Linear(4, 3)

    def collate(examples):
        return nn.utils.rnn.pad_sequence(examples, batch_first=True)

    engine = PrivacyEngine(
        model, torch.optim.SGD(model.parameters(), lr=0.1), texts, folder=folder, batch_size=20, steps=4,
        noise_multiplier=1.0, delta=1e-3, clip_norm=1.0, noise_seed=3,
    )  # fmt: skip
    for ids in engine.batches(collate, physical_batch_size=3):
        engine.step(model(made(table, ids, ids > 0)).square().sum(1))
    return engine


MADE_OF_PADDING = {
    "read from its end": lambda table, ids, real: table[ids.flip(1)[:, 0]],
    "the last one": lambda table, ids, real: table[ids[:, -1]],
    "the largest": lambda table, ids, real: table[ids].amax(1),
    "moved by one": lambda table, ids, real: table[ids.roll(1, 1)[:, 0]],
}
MADE_OF_WORDS = {
    "a mean of its own": lambda table, ids, real: (
        (table[ids] * real[..., None]).sum(1) / real.sum(1, keepdim=True)
    ),
    "the largest of its own": lambda table, ids, real: (
        table[ids].masked_fill(~real[..., None], -torch.inf).amax(1)
    ),
    "how many": lambda table, ids, real: real.sum(1, keepdim=True).expand(-1, 4) / 10.0,
    "its last one": lambda table, ids, real: table[ids[torch.arange(len(ids)), real.sum(1) - 1]],
}


@pytest.mark.parametrize("made", MADE_OF_PADDING.values(), ids=MADE_OF_PADDING)
def test_what_a_loop_makes_of_padding_does_not_enter_the_model(tmp_path, made) -> None:
    with pytest.raises(UserError, match="go by padding"):
        of_rows_made_of_words(tmp_path, made)


@pytest.mark.parametrize("made", MADE_OF_WORDS.values(), ids=MADE_OF_WORDS)
def test_what_a_loop_makes_of_words_alone_enters_the_model(tmp_path, made) -> None:
    assert of_rows_made_of_words(tmp_path, made).finished
