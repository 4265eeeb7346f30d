"""Gradient canaries: the strongest example that clipping lets through, and one who watches every noisy sum.

A canary's gradient is as long as clipping allows and points where no other example's does, so that its coordinate of a noisy
sum is C (in the batch) or 0 (not), plus the noise. To be clipped, summed, noised and charged as everything else is, it comes
from a real parameter of the model under test: a table with one number for each canary, which the loss of canary k takes the
k-th of, times a large constant. The other examples, and the rest of the model, have nothing to do with the table.

Who sees x_t = (sum's coordinate)/C of step t knows for each step how much likelier "in" is than "out" (Poisson batches of rate
q, noise multiplier σ): log(1 - q + q·exp((x_t - 1/2)/σ²)). The sum over steps is the score, the best there is; its distribution
is what the accountants bound, which is why this attack comes close to ε where one on the last model's losses stays far below.
With individual budgets a canary of group g is drawn at rate q_g and is s_g·C long: log(1 - q_g + q_g·exp(s_g·(x_t - s_g/2)/σ²)).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from dpexp.auditing.canaries import Planted
from dpexp.tasks.base import Task

LENGTH = 1e3
"""Of a canary's gradient before clipping, in units of the clipping norm."""


class Marked(NamedTuple):
    """An example that is canary `number`; its own loss counts for nothing."""

    example: Any
    number: int


class WithCanaryTable(nn.Module):
    """A model, and a table with one number for each canary.

    Args:
        base: the model.
        canaries: m.
    """

    def __init__(self, base: nn.Module, canaries: int):
        super().__init__()
        self.base = base
        # the first row is nobody's
        self.canary_table = nn.Embedding(canaries + 1, 1)
        nn.init.zeros_(self.canary_table.weight)

    def forward(
        self,
        losses: Callable[[nn.Module, Mapping[str, Tensor]], Tensor],
        batch: Mapping[str, Tensor],
        numbers: Tensor,
        length: float,
    ) -> Tensor:
        """`[B]` losses: those of the model, or of a canary its number in the table times `length`."""
        own = losses(self.base, batch)
        planted = length * self.canary_table(numbers)[:, 0].to(own.dtype)
        return torch.where(numbers > 0, planted, own)


class WithGradientCanaries(Planted):
    """A task some of whose examples are gradient canaries, for a `WithCanaryTable` model.

    Args:
        task: as the configuration made it.
        slots: `[m]`, where the canaries stand, in the order of their numbers 1, …, m.
        clip_norm: C.
    """

    def __init__(self, task: Task, slots: npt.NDArray[np.int64], clip_norm: float):
        marked = {int(slot): Marked(task.train[int(slot)], k + 1) for k, slot in enumerate(slots)}
        super().__init__(task, marked, {})
        self.gradient_length = LENGTH * clip_norm

    def collate(self, examples: list[Any]) -> dict[str, Tensor]:
        numbers = [row.number if isinstance(row, Marked) else 0 for row in examples]
        batch = self.task.collate([row.example if isinstance(row, Marked) else row for row in examples])
        return batch | {"canary": torch.tensor(numbers, dtype=torch.long)}

    def losses(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        own = {name: value for name, value in batch.items() if name != "canary"}
        return model(self.task.losses, own, batch["canary"], self.gradient_length)

    def evaluate(self, model: nn.Module, *arguments: Any, **named: Any) -> dict[str, float]:
        return self.task.evaluate(model.base, *arguments, **named)  # type: ignore[arg-type]

    def evaluate_at_end(self, model: nn.Module, *arguments: Any, **named: Any) -> dict[str, float]:
        return self.task.evaluate_at_end(model.base, *arguments, **named)  # type: ignore[arg-type]


class Observer:
    """Sees the noisy sums of every step, and keeps one score for each canary.

    Args:
        canaries: m.
        rates: q of the sampling that is claimed, or `[m]`, that of each canary.
        lengths: in units of C, after clipping: s, or `[m]`.
    """

    def __init__(self, canaries: int, rates: npt.ArrayLike, lengths: npt.ArrayLike = 1.0):
        self.rates = np.broadcast_to(np.asarray(rates, np.float64), (canaries,))
        self.lengths = np.asarray(lengths, np.float64)
        self.scores = np.zeros(canaries)

    def see(self, noisy_sum: Tensor, threshold: float, std: float) -> None:
        """Take one step into account.

        Args:
            noisy_sum: `[m + 1, 1]`, of the table.
            threshold: C.
            std: claimed standard deviation of its noise.
        """
        x = noisy_sum.detach().double().cpu().numpy()[1:, 0] / threshold
        gain = self.lengths * (x - self.lengths / 2) * (threshold / std) ** 2
        # a rate of 1 leaves no "drawn although in": log(0), and the score is the gain
        with np.errstate(divide="ignore"):
            self.scores += np.logaddexp(np.log1p(-self.rates), np.log(self.rates) + gain)
