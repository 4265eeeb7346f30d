"""Defects of a private trainer, each planted in the running one: what `dpexp.conform.sabotage` asks its checks to find.

Each voids the guarantee in a way that some library or script has been seen to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import dp_accounting
import numpy as np
import torch
from torch import Tensor

from dpexp.clipping import Clipper
from dpexp.conform.replay import BATCH, N, Points
from dpexp.privacy.ledger import Ledger
from dpexp.privacy.sampling import PoissonSampler
from dpexp.training import release as release_module
from dpexp.training import sums as sums_module
from dpexp.training.release import Release
from dpexp.training.seeding import Seeds
from dpexp.training.steps import Steps

# what takes the place of a function: (that function, its arguments) -> anything
Change = Callable[..., Any]
# name -> what is changed: the owner of a function, its name, the change
DEFECTS: dict[str, list[tuple[Any, str, Change]]] = {}


def defect(name: str, owner: Any, function: str) -> Callable[[Change], Change]:
    """Enter a defect in the table, or one more change of it."""

    def add(change: Change) -> Change:
        DEFECTS.setdefault(name, []).append((owner, function, change))
        return change

    return add


@contextmanager
def planted(changes: Sequence[tuple[Any, str, Change]]) -> Iterator[None]:
    """The trainer with a defect."""

    def around(original: Any, change: Change) -> Change:
        return lambda *arguments, **named: change(original, *arguments, **named)

    with ExitStack() as stack:
        for owner, function, change in changes:
            changed = around(getattr(owner, function), change)
            stack.enter_context(mock.patch.object(owner, function, changed))
        yield


# ------------------------------------------------------------------------------------------------------------------ noise
defect("noise halved", release_module, "add_gaussian_")(
    lambda f, tensors, stds, **named: f(tensors, (np.asarray(stds) / 2).tolist(), **named)
)


@defect("no noise on the last parameter", release_module, "add_gaussian_")
def _(f: Any, tensors: list[Tensor], stds: Any, **named: Any) -> None:
    f(tensors[:-1] or tensors, stds[:-1] if len(tensors) > 1 else stds, **named)


@defect("no noise on the counts", release_module, "add_gaussian_")
def _(f: Any, tensors: list[Tensor], stds: Any, **named: Any) -> None:
    if not isinstance(stds, float):
        f(tensors, stds, **named)


defect("noise for one group's threshold instead of all groups'", release_module, "noise_stds")(
    lambda f, thresholds, *rest: f(thresholds, *rest) / math.sqrt(len(thresholds))
)
defect("noise reused in every step", Release, "generator")(
    lambda f, self, name, step, attempt: f(self, name, 0, 0)
)
defect("noise from the step number alone, the same for other sums", Ledger, "fingerprints")(
    lambda f, self, step: ["" for _ in f(self, step)]
)


@defect("noise added again for every physical batch", Steps, "add")
def _(f: Any, self: Steps, losses: Tensor) -> bool:
    clipper = self.clipper
    if clipper is not None and self._left > 1:
        for p in self.parameters:
            if p.grad is not None:
                p.grad += torch.randn_like(p) * float(clipper.thresholds.norm())
    return bool(f(self, losses))


@defect("noise that grows with the private norms", Release, "noise")
def _(f: Any, self: Release, step: int) -> dict[str, Any]:
    found = f(self, step)
    size = sum(float(p.grad.norm()) for p in self.parameters if p.grad is not None)
    return found | {"gradients": [std * (1 + 0.01 * size) for std in found["gradients"]]}


defect("noise for the first thresholds although they have moved", Release, "noise")(
    lambda f, self, step: self.__dict__.setdefault("_first_noise", f(self, step))
)


# --------------------------------------------------------------------------------------------------------------- clipping
@defect("nothing is clipped", Clipper, "backward")
def _(f: Any, self: Clipper, *arguments: Any, **named: Any) -> Any:
    with mock.patch.object(self, "rule", "none"):
        return f(self, *arguments, **named)


@defect("one layer is not clipped", Clipper, "backward")
def _(f: Any, self: Clipper, *arguments: Any, **named: Any) -> Any:
    right = self.thresholds.clone()
    self.thresholds = torch.cat([right[:-1], right[-1:] * 1e6])
    try:
        return f(self, *arguments, **named)
    finally:
        self.thresholds = right


SKIPPED = "the head is skipped: neither clipped nor noised"


@defect(SKIPPED, Clipper, "backward")
def _(f: Any, self: Clipper, losses: Tensor, *arguments: Any, **named: Any) -> Any:
    found = f(self, losses, *arguments, **named)
    for p in self.groups[-1].params.values():
        if p.grad is not None:
            # as large as if it had not been clipped
            p.grad *= 3
    return found


@defect(SKIPPED, release_module, "add_gaussian_")
def _(f: Any, tensors: list[Tensor], stds: Any, **named: Any) -> None:
    f(tensors[:-2] or tensors, stds[:-2] if len(tensors) > 1 else stds, **named)


@defect("clipped after averaging", Clipper, "backward")
def _(f: Any, self: Clipper, losses: Tensor, *arguments: Any, **named: Any) -> Any:
    held = [p.grad for p in self.params.values()]
    for p in self.params.values():
        p.grad = None
    with mock.patch.object(self, "rule", "none"):
        found = f(self, losses, *arguments, **named)
    for k, group in enumerate(self.groups):
        grads = [p.grad for p in group.params.values() if p.grad is not None]
        norm = float(torch.stack([g.norm() for g in grads]).norm()) / max(1, len(losses))
        for gradient in grads:
            gradient *= min(1.0, float(self.thresholds[k]) / norm) if norm else 1.0
    for p, old in zip(self.params.values(), held, strict=True):
        if old is not None and p.grad is not None:
            p.grad += old
    return found


@defect("the norm of a physical batch instead of an example's", Clipper, "backward")
def _(f: Any, self: Clipper, losses: Tensor, *arguments: Any, **named: Any) -> Any:
    total = losses.sum().reshape(1).expand(len(losses)) / max(1, len(losses)) if len(losses) else losses
    return f(self, total, *arguments, **named)


defect("losses averaged over the batch", Points, "losses")(
    lambda f, self, model, batch: f(self, model, batch) / max(1, len(batch["y"]))
)


@defect("features centred with the batch's own mean", Points, "collate")
def _(f: Any, self: Points, examples: list[Any]) -> dict[str, Tensor]:
    batch = f(self, examples)
    return batch | {"x": batch["x"] - batch["x"].mean(0)} if examples else batch


# ----------------------------------------------------------------------------------------------------- counts, thresholds
defect("counts that are not centred", sums_module, "centred_counts")(
    lambda f, norms, estimates: f(norms, estimates) + norms.shape[1] / 2
)


@defect("thresholds from the batch's own norms", Steps, "_take")
def _(f: Any, self: Steps) -> bool:
    mean = self.sums.norms.float() / max(1, self.sums.drawn)
    taken = bool(f(self))
    self.policy.estimates = mean.clamp(min=1e-3).to(self.policy.estimates)
    return taken


# ------------------------------------------------------------------------------------------------------------- the update
@defect("division by the drawn size of the batch", Steps, "_take")
def _(f: Any, self: Steps) -> bool:
    with mock.patch.object(self, "expected_batch", max(1, self.sums.drawn)):
        return bool(f(self))


@defect("a learning rate that follows the private loss", Steps, "_take")
def _(f: Any, self: Steps) -> bool:
    rates = [group["lr"] for group in self.optimizer.param_groups]
    for group in self.optimizer.param_groups:
        group["lr"] *= 1 + float(self.sums.loss) / 1000
    taken = bool(f(self))
    for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    return taken


@defect("weight decay towards an average of the private norms", Steps, "_take")
def _(f: Any, self: Steps) -> bool:
    taken = bool(f(self))
    with torch.no_grad():
        for p in self.parameters:
            p.sub_(1e-4 * float(self.sums.norms.sum()))
    return taken


@defect("an empty batch is skipped without a release", Steps, "add")
def _(f: Any, self: Steps, losses: Tensor) -> bool:
    if len(losses):
        return bool(f(self, losses))
    self.taken += 1
    return True


@defect("training stops early where the private loss is low", Steps, "_take")
def _(f: Any, self: Steps) -> bool:
    taken = bool(f(self))
    if int(float(self.sums.loss) * 1e3) % 3 == 0:
        for p in self.parameters:
            p.requires_grad_(True)
        self.taken = max(self.taken, 10**6)
    return taken


# --------------------------------------------------------------------------------------------------- sampling, accounting
defect("twice the sampling rate that is accounted for", PoissonSampler, "__init__")(
    lambda f, self, n, q, key, *rest: f(self, n, min(1.0, 2 * q), key, *rest)
)


@defect("batches of a fixed size called Poisson", PoissonSampler, "draw")
def _(f: Any, self: PoissonSampler, step: int, attempt: int = 0) -> np.ndarray:
    rng = np.random.default_rng([step, attempt, *self._key])
    return np.sort(rng.choice(self.num_examples, round(self.num_examples * self.sample_rate), replace=False))


@defect("one permutation cut into batches, called Poisson", PoissonSampler, "draw")
def _(f: Any, self: PoissonSampler, step: int, attempt: int = 0) -> np.ndarray:
    size = round(self.num_examples * self.sample_rate)
    order = np.random.default_rng(list(self._key)).permutation(self.num_examples)
    at = step * size % self.num_examples
    return np.sort(np.roll(order, -at)[:size])


defect("samples from a seed that everybody knows", PoissonSampler, "__init__")(
    lambda f, self, n, q, key, *rest: f(self, n, q, b"0" * 32, *rest)
)
defect("dropout from a seed that all steps share", Seeds, "begin")(
    lambda f, self, step, attempt, number: f(self, 0, 0, 0)
)

UNCHARGED = "every other step is not charged"


@defect(UNCHARGED, Release, "charge")
def _(f: Any, self: Release, step: int, attempt: int, facts: Any, counts: Tensor) -> bool:
    return bool(f(self, step, attempt, facts, counts)) if step % 2 == 0 else True


defect(UNCHARGED, Release, "generator")(
    lambda f, self, name, step, attempt: torch.Generator().manual_seed(hash((name, step)))
)


@defect("steps charged with twice the noise", Ledger, "begin_step")
def _(f: Any, self: Ledger, step: int, event: Any, fingerprint: str) -> int:
    gaussian = dp_accounting.GaussianDpEvent(2.0)
    return int(f(self, step, dp_accounting.PoissonSampledDpEvent(BATCH / N, gaussian), fingerprint))
