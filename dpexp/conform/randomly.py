"""The suite of random models: each meets one engine; what fails is made small and shown as a program."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

from rich.console import Console

from dpexp.conform.generator import Spec, random_spec, shrink
from dpexp.conform.judge import Adapter, Reference, Verdict, judge
from dpexp.conform.render import versions
from dpexp.durable import write_atomic


def random_suite(asked: list[Adapter], models: int, seed: int, out: Path | None, console: Console) -> int:
    """Judge `models` random models, each by one adapter that its seed picks.

    Args:
        asked: adapters to pick from.
        models: how many.
        seed: of the first; the next ones count up.
        out: folder for ``random_SEED.json``; None writes nothing.
        console: for failures, as programs.

    Returns:
        How many were silently wrong.
    """
    verdicts: Counter[str] = Counter()
    failures = []
    largest = {"error": 0.0, "sensitivity": 0.0}
    for number in range(seed, seed + models):
        spec = random_spec(number)
        adapter = random.Random(number).choice(asked)
        verdict = judged(spec, adapter)
        verdicts[verdict.verdict] += 1
        if verdict.verdict == "exact":
            largest["error"] = max(largest["error"], verdict.error or 0.0)
            largest["sensitivity"] = max(largest["sensitivity"], verdict.sensitivity or 0.0)
        if verdict.verdict in ("wrong", "crash"):
            small = smallest(spec, adapter, verdict.verdict)
            failures.append(
                {"seed": number, "adapter": adapter.name, "verdict": verdict.verdict,
                 "message": judged(small, adapter).message, "program": program(small, adapter)}
            )  # fmt: skip
            console.print(
                f"model {number}, {adapter.name}: {verdict.verdict}: {verdict.message}", markup=False
            )
            console.print(program(small, adapter), markup=False)
    counts = {name: verdicts[name] for name in ("exact", "refused", "wrong", "crash")}
    console.print(f"{models} random models: {counts}; of the exact ones at most {largest}", markup=False)
    if out is not None:
        record = {
            "models": models,
            "seed": seed,
            "verdicts": counts,
            "largest": largest,
            "failures": failures,
        }
        out.mkdir(parents=True, exist_ok=True)
        write_atomic(
            out / f"random_{seed}.json", json.dumps(record | {"versions": versions()}, indent=1) + "\n"
        )
    return verdicts["wrong"]


def judged(spec: Spec, adapter: Adapter) -> Verdict:
    """What an adapter makes of a random model."""
    case = spec.case()
    return judge(case, Reference(case), adapter)


def smallest(spec: Spec, adapter: Adapter, verdict: str) -> Spec:
    """The smallest model with the same verdict."""

    def fails(candidate: Spec) -> bool:
        try:
            return judged(candidate, adapter).verdict == verdict
        except (AttributeError, NameError, RuntimeError, IndexError):
            return False  # a statement went whose layer another one needs

    return shrink(spec, fails)


def program(spec: Spec, adapter: Adapter) -> str:
    """The model as a program, with the engine and groups of the adapter."""
    engine, _, groups = adapter.name.rpartition(" ")
    return spec.program(f'groups="{groups}", clip_norm=1.0, engine="{engine}"')
