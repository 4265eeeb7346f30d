"""Whether each loss of a person's own task depends on its own example alone.

The engine proves that of the model. What stands behind the model's outputs it cannot repeat: a weight of each class that is
counted in the batch, or a norm over the batch under ``no_grad``, changes losses and shows no gradient. A task can be asked again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor, nn

from dpexp.clipping.independence.look import Look
from dpexp.clipping.independence.replay import Replay
from dpexp.errors import UserError

if TYPE_CHECKING:
    from dpexp.tasks.base import Task

# public examples that are looked at
EXAMPLES = 8


class TaskLosses(nn.Module):
    """A task's losses as a module, whose forward can be run again on other batches."""

    def __init__(self, task: Task, model: nn.Module):
        super().__init__()
        self.model = model
        # of the clipper's kind, which a replay leaves alone: the task holds the data
        self._dpexp_task = task

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        task = self._dpexp_task
        # as many as there are rows, where an example has several
        return task.losses(self.model, batch).repeat_interleave(task.rows_per_example)


def look_at_losses(task: Task, model: nn.Module, seed: int) -> str | None:
    """Compute the losses of public examples in batches of several kinds.

    Args:
        task: whose dev set has the examples.
        model: without a clipper, on the device where it trains.
        seed: public, of the augmentation.

    Returns:
        Why nothing could be compared, in words; None where it could.

    Raises:
        UserError: what an example loses depends on the others of its batch.
    """
    count = min(EXAMPLES, len(task.dev))
    if count < 2:
        return "the losses were not looked at: the task has fewer than two public examples"
    batch = task.augmented(task.collate([task.dev[i] for i in range(count)]), np.arange(count), seed, 0)
    here = next(model.parameters()).device
    placed = {name: part.to(here) if isinstance(part, Tensor) else part for name, part in batch.items()}
    look = Look(Replay(TaskLosses(task, model), (placed,), {}), count, task.rows_per_example, autocast=False)
    try:
        look.run(padding=False)
    except UserError as error:
        raise UserError(f"{type(task).__name__}.losses: {error}") from None
    return None if look.compared else f"the losses were not looked at: {look.failure}"
