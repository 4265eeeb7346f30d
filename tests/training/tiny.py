"""A task and a model so small that a training run takes milliseconds; everything else is the real thing."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dpexp import record
from dpexp.models import ModelBundle
from dpexp.privacy.keys import open_keys
from dpexp.schemas import RunConfig
from dpexp.tasks import DataInfo, Task
from dpexp.training import release
from dpexp.training.loop import Trainer
from dpexp.training.planning import budget_groups, build_plan, build_sampler
from dpexp.training.progress import Progress

NUM_EXAMPLES = 60


class TinyTask(Task):
    """Points in the plane of ten features, three classes; lengths are made up."""

    name = "tiny"

    def __init__(self, num_examples: int = NUM_EXAMPLES):
        self.labels = ["a", "b", "c"]
        generator = torch.Generator().manual_seed(5)
        features = torch.randn(num_examples + 20, 10, generator=generator)
        labels = (features[:, :3]).argmax(1)
        rows = list(zip(features, labels, strict=True))
        self.train, self.dev = rows[:num_examples], rows[num_examples:]
        self.num_examples = num_examples
        self.data = DataInfo("demo", "tiny", {"train": num_examples, "dev": 20}, {"train": "0" * 64}, [])

    def collate(self, examples: list[Any]) -> dict[str, Tensor]:
        if not examples:
            return {"x": torch.zeros(0, 10), "y": torch.zeros(0, dtype=torch.long)}
        return {"x": torch.stack([x for x, _ in examples]), "y": torch.stack([y for _, y in examples])}

    def losses(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch["x"]).float(), batch["y"], reduction="none")

    def evaluate(self, model, device, batch_size, progress=None) -> dict[str, float]:
        batch = {name: tensor.to(device) for name, tensor in self.collate(list(self.dev)).items()}
        return {"accuracy": (model(batch["x"]).argmax(1) == batch["y"]).float().mean().item()}

    def length(self, i: int) -> int:
        return 1 + i % 7


def tiny_model(hidden: int = 16) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(10, hidden), nn.Tanh(), nn.Dropout(0.2), nn.Linear(hidden, 3))


def tiny_run(
    steps: int = 6, batch_size: float = 20.0, adaptive: bool = True, private: bool = True
) -> RunConfig:
    """No files, a fixed noise seed, physical batches of eight."""
    run = RunConfig()
    run.task.name, run.model.name, run.scale.name = "tiny", "mlp", "demo"
    run.clip.name, run.clip.private = ("adaptive_perlayer" if private else "nonprivate"), private
    run.clip.groups, run.clip.adaptive, run.clip.quantile_budget = "layer", adaptive, 0.1 if adaptive else 0.0
    run.privacy.noise_multiplier, run.privacy.delta, run.privacy.noise_seed = 1.0, "1e-3", 11
    run.optim.steps, run.optim.batch_size, run.optim.lr = steps, batch_size, 0.05
    run.runtime.physical_batch_size, run.runtime.device, run.runtime.checkpoint_every = "8", "cpu", 2
    run.engine.name = "onepass"
    return run


def make_trainer(
    folder: Path, run: RunConfig, task: Task | None = None, model: nn.Module | None = None, **changes: Any
) -> Trainer:
    """As `dpexp.train` does it, on the tiny task. `changes` replace arguments of `Trainer`."""
    folder.mkdir(parents=True, exist_ok=True)
    task = task or TinyTask()
    assert run.optim.steps is not None
    groups = budget_groups(run, task.num_examples)
    plan = build_plan(run, task.num_examples, run.optim.steps, groups)
    keys = open_keys(folder, run.privacy.noise_seed)
    settings: dict[str, Any] = {
        "steps": run.optim.steps,
        "sampler": build_sampler(run, plan, task.num_examples, keys.draws, groups),
        "keys": keys,
        "signature": "tiny",
        "folder": folder,
        "device": torch.device("cpu"),
        "metrics": record.Metrics(folder / "metrics.jsonl", run.privacy.release == "strict"),
        "groups": groups,
    }
    bundle = ModelBundle(model or tiny_model(), None, "random")
    return Trainer(run, task, bundle, plan, **(settings | changes))


def run_to_end(folder: Path, run: RunConfig, **changes: Any) -> Trainer:
    """A trainer that has trained: to the end, or as far as it went."""
    trainer = make_trainer(folder, run, **changes)
    train(trainer)
    return trainer


def cut_short(folder: Path, run: RunConfig, steps: int, **changes: Any) -> Trainer:
    """A trainer that goes on where another one of the same run stopped, after so many steps."""
    stopped = make_trainer(folder, run, **changes)
    stopped.steps = steps
    train(stopped)
    return make_trainer(folder, run, **changes)


def train(trainer: Trainer) -> Any:
    delta = trainer.plan.delta if trainer.plan else None
    with Progress(trainer.steps, trainer.step, delta, torch.device("cpu")) as progress:
        return trainer.train(progress)


class Crash(Exception):
    """Stands for kill -9 where one process is enough."""


@contextmanager
def crashing(monkeypatch: pytest.MonkeyPatch, number: int) -> Iterator[None]:
    """What stands under it trains until noise is about to be drawn for this time, counted from zero; then it crashes."""
    real, calls = release.add_gaussian_, itertools.count()

    def drawn(*arguments: Any, **named: Any) -> None:
        if next(calls) == number:
            raise Crash
        real(*arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(release, "add_gaussian_", drawn)
        with pytest.raises(Crash):
            yield


def crash_in_step(monkeypatch: pytest.MonkeyPatch, trainer: Trainer, step: int) -> None:
    """Train until the noise of this step is about to be drawn (for gradients and for counts in every step), then crash."""
    with crashing(monkeypatch, 2 * step):
        train(trainer)


def weights(trainer: Trainer) -> np.ndarray:
    """All parameters as one vector, for comparing bit by bit."""
    return torch.cat([p.detach().reshape(-1) for p in trainer.model.parameters()]).numpy()


def counted_noise(factor: float = 1.0) -> Callable[..., None]:
    """What stands for `release.add_gaussian_`: the noise as it is, times a factor, under keys that count the calls.

    A run's own noise follows its sums, whose last bits are the processor's: a statistic that holds with 95% would then fail on
    one machine of twenty.
    """
    right, calls = release.add_gaussian_, itertools.count()

    def drawn(sums: Any, stds: Any, generator: Any) -> None:
        right(sums, np.multiply(stds, factor).tolist(), type(generator)(next(calls).to_bytes(32, "little")))

    return drawn
