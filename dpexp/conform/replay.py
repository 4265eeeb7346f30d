"""Record and replay: the whole trainer on neighbouring data, with the releases frozen .

The idea is Re:cord-play's (arXiv 2602.17454).

A run is recorded on data D: for every step what was clipped and counted, and what was released, that is the noisy sums. Then the
same run, with the same key, trains on D without one example, and each release is replaced by the recorded one. Whatever a run
does besides its releases may depend on the data through them alone. So nothing else may differ: weights, thresholds,
learning rates, standard deviations, dropout seeds, the ledger, the number of steps, all to the last bit. And the sums themselves
may differ by as much as their noise pays for: C_k in each group, 1/2 in each count.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

from dpexp import record
from dpexp.auditing.canaries import Without
from dpexp.models import ModelBundle
from dpexp.privacy.keys import open_keys
from dpexp.schemas import RunConfig
from dpexp.tasks import DataInfo, Task
from dpexp.training import loop
from dpexp.training.batching import sampler_for
from dpexp.training.planning import build_plan
from dpexp.training.progress import Progress

N, BATCH, FEATURES, CLASSES = 60, 20.0, 10, 3


class Points(Task):
    """Points of ten features in three classes; one in ten is far from the others."""

    name = "points"

    def __init__(self, number: int = N):
        generator = torch.Generator().manual_seed(5)
        x = torch.randn(number + 20, FEATURES, generator=generator)
        x[::10] *= 30
        rows = list(zip(x, x[:, :CLASSES].argmax(1), strict=True))
        self.labels = [str(k) for k in range(CLASSES)]
        self.train, self.dev, self.num_examples = rows[:number], rows[number:], number
        self.data = DataInfo("demo", "points", {"train": number, "dev": 20}, {"train": "0" * 64}, [])

    def collate(self, examples: list[Any]) -> dict[str, Tensor]:
        if not examples:
            return {"x": torch.zeros(0, FEATURES), "y": torch.zeros(0, dtype=torch.long)}
        return {"x": torch.stack([x for x, _ in examples]), "y": torch.stack([y for _, y in examples])}

    def losses(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")

    def evaluate(self, model: nn.Module, *arguments: Any, **named: Any) -> dict[str, float]:
        batch = self.collate(list(self.dev))
        return {"accuracy": float((model(batch["x"]).argmax(1) == batch["y"]).float().mean())}

    def length(self, i: int) -> int:
        return 1 + i % 7


def network() -> nn.Module:
    """Two layers, always the same."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES))


def settings(number_of_steps: int, *, adaptive: bool = True) -> RunConfig:
    """A run of the points: two groups, adaptive thresholds, physical batches of eight."""
    run = RunConfig()
    run.task.name, run.model.name, run.scale.name = "points", "mlp", "demo"
    run.clip.name, run.clip.private, run.clip.groups = "adaptive_perlayer", True, "layer"
    run.clip.adaptive, run.clip.quantile_budget = adaptive, 0.1 if adaptive else 0.0
    # so that the noise moves with the thresholds
    run.clip.rescale = False
    run.privacy.noise_multiplier, run.privacy.delta, run.privacy.noise_seed = 1.0, "1e-3", 11
    run.optim.steps, run.optim.batch_size, run.optim.lr = number_of_steps, BATCH, 0.05
    run.runtime.physical_batch_size, run.runtime.device = "8", "cpu"
    return run


@dataclass
class Seen:
    """One step, seen from outside: by name, so that a difference can be named.

    Attributes:
        raw: clipped sums, by parameter, before the release.
        counts: `[K]` centred counts, before the release.
        released: the noisy sums, by parameter.
        released_counts: `[K]`, or None.
        thresholds: `[K]`, in force.
        rest: everything else, comparable by ``==``.
    """

    raw: dict[str, Tensor]
    counts: Tensor
    released: dict[str, Tensor] = field(default_factory=dict)
    released_counts: Tensor | None = None
    thresholds: Tensor = field(default_factory=lambda: torch.zeros(0))
    rest: dict[str, Any] = field(default_factory=dict)


@dataclass
class Trace:
    """A run: its steps, its trainer, and its lasting facts."""

    seen: list[Seen]
    trainer: loop.Trainer
    ledger: list[str]
    updates: int


def run_points(
    run: RunConfig, *, without: Sequence[int] = (), frozen: Trace | None = None, task: Task | None = None,
    model: nn.Module | None = None, sampler: Any = None, groups: np.ndarray | None = None,
) -> Trace:  # fmt: skip
    """Train, and see every step.

    Args:
        run: see `settings`.
        without: examples that are not there; N and the draws stay (adding or removing one example, as in the audits).
        frozen: a recorded run whose releases take the place of this one's.
        task, model, sampler: instead of the points, their network, and the sampler of the configuration.
        groups: `[N]`, the budget group of each example, where the configuration has individual budgets.
    """
    task, model = task or Points(), model or network()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plan = build_plan(run, task.num_examples, run.optim.steps or 1, groups)
        assert plan is not None
        keys = open_keys(folder, run.privacy.noise_seed)
        drawn = sampler or loop_sampler(run, task, keys.draws)
        trainer = loop.Trainer(
            run, task, ModelBundle(model, None, "random"), plan,
            steps=run.optim.steps or 1, sampler=Without(drawn, np.array(without, np.int64)), keys=keys, signature="points",
            folder=folder, device=torch.device("cpu"), metrics=record.Metrics(folder / "metrics.jsonl", False), groups=groups,
        )  # fmt: skip
        progress = Progress(trainer.steps, trainer.step, plan.delta, torch.device("cpu"), Console(quiet=True))
        with _watched(trainer, frozen) as (seen, updates), progress:
            trainer.train(progress)
        assert trainer.ledger is not None
        return Trace(seen, trainer, [str(event) for event in trainer.ledger.events()], updates[0])


def loop_sampler(run: RunConfig, task: Task, key: bytes) -> Any:
    """The sampler that a configuration asks for."""
    return sampler_for(run.privacy.sampling, task.num_examples, run.optim.batch_size, key)


@contextmanager
def _watched(trainer: loop.Trainer, frozen: Trace | None) -> Iterator[tuple[list[Seen], list[int]]]:
    release, model, seeding = trainer.stepper.release, trainer.model, trainer.stepper.seeds
    assert release is not None
    seen: list[Seen] = []
    updates = [0]
    charge, add_noise, seed = release.charge, release.add_noise, seeding.begin
    seeds: list[str] = []

    def seeded(step: int, attempt: int, number: int) -> None:
        seed(step, attempt, number)
        seeds.append(hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest())

    def charged(step: int, attempt: int, facts: dict[str, Any], counts: Tensor) -> bool:
        seen.append(Seen(_gradients(model), counts.clone(), thresholds=release.clipper.thresholds.clone()))
        return charge(step, attempt, facts, counts)

    def noised(step: int, attempt: int, counts: Tensor) -> Tensor | None:
        noisy = add_noise(step, attempt, counts)
        if frozen is not None and step < len(frozen.seen):
            old = frozen.seen[step]
            for name, parameter in model.named_parameters():
                parameter.grad = old.released[name].clone()
            noisy = None if old.released_counts is None else old.released_counts.clone()
        seen[-1].released = _gradients(model)
        seen[-1].released_counts = None if noisy is None else noisy.clone()
        seen[-1].rest["noise"] = release.noise(step)
        return noisy

    def stepped(*_: Any) -> None:
        updates[0] += 1
        if seen:
            rest = seen[-1].rest
            rest["first dropout seed"] = seeds[0] if seeds else None
            rest["learning rate"] = [group["lr"] for group in trainer.optimizer.param_groups]
            rest["weights"] = [p.detach().double().flatten().tolist() for p in model.parameters()]
            rest["thresholds"] = release.clipper.thresholds.tolist()
        seeds.clear()

    seeding.begin, release.charge, release.add_noise = seeded, charged, noised  # type: ignore[method-assign]
    handle = trainer.optimizer.register_step_post_hook(stepped)
    try:
        yield seen, updates
    finally:
        handle.remove()


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


def differences(run: RunConfig, left_out: Sequence[int], **options: Any) -> list[str]:
    """Record, replay without each of some examples, and name everything that should not differ and does.

    Args:
        run: of the points.
        left_out: examples to leave out, one at a time.
        options: of `run_points`.
    """
    whole = run_points(run, **options)
    found: dict[str, None] = {}
    for i in left_out:
        other = run_points(run, without=[i], frozen=whole, **options)
        if len(other.seen) != len(whole.seen) or other.updates != whole.updates:
            found["the number of steps or updates differs"] = None
        if other.ledger != whole.ledger:
            found["the ledger differs"] = None
        for here, there in zip(whole.seen, other.seen):
            for name in here.rest:
                if here.rest[name] != there.rest.get(name):
                    found[f"{name} depends on an example besides the releases"] = None
            found |= dict.fromkeys(_too_far(here, there, whole.trainer))
    return list(found)


def _too_far(here: Seen, there: Seen, trainer: loop.Trainer) -> Iterator[str]:
    assert trainer.clipper is not None
    for group, threshold in zip(trainer.clipper.groups, here.thresholds.tolist(), strict=True):
        zero = torch.zeros(())
        parts = [
            (here.raw.get(name, zero).double() - there.raw.get(name, zero).double()).square().sum()
            for name in group.params
        ]
        moved = float(torch.stack(parts).sum().sqrt()) / threshold
        if not moved <= 1 + 1e-5:
            yield f"one example moves the sum of group {group.name} by more than its threshold"
    if float((here.counts - there.counts).abs().max()) > 0.5:
        yield "one example moves a count by more than 1/2"
