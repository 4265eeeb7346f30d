"""Evaluation on the dev set, which is public by declaration: it never touches the ledger or the step's random state."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dpexp.errors import UserError
from dpexp.models.precision import autocast
from dpexp.models.trainable import evaluation_mode

if TYPE_CHECKING:
    from dpexp.tasks.base import Task


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """As `evaluation_mode`, without autograd."""
    with evaluation_mode(model), torch.inference_mode():
        yield


def evaluate(
    task: "Task",
    model: nn.Module,
    device: torch.device,
    batch_size: int,
    precision: str = "fp32",
    progress: Callable[..., Any] | None = None,
    *,
    final: bool = False,
    folder: Path | None = None,
) -> dict[str, float]:
    """The task's metrics on its dev set, in the precision of the training.

    Args:
        final: the run is over, and what takes long is worth its time: generated text, test sets.
        folder: where predictions are kept, at the end alone.
    """
    with evaluating(model), autocast(precision, device):
        if final:
            metrics = task.evaluate_at_end(model, device, batch_size, progress, folder)
        else:
            metrics = task.evaluate(model, device, batch_size, progress)
    try:
        return {name: float(value) for name, value in metrics.items()}
    except (AttributeError, TypeError, ValueError):
        raise UserError(
            f"what {type(task).__name__} measures must be a dictionary from names to numbers, and is {metrics!r}. The steps are "
            "taken and stay charged: with that mended the same command evaluates what they made"
        ) from None
