"""From private sums to released ones: charge the step, then add its noise.

The rule that everything here serves: noise is used twice for exactly the same sum only.
"""

import hmac
import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dpexp.clipping.base import AnyClipper
from dpexp.clipping.thresholds import FixedThresholds, NormThresholds, QuantileThresholds
from dpexp.errors import UserError
from dpexp.parallel.shards import is_sharded
from dpexp.privacy.correlated import CorrelatedNoise, column_norm, noise_left
from dpexp.privacy.fingerprint import fingerprint, fingerprint_of_facts
from dpexp.privacy.ledger import Ledger
from dpexp.privacy.noise import KeyedGenerator, SecureGenerator, add_gaussian_, check_multiplier, check_stds
from dpexp.privacy.sensitivity import noise_stds, sensitivity

if TYPE_CHECKING:
    from dpexp.privacy.plan import Plan
    from dpexp.schemas import ClipConfig

# of thresholds, in float32
ROUNDING = 1e-6


class BudgetSpentError(UserError):
    """A step comes up again as another one, and no budget is left to charge it a second time."""


class Release:
    """The releases of one run.

    Args:
        plan: sampling and noise multipliers.
        clipper: attached; `p.grad` of its parameters is what is released.
        policy: its thresholds are those of the clipping.
        ledger: where steps are charged.
        key: the run's secret.
        allocation: of the noise to the groups, see `sensitivity.noise_scales`.
        secure: the exact form of the noise, see `dpexp.privacy.noise`.
    """

    def __init__(
        self,
        plan: "Plan",
        clipper: AnyClipper,
        policy: FixedThresholds,
        ledger: Ledger,
        *,
        key: bytes,
        allocation: str,
        secure: bool,
    ):
        self.plan, self.clipper, self.policy, self.ledger = plan, clipper, policy, ledger
        self.key, self.allocation, self.secure = key, allocation, secure
        self.sizes = [group.size for group in clipper.groups]
        self.parameters = [p for group in clipper.groups for p in group.params.values()]
        # None where each step's noise is its own; it may have to know which attempts of earlier steps were applied
        self.correlated: CorrelatedNoise | None = None
        if plan.bands > 1:
            self.correlated = CorrelatedNoise(plan.bands, plan.steps, partial(self.generator, "gradients"))

    def noise(self, step: int) -> dict[str, Any]:
        """Standard deviations of a step: `gradients`, one per group, of what is new in this step, and `counts`, None where none
        are released; where norms are summed, one per group. Where noise is correlated, `taken_back` says what came before.

        Raises:
            UserError: more noise than its grid is fine enough for, or hardly any.
        """
        bands = self.plan.bands
        # what correlated noise takes back is rounded to the grid too; and rounding does not shrink with an example's thresholds
        least = 1.0 if self.plan.budgets is None else min(self.plan.budgets.scales)
        check_multiplier(self.plan.sigma_new(step) * bands**0.5 / least, sum(self.sizes) + len(self.sizes))
        sigma = self.plan.sigma_new(step) * column_norm(bands, self.plan.steps)
        stds = noise_stds(self.policy.values, self.sizes, sigma, self.allocation) * self.clipper.reach
        counts: float | list[float] | None = None
        if self.policy.adaptive:
            counts = self.plan.sigma_b(step, len(self.sizes))
            if (bounds := self.policy.bounds) is not None:
                counts = (counts * bounds.double().cpu()).tolist()
        check_stds([*stds.tolist(), *(counts if isinstance(counts, list) else [counts or 0.0])])
        found: dict[str, Any] = {"gradients": stds.tolist(), "counts": counts, "secure": self.secure}
        if self.correlated is not None and step:
            # by the fingerprint of the step before, which says the same of the one before it. Weights may not tell (a learning
            # rate of 0), and new noise used twice, with other noise taken back, shows sums of the steps before in the clear
            applied = self.correlated.attempts[step - 1]
            found["taken_back"] = self.ledger.fingerprints(step - 1)[applied]
        return found

    def likely_attempt(self, step: int, facts: dict[str, Any], tried: int | None = None) -> int:
        """The attempt that a step is repeated as, if its sums turn out to be the same; else a new one.

        The last one with these facts, or the last before the one that was tried: what is no fact, the code of a loop, may have
        changed between them. A new attempt has its own sample: the ledger charges it as an independent one.
        """
        charged = self.ledger.fingerprints(step)
        same = fingerprint_of_facts(self.key, facts)
        known = [attempt for attempt, found in enumerate(charged[:tried]) if found.startswith(same)]
        return known[-1] if known else len(charged)

    def charge(self, step: int, attempt: int, facts: dict[str, Any], counts: Tensor) -> bool:
        """Write the step to the ledger, on the disk, unless it stands there.

        Args:
            step, attempt: what the sums were drawn as.
            facts: see `fingerprint`.
            counts: `[K]`, before noise; the other sums are in `p.grad`.

        Returns:
            False where this attempt was charged for other sums although the facts are equal (the runtime is not
            deterministic): draw the sums again, as the next attempt. Nothing was written then.

        Raises:
            UserError: an example can move the sums further than their noise is for, or, as a `BudgetSpentError`, the budget of a
                filter does not cover another attempt. Nothing was written then.
        """
        thresholds = self.policy.values.cpu().double()
        bound = self.clipper.reach * float(sensitivity(thresholds, torch.ones_like(thresholds)))
        # each of them: noise may be shared out by the thresholds
        above = self.clipper.thresholds.cpu().double() > thresholds * (1 + ROUNDING)
        most = self.plan.max_clip_scale * bound * (1 + ROUNDING)
        if bool(above.any()) or not self.clipper.sensitivity <= most:
            raise UserError(
                f"one example can move the clipped sum by {self.clipper.sensitivity:g}, and the noise of this step is for "
                f"{self.plan.max_clip_scale * bound:g}: leave the thresholds to the policy, and attach the clipper with the "
                "plan's max_clip_scale and a rule that clips"
            )
        if any(gradient.dtype.itemsize < 4 for gradient in self._gradients()):
            raise UserError(
                "clipped sums in 16 bits: their rounding can move them by more than an example may, and the noise is for an "
                "example alone. Were the weights made 16 bits wide after the engine (model.half())? Do it "
                "before PrivacyEngine(...), or keep them in float32 and compute under autocast"
            )
        if self.correlated is not None:
            self.correlated.reserve(self._gradients())
        charged = self.ledger.fingerprints(step)
        found = self._fingerprint(facts, counts)
        if self.ledger.ranks is not None:
            # before anything is written: what some rank has not got is nobody's to release
            self.ledger.ranks.agree(f"the sum of step {step}", found)
        if attempt < len(charged) and charged[attempt] != found:
            return False
        if charged and attempt == len(charged) and not self.plan.affords(self.ledger.event(), step):
            raise BudgetSpentError(
                f"the budget does not cover another attempt of step {step}: the run ends before it"
            )
        if self.ledger.begin_step(step, self.plan.charge(step, attempt), found) != attempt:
            raise RuntimeError(f"the ledger does not agree that step {step} is in attempt {attempt}")
        return True

    def _fingerprint(self, facts: dict[str, Any], counts: Tensor) -> str:
        return fingerprint(self.key, facts, [*self._gradients(), counts])

    def add_noise(self, step: int, attempt: int, counts: Tensor) -> Tensor | None:
        """Add the noise of a charged step to `p.grad` and to the counts, in place.

        Returns:
            The noisy counts, `[K]`; None where the thresholds are fixed, and no counts are released.
        """
        noise = self.noise(step)
        groups = zip(self.clipper.groups, noise["gradients"], strict=True)
        stds = [std for group, std in groups for _ in group.params]
        if self.correlated is None:
            add_gaussian_(self._gradients(), stds, generator=self.generator("gradients", step, attempt))
        else:
            self.correlated.add_(self._gradients(), stds, step, attempt)
        if noise["counts"] is None:
            return None
        each = isinstance(noise["counts"], list)
        tensors = list(counts.split(1)) if each else [counts]
        add_gaussian_(tensors, noise["counts"], generator=self.generator("counts", step, attempt))
        return counts

    def stds(self, step: int) -> dict[int, float]:
        """Standard deviation of the noise in the sum of each parameter's gradients, by ``id(p)``."""
        groups = zip(self.clipper.groups, self.noise(step)["gradients"], strict=True)
        left = 1.0 if self.correlated is None else float(noise_left(self.plan.bands, self.plan.steps)[step])
        return {id(p): std * left for group, std in groups for p in group.params.values()}

    def signal_to_noise(self, step: int) -> float:
        """Compute ‖Σ clipped gradients‖ over the root mean square norm of their noise, before it is added.

        Not private: it is for the owner of the data (Li et al., section 3.1.1).
        """
        signal, noise = self._signal_and_noise(step)
        return math.sqrt(signal / noise) if noise > 0 else math.inf

    def _signal_and_noise(self, step: int) -> tuple[float, float]:
        """The square of the norm of the sums, and the expected one of their noise."""
        stds = self.stds(step)
        grads: list[Any] = [p.grad for p in self.parameters if p.grad is not None]
        squares = [grad.double().square().sum() for grad in grads]
        signal = sum(float(square.full_tensor() if is_sharded(square) else square) for square in squares)
        return signal, sum(stds[id(p)] ** 2 * p.numel() for p in self.parameters)

    def _gradients(self) -> list[Tensor]:
        """The clipper leaves a tensor for every parameter, zeros where nothing arrived."""
        return [p.grad for p in self.parameters if p.grad is not None]

    def generator(self, name: str, step: int, attempt: int) -> KeyedGenerator:
        """The noise called `name` of a charged step; each name may be used once.

        Keyed with the fingerprint too: where the ledger cannot know of another sum that the key served (a copy of the
        folder, a ledger that was put back or deleted, the same `noise_seed` elsewhere), the noise differs all the same."""
        use = f"noise of {name} {self.ledger.fingerprints(step)[attempt]} {step} {attempt}"
        kind = SecureGenerator if self.secure else KeyedGenerator
        return kind(hmac.digest(self.key, use.encode(), "sha256"))


def build_policy(clip: "ClipConfig", num_groups: int) -> FixedThresholds:
    """The threshold policy of a configuration: C/√K for every group to begin with (He et al., Appendix A.1)."""
    start = clip.clip_norm / math.sqrt(num_groups)
    if not clip.adaptive:
        return FixedThresholds(torch.full((num_groups,), start, dtype=torch.float32))
    begin = start if clip.init_threshold is None else clip.init_threshold
    # whatever the dtype that tensors have by default
    first = torch.full((num_groups,), begin, dtype=torch.float32)
    # rescaled to C, a single threshold would stay where it is whatever its counts cost
    rescale_to = clip.clip_norm if clip.rescale and num_groups > 1 else None
    if clip.follows == "norm":
        return NormThresholds(first, clip.norm_factor, clip.norm_bound, clip.threshold_floor, rescale_to)
    return QuantileThresholds(
        first,
        clip.target_quantile,
        clip.quantile_lr,
        clip.threshold_floor,
        rescale_to,
        arithmetic=clip.quantile_update == "arithmetic",
    )
