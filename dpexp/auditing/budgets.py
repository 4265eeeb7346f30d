"""``python -m dpexp.auditing.budgets``: how near the white-box audit comes to each of several budgets: results/audit.

Runs of the trainer whose examples have three budgets (`dpexp.privacy.individual`), all of them gradient canaries; the canaries of
each group are held against their group's ε. Once with thresholds of each group's own, in full batches; once with sampling rates
of each group's own, in batches of half of the examples.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from dpexp.auditing.canaries import Without, flip_coins
from dpexp.auditing.estimates import estimates
from dpexp.auditing.trials import CONFIDENCE, DELTA, GUESSES, STEPS
from dpexp.auditing.verdict import verdict
from dpexp.auditing.white_box import Observer, WithCanaryTable, WithGradientCanaries
from dpexp.conform.adapters import quiet
from dpexp.conform.render import versions
from dpexp.conform.replay import Points, network, run_points, settings
from dpexp.durable import write_atomic
from dpexp.privacy.individual import draw_groups
from dpexp.privacy.shown import downwards, upwards
from dpexp.training.batching import sampler_for
from dpexp.training.planning import build_plan

EPSILONS, SHARES, CANARIES, RUNS = [2.0, 4.0, 8.0], [0.34, 0.43, 0.23], 20_000, 20
# expected batches as shares of N: thresholds can differ in full batches, sampling rates cannot
METHODS = {"scaling": 1.0, "sampling": 0.5}
ESTIMATORS = ("Steinke", "f-DP", "two worlds", "Gaussian pair")


def audited(method: str, canaries: int, seed: int) -> list[dict[str, Any]]:
    """One run, and what each estimator makes of each group's canaries.

    Args:
        method: one of `METHODS`.
        canaries: m, in as many examples.
        seed: of noise, coins and groups.

    Returns:
        Of each group the fields of a `dpexp.auditing.verdict.verdict`: the ledger's ε beside the best bound.
    """
    run = settings(STEPS, adaptive=False)
    run.clip.groups, run.clip.clip_norm = "flat", 1.0
    run.optim.batch_size = METHODS[method] * canaries
    run.privacy.noise_multiplier, run.privacy.delta, run.privacy.noise_seed = None, str(DELTA), seed
    run.runtime.physical_batch_size = "500"
    run.individual.name, run.individual.epsilons, run.individual.shares = method, EPSILONS, SHARES
    key, groups = seed.to_bytes(32, "little"), draw_groups(canaries, SHARES, seed)
    plan = build_plan(run, canaries, STEPS, groups)
    assert plan is not None
    assert plan.budgets is not None
    rates, lengths = np.asarray(plan.budgets.rates), np.asarray(plan.budgets.scales)
    slots, included = np.arange(canaries), flip_coins(canaries, key)
    drawn = sampler_for("poisson", canaries, run.optim.batch_size, key, groups, plan.budgets.rates)
    trace = run_points(
        run, task=WithGradientCanaries(Points(canaries), slots, 1.0), model=WithCanaryTable(network(), canaries),
        sampler=Without(drawn, slots[~included]), groups=groups,
    )  # fmt: skip
    observer = Observer(canaries, rates[groups], lengths[groups])
    for step in trace.seen:
        observer.see(step.released["canary_table.weight"], 1.0, plan.sigma_new(0))
    assert trace.trainer.ledger is not None
    spent = [{"epsilon": found} for found in trace.trainer.ledger.epsilons_by_budget(DELTA)]
    scores = observer.scores
    found = verdict(
        {"accountant": "pld", "individual": {"groups": spent}}, groups, canaries, CONFIDENCE,
        lambda mine, level: estimates(scores[mine], included[mine], GUESSES, DELTA, level),
    )  # fmt: skip
    rows = found["rows"]
    return [
        part | {"rows": [row for row in rows if row["group"] == part["group"]]} for part in found["groups"]
    ]


def summary(runs: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Average runs group by group.

    Args:
        runs: of each run what `audited` returns.

    Returns:
        Of each group the claim, the number of canaries, how many runs refute the claim, each run's best bound, and the mean over
        the runs of each estimator's best bound.
    """
    groups = []
    for parts in zip(*runs, strict=True):
        best = {
            name: float(np.mean([
                max(row["epsilon_lower"] for row in part["rows"] if row["estimator"] == name) for part in parts
            ]))
            for name in ESTIMATORS
        }  # fmt: skip
        groups.append({
            "epsilon_claimed": parts[0]["epsilon_claimed"], "canaries": parts[0]["canaries"],
            "refuted": sum(part["refuted"] for part in parts),
            "epsilon_lower": [part["epsilon_lower"] for part in parts], "mean_of_best": best,
        })  # fmt: skip
    return groups


def main(out: str = "results/audit") -> int:
    """Write budgets.json and budgets.md. Returns 1 where more runs refute a budget than the confidence lets expect."""
    console = Console(highlight=False, soft_wrap=True)
    runs: dict[str, Any] = {}
    with quiet():
        for method in METHODS:
            begun = time.process_time()
            groups = summary([audited(method, CANARIES, seed) for seed in range(RUNS)])
            runs[method] = {"groups": groups, "cpu_seconds": round(time.process_time() - begun, 1)}
            said = "; ".join(
                f"{upwards(part['epsilon_claimed'], '.2f')}: {downwards(np.mean(part['epsilon_lower']), '.2f')}"
                for part in groups
            )
            console.print(f"{method}, claimed and at least: {said}", markup=False)
    record = {
        "runs": runs, "repeats": RUNS, "confidence": CONFIDENCE, "delta": DELTA, "steps": STEPS, "canaries": CANARIES,
        "versions": versions(), "command": "python -m dpexp.auditing.budgets",
    }  # fmt: skip
    target = Path(out)
    target.mkdir(parents=True, exist_ok=True)
    write_atomic(target / "budgets.json", json.dumps(record, indent=1) + "\n")
    write_atomic(target / "budgets.md", page(record))
    return int(
        any(part["refuted"] > (1 - CONFIDENCE) * RUNS for run in runs.values() for part in run["groups"])
    )


def page(found: dict[str, Any]) -> str:
    """The record in Markdown."""
    lines = [
        "# What the white-box audit sees of individual budgets", "",
        f"Made by `make audits`: {found['repeats']} runs each of {found['steps']} batches of {found['canaries']} gradient "
        f"canaries; the canaries of each group, held against its ε at δ = {found['delta']:g}. Lower bounds at "
        f"{found['confidence']:.0%} for all groups and estimators together; means over the runs. Scaling: full batches, "
        "thresholds of each group's own. Sampling: half of the examples, rates of each group's own; who is in which batch then "
        "hides much of what the noise does not. Refuted: runs whose best bound is above the claim.", "",
        f"| budgets by | claimed ε | canaries | {' | '.join(ESTIMATORS)} | best/claimed | lowest to highest | refuted |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for method, run in found["runs"].items():
        for part in run["groups"]:
            cells = " | ".join(downwards(part["mean_of_best"][name], ".2f") for name in ESTIMATORS)
            claimed, shares = (
                part["epsilon_claimed"],
                np.asarray(part["epsilon_lower"]) / part["epsilon_claimed"],
            )
            lines.append(
                f"| {method} | {upwards(claimed, '.3f')} | {part['canaries']} | {cells} | {shares.mean():.2f} | "
                f"{shares.min():.2f} to {shares.max():.2f} | {part['refuted']} of {found['repeats']} |"
            )
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(main())
