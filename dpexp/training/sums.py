"""What the physical batches of a step add up to besides `p.grad`. All of it is private."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dpexp.clipping import Report
from dpexp.clipping.thresholds import FixedThresholds
from dpexp.parallel import Ranks
from dpexp.privacy.sensitivity import centred_counts, centred_norms


def not_finite(step: int) -> str:
    """Say that a step has met losses that are no numbers."""
    return (
        f"step {step}: losses are NaN or infinite, and examples with such a loss or gradient add nothing. Look at the data "
        "and at the learning rate (this is known without noise: keep it to yourself)"
    )


@dataclass
class Sums:
    """The sums of one step besides those of the gradients, before any noise."""

    # [K] what the thresholds follow: centred counts, or centred sums of norms; float64
    counts: Tensor
    # [K] sums of the norms, float64
    norms: Tensor
    # [K] how many examples were clipped, float64
    clipped: Tensor
    # sum of the losses
    loss: Tensor
    drawn: int = 0
    # norm of the clipped sum over that of its noise, where it is asked for
    signal_to_noise: float | None = None
    # [K, b] norms of each physical batch, where they are asked for
    every: list[Tensor] | None = None

    @classmethod
    def none(cls, num_groups: int, device: torch.device, *, every: bool = False) -> "Sums":
        """The sums of no example at all."""
        counts, norms, clipped = torch.zeros(3, num_groups, dtype=torch.float64, device=device)
        return cls(counts, norms, clipped, torch.zeros((), device=device), every=[] if every else None)

    def add(self, losses: Tensor, report: Report | None, policy: FixedThresholds) -> None:
        """Add one physical batch."""
        self.drawn += len(losses)
        self.loss += losses.detach().sum().to(self.loss)
        if report is not None:
            bounds = policy.bounds
            if bounds is None:
                self.counts += centred_counts(report.norms, policy.estimates).to(self.counts)
            else:
                self.counts += centred_norms(report.norms, bounds).to(self.counts)
            self.norms += report.norms.sum(1).to(self.norms)
            self.clipped += report.clipped.to(self.clipped)
            if self.every is not None:
                self.every.append(report.norms.detach().float().cpu())

    def sum_(self, ranks: Ranks) -> None:
        """Add up what all ranks have, on all of them.

        Centred counts are multiples of 1/2, so that no order of adding changes them.
        """
        if not ranks.several:
            return
        ours = torch.stack([self.loss.double(), torch.tensor(self.drawn).to(self.counts)])
        together = torch.cat([self.counts, self.norms, self.clipped, ours])
        ranks.sum_([together])
        groups = len(self.counts)
        self.counts, self.norms, self.clipped, (loss, drawn) = together.split([groups, groups, groups, 2])
        self.loss, self.drawn = loss.to(self.loss), round(float(drawn))
        if self.every is not None:
            self.every = [norms for theirs in ranks.gather(self.every) for norms in theirs]
