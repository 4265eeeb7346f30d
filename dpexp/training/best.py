"""The weights that were best on the public dev set, in the place of the last ones (`optim.keep_best_every`).

The code of Li et al. keeps these for classification (private-transformers, classification/src/trainer.py:592, every 10 steps);
the papers' text speaks of no such choice.

What it costs: nothing, where dev is public. All T steps are charged, the weights of each are released, and which of them is kept
is decided by public data: post-processing. On a dev set that is private it would be a release of its own, which no noise covers.
The kept score is the largest of several, and so a little optimistic on the set that chose it.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dpexp.errors import UserError


class Best:
    """The best weights so far; of equal scores the first.

    Args:
        tensors: what is evaluated, on its device; copied when it is best.
        metric: larger is better. Where an evaluation does not have it (generated text is measured at the end alone), the
            smallest `loss` counts.
    """

    def __init__(self, tensors: Sequence[Tensor], metric: str):
        self.tensors, self.metric = list(tensors), metric
        self.step, self.score = 0, -math.inf
        self.kept: list[Tensor] = []

    def offer(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep the weights after `step` steps where they score better than all before.

        Raises:
            UserError: the task measured neither its metric nor a loss.
        """
        if self.metric not in metrics and "loss" not in metrics:
            raise UserError(
                "optim.keep_best_every chooses by the dev set, and this task has none: set it to 0"
            )
        score = metrics.get(self.metric, -metrics.get("loss", math.nan))
        if score > self.score:
            self.step, self.score = step, score
            self.kept = [tensor.detach().clone() for tensor in self.tensors]

    @torch.no_grad()
    def put_back(self) -> None:
        """Write the kept weights into the tensors: the end of training."""
        for tensor, kept in zip(self.tensors, self.kept, strict=False):
            tensor.detach().copy_(kept)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"step": self.step, "score": self.score, "kept": self.kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`.

        Raises:
            UserError: it is not that of these tensors.
        """
        if state["kept"] and [t.shape for t in state["kept"]] != [t.shape for t in self.tensors]:
            raise UserError(
                "the checkpoint's best weights do not fit the model: start again with another seed, or delete the run's folder"
            )
        self.step, self.score = state["step"], state["score"]
        self.kept = [
            kept.to(tensor.device) for kept, tensor in zip(state["kept"], self.tensors, strict=False)
        ]
