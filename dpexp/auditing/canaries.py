"""Canaries in the training data: what they are, where they stand, and what a model makes of them.

N is public: it fixes the sampling rate, the expected batch and δ. So canaries take the places ("slots") of examples drawn at
random, and nothing that the plan is made from changes. The slot of a canary whose coin says "out" stays empty: its number may be
drawn like any other, and then nothing is added to the sums. The training with a canary and the one without it thus differ by
one example that is there or not, in one and the same slot of N: adding or removing one example, which is the relation that the
accountants' ε speaks about. (Had an "out" slot held the example that was there before, this would audit the replacement of one
example, which ε does not bound.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from dpexp.errors import UserError
from dpexp.privacy.sampling import stream
from dpexp.tasks import classification, images, sequences
from dpexp.tasks.base import Task, WrappedTask
from dpexp.tasks.generation import Generation
from dpexp.tasks.target_loss import token_losses
from dpexp.training.batching import Sampler
from dpexp.training.evaluation import evaluating

CONTENTS = ("random", "mislabelled")
# canaries per forward pass
BATCH = 32
# words to draw from, and words of a secret (Li et al., App. M: 10, and 5 on average)
VOCABULARY, LENGTH = 10, 5
FIELDS = ("name", "Type", "area")


class Replaced(Sequence[Any]):
    """Examples, some of which are replaced."""

    def __init__(self, examples: Sequence[Any], replacements: Mapping[int, Any]) -> None:
        self.examples, self.replacements = examples, replacements

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, i: Any) -> Any:
        return self.replacements[i] if i in self.replacements else self.examples[i]


class Planted(WrappedTask):
    """A task with canaries in some of its training examples' slots, and otherwise the task that it was.

    Args:
        task: as the configuration made it.
        canaries: slot -> example, whatever the task's `collate` takes.
        lengths: slot -> length of the example, in the unit of `task.length`.
    """

    def __init__(self, task: Task, canaries: Mapping[int, Any], lengths: Mapping[int, int]) -> None:
        super().__init__(task)
        self.lengths, self.train = lengths, Replaced(task.train, canaries)

    def length(self, i: int) -> int:
        """Of the canary, where one stands."""
        return self.lengths[i] if i in self.lengths else self.task.length(i)


class Without:
    """A sampler whose draws of empty slots add nothing.

    Args:
        sampler: over all N slots.
        empty: `[n]` slots without an example.
    """

    def __init__(self, sampler: Sampler, empty: npt.NDArray[np.int64]) -> None:
        self.sampler, self.empty = sampler, empty
        self.rate_of = getattr(sampler, "rate_of", None)

    def draw(self, step: int, attempt: int = 0) -> npt.NDArray[np.int64]:
        """The indices of the draw at which there is an example."""
        drawn = self.sampler.draw(step, attempt)
        return drawn[~np.isin(drawn, self.empty)]


def choose_slots(num_examples: int, number: int, key: bytes) -> npt.NDArray[np.int64]:
    """`[number]` distinct slots, at random.

    Raises:
        UserError: more slots than examples.
    """
    if not 1 <= number <= num_examples:
        raise UserError(
            f"{number} canaries in {num_examples} training examples: give at least one, and at most as many as there are examples"
        )
    return _random(key, "audit slots").choice(num_examples, number, replace=False).astype(np.int64)


def flip_coins(number: int, key: bytes) -> npt.NDArray[np.bool_]:
    """`[number]` fair coins that only the holder of the run's secret key knows."""
    return _random(key, "audit coins").random(number) < 0.5


def make_canaries(
    task: Task, tokenizer: Any, slots: npt.NDArray[np.int64], content: str, key: bytes
) -> list[Any]:
    """A canary for every slot, each made by itself: it depends on the example that stood there and on chance.

    Args:
        task: text classification or infilling, image classification, or generation.
        tokenizer: of texts; special tokens stay where they are.
        content: ``random``: random tokens, or pixels, in the example's length, and a random label; of generation, a random target
            after the example's own prompt. ``mislabelled``: the example with another label.
        key: the run's secret.

    Raises:
        UserError: unknown content, one that the task has no meaning for, or another kind of task.
    """
    if content not in CONTENTS:
        raise UserError(f"content={content} is not a choice; choices: {', '.join(CONTENTS)}")
    rng, classes = _random(key, "audit canaries"), len(task.labels)
    first = task.train[int(slots[0])]
    if content == "mislabelled":
        if not isinstance(first, classification.Example | images.Example) or classes < 2:
            raise UserError(
                f"content=mislabelled needs classes, and task={task.name} has none: take content=random"
            )
        rows = [task.train[int(slot)] for slot in slots]
        return [row._replace(label=(row.label + int(rng.integers(1, classes))) % classes) for row in rows]
    if isinstance(first, images.Example):
        return [
            images.Example(
                rng.integers(0, 256, first.pixels.shape).astype(np.uint8), int(rng.integers(classes))
            )
            for _ in slots
        ]
    if not isinstance(first, classification.Example | sequences.Example):
        raise UserError(f"task={task.name}: there are no canaries for this kind of task")
    special = np.array(sorted(tokenizer.all_special_ids), np.int64)
    ordinary = np.setdiff1d(np.fromiter(tokenizer.get_vocab().values(), np.int64), special)

    def random_tokens(tokens: np.ndarray) -> np.ndarray:
        return np.where(np.isin(tokens, special), tokens, rng.choice(ordinary, len(tokens))).astype(np.int32)

    made: list[Any] = []
    for slot in slots:
        row = task.train[int(slot)]
        if isinstance(row, sequences.Example):
            made.append(row._replace(target=random_tokens(row.target)))
        else:
            made.append(row._replace(tokens=random_tokens(row.tokens), label=int(rng.integers(classes))))
    return made


@torch.no_grad()
def canary_losses(
    task: Task,
    model: nn.Module,
    examples: Sequence[Any],
    device: torch.device,
    of: Callable[[nn.Module, dict[str, Tensor]], Tensor] | None = None,
) -> npt.NDArray[np.float64]:
    """`[n]` losses in evaluation mode, float32 and without augmentation.

    Args:
        of: (model, batch) -> `[B]`; the task's losses by default.
    """
    found = [np.empty(0, np.float64)]
    with evaluating(model):
        for start in range(0, len(examples), BATCH):
            batch = task.collate(list(examples[start : start + BATCH]))
            batch = {name: tensor.to(device) for name, tensor in batch.items()}
            found.append((of or task.losses)(model, batch).double().cpu().numpy())
    return np.concatenate(found)


@dataclass(frozen=True)
class Secret:
    """A random text after a random prompt, in the form of E2E (Li et al., App. M).

    prompt: `[P]` int32.
    number: which of the V^l texts over `words` it is, in base V.
    words: `[V]` int32 tokens that texts are made of.
    repetitions: how many slots it is written to.
    ending: `[.]` int32 tokens behind it.
    """

    prompt: np.ndarray
    number: int
    words: np.ndarray
    repetitions: int
    ending: np.ndarray

    @property
    def space(self) -> int:
        """How many texts it could have been."""
        return len(self.words) ** LENGTH

    def text(self, number: int) -> np.ndarray:
        """`[LENGTH]` int32, the tokens of a text of the space."""
        digits = [number // len(self.words) ** place % len(self.words) for place in range(LENGTH)]
        return self.words[digits].astype(np.int32)

    @property
    def example(self) -> sequences.Example:
        """As it is trained on."""
        return sequences.Example(self.prompt, np.concatenate([self.text(self.number), self.ending]))

    def candidates(self, numbers: Sequence[int]) -> list[sequences.Example]:
        """Texts of the space after this secret's prompt, without an end token, for comparison by loss."""
        return [sequences.Example(self.prompt, self.text(number)) for number in numbers]


def make_secrets(task: Task, repetitions: Sequence[int], number: int, key: bytes) -> list[Secret]:
    """`number` secrets for each count of repetitions.

    One vocabulary of `VOCABULARY` words of one token each serves prompts and secrets, as in the paper.

    Raises:
        UserError: the task writes no text, the tokenizer has too few words, or a repetition below 1.
    """
    if not isinstance(task, Generation):
        raise UserError(
            f"method=exposure needs a task that writes text, and task={task.name} is none: take task=e2e"
        )
    if not repetitions or min(repetitions) < 1 or number < 1:
        raise UserError(f"repetitions={list(repetitions)}, secrets={number}: give counts of 1 or more")
    rng = _random(key, "audit secrets")
    words = _words(task.tokenizer, rng)
    ids, frame = np.array(list(words.values()), np.int32), task.train.frame
    made = []
    for count in repetitions:
        for _ in range(number):
            fields = [f"{field} : {rng.choice(list(words))}" for field in FIELDS]
            source = np.asarray(_plain(task.tokenizer, f" {' | '.join(fields)} "), np.int32)
            prompt = frame.prompt(source, min(LENGTH + len(frame.ending), frame.longest_target))
            made.append(Secret(prompt, int(rng.integers(len(ids) ** LENGTH)), ids, count, frame.ending))
    return made


def secret_losses(
    task: Task, model: nn.Module, secret: Secret, candidates: int, device: torch.device, key: bytes
) -> tuple[float, npt.NDArray[np.float64]]:
    """The secret's log-perplexity and those of `candidates` other texts of its space, drawn at random without repetition.

    Returns:
        In nats, summed over the words: a number and `[candidates]`.
    """
    others = _random(key, "audit candidates").choice(
        secret.space, min(candidates + 1, secret.space), replace=False
    )
    numbers = [secret.number, *(int(n) for n in others[others != secret.number][:candidates])]
    losses = canary_losses(
        task, model, secret.candidates(numbers), device, of=lambda net, batch: token_losses(net, batch).sum(1)
    )
    return float(losses[0]), losses[1:]


def _words(tokenizer: Any, rng: np.random.Generator) -> dict[str, int]:
    """Words that are one token each behind a blank, drawn at random."""
    words: dict[str, int] = {}
    for token in rng.permutation(np.array(sorted(tokenizer.get_vocab().values()))):
        word = str(tokenizer.decode([int(token)])).strip()
        if (
            word.isalpha()
            and len(word) > 2
            and word not in words
            and _plain(tokenizer, f" {word}") == [int(token)]
        ):
            words[word] = int(token)
        if len(words) == VOCABULARY:
            return words
    raise UserError(
        f"{type(tokenizer).__name__} has {len(words)} words of one token, and secrets need {VOCABULARY}: take another tokenizer"
    )


def _plain(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, return_attention_mask=False)["input_ids"]
    return ids


def _random(key: bytes, name: str) -> np.random.Generator:
    return np.random.default_rng(stream(key, name, 0))
