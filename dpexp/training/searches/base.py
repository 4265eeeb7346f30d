"""Step sizes found within the privacy budget, and a budget that rises when they can't be found (Monir et al., section 3.1.2).

Both searches ask about the losses of the very sample that the noisy gradient g̃ came from, after g̃ is released. What they release
is the number of a step size, or that there is none; its price is part of the step's event (`dpexp.privacy.searches`). Every
example's loss is bounded to [0, C_obj] first. A search that finds nothing leaves the weights where they are: the next step
measures again on a sample of its own, and the mean of both gradients, weighted by their information, is searched along.

Here is what both share; `noisymax.py` and `noisybtls.py` hold the two methods.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from dpexp.privacy.noise import KeyedGenerator
from dpexp.privacy.sampling import generator_from
from dpexp.training.evaluation import evaluating
from dpexp.training.release import Release

if TYPE_CHECKING:
    from dpexp.privacy.plan import Plan
    from dpexp.schemas import SearchConfig

Losses = Callable[[np.ndarray], Tensor]
"""Indices of training examples -> their losses, ``[b]``, under the present weights."""


class StepSearch(ABC):
    """What the two searches have in common: the gradient to search along, the levels of the budgets, and the losses.

    Args:
        settings: of the search.
        release: its plan takes the levels of each step from here.
        model: whose losses are asked for, in evaluation mode.
        losses: see `Losses`.
        expected_batch: B; the gradient is the noisy sum over it.
        largest: the largest step size to begin with.
    """

    def __init__(
        self,
        settings: "SearchConfig",
        release: Release,
        model: nn.Module,
        losses: Losses,
        *,
        expected_batch: float,
        largest: float,
    ):
        self.settings, self.release, self.model, self.losses = settings, release, model, losses
        self.expected_batch, self.largest = expected_batch, largest
        self.parameters = [p for group in release.clipper.groups for p in group.params.values()]
        self.plan: Plan = release.plan
        # of the information 1/σ² of either release, relative to that of the first step
        self.gradient_level, self.search_level = 1.0, 1.0
        self.bound = settings.objective_clip
        # the mean of the gradients that were measured at the present weights, and its information
        self.kept: list[Tensor] | None = None
        self.kept_weight, self.kept_level = 0.0, 0.0
        self.chosen = 0.0
        # of the step at hand: the gradient's noise multiplier, ε of the search, and the bounded losses at θ
        self.sigma, self.epsilon, self.multiplier = 0.0, 0.0, 0.0
        self.before: list[np.ndarray] = []
        self.prepare()

    # -- what the methods decide ---------------------------------------------------------------------------------------

    @abstractmethod
    def search(self, gradient: list[Tensor], sample: list[np.ndarray], noise: KeyedGenerator) -> float:
        """Release a step size along the gradient; 0 where none is good."""

    @abstractmethod
    def failed(self, measured: list[Tensor]) -> None:
        """Raise a budget."""

    def succeeded(self, gradient: list[Tensor], size: float) -> None:
        """Learn from a step that was taken."""

    # -- a step --------------------------------------------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        """What the next step depends on besides the weights: the budget it has, and all that was released before."""
        digest = hashlib.sha256()
        for name, value in sorted(self.state_dict().items()):
            tensors = value if isinstance(value, list) else [value]
            for item in tensors:
                content = item.numpy().tobytes() if isinstance(item, Tensor) else repr(item).encode()
                digest.update(name.encode() + content)
        search = self.release.plan.search
        assert search is not None
        return {"search": search.epsilon(self.release.plan.noise_multiplier), "state": digest.hexdigest()}

    def prepare(self) -> None:
        """Let the plan of the next step have the present levels.

        After a failure only what is missing is measured (gradient averaging): with levels l' before and l now, a gradient
        of information l - l' and the kept one of l' make one of l together.
        """
        level = self.gradient_level - self.kept_level
        if level <= 0:
            level = self.gradient_level
        self.release.plan = self.plan.raised(level, self.search_level)

    def move(self, step: int, attempt: int, pieces: list[np.ndarray]) -> None:
        """Search along the noisy mean gradient in `p.grad`, and move the weights if a step size is found."""
        measured = [p.grad.detach().clone() for p in self.parameters if p.grad is not None]
        plan = self.release.plan
        assert plan.search is not None
        level = plan.search.gradient_level
        self.sigma, self.epsilon = plan.sigma_new(step), plan.search.epsilon(plan.sigma(step))
        gradient, weight = self._averaged(measured), self._information()
        self.multiplier = plan.search.multiplier(plan.sigma(step))
        with evaluating(self.model):
            self.before = [self._bounded(piece) for piece in pieces]
        size = self.search(gradient, pieces, self.release.generator("search", step, attempt))
        self.chosen = size
        if size > 0:
            with torch.no_grad():
                for p, g in zip(self.parameters, gradient, strict=True):
                    p.sub_(g, alpha=size)
            self.succeeded(gradient, size)
            self.kept, self.kept_weight, self.kept_level = None, 0.0, 0.0
        else:
            self.failed(measured)
            self.kept, self.kept_weight = gradient, self.kept_weight + weight
            self.kept_level += level
        self.prepare()

    def sums(self, gradient: list[Tensor], sizes: Sequence[float], sample: list[np.ndarray]) -> np.ndarray:
        """Sums over the sample of what `contributions` makes of the losses at θ - size·g̃.

        Returns:
            ``[len(sizes)]``, float64.
        """
        start = [p.detach().clone() for p in self.parameters]
        totals = np.zeros(len(sizes))
        try:
            for j, size in enumerate(sizes):
                with torch.no_grad():
                    for p, at, g in zip(self.parameters, start, gradient, strict=True):
                        p.copy_(at - size * g)
                with evaluating(self.model):
                    totals[j] = sum(
                        self.contributions(before, self._bounded(piece)).sum()
                        for before, piece in zip(self.before, sample, strict=True)
                    )
        finally:
            with torch.no_grad():
                for p, at in zip(self.parameters, start, strict=True):
                    p.copy_(at)
        return totals

    @abstractmethod
    def contributions(self, before: np.ndarray, after: np.ndarray) -> np.ndarray:
        """What each example adds to a sum, from its bounded losses at θ and at a candidate."""

    def _bounded(self, piece: np.ndarray) -> np.ndarray:
        """``[b]`` losses in [0, C_obj], float64; one that is no number counts as C_obj."""
        losses = self.losses(piece).double().cpu().numpy()
        return np.clip(np.nan_to_num(losses, nan=self.bound), 0.0, self.bound)

    def _information(self) -> float:
        """1/(σC)² of the gradient of the step at hand: thresholds and a schedule of the noise may move between two of them."""
        return 1 / (self.sigma**2 * float(self.release.policy.values.double().square().sum()))

    def _averaged(self, measured: list[Tensor]) -> list[Tensor]:
        if self.kept is None:
            return measured
        weight = self._information()
        share = weight / (weight + self.kept_weight)
        return [old + share * (new - old) for old, new in zip(self.kept, measured, strict=True)]

    @staticmethod
    def comparisons(noise: KeyedGenerator) -> np.random.Generator:
        """Noise for what is compared and not released: the rounding of floating-point numbers then shows in no answer."""
        return generator_from(noise.next_key())

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    NUMBERS: tuple[str, ...] = (
        "gradient_level", "search_level", "bound", "kept_weight", "kept_level", "chosen", "largest",
    )  # fmt: skip
    TENSORS: tuple[str, ...] = ("kept",)

    def state_dict(self) -> dict[str, Any]:
        """All that the next step depends on, as plain values and tensors on the CPU; every part of it is released."""
        state: dict[str, Any] = {name: getattr(self, name) for name in self.NUMBERS}
        for name in self.TENSORS:
            state[name] = [tensor.cpu() for tensor in getattr(self, name) or []]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""
        for name in self.NUMBERS:
            setattr(self, name, state[name])
        for name in self.TENSORS:
            tensors = [t.to(p.device) for t, p in zip(state[name], self.parameters, strict=False)]
            setattr(self, name, tensors or None)
        self.prepare()
