"""What the outputs of a run tell about each example, added up beside its steps (`dpexp.privacy.output_specific`)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpexp.privacy.output_specific import OutputSpecific
from dpexp.privacy.plan import Plan
from dpexp.schemas import AnalysisConfig
from dpexp.training.steps import Steps

# of the examples, whose quantiles a record holds
SHARES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


class OutputAnalysis:
    """Charge every example with what it contributes, by looking at all of them now and then.

    Args:
        settings: how often to look, and how finely.
        plan: of the run.
        num_examples: N.
    """

    def __init__(self, settings: AnalysisConfig, plan: Plan, num_examples: int):
        self.settings, self.plan, self.num_examples = settings, plan, num_examples
        self.specific = OutputSpecific(num_examples, settings.rounding)
        self.ratios: np.ndarray | None = None
        # steps
        self.looked_at = 0

    def look(self, steps: Steps, losses_of: Callable[[np.ndarray], Tensor], physical_batch_size: int) -> None:
        """Charge the coming step.

        Args:
            steps: what takes it; its sums are cleared.
            losses_of: numbers of examples -> ``[b]`` losses, as the coming step would see them.
            physical_batch_size: how many at once.
        """
        step, release = steps.taken, steps.release
        assert release is not None
        # its noise may have moved since the run was planned
        plan = release.plan
        if self.ratios is None or step % self.settings.output_specific_every == 0:
            release.clipper.thresholds = steps.policy.values
            stds = torch.tensor(release.noise(step)["gradients"], dtype=torch.float64).unsqueeze(1)
            bounds = steps.policy.values.double().cpu().unsqueeze(1)
            found = []
            for start in range(0, self.num_examples, physical_batch_size):
                stop = min(start + physical_batch_size, self.num_examples)
                report = release.clipper.backward(losses_of(np.arange(start, stop)))
                steps.clear()
                contributed = torch.minimum(report.norms.double().cpu(), bounds) / stds
                found.append(contributed.square().sum(0).sqrt() * plan.sigma_new(step))
            self.ratios = torch.cat(found).numpy()
        self.specific.add(self.ratios, plan.rate(step), plan.sigma_new(step), 1)
        self.looked_at += 1

    def conclude(self, folder: Path, charges: int) -> dict[str, Any]:
        """Return quantiles of the ε of examples along this run's outputs; the whole list goes to the folder.

        Args:
            folder: of the run.
            charges: of its ledger; where some of them were not looked at, nothing is told.
        """
        if self.looked_at < charges:
            return {
                "epsilon_quantiles": None,
                "note": f"{charges - self.looked_at} of {charges} charges were not looked at, and what they told is not known: "
                "the analysis was not on from the first step, or steps were charged again after an interruption",
            }
        found = self.specific.epsilons(self.plan.delta)
        np.save(folder / "output_specific.npy", found)
        return {
            "epsilon_quantiles": dict(
                zip(map(str, SHARES), np.quantile(found, SHARES).tolist(), strict=True)
            ),
            "every": self.settings.output_specific_every,
            "rounding": self.settings.rounding,
            "not_private": True,
            "note": "an analysis of this run's outputs, not a guarantee",
        }

    def state_dict(self) -> list[Tensor]:
        """Return what a checkpoint keeps."""
        if self.ratios is None:
            return []
        return [*map(torch.from_numpy, (self.specific.spent, self.ratios)), torch.tensor(self.looked_at)]

    def load_state_dict(self, kept: list[Tensor]) -> None:
        """Go on from what `state_dict` gave."""
        if kept:
            spent, ratios, *looked_at = kept
            self.specific.spent, self.ratios = spent.numpy(), ratios.numpy()
            # of an earlier version: not known
            self.looked_at = int(looked_at[0]) if looked_at else 0
