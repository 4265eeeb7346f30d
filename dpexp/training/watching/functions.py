"""Whether losses that a person's own code computes depend on their own example alone.

The engine proves that of the model. What stands behind the model's outputs it cannot repeat: a weight of each class that is
counted in the batch, or a norm over the batch under ``no_grad``, changes losses and shows no gradient. Who computes them can be
asked again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from dpexp.clipping.independence.batches import Arrangement
from dpexp.clipping.independence.look import Look
from dpexp.clipping.independence.padding import ROW_NUMBERS
from dpexp.clipping.independence.replay import Replay
from dpexp.clipping.survey.layouts import due
from dpexp.clipping.tapping.forwards import tensors_in
from dpexp.errors import UserError
from dpexp.tasks.base import Task
from dpexp.training.watching.collating import refuse_company, refuse_mixing
from dpexp.training.watching.reading import numbers_of, refuse_other_rows

# examples that are looked at
EXAMPLES = 8

READS = (
    "{name}.collate, augmented or losses read other rows of the training data than those of their batch, from {name}.train (a "
    "partner of mixup, negatives, a mean over all): an example would then move what others give, too. Make each row of its own "
    "example alone, or of public data"
)

Losses = Callable[[Any, Any], Tensor]


def look_at_losses(
    losses: Losses,
    model: nn.Module,
    batch: Any,
    name: str,
    padding: bool,
    shared: dict[str, str] | None = None,
) -> str | None:
    """Compute losses again, without gradients and without chance, on other batches of the same rows.

    Args:
        losses: ``(model, batch) -> [b]``.
        model: with or without a clipper.
        batch: on the model's device; its tensors begin with the batch.
        name: of the function, for a refusal.
        padding: whether to compute them with more padding too, where the batch says what that is.
        shared: is told, under this name, what the examples share of chance, in words, if they do.

    Returns:
        Why nothing could be compared, in words; None where it could.

    Raises:
        UserError: what an example loses depends on the others of its batch.
    """
    tensors = [t for t in tensors_in(batch) if t.dim()]
    count = len(tensors[0]) if tensors else 0
    if count < 2:
        return f"{name} was not looked at: fewer than two examples"
    replay = Replay(_AsModule(losses, model), (batch,), {})
    look = Look(replay, Arrangement(count))
    try:
        look.run(padding)
    except UserError as error:
        raise UserError(f"{name}: {error}") from None
    if shared is not None and look.shared:
        shared[name] = f"{look.shared} in {name}"
    return None if look.compared else f"{name} was not looked at: {look.failure}"


def look_at_task(
    task: Task,
    model: nn.Module,
    seed: int,
    steps: int = 1,
    by_user: bool = False,
    shared: dict[str, str] | None = None,
) -> str | None:
    """Look at the batch, the augmentation and the losses of some examples; see `refuse_mixing` and `look_at_losses`.

    They are public where the dev set has two; else the first of the training set, of which nothing is told but that they mix.

    Args:
        task: whose examples they are.
        model: on the device where it trains.
        seed: public, of the augmentation.
        steps: of the training. An augmentation may begin late: it is looked at in the first step, the last one, and now
            and then.
        by_user: users are protected, and rows of one may meet in an example: which these are is not looked at then.
        shared: see `look_at_losses`.
    """
    if not by_user:
        refuse_other_rows(task.train)
    changing = type(task).augmented is not Task.augmented
    name = f"{type(task).__name__}.{'augmented, or its losses' if changing else 'losses'}"
    looked_at = dict.fromkeys([0, *filter(due, range(steps)), max(0, steps - 1)] if changing else [0])
    source = task.dev if len(task.dev) > 1 else task.train
    count = min(EXAMPLES, len(source))
    if count < 2:
        return f"{name} was not looked at: fewer than two examples"
    rows = [source[i] for i in range(count)]
    with _reading_own_rows(task, count):
        return _look_at_rows(task, model, rows, seed, list(looked_at), name, shared)


def _look_at_rows(
    task: Task,
    model: nn.Module,
    rows: list[Any],
    seed: int,
    steps: list[int],
    name: str,
    shared: dict[str, str] | None,
) -> str | None:
    """Look at these examples, augmented as in these steps."""
    count = len(rows)
    refuse_mixing(task.collate, rows)
    refuse_company(task.collate, rows, shared=shared)
    here = next(model.parameters()).device
    collated: Any = task.collate(rows)
    if not isinstance(collated, Mapping):
        raise UserError(
            f"{type(task).__name__}.collate makes a {type(collated).__name__} of a list of examples: make a dictionary of tensors"
        )
    batch = {k: v.to(here) if isinstance(v, Tensor) else v for k, v in collated.items()}
    # the numbers of the examples, by which an augmentation may go, move with their rows
    batch[ROW_NUMBERS] = torch.arange(count, device=here)
    for step in steps:
        losses = partial(_augmented_losses, task, seed, step)
        note = look_at_losses(losses, model, batch, name, padding=task.pad_to is None, shared=shared)
        if note is not None:
            return note
    return None


@contextmanager
def _reading_own_rows(task: Task, count: int) -> Iterator[None]:
    """Let a task read the first ``count`` of its training rows, whose numbers the examples at hand have.

    Raises:
        UserError: it has read others.
    """
    rows = task.train
    # a subclass may have made a data set of torch's
    readable: tuple[type, ...] = (Sequence, Dataset)
    if not isinstance(rows, readable) or "train" not in vars(task):
        yield
        return
    noting = _Noting(rows, count)
    task.train = noting
    try:
        yield
    finally:
        task.train = rows
    if noting.others:
        raise UserError(READS.format(name=type(task).__name__))


class _Noting(Sequence[Any]):
    """Rows, and whether others than the first ones were read."""

    def __init__(self, rows: Any, count: int) -> None:
        self._rows, self.others = rows, False
        # and what has no number, as a column
        self._allowed = {*range(count), None}

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Any]:
        # not to the first number that is none of theirs, which many data sets do not tell
        return (self[i] for i in range(len(self)))

    def __getitem__(self, i: Any) -> Any:
        found = self._rows[i]
        self.others |= not numbers_of(i, len(self)) <= self._allowed
        return found

    def __getattr__(self, name: str) -> Any:
        if name == "_rows":
            # of a copy that is not made yet
            raise AttributeError(name)
        return getattr(self._rows, name)


def _augmented_losses(task: Task, seed: int, step: int, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """What training makes of a collated batch, with its `ROW_NUMBERS`."""
    rows = {name: part for name, part in batch.items() if name != ROW_NUMBERS}
    return task.losses(model, task.augmented(rows, batch[ROW_NUMBERS].cpu().numpy(), seed, step))


class _AsModule(nn.Module):
    """Losses as a module, whose forward can be run again."""

    def __init__(self, losses: Losses, model: nn.Module):
        super().__init__()
        self.model = model
        # named as what a replay leaves alone: behind it may stand a whole data set
        self._dpexp_losses = losses

    def forward(self, batch: Any) -> Tensor:
        return self._dpexp_losses(self.model, batch)
