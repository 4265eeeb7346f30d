"""A loop of one's own around `PrivacyEngine`, so small that a run takes milliseconds; and a crash wherever it is wanted."""

import itertools

import torch
from torch import nn
from torch.utils.data import TensorDataset

from dpexp import PrivacyEngine
from dpexp.training import release
from tests.training.tiny import TinyTask, crashing

TASK = TinyTask()


def data():
    return TensorDataset(torch.stack([x for x, _ in TASK.train]), torch.stack([y for _, y in TASK.train]))


def network(dropout=0.0):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 3))


def make(folder, model=None, optimizer=None, dataset=None, **changes):
    model = model or network()
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.5)
    settings = dict(
        batch_size=20, steps=6, noise_multiplier=1.0, delta=1e-3, noise_seed=11, checkpoint_every=2
    )
    return PrivacyEngine(
        model, optimizer, data() if dataset is None else dataset, folder=folder, **(settings | changes)
    )


def losses_of(engine, batch):
    return nn.functional.cross_entropy(engine.model(batch[0]), batch[1], reduction="none")


def train(engine, size=8, steps=None, losses=losses_of, after=lambda batch: None, **options):
    for batch in engine.batches(physical_batch_size=size, steps=steps, **options):
        engine.step(losses(engine, batch))
        after(batch)
    return engine


def flat(engine):
    return torch.cat([p.detach().reshape(-1) for p in engine.model.parameters()]).numpy().copy()


def noise_by_number(monkeypatch):
    """The same noise for the n-th release of every run: sums that differ by rounding would otherwise get other noise."""

    def reset():
        counter = itertools.count()

        def add(tensors, std, generator=None):
            stds = std if isinstance(std, list) else [std] * len(tensors)
            own = torch.Generator().manual_seed(next(counter))
            for tensor, sigma in zip(tensors, stds, strict=True):
                tensor.add_(
                    torch.randn(tensor.shape, generator=own, dtype=torch.float64).to(tensor), alpha=sigma
                )

        monkeypatch.setattr(release, "add_gaussian_", add)

    return reset


def crash_at(monkeypatch, engine, number):
    with crashing(monkeypatch, number):
        train(engine)
    engine.close()


def first_batch(engine, size=8):
    return next(iter_ := engine.batches(physical_batch_size=size)), iter_


def adam_of(*parameters):
    return torch.optim.Adam(parameters)


def mixed_up(x):
    return 0.7 * x + 0.3 * x[torch.randperm(len(x))]
