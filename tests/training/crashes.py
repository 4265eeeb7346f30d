"""Runs that are killed, as a program: one import of the libraries, then a fork for every run.

``python -m tests.training.crashes FOLDER`` prints one JSON object: scenario -> how often it was killed, the hash of its
final weights, and the (step, attempt) pairs of its ledger.
"""

import hashlib
import json
import os
import random
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch._dynamo  # the optimisers would import it, slowly, once for every fork

from dpexp import provenance
from dpexp.training import loop, release, state
from tests.killing import in_child
from tests.training.tiny import run_to_end, tiny_run, weights

STEPS = 6
KILLED_STEP = 4


def die(*args: object, **kwargs: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def at_call(number: int, function: Callable, *, after: bool) -> Callable:
    """`function`, but the process is killed just before or just after its call with this number (from 1)."""
    calls = 0

    def wrapped(*args: object, **kwargs: object) -> object:
        nonlocal calls
        calls += 1
        if calls == number and not after:
            die()
        result = function(*args, **kwargs)
        if calls == number:
            die()
        return result

    return wrapped


def patch(name: str) -> None:
    """Arrange for this process to be killed at a named instant."""
    if name == "before the ledger":
        release.Ledger.begin_step = at_call(KILLED_STEP, release.Ledger.begin_step, after=False)
    elif name == "after the ledger":
        release.Ledger.begin_step = at_call(KILLED_STEP, release.Ledger.begin_step, after=True)
    elif name == "between the two noises":  # gradients and counts of each step
        release.add_gaussian_ = at_call(2 * KILLED_STEP - 1, release.add_gaussian_, after=True)
    elif name == "after the optimiser":
        torch.optim.Adam.step = at_call(KILLED_STEP, torch.optim.Adam.step, after=True)
    elif name == "within a checkpoint":
        state._HashingWriter.write = at_call(40, state._HashingWriter.write, after=False)
    elif name == "before the pointer":
        state.write_json = at_call(3, state.write_json, after=False)
    elif name == "after the pointer":
        state.write_json = at_call(3, state.write_json, after=True)
    elif name == "before the last evaluation":
        loop.evaluate = die


NAMED = (
    "before the ledger", "after the ledger", "between the two noises", "after the optimiser", "within a checkpoint",
    "before the pointer", "after the pointer", "before the last evaluation",
)  # fmt: skip


def work(folder: Path, instant: str | None) -> None:
    if instant is not None:
        patch(instant)
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    trainer = run_to_end(folder, tiny_run(steps=STEPS))
    (folder / "weights.txt").write_text(hashlib.sha256(weights(trainer).tobytes()).hexdigest())


def run(folder: Path, instant: str | None = None, at: Sequence[int] = ()) -> dict[str, object]:
    """Start again and again until a run ends by itself; `at`: of the first ones, the call at which each is killed."""
    killed, later = 0, iter(at)
    while True:
        status, calls = in_child(partial(work, folder, instant if not killed else None), next(later, None))
        if os.WIFEXITED(status):
            if os.WEXITSTATUS(status):
                raise SystemExit(f"{folder.name}: the run failed")
            break
        killed += 1
    lines = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    charged = [(line["step"], line["attempt"]) for line in lines if "step" in line]
    found = (folder / "weights.txt").read_text()
    return {"killed": killed, "weights": found, "charged": charged, "calls": calls}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    provenance.code_hash = lambda: "c0de"  # the sources may be edited while this runs
    rng = random.Random(0)
    results = {"never": run(folder / "never")}
    for name in NAMED:
        results[name] = run(folder / name.replace(" ", "-"), name)
    results["at random"] = run(
        folder / "at-random", at=[rng.randrange(1, results["never"]["calls"]) for _ in range(6)]
    )
    print(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
