"""From the indices of a logical batch to its sums: gradients in `p.grad`, counts, norms, loss. All of it is private."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from dpexp.clipping import Clipper, Report
from dpexp.clipping.thresholds import FixedThresholds
from dpexp.privacy.noise import seed_torch
from dpexp.privacy.sampling import stream
from dpexp.training import mechanism
from dpexp.training.batching import physical_batches
from dpexp.training.evaluation import autocast

if TYPE_CHECKING:
    from dpexp.tasks.base import Task

# static: a scale that reacted to an overflow would release, unnoised, that there was one
FP16_LOSS_SCALE = 2.0**10


@dataclass
class Sums:
    """What the physical batches of one step add up to besides `p.grad`, before any noise."""

    counts: Tensor  # [K] centred counts, float64
    norms: Tensor  # [K] sums of the norms, float64
    clipped: Tensor  # [K] how many examples were clipped, float64
    loss: Tensor  # sum of the losses
    drawn: int = 0
    every: list[Tensor] | None = None  # [K, b] norms of each physical batch, where they are asked for

    def add(self, losses: Tensor, report: Report | None, policy: FixedThresholds) -> None:
        """Add one physical batch."""
        self.drawn += len(losses)
        self.loss += losses.detach().sum().to(self.loss)
        if report is not None:
            self.counts += mechanism.centred_counts(report.norms, policy.estimates).to(self.counts)
            self.norms += report.norms.sum(1).to(self.norms)
            self.clipped += report.clipped.to(self.clipped)
            if self.every is not None:
                self.every.append(report.norms.detach().float().cpu())


class Accumulator:
    """Computes the sums of a step.

    Args:
        task: examples and losses.
        model: on `device`, in training mode.
        clipper: attached to the model; None for plain gradients.
        policy: thresholds to clip with, and estimates to count against.
        device: where the model is.
        precision: fp32, bf16 or fp16.
        seed: public; it decides augmentations, example by example.
        key: the run's secret; it decides dropout.
        clip_scales: `[N]`, the factor of each example's thresholds; None where it is 1 for all.
    """

    def __init__(
        self,
        task: "Task",
        model: nn.Module,
        clipper: Clipper | None,
        policy: FixedThresholds,
        device: torch.device,
        precision: str,
        seed: int,
        key: bytes,
        clip_scales: Tensor | None = None,
    ):
        self.clip_scales = clip_scales
        self.task, self.model, self.clipper, self.policy = task, model, clipper, policy
        self.device, self.precision, self.seed, self.key = device, precision, seed, key
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.loss_scale = FP16_LOSS_SCALE if precision == "fp16" else 1.0
        # of every example, for the next step; what is written of them is marked not private
        self.keep_norms = False

    @property
    def gradients(self) -> list[Tensor]:
        """The sums of gradients."""
        return [p.grad for p in self.parameters if p.grad is not None]

    def sums(
        self, indices: np.ndarray, step: int, attempt: int, size: int, stop: Callable[[], bool]
    ) -> Sums | None:
        """The sums over the examples `indices`; that of the gradients is left in `p.grad`.

        Args:
            indices: `[n]`, the logical batch of the step; n may be 0: a step like any other, with sums of zero.
            step: for dropout and augmentations.
            attempt: for dropout, as for the sample.
            size: examples per physical batch.
            stop: asked before every physical batch.

        Returns:
            None where `stop` said so; `p.grad` is then empty.

        Raises:
            torch.OutOfMemoryError: a physical batch is too large.
        """
        self._clear()
        num_groups = 0
        if self.clipper is not None:
            self.clipper.thresholds = self.policy.values
            num_groups = len(self.clipper.groups)
        counts, norms, clipped = torch.zeros(3, num_groups, dtype=torch.float64, device=self.device)
        sums = Sums(counts, norms, clipped, torch.zeros((), device=self.device))
        sums.every = [] if self.keep_norms else None
        pieces = physical_batches(indices, self.task.length, size)
        for number, piece in enumerate(pieces):
            if stop():
                self._clear()
                return None
            # Dropout draws by place in the batch, and one more example moves the places of the others. In public that would
            # let it move the sum by more than its own share; in secret all places are alike (docs/privacy.md). It depends
            # on key, step, attempt and piece alone, so that resuming needs no state.
            seed_torch(stream(self.key, f"dropout {number}", step, attempt))
            batch = self.on_device(self.task.collate([self.task.train[int(i)] for i in piece]))
            losses = self.losses(self.task.augmented(batch, piece, self.seed, step))
            scales = None if self.clip_scales is None else self.clip_scales[torch.from_numpy(piece)]
            sums.add(losses, self.backward(losses, scales), self.policy)
        if not pieces:
            empty = torch.zeros(0, device=self.device)
            sums.add(empty, self.backward(empty), self.policy)
        if self.clipper is None and self.loss_scale != 1.0:
            torch._foreach_div_(self.gradients, self.loss_scale)
        mechanism.all_reduce_sum_([*self.gradients, counts, norms, clipped, sums.loss])
        return sums

    def losses(self, batch: dict[str, Tensor]) -> Tensor:
        """`[B]` losses of a collated batch, in the precision of the run."""
        with autocast(self.precision, self.device):
            return self.task.losses(self.model, self.on_device(batch))

    def on_device(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The batch where the model is."""
        return {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.items()}

    def backward(self, losses: Tensor, clip_scales: Tensor | None = None) -> Report | None:
        """Add the sum of the gradients, clipped or plain, to `p.grad`.

        Plain gradients still carry the loss scale. ``clip_scales``: `[B]`, factors of the thresholds.
        """
        if self.clipper is not None:
            return self.clipper.backward(losses, clip_scales, loss_scale=self.loss_scale)
        if len(losses):
            (losses.sum() * self.loss_scale).backward()
        else:
            for parameter in self.parameters:
                parameter.grad = torch.zeros_like(parameter)
        return None

    def _clear(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
