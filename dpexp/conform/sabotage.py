"""``python -m dpexp.conform.sabotage``: defects planted in our own trainer, and which check finds each.

A check that has never failed proves nothing. Each defect below voids the guarantee in a way that some library or script has been
seen to; it is planted in the running trainer, and every check is asked. One that no check sees ends with exit status 1.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from dpexp.auditing.canaries import Without, flip_coins
from dpexp.auditing.gaussian import pair_lower_bound
from dpexp.auditing.white_box import Observer, Watched, WithGradientCanaries
from dpexp.clipping import Clipper
from dpexp.conform import replay
from dpexp.conform.adapters import ours, quiet
from dpexp.conform.judge import Reference, judge
from dpexp.conform.replay import BATCH, N, Points, network, run_points, settings
from dpexp.conform.traps import trap_case
from dpexp.durable import write_atomic
from dpexp.privacy.ledger import Ledger
from dpexp.privacy.sampling import PoissonSampler
from dpexp.training import release as release_module
from dpexp.training import sums as sums_module
from dpexp.training.release import Release
from dpexp.training.steps import Steps

Defect = Callable[[ExitStack], None]
DEFECTS: dict[str, Defect] = {}
Z = 6.0
"""Standard deviations beyond which a statistic counts as wrong: one false alarm in 10^9."""


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
    _around(stack, Release, "_generator", lambda f, self, name, step, attempt: f(self, name, 0, 0))


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
                p.grad *= 3  # as large as if it had not been clipped
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
        held = [p.grad for p in self._params.values()]
        for p in self._params.values():
            p.grad = None
        with mock.patch.object(self, "rule", "none"):
            found = f(self, losses, *arguments, **named)
        for k, group in enumerate(self.groups):
            grads = [p.grad for p in group.params.values() if p.grad is not None]
            norm = float(torch.stack([g.norm() for g in grads]).norm()) / max(1, len(losses))
            for gradient in grads:
                gradient *= min(1.0, float(self.thresholds[k]) / norm) if norm else 1.0
        for p, old in zip(self._params.values(), held, strict=True):
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
        rates = [group["lr"] for group in self.optimizer.param_groups]  # type: ignore[attr-defined]
        for group in self.optimizer.param_groups:  # type: ignore[attr-defined]
            group["lr"] *= 1 + float(self.sums.loss) / 1000
        taken = bool(f(self))
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):  # type: ignore[attr-defined]
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
    def double(f: Any, self: PoissonSampler, n: int, q: float, key: bytes) -> None:
        f(self, n, min(1.0, 2 * q), key)

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
    _around(stack, PoissonSampler, "__init__", lambda f, self, n, q, key: f(self, n, q, b"0" * 32))


@defect("dropout from a seed that all steps share")
def _(stack: ExitStack) -> None:
    _around(stack, Steps, "seed", lambda f, self, step, number: torch.manual_seed(0))


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
        "_generator",
        lambda f, self, name, s, a: torch.Generator().manual_seed(hash((name, s))),
    )


@defect("steps charged with twice the noise")
def _(stack: ExitStack) -> None:
    import dp_accounting

    def cheap(f: Any, self: Ledger, step: int, event: Any, fingerprint: str) -> int:
        gaussian = dp_accounting.GaussianDpEvent(2.0)
        return int(f(self, step, dp_accounting.PoissonSampledDpEvent(BATCH / N, gaussian), fingerprint))

    _around(stack, Ledger, "begin_step", cheap)


# ----------------------------------------------------------------------------------------------------------------- checks
def check_conformance() -> list[str]:
    """Three traps of the conformance suite, per layer and flat."""
    found = []
    for name in ("a perceptron", "a layer called twice", "accumulation over two physical batches"):
        case = trap_case(name)
        reference = Reference(case)
        for groups in ("layer", "flat"):
            verdict = judge(case, reference, ours("auto", groups))
            if verdict.verdict != "exact":
                found.append(f"{name}: {verdict.message}")
    return found


def check_replay() -> list[str]:
    """Record and replay of eight steps, without each of five examples."""
    return replay.differences(settings(8), [0, 10, 20, 33, 47])


def check_noise() -> list[str]:
    """What was added to the sums of forty steps: its size in every parameter, and that it never comes twice."""
    run = settings(40)
    whole, other = run_points(run), run_points(run, without=[10])
    nominal = 1.0 / math.sqrt(1 - run.clip.quantile_budget)
    found: list[str] = []
    noises: list[dict[str, Tensor]] = []
    for step in whole.seen:
        std = nominal * float(step.thresholds.norm())
        if not all(abs(said / std - 1) < 1e-5 for said in step.rest["noise"]["gradients"]):
            found.append(f"the noise is said to be {step.rest['noise']['gradients']}, and {std:.4g} is due")
            break
    for step in whole.seen:
        std = nominal * float(step.thresholds.norm())
        noises.append({n: (step.released[n] - step.raw[n]).double() / std for n in step.released})
    for name in noises[0]:
        z = torch.stack([noise[name].flatten() for noise in noises]).flatten()
        off = float(z.square().mean() - 1) / math.sqrt(2 / len(z))
        if not abs(off) < Z:
            found.append(f"noise on {name} has {float(z.square().mean()):.2f} times its variance")
    flat = [torch.cat([value.flatten() for value in noise.values()]) for noise in noises]
    again = [
        torch.cat([(s.released[n] - s.raw[n]).double().flatten() for n in s.released]) for s in other.seen
    ]
    pairs = [(a, b, "two steps") for a, b in itertools.pairwise(flat)] + [
        (a, b, "two runs on neighbouring data") for a, b in zip(flat, again)
    ]
    for a, b, what in pairs:
        cosine = float(a @ b / (a.norm() * b.norm()))
        if not abs(cosine) < Z / math.sqrt(len(a)):
            found.append(f"{what} share noise")
            break
    counts = torch.stack([s.released_counts - s.counts for s in whole.seen if s.released_counts is not None])
    ratio = float(counts.square().mean()) / (len(whole.seen[0].counts) / (4 * run.clip.quantile_budget))
    if not abs(ratio - 1) < Z * math.sqrt(2 / counts.numel()):
        found.append(f"noise on the counts has {ratio:.2f} times its variance")
    return found


def check_draws() -> list[str]:
    """Sizes of a thousand batches: mean and variance of a Poisson sample, other draws under another key, other dropout seeds."""
    run, task = settings(1), Points()
    rate = BATCH / N
    drawn = [replay.loop_sampler(run, task, b"a" * 32).draw(step) for step in range(1000)]
    other = replay.loop_sampler(run, task, b"b" * 32)
    sizes = np.array([len(indices) for indices in drawn])
    expected = N * rate * (1 - rate)
    found = []
    if not abs(sizes.mean() - N * rate) < Z * math.sqrt(expected / 1000):
        found.append(f"batches have {sizes.mean():.1f} examples, and {N * rate:.1f} are accounted for")
    if not 0.7 < sizes.var() / expected < 1.4:
        found.append("the sizes of batches do not vary as those of Poisson samples")
    if all(np.array_equal(indices, other.draw(step)) for step, indices in enumerate(drawn[:20])):
        found.append("the samples do not depend on the key")
    seeds = [step.rest["first dropout seed"] for step in run_points(settings(5)).seen]
    if len(set(seeds)) < len(seeds):
        found.append("steps share a dropout seed")
    return found


def check_ledger() -> list[str]:
    """Every update is a release and a charge, empty batches too, and epsilon is what dp_accounting makes of the configuration."""
    import dp_accounting
    from dp_accounting.rdp import RdpAccountant

    run, found = settings(6, adaptive=False), []
    trace = run_points(run)
    event = dp_accounting.PoissonSampledDpEvent(BATCH / N, dp_accounting.GaussianDpEvent(1.0))
    right = RdpAccountant().compose(event, 6).get_epsilon(1e-3)
    ledger = trace.trainer.ledger
    assert ledger is not None
    claimed = ledger.epsilon(1e-3, "rdp")
    if not claimed >= right * (1 - 1e-3):
        found.append(f"the ledger says epsilon {claimed:.2f}, and the configuration costs {right:.2f}")
    if not len(trace.ledger) >= 1 or trace.updates != len(trace.seen):
        found.append("an update has no release")

    class Sometimes:
        def draw(self, step: int, attempt: int = 0) -> np.ndarray:
            return np.arange(0 if step % 2 else 9)

    empty = run_points(settings(4, adaptive=False), sampler=Sometimes())
    if len(empty.seen) != 4 or empty.updates != 4:
        found.append("an empty batch is not released")
    return found


def check_audit() -> list[str]:
    """The white-box audit: 600 gradient canaries in four full batches, at a confidence that one in a million misses."""
    run = settings(4, adaptive=False)
    run.clip.groups, run.clip.clip_norm, run.optim.batch_size = "flat", 1.0, 600.0
    run.privacy.noise_multiplier, run.privacy.delta, run.runtime.physical_batch_size = 2.0, "1e-5", "300"
    key = b"k" * 32
    slots, included = np.arange(600), flip_coins(600, key)
    task = WithGradientCanaries(Points(600), slots, 1.0)
    sampler = Without(replay.loop_sampler(run, task, key), slots[~included])
    trace = run_points(run, task=task, model=Watched(network(), 600), sampler=sampler)
    observer = Observer(600, 1.0)
    for step in trace.seen:
        observer.see(step.released["canary_table.weight"], 1.0, 2.0)
    ledger = trace.trainer.ledger
    assert ledger is not None
    claimed = ledger.epsilon(1e-5, "rdp")
    if not np.isfinite(observer.scores).all() or observer.scores.std() == 0:
        return ["the noisy sums of canaries are not noisy"]
    lower = pair_lower_bound(observer.scores, included, 1e-5, 1 - 1e-6)
    return [f"epsilon is at least {lower:.2f}, and {claimed:.2f} is claimed"] if lower > claimed else []


CHECKS: dict[str, Callable[[], list[str]]] = {
    "conformance": check_conformance,
    "draws": check_draws,
    "ledger": check_ledger,
    "record and replay": check_replay,
    "noise": check_noise,
    "audit": check_audit,
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """The trainer with a defect."""
    with ExitStack() as stack:
        DEFECTS[name](stack)
        yield


def asked(check: str) -> tuple[list[str], float]:
    """What a check finds, and its seconds. An error in the check is a finding too: the defect did not go unseen."""
    begun = time.perf_counter()
    try:
        found = CHECKS[check]()
    except Exception as error:
        # the table names no folder of the machine that it was made on
        said = re.sub(r"\S*/(?=\S)", "", str(error).partition("\n")[0])
        found = [f"{type(error).__name__}: {said[:120]}"]
    return found, time.perf_counter() - begun


def main(out: str = "results/sabotage") -> int:
    """Ask every check about every defect, write the table, and return how many defects went unseen, or alarms were false."""
    console = Console(highlight=False, soft_wrap=True)
    rows: list[dict[str, Any]] = []
    with quiet():
        false = {check: found for check in CHECKS if (found := asked(check)[0])}
        if false:
            console.print(f"false alarms without a defect: {false}", markup=False)
            return len(false)
        for name in DEFECTS:
            with planted(name):
                answers = {check: asked(check) for check in CHECKS}
            seen = {check: found[0] for check, (found, _) in answers.items() if found}
            seconds = {check: round(taken, 2) for check, (_, taken) in answers.items()}
            rows.append({"defect": name, "seen": seen, "seconds": seconds})
            console.print(f"{name}: {', '.join(seen) or 'UNSEEN'}", markup=False)
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / "sabotage.json", json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
    write_atomic(folder / "sabotage.md", page(rows))
    unseen = sum(not row["seen"] for row in rows)
    console.print(f"{len(rows)} defects, {unseen} unseen", markup=False)
    return unseen


def page(rows: list[dict[str, Any]]) -> str:
    """The table in Markdown."""
    lines = [
        "# Defects planted in our own trainer, and which check finds each", "",
        f"Made by `make sabotage`: {len(rows)} defects, each alone in the running trainer (a perceptron on 60 points, one CPU "
        "thread). ✓ the check sees it; — it does not. Without a defect all checks are silent. The last row is each check's "
        "cost, the median in seconds.", "",
        f"| defect | {' | '.join(CHECKS)} | what the cheapest one says |", "|---" * (len(CHECKS) + 2) + "|",
    ]  # fmt: skip
    for row in rows:
        marks = " | ".join("✓" if check in row["seen"] else "—" for check in CHECKS)
        cheapest = min(row["seen"], key=lambda check: row["seconds"][check], default=None)
        said = row["seen"][cheapest].replace("|", "/")[:110] if cheapest else "**unseen**"
        lines.append(f"| {row['defect']} | {marks} | {said} |")
    costs = [f"{float(np.median([row['seconds'][check] for row in rows])):.1f}" for check in CHECKS]
    lines += [f"| seconds | {' | '.join(costs)} | |", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
