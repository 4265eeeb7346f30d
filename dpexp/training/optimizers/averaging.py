"""Averages of the weights over the steps: exponential, as De et al. 2022 (section 4.3) evaluate them, or of all steps alike, as
the last line of Algorithm 1 of He et al. 2023 allows.

An average of released weights is post-processing: it costs no privacy.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from dpexp.errors import UserError


def decay_at(step: int, decay: float) -> float:
    """The weight of the past when the result of step `step` (0-based) joins it: min(decay, (1 + t)/(10 + t)).

    At the beginning less than `decay`, so that the initial weights are soon forgotten.
    """
    return min(decay, (1 + step) / (10 + step))


class Averages:
    """Averages of tensors that an optimiser moves.

    Args:
        tensors: on their device; the averages begin as copies of them.
        decay: of an exponential average, in [0, 1); None: the mean (1/t)·Σ θ_s of the results of all steps s = 1 … t.
    """

    def __init__(self, tensors: Sequence[Tensor], decay: float | None):
        self.tensors, self.decay = list(tensors), decay
        self.values = [tensor.detach().clone() for tensor in self.tensors]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """The tensors after step `step` (0-based) join the averages."""
        share = 1 / (step + 1) if self.decay is None else 1 - decay_at(step, self.decay)
        torch._foreach_lerp_(self.values, [tensor.detach() for tensor in self.tensors], share)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the tensors hold their averages; afterwards what they held before, to the last bit."""
        before = [tensor.detach().clone() for tensor in self.tensors]
        self.apply()
        try:
            yield
        finally:
            self._write(before)

    def apply(self) -> None:
        """Leave the averages in the tensors: the end of training."""
        self._write(self.values)

    def state_dict(self) -> list[Tensor]:
        """For a checkpoint."""
        return self.values

    def load_state_dict(self, values: Sequence[Tensor]) -> None:
        """Write a `state_dict` back in place.

        Raises:
            UserError: it is not that of these tensors.
        """
        if [value.shape for value in values] != [value.shape for value in self.values]:
            raise UserError(
                "the checkpoint's averages do not fit the model: start again with another seed, or delete the "
                "run's folder"
            )
        for mine, value in zip(self.values, values, strict=True):
            mine.copy_(value)

    @torch.no_grad()
    def _write(self, values: Sequence[Tensor]) -> None:
        for tensor, value in zip(self.tensors, values, strict=True):
            tensor.detach().copy_(value)
