"""``python -m dpexp.auditing.trials``: how much the white-box audit sees, and how often it cries wolf: results/audit.

*Power*: one run of the trainer with 20,000 gradient canaries in full batches, at ε = 4 and 8; the estimators' lower bounds beside
the claim. *False alarms*: 200 runs that keep their claim, each audited at 95%; a bound above the claim is an alarm, and 10 are
expected of a bound that is exact. The runs are whole ones: clipping, noise, ledger; the model is small.
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
from dpexp.auditing.white_box import Observer, WithCanaryTable, WithGradientCanaries
from dpexp.conform import replay
from dpexp.conform.adapters import quiet
from dpexp.conform.render import versions
from dpexp.conform.replay import Points, network, run_points, settings
from dpexp.durable import write_atomic
from dpexp.privacy.gaussian import gaussian_epsilon
from dpexp.privacy.shown import downwards, upwards

DELTA, STEPS, CONFIDENCE = 1e-5, 4, 0.95
GUESSES = [1.0, 0.3, 0.1]
POWER = {4.0: 20_000, 8.0: 20_000}
ALARMS, ALARM_CANARIES, ALARM_EPSILON = 200, 600, 4.0
MOST_ALARMS = 10


def audited(epsilon: float, canaries: int, seed: int) -> tuple[float, list[dict[str, Any]]]:
    """One run of four full batches, and what each estimator makes of its noisy sums.

    Args:
        epsilon: that the noise is made for, at δ = 1e-5.
        canaries: m, in as many examples.
        seed: of noise and coins.

    Returns:
        The ledger's ε, and the rows of `dpexp.audit.estimates`.
    """
    sigma = STEPS**0.5 * _sigma(epsilon)
    run = settings(STEPS, adaptive=False)
    run.clip.groups, run.clip.clip_norm, run.optim.batch_size = "flat", 1.0, float(canaries)
    run.privacy.noise_multiplier, run.privacy.delta, run.privacy.noise_seed = sigma, str(DELTA), seed
    run.runtime.physical_batch_size = "500"
    key = seed.to_bytes(32, "little")
    slots, included = np.arange(canaries), flip_coins(canaries, key)
    task = WithGradientCanaries(Points(canaries), slots, 1.0)
    sampler = Without(replay.loop_sampler(run, task, key), slots[~included])
    trace = run_points(run, task=task, model=WithCanaryTable(network(), canaries), sampler=sampler)
    observer = Observer(canaries, 1.0)
    for step in trace.seen:
        observer.see(step.released["canary_table.weight"], 1.0, sigma)
    assert trace.trainer.ledger is not None
    claimed = trace.trainer.ledger.epsilon(DELTA, "pld")
    return claimed, estimates(observer.scores, included, GUESSES, DELTA, CONFIDENCE)


def _sigma(epsilon: float) -> float:
    """The multiplier of one Gaussian of this ε at δ."""
    low, high = 0.01, 100.0
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if gaussian_epsilon(DELTA, 1 / middle) > epsilon else (low, middle)
    return high


def main(out: str = "results/audit", alarms: int = ALARMS) -> int:
    """Write trials.json and trials.md. Returns 1 where a bound is below 0.8 ε or there are more than 10 of 200 false alarms."""
    console = Console(highlight=False, soft_wrap=True)
    power: list[dict[str, Any]] = []
    bounds: list[list[float]] = []
    with quiet():
        for epsilon, canaries in POWER.items():
            begun = time.process_time()
            claimed, rows = audited(epsilon, canaries, 0)
            seconds = round(time.process_time() - begun, 1)
            power.append({"claimed": claimed, "canaries": canaries, "cpu_seconds": seconds, "rows": rows})
            console.print(
                f"claimed {claimed:.3f}: at least {_best(rows):.3f}, {seconds} CPU seconds", markup=False
            )
        for seed in range(1, alarms + 1):
            claimed, rows = audited(ALARM_EPSILON, ALARM_CANARIES, seed)
            bounds.append([claimed, _best(rows)])
    false = sum(bound > claimed for claimed, bound in bounds)
    console.print(f"{false} false alarms in {alarms} runs", markup=False)
    found = {
        "power": power, "confidence": CONFIDENCE, "delta": DELTA, "steps": STEPS, "false_alarms": false, "runs": alarms,
        "alarm_canaries": ALARM_CANARIES, "bounds": bounds, "versions": versions(),
        "command": "python -m dpexp.auditing.trials",
    }  # fmt: skip
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / "trials.json", json.dumps(found, indent=1) + "\n")
    write_atomic(folder / "trials.md", page(found))
    weak = any(_best(row["rows"]) < 0.8 * row["claimed"] for row in power)
    return int(weak or false * ALARMS > MOST_ALARMS * alarms)


def page(found: dict[str, Any]) -> str:
    """The record in Markdown."""
    lines = [
        "# What the white-box audit sees", "",
        f"Made by `make audits`: one run each of {found['steps']} full batches of gradient canaries through clipping, noise and "
        f"ledger; δ = {found['delta']:g}. Lower bounds on ε at {found['confidence']:.0%}, the error shared by all estimators; of "
        "an estimator with several numbers of guesses the best.", "",
        "| claimed ε | canaries | CPU seconds | Steinke | f-DP | two worlds | Gaussian pair | best/claimed |",
        "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for row in found["power"]:
        best = {
            name: max(r["epsilon_lower"] for r in row["rows"] if r["estimator"] == name)
            for name in ("Steinke", "f-DP", "two worlds", "Gaussian pair")
        }
        cells = " | ".join(downwards(value, ".2f") for value in best.values())
        share = downwards(_best(row["rows"]) / row["claimed"], ".2f")
        lines.append(
            f"| {upwards(row['claimed'], '.3f')} | {row['canaries']} | {row['cpu_seconds']:.0f} | {cells} | {share} |"
        )
    lines += [
        "",
        f"False alarms, runs of {found['alarm_canaries']} canaries that keep their claim and whose best bound is above it: "
        f"{found['false_alarms']} of {found['runs']}.",
        "",
    ]
    return "\n".join(lines)


def _best(rows: list[dict[str, Any]]) -> float:
    return max(float(row["epsilon_lower"]) for row in rows)


if __name__ == "__main__":
    sys.exit(main())
