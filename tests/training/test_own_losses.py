"""A person's own losses: what one example loses may not depend on the others of its batch."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode
from torch.utils.data import TensorDataset

from dpexp import PrivacyEngine
from dpexp.errors import UserError
from dpexp.privacy.keys import LEDGER
from dpexp.training.watching import watch
from tests.training.mixing_tasks import (
    AllWithAll,
    AsleepBefore,
    Balanced,
    Hardest,
    Normalised,
    Weighted,
    own_loop,
)
from tests.training.tiny import TinyTask, tiny_model


class Asleep(TinyTask):
    """A scale of the batch with a floor, which no row of the first batches passes."""

    def losses(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        outputs = model(batch["x"])
        scaled = outputs / outputs.detach().abs().amax().clamp(min=100)
        return nn.functional.cross_entropy(scaled, batch["y"], reduction="none")


class AsleepCollated(TinyTask):
    """The same in its batches."""

    def collate(self, examples: list[Any]) -> dict[str, Tensor]:
        batch = super().collate(examples)
        return batch | {"x": batch["x"] / batch["x"].abs().amax().clamp(min=100)}


class Negatives(TinyTask):
    """The other examples as negatives, without a gradient."""

    def losses(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        outputs = model(batch["x"])
        return nn.functional.cross_entropy(
            outputs @ outputs.detach().T, torch.arange(len(outputs)), reduction="none"
        )


class Shuffled(TinyTask):
    """Each example with the label of another one."""

    def losses(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        order = torch.randperm(len(batch["x"]))
        return nn.functional.cross_entropy(model(batch["x"][order]), batch["y"], reduction="none")


class InAnotherOrder(TinyTask):
    def losses(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        order = torch.randperm(len(batch["x"]))
        return super().losses(model, {name: rows[order] for name, rows in batch.items()})


class WrittenInPlace(TinyTask):
    def losses(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        outputs = model(batch["x"])
        mean = torch.zeros(3)
        with torch.no_grad():
            mean += outputs.sum(0) / 100
        found = torch.zeros(len(outputs))
        found[:] = (outputs - mean).square().sum(1)
        return found


class PerHead(nn.Module):
    """Called by its parts: its own forward never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(10, 5), nn.Linear(5, 3)


class InParts(TinyTask):
    def losses(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        hidden = model.body(batch["x"])
        return model.head(hidden - hidden.detach().mean(0)).square().sum(1)


class Many(TinyTask):
    """What a loop may do with its examples: masks, writing, sorting there and back, another network, chance, 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = tiny_model()

    def losses(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        x, y = batch["x"], batch["y"]
        outputs = model(x).clone()
        outputs[:, 1] *= 2
        outputs += 0.1 * torch.randn_like(outputs)
        with torch.no_grad(), torch.autocast("cpu"):
            taught = self.teacher(nn.functional.dropout(x, 0.5)).float()
        found = nn.functional.cross_entropy(outputs, y, reduction="none") / 100
        found[y == 1] = (outputs - taught).square().mean(1)[y == 1]
        order = found.detach().argsort()
        found = found[order][order.argsort()]
        norm = sum(p.square().sum() for p in model.parameters())
        return torch.where(found.detach().isfinite(), found, 0 * found) + norm


@pytest.mark.parametrize(
    "task", [Balanced, Normalised, Hardest, Asleep, AllWithAll, Negatives, Shuffled, WrittenInPlace]
)
def test_losses_of_a_loop_that_go_by_the_batch_are_refused_at_its_first_step(tmp_path, task) -> None:
    with pytest.raises(UserError, match="mixes examples: the loss of one changes when the others"):
        own_loop(tmp_path, task(), tiny_model())
    assert _get_current_function_mode() is None
    ledger = tmp_path / LEDGER
    assert not ledger.exists() or "fingerprint" not in ledger.read_text()


@pytest.mark.parametrize(
    ("task", "words"),
    [(AsleepBefore, "before they enter the model"), (AsleepCollated, "collate_fn mixes examples")],
)
def test_what_sleeps_until_a_large_row_comes_is_refused_before_it(tmp_path, task, words) -> None:
    with pytest.raises(UserError, match=words):
        own_loop(tmp_path, task(), tiny_model())


def test_a_model_that_is_called_by_its_parts_is_refused_where_they_mix(tmp_path) -> None:
    with pytest.raises(UserError, match="mixes examples: the loss of one changes when the others"):
        own_loop(tmp_path, InParts(), PerHead())


def test_watching_a_loop_puts_no_hooks_on_all_modules(tmp_path) -> None:
    """`torch.compile` warns of them, and every module of the program would call them."""

    class Looking(TinyTask):
        def losses(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            assert not torch.nn.modules.module._has_any_global_hook()
            return super().losses(model, batch)

    own_loop(tmp_path, Looking(), tiny_model())


@pytest.mark.parametrize("task", [TinyTask, Weighted, Many, InAnotherOrder])
def test_losses_of_a_loop_that_go_by_their_own_example_pass(tmp_path, caplog, task) -> None:
    assert own_loop(tmp_path, task(), tiny_model()).finished
    assert _get_current_function_mode() is None
    assert "not looked at" not in caplog.text


@pytest.mark.parametrize("short", [False, True])
def test_a_loop_that_cannot_be_watched_says_so(tmp_path, caplog, monkeypatch, short) -> None:
    class Listed(TinyTask):
        def losses(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            return super().losses(model, batch) * torch.func.vmap(lambda y: 1.0 + y)(batch["y"])

    if not short:
        # in the second batch, and else in the last
        monkeypatch.setattr(watch, "PATIENCE", 2)
    engine = own_loop(tmp_path, Listed(), tiny_model())
    assert engine.finished
    assert caplog.text.count("losses were not looked at") == 1
    engine.close()
    # also by the card of a later process, which takes no step
    again = own_loop(tmp_path, Listed(), tiny_model())
    again.write_card(tmp_path / "model")
    assert "not proven: losses were not looked at" in (tmp_path / "model" / "PRIVACY.md").read_text()


def test_a_batch_that_tells_nothing_is_not_said_where_others_have_told(tmp_path, caplog) -> None:
    class Last(TinyTask):
        seen = 0

        def losses(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            self.seen += 1
            # ten, as many as a row has columns, may go by the batch: all of the first 16 are watched
            return super().losses(model, batch) * (10.0 if self.seen < watch.PATIENCE else 0.0)

    assert own_loop(tmp_path, Last(), tiny_model(), steps=20, size=64).finished
    assert "not looked at" not in caplog.text


def test_a_card_tells_nothing_of_a_batch_that_could_not_be_looked_at(tmp_path) -> None:
    """Six labels that look like an order, in every batch: the note goes with the model, and they do not."""
    x, y = torch.randn(6, 10), torch.tensor([3, 1, 0, 5, 4, 2])
    model = nn.Sequential(nn.Linear(10, 6))
    engine = PrivacyEngine(
        model, torch.optim.SGD(model.parameters(), lr=0.1), TensorDataset(x, y),
        folder=tmp_path / "run", batch_size=6, steps=18, noise_multiplier=1.0, delta=1e-3,
    )  # fmt: skip
    for batch in engine.batches():
        engine.step(nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none"))
    engine.write_card(tmp_path)
    (note,) = engine.clipper.notes
    assert f"not proven: {note}" in (tmp_path / "PRIVACY.md").read_text()
    assert "may be labels or an order" in note
    assert not any(letter.isdigit() for letter in note)


def test_a_loop_that_is_left_is_watched_no_longer(tmp_path) -> None:
    model, task = tiny_model(), TinyTask()
    engine = PrivacyEngine(
        model, torch.optim.SGD(model.parameters(), lr=0.1), task.train, folder=tmp_path, batch_size=20, steps=2,
        noise_multiplier=1.0, delta=1e-3, clip_norm=1.0, noise_seed=3,
    )  # fmt: skip
    for _ in engine.batches(task.collate):
        assert isinstance(_get_current_function_mode(), watch.Trace)
        break
    assert _get_current_function_mode() is None
    for batch in engine.batches(task.collate):
        # entered after what watches, and left after it
        with torch.device("cpu"):
            engine.step(task.losses(model, batch))
    assert engine.finished
    assert _get_current_function_mode() is None


def test_a_loop_of_ones_own_asks_before_it_begins_or_within(tmp_path) -> None:
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
    # of its forwards none waits for a back-propagation, which would take it for one more of the first step
    assert not engine.clipper._independence.waiting
    assert not engine.clipper._backend.recorder.watched
    for (x,) in engine.batches(physical_batch_size=8):
        if len(x) > 1:
            # or within: what is computed on other batches is not the loop's
            engine.look_at_losses(lambda model, rows: model(rows[0]).square().sum(1), (x,))
        engine.step(model(x).square().sum(1))
    assert engine.finished
