"""A model, a batch and its losses: one question that a clipping library is asked."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

Batch = dict[str, Tensor]
LossFn = Callable[[nn.Module, Batch], Tensor]
B = 4
"""Examples in a batch; other sizes of a case differ from it, so that a layout guessed from shapes is seen."""


@dataclass
class Case:
    """One question.

    Attributes:
        model: on the CPU, in training mode, without randomness.
        batch: every tensor has the examples along ``batch_dim``. Its last example is unlike the others where it can be, so
            that statistics over the batch show.
        losses: (model, batch) -> ``[B]`` losses.
        then: batches of later steps; the first batch is always given twice.
        pieces: physical batches that a batch is cut into.
        batch_dim: where the examples stand in every tensor.
        trim: what a data loader makes of a batch some of whose rows are gone: it pads to the longest that is left.
        tolerance: of the error, in units of C: 1e-5, or more where a case's own precision is coarse.
        slack: of the sensitivity, in units of C: 1e-5, or more for the same reason.
        clip_norm: C, in units of the median norm of an example's gradient.
        left_out: examples to leave out one at a time; none means each of them.
        parts: words of a refusal that name the part in question where no module or parameter is to blame.
    """

    model: nn.Module
    batch: Batch
    losses: LossFn
    then: Sequence[Batch] = ()
    pieces: int = 1
    batch_dim: int = 0
    trim: Callable[[Batch], Batch] = field(default=lambda batch: batch)
    tolerance: float = 1e-5
    slack: float = 1e-5
    clip_norm: float = 0.9
    left_out: tuple[int, ...] = ()
    parts: tuple[str, ...] = ()

    def size(self, batch: Batch) -> int:
        """How many examples a batch has."""
        return next(iter(batch.values())).shape[self.batch_dim]

    def pick(self, batch: Batch, rows: Sequence[int]) -> Batch:
        """The batch that a data loader makes of some of a batch's examples."""
        index = torch.tensor(list(rows), dtype=torch.long)
        picked = {name: value.index_select(self.batch_dim, index) for name, value in batch.items()}
        return self.trim(picked) if rows else picked

    def without(self, batch: Batch, i: int) -> Batch:
        """The neighbour of a batch: example i is left out."""
        return self.pick(batch, [j for j in range(self.size(batch)) if j != i])

    def cut(self, batch: Batch) -> list[Batch]:
        """The batch in physical batches."""
        size = self.size(batch)
        if self.pieces == 1 or size < self.pieces:
            return [batch]
        share = -(-size // self.pieces)
        return [self.pick(batch, range(at, min(at + share, size))) for at in range(0, size, share)]

    def fresh_model(self) -> nn.Module:
        """A copy that nothing was done to."""
        return copy.deepcopy(self.model)


Builder = Callable[[], Case]


def seeded(name: str, build: Builder, dtype: torch.dtype | None = torch.float64) -> Case:
    """Build a case so that its name alone decides its random numbers.

    Args:
        dtype: what weights and features are converted to; None leaves them as they are.
    """
    torch.manual_seed(zlib.crc32(name.encode()))
    case = build()
    if dtype is not None:
        case.model.to(dtype)
        case.batch = converted(case.batch, dtype)
        case.then = [converted(batch, dtype) for batch in case.then]
    case.model.train()
    return case


def converted(batch: Batch, dtype: torch.dtype) -> Batch:
    """The batch with features of another precision; indices and masks stay."""
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in batch.items()}


def plain_sum_of_squares(model: nn.Module, batch: Batch) -> Tensor:
    """``[B]``: how far the model's output is from 0.3, for models of one tensor."""
    output = model(*batch.values())
    return (output - 0.3).pow(2).flatten(1).sum(1)
