"""``python -m dpexp.conform.kills``: private runs killed (SIGKILL) at random instants a hundred times: results/kills.

Each run is begun in a process of its own and killed, a random time after its start or after one of its first releases, up to
twelve times, until it ends by itself. A third of them are trainings, a third audits (gradient canaries in the same trainer), and
a third train a model that writes, and write texts at their end, in which they are killed too. In every fourth run one process of
four computes slightly other sums, as a runtime that is not deterministic does: its steps may not reuse noise, and must be charged
again. A log beside the run, written and synced as soon as a step's noise is drawn, says what was released; it is compared with
the ledger.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import random
import signal
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor, nn

from dpexp import record
from dpexp.auditing.canaries import Without, flip_coins
from dpexp.auditing.white_box import WithCanaryTable, WithGradientCanaries
from dpexp.config import compose
from dpexp.conform.adapters import quiet
from dpexp.conform.render import versions
from dpexp.conform.replay import Points, loop_sampler, network, settings
from dpexp.durable import write_atomic
from dpexp.models import ModelBundle, build_tokenizer
from dpexp.privacy.accountants import epsilon
from dpexp.privacy.events import composed
from dpexp.privacy.keys import open_keys
from dpexp.schemas import RunConfig
from dpexp.tasks import Task, build_task
from dpexp.training import loop
from dpexp.training.planning import build_plan
from dpexp.training.progress import Progress

KILLS, MOST, STEPS, DELTA = 100, 12, 12, 1e-3
KINDS = {
    "training": "trainings",
    "audit": "audits",
    "generation": "trainings that end with writing texts",
}
WRITING = [
    "task=e2e", "scale=demo", "clip=adaptive_perlayer", "optim.epochs=null", f"optim.steps={STEPS}", "optim.batch_size=20",
    "data.num_examples=60", "data.cache=null", "runtime=cpu", "runtime.physical_batch_size=16", "task.max_length=64",
    "task.generation.max_target=12", "task.generation.examples=8",
]  # fmt: skip
RELEASED, END = "released.log", "end.json"


def train(folder: Path, seed: int, kind: str, *, other_sums: bool = False) -> None:
    """Begin a run, or go on with it, to its end.

    Args:
        folder: of the run.
        seed: of its key.
        kind: one of `KINDS`.
        other_sums: one example is a little different, so that no sum is what it was.
    """
    run, task, model, slots = _asked(kind, seed)
    run.privacy.noise_seed, run.runtime.checkpoint_every = seed, 3
    # Measured choices are another order of additions in each folder, and so another end.
    run.engine.choice = "rule"
    plan = build_plan(run, task.num_examples, STEPS)
    assert plan is not None
    keys = open_keys(folder, seed)
    trainer = loop.Trainer(
        run, task, ModelBundle(model, None, "random"), plan,
        steps=STEPS, sampler=Without(loop_sampler(run, task, keys.draws), slots), keys=keys, signature="points", folder=folder,
        device=torch.device("cpu"), metrics=record.Metrics(folder / "metrics.jsonl", False),
    )  # fmt: skip
    release = trainer.stepper.release
    assert release is not None
    add_noise, charge = release.add_noise, release.charge

    def charged(step: int, attempt: int, facts: dict[str, Any], counts: Tensor) -> bool:
        if other_sums:
            for p in release.parameters:
                if p.grad is not None:
                    p.grad.view(-1)[0] *= 1 + 1e-6
                    p.grad.view(-1)[0] += 1e-6
        return charge(step, attempt, facts, counts)

    def noised(step: int, attempt: int, counts: Tensor) -> Tensor | None:
        noisy = add_noise(step, attempt, counts)
        seen = hashlib.sha256(
            b"".join(p.grad.numpy().tobytes() for p in release.parameters if p.grad is not None)
        )
        with (folder / RELEASED).open("a", encoding="utf-8") as log:
            log.write(f"{step} {attempt} {seen.hexdigest()[:16]}\n")
            log.flush()
            os.fsync(log.fileno())
        return noisy

    release.add_noise, release.charge = noised, charged  # type: ignore[method-assign]
    with Progress(STEPS, trainer.step, DELTA, torch.device("cpu"), Console(quiet=True)) as progress:
        trainer.train(progress)
    assert trainer.ledger is not None
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    texts = b"".join(file.read_bytes() for file in sorted(folder.glob("predictions/*.jsonl")))
    end = {
        "weights": hashlib.sha256(weights).hexdigest()[:16],
        "texts": hashlib.sha256(texts).hexdigest()[:16] if texts else None,
        "epsilon": trainer.ledger.epsilon(DELTA, "rdp"),
        "charged": [len(trainer.ledger.fingerprints(step)) for step in range(STEPS)],
    }
    write_atomic(folder / END, json.dumps(end))


def _asked(kind: str, seed: int) -> tuple[RunConfig, Task, nn.Module, NDArray[np.int64]]:
    """Configuration, task, model, and slots without an example."""
    none = np.zeros(0, np.int64)
    if kind == "generation":
        run, texts, tokenizer = _writing()
        bundle = texts.build_network(run.model, run.peft, scale=run.scale.name, seed=0, tokenizer=tokenizer)
        return copy.deepcopy(run), texts, bundle.model, none
    run, points = settings(STEPS), Points()
    if kind == "training":
        return run, points, network(), none
    run.clip.groups, slots = "flat", np.arange(0, points.num_examples, 3)
    task, model = (
        WithGradientCanaries(points, slots, run.clip.clip_norm),
        WithCanaryTable(network(), len(slots)),
    )
    return run, task, model, slots[~flip_coins(len(slots), seed.to_bytes(32, "little"))]


@cache
def _writing() -> tuple[RunConfig, Task, Any]:
    """The embedded texts and a tiny GPT-2; made once, before processes are started."""
    run = compose(WRITING)
    tokenizer = build_tokenizer(run.model, scale=run.scale.name)
    return run, build_task(run.task, run.data, run.scale.name, tokenizer, 0), tokenizer


def killed_run(
    folder: Path, seed: int, kind: str, rng: random.Random, *, other: bool, typical: float
) -> dict[str, Any]:
    """One run, killed until it ends by itself.

    Args:
        folder: empty.
        seed, kind: see `train`.
        rng: says when to kill.
        other: whether some of its processes compute other sums.
        typical: seconds that a process takes undisturbed.

    Returns:
        How it ended, how often it was killed, and what was released.
    """
    kills = changed = 0
    while not (folder / END).exists():
        other_sums = other and rng.random() < 0.25
        changed += other_sums
        child = os.fork()
        if child == 0:
            code = 1
            try:
                train(folder, seed, kind, other_sums=other_sums)
                code = 0
            finally:
                os._exit(code)
        # behind a release, because on a busy machine a time alone would end most of them on the way to their first step
        begun, after = _releases(folder), rng.randrange(4)
        delay = rng.uniform(0, typical / rng.choice((2, STEPS))) if kills < MOST else math.inf
        deadline, status = math.inf, None
        while status is None:
            done, found = os.waitpid(child, os.WNOHANG)
            if done:
                status = found
            elif deadline == math.inf and _releases(folder) >= begun + after:
                deadline = time.monotonic() + delay
            elif time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
                status = os.waitpid(child, 0)[1]
            else:
                time.sleep(0.002)
        if os.WIFSIGNALED(status):
            kills += 1
        elif os.WEXITSTATUS(status):
            raise RuntimeError(f"a process of run {seed} ended with status {os.WEXITSTATUS(status)}")
    lines = {tuple(line.split()) for line in (folder / RELEASED).read_text(encoding="utf-8").splitlines()}
    return json.loads((folder / END).read_text()) | {
        "kind": kind, "seed": seed, "kills": kills, "processes_with_other_sums": changed, "released": sorted(lines),
    }  # fmt: skip


def _releases(folder: Path) -> int:
    """How many a run has made so far, in all of its processes."""
    log = folder / RELEASED
    return log.read_bytes().count(b"\n") if log.exists() else 0


def faults(run: dict[str, Any], whole: dict[str, Any], plan_event: Any) -> list[str]:
    """What is wrong with a killed run, beside the same run undisturbed."""
    found = []
    places = {(step, attempt) for step, attempt, _ in run["released"]}
    if len(places) != len(run["released"]):
        found.append("one attempt was released with two different sums or noises")
    if any(int(attempt) >= run["charged"][int(step)] for step, attempt in places):
        found.append("a release is not in the ledger")
    least = epsilon(composed([(plan_event, len(places))]), DELTA, "rdp")
    if run["epsilon"] < least * (1 - 1e-9):
        found.append(
            f"epsilon {run['epsilon']:.4f} is below {least:.4f}, the price of {len(places)} releases"
        )
    same = all(run[name] == whole[name] for name in ("weights", "epsilon", "texts"))
    if not run["processes_with_other_sums"] and not same:
        found.append("the end is another one than that of the run without kills")
    return found


def main(out: str = "results/kills", kills: int = KILLS) -> int:
    """Kill `kills` times or more and write kills.json and kills.md. Returns how many runs were at fault."""
    torch.set_num_threads(1)
    rng, runs, wrong = random.Random(0), [], 0
    console = Console(highlight=False, soft_wrap=True)
    events, target = {kind: _event(kind) for kind in KINDS}, Path(out)
    target.mkdir(parents=True, exist_ok=True)
    with quiet(), tempfile.TemporaryDirectory() as name:
        seed = done = 0
        while done < kills:
            kind = tuple(KINDS)[seed % len(KINDS)]
            folders = [Path(name) / f"{seed}{end}" for end in ("whole", "killed")]
            for folder in folders:
                folder.mkdir()
            begun = time.monotonic()
            whole = killed_run(folders[0], seed, kind, rng, other=False, typical=1e9)
            typical = time.monotonic() - begun
            run = killed_run(folders[1], seed, kind, rng, other=seed % 4 == 3, typical=typical)
            said = faults(run, whole, events[kind])
            wrong += bool(said)
            done += run["kills"]
            second = sum(run["charged"]) - STEPS
            runs.append(
                {key: run[key] for key in ("kind", "seed", "kills", "processes_with_other_sums", "epsilon")}
                | {"epsilon_undisturbed": whole["epsilon"], "second_attempts": second, "faults": said}
            )
            console.print(
                f"{kind} {seed}: {run['kills']} kills, {second} second attempts {said or ''}", markup=False
            )
            seed += 1
            found = {
                "kills": done,
                "runs": runs,
                "versions": versions(),
                "command": "python -m dpexp.conform.kills",
            }
            write_atomic(target / "kills.json", json.dumps(found, indent=1) + "\n")
            write_atomic(target / "kills.md", page(found))
    return wrong


def _event(kind: str = "training") -> Any:
    run, task = (settings(STEPS), Points()) if kind != "generation" else _writing()[:2]
    plan = build_plan(run, task.num_examples, STEPS)
    assert plan is not None
    return plan.charge(0)


def page(found: dict[str, Any]) -> str:
    """The record in Markdown."""
    rows = found["runs"]
    kinds = ", ".join(KINDS[kind] for kind in KINDS if any(row["kind"] == kind for row in rows))
    same = [row for row in rows if not row["processes_with_other_sums"]]
    other = [row for row in rows if row["processes_with_other_sums"]]
    return "\n".join(
        [
            "# Runs killed at random instants", "",
            f"Made by `make kills`: {found['kills']} kills (SIGKILL) in {len(rows)} runs of {STEPS} steps of small models: "
            f"{kinds}; each gone on with until it ended. Norm methods are chosen by rule: what is measured may differ from "
            "folder to folder, and with it the order of additions.", "",
            f"- {len(same)} runs ({sum(r['kills'] for r in same)} kills) on a runtime that repeats itself: "
            f"{sum(not r['faults'] for r in same)} ended with the same weights, texts where there are any, and ε as the run "
            "without kills, to the last bit; "
            f"{sum(r['second_attempts'] for r in same)} second attempts.",
            f"- {len(other)} runs ({sum(r['kills'] for r in other)} kills) in which some processes computed other sums: "
            f"{sum(r['second_attempts'] for r in other)} second attempts, all charged; "
            f"{sum(not r['faults'] for r in other)} of the runs without a fault.",
            f"- In {sum(bool(r['faults']) for r in rows)} of the {len(rows)} runs an ε was below the price of what had been "
            "released, a release was missing in the ledger, or one attempt was released twice.", "",
        ]
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
