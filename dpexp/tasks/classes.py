"""Classification of anything: one label for each example, and how well it is told."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpexp.models.trainable import evaluation_mode
from dpexp.parallel.sharing import shared_out
from dpexp.tasks.base import Progress, Task, logits_of


class Classification(Task):
    """A task of examples with one label each; a subclass adds `collate`, whose batch holds ``labels``, and `logits`.

    metric, metric_name: of predicted and right classes, `[n]` each; what a record calls it.
    splits: "train", perhaps "dev" and more whose names begin so. Each has `labels` and `lengths`, `[rows]`.
    """

    metric: Callable[[np.ndarray, np.ndarray], float]
    metric_name: str
    splits: dict[str, Any]

    @abstractmethod
    def logits(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """`[rows, classes]` of a collated batch."""

    def losses(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Cross-entropy of each example, `[B]`, in float32 or better."""
        labels = batch["labels"]
        if len(labels) == 0:
            return torch.zeros(0, device=labels.device)
        return cross_entropy(logits_of(self.logits(model, batch), len(self.labels)), labels)

    def evaluate(
        self, model: nn.Module, device: torch.device, batch_size: int, progress: Progress | None = None
    ) -> dict[str, float]:
        """The metric and the mean loss on dev, and those of further dev sets with their names behind.

        Args:
            model: its mode is restored.
            device: where the model is.
            batch_size: examples per forward pass; examples of similar length go together.
            progress: called with (examples done, examples in all).
        """
        splits = {split: examples for split, examples in self.splits.items() if split.startswith("dev")}
        total = sum(map(len, splits.values()))
        metrics: dict[str, float] = {}
        done = 0
        with evaluation_mode(model):
            for split, examples in splits.items():
                predicted, losses = np.empty(len(examples), np.int64), np.empty(len(examples), np.float64)
                longest_first = np.argsort(-examples.lengths, kind="stable")
                batches = [longest_first[at : at + batch_size] for at in range(0, len(examples), batch_size)]

                def measure(chosen: np.ndarray, examples: Any = examples) -> tuple[np.ndarray, np.ndarray]:
                    return self._measure(model, device, [examples[i] for i in chosen])

                for chosen, measured in shared_out(batches, measure):
                    predicted[chosen], losses[chosen] = measured
                    done += len(chosen)
                    if progress is not None:
                        progress(done, total)
                suffix = split.removeprefix("dev")
                metrics[self.metric_name + suffix] = self.metric(predicted, examples.labels)
                metrics["loss" + suffix] = float(losses.mean())
        return metrics

    @torch.no_grad()
    def _measure(
        self, model: nn.Module, device: torch.device, examples: list[Any]
    ) -> tuple[np.ndarray, np.ndarray]:
        batch = {name: tensor.to(device) for name, tensor in self.collate(examples).items()}
        logits = self.logits(model, batch)
        return logits.argmax(-1).cpu().numpy(), cross_entropy(logits, batch["labels"]).cpu().numpy()


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """`[rows]`, in float32 or better."""
    at_least_float32 = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.to(at_least_float32), labels, reduction="none")
