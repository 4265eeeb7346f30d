"""Defects of a private trainer, each planted in the running one: what `dpexp.conform.sabotage` asks its checks to find.

Each voids the guarantee in a way that some library or script has been seen to.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

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
from dpexp.training.steps import Steps

Defect = Callable[[ExitStack], None]
DEFECTS: dict[str, Defect] = {}


def defect(name: str) -> Callable[[Defect], Defect]:
    """Enter a defect in the table."""

    def add(plant: Defect) -> Defect:
        DEFECTS[name] = plant
        return plant

    return add


def _around(stack: ExitStack, owner: Any, name: str, change: Callable[..., Any]) -> None:
    """Replace ``owner.name`` by ``change(original, *arguments)``."""
    original = getattr(owner, name)

    def changed(*arguments: Any, **named: Any) -> Any:
        return change(original, *arguments, **named)

    stack.enter_context(mock.patch.object(owner, name, changed))


# ------------------------------------------------------------------------------------------------------------------ noise
@defect("noise halved")
def _(stack: ExitStack) -> None:
    _around(
        stack, release_module, "add_gaussian_", lambda f, t, s, **k: f(t, (np.asarray(s) / 2).tolist(), **k)
    )


@defect("no noise on the last parameter")
def _(stack: ExitStack) -> None:
    def all_but_last(f: Any, tensors: list[Tensor], stds: Any, **named: Any) -> None:
        f(tensors[:-1] or tensors, stds[:-1] if len(tensors) > 1 else stds, **named)

    _around(stack, release_module, "add_gaussian_", all_but_last)


@defect("no noise on the counts")
def _(stack: ExitStack) -> None:
    _around(
        stack,
        release_module,
        "add_gaussian_",
        lambda f, t, s, **k: None if isinstance(s, float) else f(t, s, **k),
    )


@defect("noise for one group's threshold instead of all groups'")
def _(stack: ExitStack) -> None:
    def alone(f: Any, thresholds: Tensor, *rest: Any) -> Tensor:
        return f(thresholds, *rest) / math.sqrt(len(thresholds))

    _around(stack, release_module, "noise_stds", alone)


@defect("noise reused in every step")
def _(stack: ExitStack) -> None:
    _around(stack, Release, "generator", lambda f, self, name, step, attempt: f(self, name, 0, 0))


@defect("noise from the step number alone, the same for other sums")
def _(stack: ExitStack) -> None:
    _around(stack, Ledger, "fingerprints", lambda f, self, step: ["" for _ in f(self, step)])


@defect("noise added again for every physical batch")
def _(stack: ExitStack) -> None:
    def twice(f: Any, self: Steps, losses: Tensor) -> bool:
        clipper = self.clipper
        if clipper is not None and self._left > 1:
            for p in self.parameters:
                if p.grad is not None:
                    p.grad += torch.randn_like(p) * float(clipper.thresholds.norm())
        return bool(f(self, losses))

    _around(stack, Steps, "add", twice)


@defect("noise that grows with the private norms")
def _(stack: ExitStack) -> None:
    def follows(f: Any, self: Release, step: int) -> dict[str, Any]:
        found = f(self, step)
        size = sum(float(p.grad.norm()) for p in self.parameters if p.grad is not None)
        return found | {"gradients": [std * (1 + 0.01 * size) for std in found["gradients"]]}

    _around(stack, Release, "noise", follows)


@defect("noise for the first thresholds although they have moved")
def _(stack: ExitStack) -> None:
    first: dict[int, dict[str, Any]] = {}
    _around(stack, Release, "noise", lambda f, self, step: first.setdefault(id(self), f(self, step)))


# --------------------------------------------------------------------------------------------------------------- clipping
def _backward(stack: ExitStack, change: Callable[..., Any]) -> None:
    _around(stack, Clipper, "backward", change)


@defect("nothing is clipped")
def _(stack: ExitStack) -> None:
    def plain(f: Any, self: Clipper, *arguments: Any, **named: Any) -> Any:
        with mock.patch.object(self, "rule", "none"):
            return f(self, *arguments, **named)

    _backward(stack, plain)


@defect("one layer is not clipped")
def _(stack: ExitStack) -> None:
    def loose(f: Any, self: Clipper, *arguments: Any, **named: Any) -> Any:
        right = self.thresholds.clone()
        self.thresholds = torch.cat([right[:-1], right[-1:] * 1e6])
        try:
            return f(self, *arguments, **named)
        finally:
            self.thresholds = right

    _backward(stack, loose)


@defect("the head is skipped: neither clipped nor noised")
def _(stack: ExitStack) -> None:
    def skips(f: Any, self: Clipper, losses: Tensor, *arguments: Any, **named: Any) -> Any:
        found = f(self, losses, *arguments, **named)
        for p in self.groups[-1].params.values():
            if p.grad is not None:
                # as large as if it had not been clipped
                p.grad *= 3
        return found

    _backward(stack, skips)
    _around(
        stack,
        release_module,
        "add_gaussian_",
        lambda f, t, s, **k: f(t[:-2] or t, s[:-2] if len(t) > 1 else s, **k),
    )


@defect("clipped after averaging")
def _(stack: ExitStack) -> None:
    def after(f: Any, self: Clipper, losses: Tensor, *arguments: Any, **named: Any) -> Any:
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

    _backward(stack, after)


@defect("the norm of a physical batch instead of an example's")
def _(stack: ExitStack) -> None:
    def jointly(f: Any, self: Clipper, losses: Tensor, *arguments: Any, **named: Any) -> Any:
        total = losses.sum().reshape(1).expand(len(losses)) / max(1, len(losses)) if len(losses) else losses
        return f(self, total, *arguments, **named)

    _backward(stack, jointly)


@defect("losses averaged over the batch")
def _(stack: ExitStack) -> None:
    _around(stack, Points, "losses", lambda f, self, m, b: f(self, m, b) / max(1, len(b["y"])))


@defect("features centred with the batch's own mean")
def _(stack: ExitStack) -> None:
    def centred(f: Any, self: Points, examples: list[Any]) -> dict[str, Tensor]:
        batch = f(self, examples)
        return batch | {"x": batch["x"] - batch["x"].mean(0)} if examples else batch

    _around(stack, Points, "collate", centred)


# ----------------------------------------------------------------------------------------------------- counts, thresholds
@defect("counts that are not centred")
def _(stack: ExitStack) -> None:
    _around(stack, sums_module, "centred_counts", lambda f, norms, e: f(norms, e) + norms.shape[1] / 2)


@defect("thresholds from the batch's own norms")
def _(stack: ExitStack) -> None:
    def own(f: Any, self: Steps) -> bool:
        mean = self.sums.norms.float() / max(1, self.sums.drawn)
        taken = bool(f(self))
        self.policy.estimates = mean.clamp(min=1e-3).to(self.policy.estimates)
        return taken

    _around(stack, Steps, "_take", own)


# ------------------------------------------------------------------------------------------------------------- the update
@defect("division by the drawn size of the batch")
def _(stack: ExitStack) -> None:
    def drawn(f: Any, self: Steps) -> bool:
        with mock.patch.object(self, "expected_batch", max(1, self.sums.drawn)):
            return bool(f(self))

    _around(stack, Steps, "_take", drawn)


@defect("a learning rate that follows the private loss")
def _(stack: ExitStack) -> None:
    def follows(f: Any, self: Steps) -> bool:
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] *= 1 + float(self.sums.loss) / 1000
        taken = bool(f(self))
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        return taken

    _around(stack, Steps, "_take", follows)


@defect("weight decay towards an average of the private norms")
def _(stack: ExitStack) -> None:
    def decays(f: Any, self: Steps) -> bool:
        taken = bool(f(self))
        with torch.no_grad():
            for p in self.parameters:
                p.sub_(1e-4 * float(self.sums.norms.sum()))
        return taken

    _around(stack, Steps, "_take", decays)


@defect("an empty batch is skipped without a release")
def _(stack: ExitStack) -> None:
    def skips(f: Any, self: Steps, losses: Tensor) -> bool:
        if len(losses):
            return bool(f(self, losses))
        self.taken += 1
        return True

    _around(stack, Steps, "add", skips)


@defect("training stops early where the private loss is low")
def _(stack: ExitStack) -> None:
    def stops(f: Any, self: Steps) -> bool:
        taken = bool(f(self))
        if int(float(self.sums.loss) * 1e3) % 3 == 0:
            for p in self.parameters:
                p.requires_grad_(True)
            self.taken = max(self.taken, 10**6)
        return taken

    _around(stack, Steps, "_take", stops)


# --------------------------------------------------------------------------------------------------- sampling, accounting
@defect("twice the sampling rate that is accounted for")
def _(stack: ExitStack) -> None:
    def double(f: Any, self: PoissonSampler, n: int, q: float, key: bytes, *rest: Any) -> None:
        f(self, n, min(1.0, 2 * q), key, *rest)

    _around(stack, PoissonSampler, "__init__", double)


@defect("batches of a fixed size called Poisson")
def _(stack: ExitStack) -> None:
    def fixed(f: Any, self: PoissonSampler, step: int, attempt: int = 0) -> np.ndarray:
        rng = np.random.default_rng([step, attempt, *self._key])
        return np.sort(
            rng.choice(self.num_examples, round(self.num_examples * self.sample_rate), replace=False)
        )

    _around(stack, PoissonSampler, "draw", fixed)


@defect("one permutation cut into batches, called Poisson")
def _(stack: ExitStack) -> None:
    def cut(f: Any, self: PoissonSampler, step: int, attempt: int = 0) -> np.ndarray:
        size = round(self.num_examples * self.sample_rate)
        order = np.random.default_rng(list(self._key)).permutation(self.num_examples)
        at = step * size % self.num_examples
        return np.sort(np.roll(order, -at)[:size])

    _around(stack, PoissonSampler, "draw", cut)


@defect("samples from a seed that everybody knows")
def _(stack: ExitStack) -> None:
    _around(stack, PoissonSampler, "__init__", lambda f, self, n, q, key, *r: f(self, n, q, b"0" * 32, *r))


@defect("dropout from a seed that all steps share")
def _(stack: ExitStack) -> None:
    _around(stack, Steps, "_seed", lambda f, self, name, step: f(self, "of all", 0))


@defect("every other step is not charged")
def _(stack: ExitStack) -> None:
    def forgets(f: Any, self: Release, step: int, attempt: int, facts: Any, counts: Tensor) -> bool:
        if step % 2 == 0:
            return bool(f(self, step, attempt, facts, counts))
        self._skipped = True  # type: ignore[attr-defined]
        return True

    _around(stack, Release, "charge", forgets)
    _around(
        stack,
        Release,
        "generator",
        lambda f, self, name, s, a: torch.Generator().manual_seed(hash((name, s))),
    )


@defect("steps charged with twice the noise")
def _(stack: ExitStack) -> None:
    import dp_accounting

    def cheap(f: Any, self: Ledger, step: int, event: Any, fingerprint: str) -> int:
        gaussian = dp_accounting.GaussianDpEvent(2.0)
        return int(f(self, step, dp_accounting.PoissonSampledDpEvent(BATCH / N, gaussian), fingerprint))

    _around(stack, Ledger, "begin_step", cheap)
