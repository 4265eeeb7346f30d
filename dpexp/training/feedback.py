"""Noise that follows the training: its level moves by what was released, under a Rényi filter (`dpexp.privacy.searches`).

The level multiplies σ_0. It begins at ``start`` >= 1; the budget is what the planned steps cost at level 1. Less noise than that
is paid for with steps: the run ends where no further one fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from dpexp.errors import UserError
from dpexp.privacy.schedules import RELEASED_AT_LEAST, Schedule
from dpexp.training.release import Release
from dpexp.training.steps import Steps


class Feedback:
    """The level, and what moves it.

    Args:
        schedule: an adaptive one.
        release: its plan has the level of the next step.
        metric: of the task, which a schedule by validation follows.
    """

    def __init__(self, schedule: Schedule, release: Release, metric: str):
        self.schedule, self.release, self.metric = schedule, release, metric
        self.level = schedule.start or 1.0
        self.seen: list[float] = []
        self._apply()

    def took(self, steps: Steps, evaluate: Callable[[], Mapping[str, float]]) -> None:
        """Learn from the step that was taken last; ``evaluate``: to metrics on public data.

        Raises:
            UserError: the metric that the noise follows is not measured.
        """
        variance = sum(steps.stds[id(p)] ** 2 * p.numel() for p in steps.parameters)
        self.stepped(steps.gradients, variance)
        if self.validates_after(steps.taken):
            metrics = evaluate()
            if self.metric not in metrics:
                raise UserError(
                    f"schedule=validation follows task.metric={self.metric}, which this task does not measure"
                )
            self.validated(metrics[self.metric])

    def validates_after(self, step: int) -> bool:
        """Whether `validated` wants the metric after so many steps."""
        return False

    def validated(self, score: float) -> None:
        """Learn from a metric on public data."""

    def stepped(self, gradients: Sequence[Tensor], variance: float) -> None:
        """Learn from the noisy mean gradient of a step. ``variance``: of its noise, summed over all coordinates."""

    def state_dict(self) -> dict[str, Any]:
        """All of it is public or released."""
        return {"level": self.level, "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""
        self.level, self.seen = state["level"], list(state["seen"])
        self._apply()

    def _apply(self) -> None:
        self.release.plan = replace(self.release.plan, level=self.level)


class Validation(Feedback):
    """Decay by validation on public data (Yu et al. 2019; Monir et al., section 3.1.1).

    S_e is the mean of the last ``window`` scores, S_0 = 0. Where it has risen by less than ``threshold``, S_e - S_(e-1) < δ, the
    noise falls to k times its level. (The review prints |S - S_(e-1)| and σ_e on both sides; a falling score is no progress.)
    """

    def validates_after(self, step: int) -> bool:
        """Every ``every`` steps."""
        return step % (self.schedule.every or 1) == 0

    def validated(self, score: float) -> None:
        """See the class."""
        window = self.schedule.window or 1
        before = self.seen[-window:]
        self.seen.append(score)
        after = self.seen[-window:]
        risen = sum(after) / len(after) - (sum(before) / len(before) if before else 0.0)
        if risen < (self.schedule.threshold or 0.0):
            self.level *= self.schedule.decay_rate or 1.0
            self._apply()


class ReleasedNorm(Feedback):
    """σ in proportion to the norm of the gradient (Fay et al. 2023), as far as released gradients tell it.

    The norm itself is private. But ‖g̃‖² minus the variance of its noise is an unbiased estimate of ‖∇‖², from what is released
    anyway. The level is ``start`` times the root of the mean of the last ``window`` estimates over that of the first ones, at
    most ``start`` and at least a tenth of it.
    """

    def stepped(self, gradients: Sequence[Tensor], variance: float) -> None:
        """See the class."""
        window, start = self.schedule.window or 1, self.schedule.start or 1.0
        self.seen.append(sum(float(g.double().square().sum()) for g in gradients) - variance)
        if len(self.seen) <= window:
            return
        self.seen = [*self.seen[:window], *self.seen[window:][-window:]]
        first, last = (max(0.0, sum(part)) / len(part) for part in (self.seen[:window], self.seen[window:]))
        ratio = math.sqrt(last / first) if first > 0 else 1.0
        self.level = start * min(1.0, max(RELEASED_AT_LEAST, ratio))
        self._apply()


def build_feedback(schedule: Schedule, release: Release, metric: str) -> Feedback | None:
    """What moves the noise of an adaptive schedule; None for any other."""
    if not schedule.adaptive:
        return None
    return (Validation if schedule.name == "validation" else ReleasedNorm)(schedule, release, metric)
