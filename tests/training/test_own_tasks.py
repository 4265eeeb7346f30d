"""Tasks of one's own: their losses, augmentations and training rows go by one example each, or are refused before a step."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from dpexp.errors import UserError
from dpexp.statement import privacy_block
from dpexp.training.watching.functions import look_at_task
from tests.training.mixing_tasks import AllWithAll, AsleepBefore, Balanced, Hardest, Normalised, Weighted
from tests.training.tiny import TinyTask, make_trainer, run_to_end, tiny_model, tiny_run


class Remembering(TinyTask):
    """A running mean of the losses, kept in the task."""

    seen = 0.0

    def losses(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        found = super().losses(model, batch)
        self.seen = 0.5 * self.seen + float(found.detach().mean())
        return found / self.seen


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


@pytest.mark.parametrize("task", [Balanced, Normalised, Hardest, AsleepBefore, Remembering, AllWithAll])
def test_losses_that_go_by_the_batch_are_refused(task: type[TinyTask]) -> None:
    with pytest.raises(UserError, match=rf"{task.__name__}\.losses: .*mixes examples"):
        look_at_task(task(), tiny_model(), 0)


class Partners(Dataset[Any]):
    """Each row beside the one before it."""

    def __init__(self, rows: list[Any]):
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Any:
        (x, y), (other, _) = self.rows[i], self.rows[i - 1]
        return (x + other) / 2, y


def test_a_training_set_that_makes_an_example_of_several_rows_is_refused() -> None:
    task = TinyTask()
    task.train = Partners(task.train)
    with pytest.raises(UserError, match="makes one example of several rows"):
        look_at_task(task, tiny_model(), 0)
    assert look_at_task(task, tiny_model(), 0, by_user=True) is None


class Flipped(TinyTask):
    """One coin for all of a batch."""

    def losses(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        x = batch["x"].flip(-1) if torch.rand(1) < 0.5 else batch["x"]
        return super().losses(model, {**batch, "x": x})


def test_a_coin_that_a_task_tosses_for_a_batch_is_refused_where_a_sample_is_cut(tmp_path: Path) -> None:
    run = tiny_run(steps=2)
    run.task.kind = "custom"
    with pytest.raises(
        UserError, match=r"share what rand draws, 1 number in Flipped.losses .* physical batch size"
    ):
        run_to_end(tmp_path / "pieces", run, task=Flipped())
    for size in (1, len(Flipped().train)):
        run.runtime.physical_batch_size = str(size)
        assert run_to_end(tmp_path / f"{size}", run, task=Flipped()).step == 2


@pytest.mark.parametrize("task", [TinyTask, Weighted, Twice])
def test_losses_of_each_example_alone_pass(task: type[TinyTask]) -> None:
    state = torch.get_rng_state()
    assert look_at_task(task(), tiny_model(), 0) is None
    assert torch.equal(torch.get_rng_state(), state)


class Masked(TinyTask):
    """Rows of 1, 2, 3 … tokens, and a loss for each of them."""

    mean = False

    def collate(self, examples: list[Any]) -> dict[str, Tensor]:
        mask = torch.arange(len(examples)) <= torch.arange(len(examples))[:, None]
        return super().collate(examples) | {"attention_mask": mask.long()}

    def losses(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        tokens = super().losses(model, batch)[:, None] * batch["attention_mask"]
        return tokens.mean(1) if self.mean else tokens.sum(1) / batch["attention_mask"].sum(1)


def test_losses_of_a_task_do_not_go_by_padding() -> None:
    task = Masked()
    assert look_at_task(task, tiny_model(), 0) is None
    task.mean = True
    with pytest.raises(UserError, match=r"Masked\.losses: .*when its batch is padded further"):
        look_at_task(task, tiny_model(), 0)
    task.pad_to = 8
    assert look_at_task(task, tiny_model(), 0) is None


class Pointing(Masked):
    """A loss of the token that a number beside the tokens names: the last one of each row."""

    def collate(self, examples: list[Any]) -> dict[str, Tensor]:
        batch = super().collate(examples)
        return batch | {"positions": batch["attention_mask"].sum(1) - 1}

    def losses(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        tokens = TinyTask.losses(self, model, batch)[:, None] * batch["attention_mask"].cumsum(1)
        # of rows of several numbers, torch reads behind the end without a word where no gradient is asked for
        rows = tokens[..., None].repeat(1, 1, 16)
        return rows.take_along_dim(batch["positions"][:, None, None], 1).mean((1, 2))


def test_a_batch_that_names_its_tokens_by_number_is_not_cut_before_them() -> None:
    assert look_at_task(Pointing(), tiny_model(), 0) is None


def test_what_cannot_be_looked_at_is_said_without_the_words_of_an_error(caplog) -> None:
    """The note goes with the model, and the words may be those of a private row."""
    caplog.set_level("DEBUG")
    note = look_at_task(Unlucky(), tiny_model(), 0) or ""
    assert "RuntimeError" in note
    assert "Mondays" not in note
    assert "only on Mondays" in caplog.text
    few = TinyTask()
    few.dev, few.train = few.dev[:1], few.train[:1]
    assert "fewer than two examples" in (look_at_task(few, tiny_model(), 0) or "")


@pytest.mark.parametrize("rows", [0, 1])
def test_without_a_dev_set_examples_of_the_training_are_looked_at(rows: int) -> None:
    task, mixing = Weighted(), Normalised()
    task.dev, mixing.dev = task.dev[:rows], mixing.dev[:rows]
    assert look_at_task(task, tiny_model(), 0) is None
    with pytest.raises(UserError, match="mixes examples"):
        look_at_task(mixing, tiny_model(), 0)


class Standardised(TinyTask):
    def augmented(self, batch: dict[str, Tensor], indices: Any, seed: int, step: int) -> dict[str, Tensor]:
        x = batch["x"]
        return {**batch, "x": (x - x.mean(0)) / (x.std(0) + 1e-3)} if len(x) > 1 else batch


class Mixup(TinyTask):
    begins = 0

    def augmented(self, batch: dict[str, Tensor], indices: Any, seed: int, step: int) -> dict[str, Tensor]:
        x = batch["x"]
        return {**batch, "x": 0.5 * x + 0.5 * x[torch.randperm(len(x))]} if step >= self.begins else batch


class LateMixup(Mixup):
    begins = 90


class Drifting(TinyTask):
    """A running mean of the batches."""

    seen: Any = 0.0

    def augmented(self, batch: dict[str, Tensor], indices: Any, seed: int, step: int) -> dict[str, Tensor]:
        self.seen = 0.9 * self.seen + 0.1 * batch["x"].mean(0)
        return {**batch, "x": batch["x"] - self.seen}


class ByNumber(TinyTask):
    """As it is meant: a function of (seed, step, index) alone."""

    def augmented(self, batch: dict[str, Tensor], indices: Any, seed: int, step: int) -> dict[str, Tensor]:
        noise = [np.random.default_rng([seed, step, int(i)]).normal(size=10) for i in indices]
        return {**batch, "x": batch["x"] + torch.from_numpy(np.array(noise)).float().view(-1, 10)}


@pytest.mark.parametrize("task", [Standardised, Mixup, LateMixup, Drifting])
def test_an_augmentation_that_goes_by_the_batch_is_refused(task: type[TinyTask]) -> None:
    with pytest.raises(UserError, match=rf"{task.__name__}\.augmented, or its losses: .*mixes examples"):
        look_at_task(task(), tiny_model(), 0, steps=100)


def test_an_augmentation_of_each_example_alone_passes() -> None:
    assert look_at_task(ByNumber(), tiny_model(), 0, steps=100) is None


class Partner(TinyTask):
    """Mixup with a training row whose number is public: no other row of the batch has a part in it."""

    def __init__(self, shift: int) -> None:
        super().__init__()
        self.shift = shift

    def augmented(self, batch: dict[str, Tensor], indices: Any, seed: int, step: int) -> dict[str, Tensor]:
        others = [self.train[(int(i) + self.shift) % len(self.train)][0] for i in indices]
        return {**batch, "x": 0.5 * batch["x"] + 0.5 * torch.stack(others)} if others else batch


class Centred(TinyTask):
    def losses(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return super().losses(
            model, batch | {"x": batch["x"] - torch.stack([x for x, _ in self.train]).mean(0)}
        )


class AtOnce(Partner):
    """The same, all of them read at once."""

    def __init__(self, shift: int) -> None:
        super().__init__(shift)
        self.train: Any = TensorDataset(*map(torch.stack, zip(*self.train, strict=True)))

    def augmented(self, batch: dict[str, Tensor], indices: Any, seed: int, step: int) -> dict[str, Tensor]:
        others = self.train[[(int(i) + self.shift) % len(self.train) for i in indices]][0]
        return {**batch, "x": 0.5 * batch["x"] + 0.5 * others}


@pytest.mark.parametrize("task", [Partner(17), AtOnce(17), Centred()])
def test_a_task_that_reads_other_training_rows_than_those_of_its_batch_is_refused(task: TinyTask) -> None:
    rows = task.train
    with pytest.raises(UserError, match="read other rows of the training data than those of their batch"):
        look_at_task(task, tiny_model(), 0)
    assert task.train is rows


def test_a_task_may_read_its_own_row_again() -> None:
    assert look_at_task(Partner(0), tiny_model(), 0) is None
    assert look_at_task(AtOnce(0), tiny_model(), 0) is None


def test_what_was_not_looked_at_is_among_the_conditions() -> None:
    block = privacy_block(tiny_run(), None, {}, 0, 0, unproven=["Mine.losses was not looked at: why"])
    assert "not proven: Mine.losses was not looked at: why" in block["notes"]


def test_a_run_of_ones_own_task_is_refused_before_anything_is_released(tmp_path) -> None:
    run = tiny_run()
    run.task.kind = "custom"
    with pytest.raises(UserError, match="mixes examples"):
        make_trainer(tmp_path / "balanced", run, task=Balanced())
    assert make_trainer(tmp_path / "weighted", run, task=Weighted()).details()["clipping_notes"] == []


class Paired(TinyTask):
    """Mixup, where nobody looks at losses."""

    def collate(self, examples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        batch = super().collate(examples)
        return {**batch, "x": 0.5 * (batch["x"] + batch["x"].flip(0))}


def test_a_task_that_mixes_its_batches_is_refused(tmp_path) -> None:
    with pytest.raises(UserError, match="collate_fn mixes examples"):
        look_at_task(Paired(), tiny_model(), 0)
