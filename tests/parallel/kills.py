"""Ranks that are killed at random, as a program: one import of the libraries, then a fork for every rank of every start.

``python -m tests.parallel.kills FOLDER`` writes FOLDER/kills.json and FOLDER/kills.md. Runs on two ranks, with whole models, with
sharded ones and with a model in two stages, are started again and again; each time a random rank is killed at a random instant,
and the other one ends as it does under torchrun, which then starts both again. Every run must end with the weights of one that
nobody killed, and its ledger must hold every step once.
"""

import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from safetensors.torch import load_file

from dpexp import provenance, record
from dpexp.config import compose
from dpexp.parallel import current
from dpexp.train import run_together
from tests.parallel.cases import Case, made, whole
from tests.pipeline.test_training import CASES, SMALL, STAGED, use_own_cache
from tests.training.tiny import make_trainer, tiny_run, train

RANKS, STEPS = 2, 6
RUNTIMES = ("ddp", "fsdp", "pipeline")


def train_whole_or_sharded(folder: Path, runtime: str) -> list[torch.Tensor]:
    """Train a small network to its end; its weights."""
    ranks = current()
    run = tiny_run(steps=STEPS)
    run.runtime.parallel = runtime
    metrics = record.Metrics(folder / "metrics.jsonl", strict=False, writes=ranks.writes)
    trainer = make_trainer(folder, run, model=made(Case("mlp")), ranks=ranks, metrics=metrics)
    train(trainer)
    return [whole(p).contiguous() for p in trainer.model.parameters()]


def train_stages(folder: Path) -> list[torch.Tensor]:
    """Train a small GPT-2 in two stages to its end; its weights."""
    use_own_cache(folder.parent / "cache")
    overrides = [*SMALL, *STAGED, *CASES["adaptive"], f"optim.steps={STEPS}", "runtime.checkpoint_every=2"]
    run_together(compose([*overrides, f"runtime.runs_dir={folder}"]), current())
    kept = load_file(next(folder.rglob("*.safetensors")))
    return [kept[name] for name in sorted(kept)]


def rank_of(number: int, folder: Path, runtime: str, start: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        meeting = f"file://{folder.parent}/{folder.name}.meeting{start}"
        dist.init_process_group("gloo", init_method=meeting, rank=number, world_size=RANKS)
        values = train_stages(folder) if runtime == "pipeline" else train_whole_or_sharded(folder, runtime)
        if current().writes:
            digest = hashlib.sha256(b"".join(v.numpy().tobytes() for v in values)).hexdigest()
            (folder / "weights.txt").write_text(digest)
        dist.barrier()
    except BaseException as error:
        print(type(error).__name__, str(error)[:200], file=sys.stderr)
        os._exit(1)
    os._exit(0)


def once(folder: Path, runtime: str, start: int, kill: tuple[int, float] | None) -> bool:
    """Start all ranks; whether they ended by themselves."""
    folder.mkdir(parents=True, exist_ok=True)
    pids = [rank_of(number, folder, runtime, start) for number in range(RANKS)]
    if kill is not None:
        time.sleep(kill[1])
        os.kill(pids[kill[0]], signal.SIGKILL)
        os.waitpid(pids[kill[0]], 0)
        other = pids[1 - kill[0]]
        for _ in range(200):  # it notices, or torchrun ends it
            if os.waitpid(other, os.WNOHANG)[0]:
                return False
            time.sleep(0.01)
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)
        return False
    endings = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    if any(endings):
        raise SystemExit(f"{folder.name}: ranks ended with {endings}")
    return True


def ending(folder: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in next(folder.rglob("ledger.jsonl")).read_text().splitlines()]
    return {
        "weights": (folder / "weights.txt").read_text(),
        "charged": [[line["step"], line["attempt"]] for line in lines],
    }


def main(folder: Path, kills: int, runtime: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    provenance.code_hash = lambda: "c0de"  # the sources may be edited while this runs
    began = time.monotonic()
    once(folder / "never", runtime, 0, None)
    took = time.monotonic() - began
    rng = random.Random(0)
    expected, runs, killed = ending(folder / "never"), [], 0
    while killed < kills:
        place, start = folder / f"run{len(runs)}", 0
        for _ in range(min(5, kills - killed)):
            once(place, runtime, start, (rng.randrange(RANKS), rng.uniform(0.05, took)))
            killed, start = killed + 1, start + 1
        once(place, runtime, start, None)
        runs.append(ending(place))
    assert expected["charged"] == [[step, 0] for step in range(STEPS)]
    return {
        "ranks": RANKS, "runtime": runtime, "steps": STEPS, "kills": killed, "runs": len(runs),
        "endings_equal": all(run["weights"] == expected["weights"] for run in runs),
        "ledgers_equal": all(run["charged"] == expected["charged"] for run in runs),
    }  # fmt: skip


def page(found: dict[str, Any]) -> str:
    """The record in words."""
    rows = found["runs"]
    lines = [
        "# Ranks killed at random instants",
        "",
        f"Made by `make kill-ranks`: {sum(row['kills'] for row in rows)} kills (SIGKILL) of one of two ranks, each at a random "
        "instant of a run of six steps, start-up and end included. After each kill all ranks are started again, as torchrun "
        "does. A run is killed up to five times, and then left to end. It is compared with a run that nobody killed.",
        "",
        "| runtime | kills | runs | weights equal, to the last bit | every step in the ledger once |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        equal, once = ("yes" if row[name] else "NO" for name in ("endings_equal", "ledgers_equal"))
        lines.append(f"| {row['runtime']} | {row['kills']} | {row['runs']} | {equal} | {once} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        found = [main(Path(name) / runtime, 10, runtime) for runtime in sys.argv[2:] or RUNTIMES]
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    details = {
        "git": provenance.git_state(),
        "versions": provenance.versions(),
        "hardware": provenance.hardware(torch.device("cpu")),
    }
    together = {"runs": found, **details}
    (target / "kills.json").write_text(json.dumps(together, indent=2) + "\n", encoding="utf-8")
    (target / "kills.md").write_text(page(together), encoding="utf-8")
    print(page(together))
    sys.exit(0 if all(runs["endings_equal"] and runs["ledgers_equal"] for runs in found) else 1)
