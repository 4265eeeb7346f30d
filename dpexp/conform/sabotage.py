"""``python -m dpexp.conform.sabotage``: defects planted in our own trainer, and which check finds each.

A check that has never failed proves nothing. Each defect (`dpexp.conform.defects`) is planted in the running trainer, and every
check is asked. One that no check sees ends with exit status 1.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from dpexp.auditing.canaries import Without, flip_coins
from dpexp.auditing.gaussian import pair_lower_bound
from dpexp.auditing.white_box import Observer, WithCanaryTable, WithGradientCanaries
from dpexp.conform import replay
from dpexp.conform.adapters import ours, quiet
from dpexp.conform.defects import DEFECTS, planted
from dpexp.conform.judge import Reference, judge
from dpexp.conform.replay import BATCH, N, Points, network, run_points, settings
from dpexp.conform.traps import trap_case
from dpexp.durable import write_atomic

Z = 6.0
"""Standard deviations beyond which a statistic counts as wrong: one false alarm in 10^9."""


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
    # until the example is drawn that one of them does without, they are one and the same
    apart = [any(not torch.equal(a.raw[n], b.raw[n]) for n in a.raw) for a, b in zip(whole.seen, other.seen)]
    pairs = [(a, b, "two steps") for a, b in itertools.pairwise(flat)] + [
        (a, b, "two runs on neighbouring data") for a, b in itertools.compress(zip(flat, again), apart)
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
    trace = run_points(run, task=task, model=WithCanaryTable(network(), 600), sampler=sampler)
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
        for name, changes in DEFECTS.items():
            with planted(changes):
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
