"""Tasks whose losses go by the batch, and some whose losses do not; and a loop of one's own around any of them."""

from pathlib import Path

import torch
from torch import Tensor, nn

from dpexp import PrivacyEngine
from tests.training.tiny import TinyTask


class Balanced(TinyTask):
    """Weights of the classes as they are counted in the batch: the gradients of a batch look right."""

    def losses(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        counts = torch.bincount(batch["y"], minlength=3).clamp(min=1)
        weights = len(batch["y"]) / (3 * counts)
        return super().losses(model, batch) * weights[batch["y"]]


class Normalised(TinyTask):
    def losses(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        found = super().losses(model, batch)
        return found / found.detach().mean()


class Hardest(TinyTask):
    """Online mining: only the examples that are harder than the middle one count."""

    def losses(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        found = super().losses(model, batch)
        return torch.where(found >= found.detach().median(), found, 0 * found)


class AsleepBefore(TinyTask):
    """The same of what enters the model."""

    def losses(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        x = batch["x"]
        return super().losses(model, batch | {"x": x / x.abs().amax().clamp(min=100)})


class AllWithAll(TinyTask):
    """Outputs `[b, 1]` minus targets `[b]`: a table, and its rows know all targets."""

    def losses(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return (model(batch["x"])[:, :1] - batch["y"]).square().mean(1)


class Weighted(TinyTask):
    """Weights that follow from the example alone, and noise of its own."""

    def losses(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        weights = torch.tensor([1.0, 2.0, 0.5])[batch["y"]]
        moved = {**batch, "x": batch["x"] + 0.1 * torch.randn_like(batch["x"])}
        return super().losses(model, moved) * weights


def own_loop(folder: Path, task: TinyTask, model: nn.Module, steps: int = 2, size: int = 9) -> PrivacyEngine:
    engine = PrivacyEngine(
        model, torch.optim.SGD(model.parameters(), lr=0.1), task.train, folder=folder, batch_size=20, steps=steps,
        noise_multiplier=1.0, delta=1e-3, clip_norm=1.0, noise_seed=3,
    )  # fmt: skip
    for batch in engine.batches(task.collate, physical_batch_size=size):
        engine.step(task.losses(model, batch))
    return engine
