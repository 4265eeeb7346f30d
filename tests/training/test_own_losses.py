"""A person's own losses: what one example loses may not depend on the others of its batch."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dpexp import PrivacyEngine
from dpexp.errors import UserError
from dpexp.training.own_losses import look_at_task
from tests.training.tiny import TinyTask, make_trainer, tiny_model, tiny_run


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


class Remembering(TinyTask):
    """A running mean of the losses, kept in the task."""

    seen = 0.0

    def losses(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        found = super().losses(model, batch)
        self.seen = 0.5 * self.seen + float(found.detach().mean())
        return found / self.seen


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


class Twice(Weighted):
    """Two rows of every example, averaged."""

    rows_per_example = 2

    def augmented(self, batch: dict[str, Tensor], indices: Any, seed: int, step: int) -> dict[str, Tensor]:
        return {name: part.repeat_interleave(2, 0) for name, part in batch.items()}

    def losses(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return super().losses(model, batch).unflatten(0, (-1, 2)).mean(1)


class Unlucky(TinyTask):
    def losses(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        raise RuntimeError("only on Mondays")


@pytest.mark.parametrize("task", [Balanced, Normalised, Hardest, Remembering, AllWithAll])
def test_losses_that_go_by_the_batch_are_refused(task: type[TinyTask]) -> None:
    with pytest.raises(UserError, match=rf"{task.__name__}\.losses: .*mixes examples"):
        look_at_task(task(), tiny_model(), 0)


@pytest.mark.parametrize("task", [TinyTask, Weighted, Twice])
def test_losses_of_each_example_alone_pass(task: type[TinyTask]) -> None:
    state = torch.get_rng_state()
    assert look_at_task(task(), tiny_model(), 0) is None
    assert torch.equal(torch.get_rng_state(), state)


def test_what_cannot_be_looked_at_is_said() -> None:
    assert "only on Mondays" in (look_at_task(Unlucky(), tiny_model(), 0) or "")
    few = TinyTask()
    few.dev = few.dev[:1]
    assert "fewer than two examples" in (look_at_task(few, tiny_model(), 0) or "")


def test_a_run_of_ones_own_task_is_refused_before_anything_is_released(tmp_path) -> None:
    run = tiny_run()
    run.task.kind = "custom"
    with pytest.raises(UserError, match="mixes examples"):
        make_trainer(tmp_path / "balanced", run, task=Balanced())
    assert make_trainer(tmp_path / "weighted", run, task=Weighted()).details()["clipping_notes"] == []


def test_a_loop_of_ones_own_asks_before_it_begins(tmp_path) -> None:
    task = Balanced()
    engine = PrivacyEngine(
        model := tiny_model(), torch.optim.SGD(model.parameters(), lr=0.1), TensorDataset(torch.randn(60, 10)),
        folder=tmp_path, batch_size=20, steps=2, noise_multiplier=1.0, delta=1e-3, clip_norm=1.0,
    )  # fmt: skip
    batch = task.collate(task.train[:6])
    with pytest.raises(UserError, match=r"losses: .*mixes examples"):
        engine.look_at_losses(task.losses, batch)
    with pytest.raises(UserError, match="fewer than two examples"):
        engine.look_at_losses(task.losses, task.collate(task.train[:1]))
    engine.look_at_losses(Weighted().losses, batch)
    for (x,) in engine.batches(physical_batch_size=8):
        engine.step(model(x).square().sum(1))
    assert engine.finished
