"""A person's own losses: what one example loses may not depend on the others of its batch."""

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode
from torch.utils.data import Dataset, TensorDataset

from dpexp import PrivacyEngine
from dpexp.errors import UserError
from dpexp.privacy.keys import LEDGER
from dpexp.statement import privacy_block
from dpexp.training.watching import watch
from dpexp.training.watching.functions import look_at_task
from tests.training.tiny import TinyTask, make_trainer, run_to_end, tiny_model, tiny_run


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


class Asleep(TinyTask):
    """A scale of the batch with a floor, which no row of the first batches passes."""

    def losses(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        outputs = model(batch["x"])
        scaled = outputs / outputs.detach().abs().amax().clamp(min=100)
        return nn.functional.cross_entropy(scaled, batch["y"], reduction="none")


class AsleepBefore(TinyTask):
    """The same of what enters the model."""

    def losses(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        x = batch["x"]
        return super().losses(model, batch | {"x": x / x.abs().amax().clamp(min=100)})


class AsleepCollated(TinyTask):
    """The same in its batches."""

    def collate(self, examples: list[Any]) -> dict[str, Tensor]:
        batch = super().collate(examples)
        return batch | {"x": batch["x"] / batch["x"].abs().amax().clamp(min=100)}


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


class Counted(TinyTask):
    """As many as there are: whoever joins makes the others weigh less."""

    def losses(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        found = super().losses(model, batch)
        return found / len(found)


class Texts(TinyTask):
    """As many tokens as their length says; the others of a row are padding, and so is a token of losses there."""

    def __init__(self, weigh: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weigh = weigh
        self.train = [(x, y, 1 + i % 10) for i, (x, y) in enumerate(self.train)]

    def collate(self, examples: list[Any]) -> dict[str, Tensor]:
        lengths = torch.tensor([length for _, _, length in examples])
        real = torch.arange(int(lengths.max())) < lengths[:, None]
        return super().collate([(x, y) for x, y, _ in examples]) | {"real": real}

    def losses(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        tokens = super().losses(model, batch)[:, None] * batch["real"]
        return self.weigh(tokens, batch["real"])


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


def own_loop(folder: Path, task: TinyTask, model: nn.Module, steps: int = 2, size: int = 9) -> PrivacyEngine:
    engine = PrivacyEngine(
        model, torch.optim.SGD(model.parameters(), lr=0.1), task.train, folder=folder, batch_size=20, steps=steps,
        noise_multiplier=1.0, delta=1e-3, clip_norm=1.0, noise_seed=3,
    )  # fmt: skip
    for batch in engine.batches(task.collate, physical_batch_size=size):
        engine.step(task.losses(model, batch))
    return engine


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


def test_losses_are_not_divided_by_how_many_were_drawn(tmp_path) -> None:
    with pytest.raises(UserError, match="scales losses by a number that goes by their batch"):
        own_loop(tmp_path, Counted(), tiny_model())


BY_ITS_SIZE = {
    "a tensor": lambda found: found / torch.tensor(float(len(found))),
    "of its kind": lambda found: found / found.new_tensor(len(found)),
    "in front": lambda found: torch.tensor(1 / len(found)) * found,
    "16 bits": lambda found: found * torch.tensor(1 / len(found), dtype=torch.bfloat16),
    "one for each": lambda found: found / torch.full_like(found, len(found)),
    "anew for each": lambda found: found / torch.full((len(found),), len(found)),
    "ones": lambda found: found / torch.ones_like(found).sum(),
    "shape": lambda found: found / torch.tensor(found.shape).prod(),
}


@pytest.mark.parametrize("scale", BY_ITS_SIZE.values(), ids=BY_ITS_SIZE)
def test_losses_are_not_divided_by_a_tensor_of_how_many_were_drawn(tmp_path, scale) -> None:
    class Scaled(TinyTask):
        def losses(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            return scale(super().losses(model, batch))

    with pytest.raises(UserError, match="scales losses by a number that goes by their batch"):
        own_loop(tmp_path, Scaled(), tiny_model())


BY_A_FUNCTION_OF_ITS_SIZE: dict[str, Callable[[Tensor, int], Tensor]] = {
    "the expected size": lambda found, step: found * (20 / len(found)),
    "a root": lambda found, step: found / math.sqrt(len(found)),
    "a root of a tensor": lambda found, step: found / torch.tensor(float(len(found))).sqrt(),
    "a logarithm, annealed": lambda found, step: 0.5 * found / math.log(1 + len(found)),
}
BY_THE_STEP: dict[str, Callable[[Tensor, int], Tensor]] = {
    "annealed": lambda found, step: found * 0.9**step,
    "a cycle": lambda found, step: found * (1 + step % 3),
    "drawn": lambda found, step: found * random.Random(step).random(),
    "a constant": lambda found, step: found * 20.0,
    "a log beside it": lambda found, step: (found.detach() / math.sqrt(len(found)), found)[1],
}


@pytest.mark.parametrize("scale", BY_A_FUNCTION_OF_ITS_SIZE.values(), ids=BY_A_FUNCTION_OF_ITS_SIZE)
def test_losses_are_not_scaled_by_what_follows_from_how_many_were_drawn(tmp_path, scale) -> None:
    with pytest.raises(UserError, match="scales losses by a number that goes by their batch"):
        scaled_loop(tmp_path, scale)


@pytest.mark.parametrize("scale", BY_THE_STEP.values(), ids=BY_THE_STEP)
def test_losses_may_be_scaled_by_what_follows_from_the_step(tmp_path, scale) -> None:
    assert scaled_loop(tmp_path, scale).finished


def scaled_loop(folder: Path, scale: Callable[[Tensor, int], Tensor]) -> PrivacyEngine:
    """Of one physical batch for each step: what differs within a step is seen by it."""

    class Scaled(TinyTask):
        calls = 0

        def losses(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            self.calls += 1
            return scale(super().losses(model, batch), self.calls)

    return own_loop(folder, Scaled(), tiny_model(), steps=16, size=64)


def test_losses_are_not_divided_by_what_a_collate_function_has_counted(tmp_path) -> None:
    class Tokens(Texts):
        def collate(self, examples: list[Any]) -> dict[str, Tensor]:
            batch = super().collate(examples)
            return batch | {"tokens": batch["real"].sum()}

        def losses(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            return super().losses(model, batch) / batch["tokens"]

    with pytest.raises(UserError, match="scales losses by a number that goes by their batch"):
        own_loop(tmp_path, Tokens(BY_ITSELF["its own tokens"]), tiny_model())


def test_losses_may_be_divided_by_constants_and_by_lengths_that_are_alike(tmp_path) -> None:
    class Alike(TinyTask):
        lengths = iter((4, 4, 5, 5, 6, 6, 7, 7))

        def losses(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            length = next(self.lengths)
            tokens = super().losses(model, batch)[:, None].expand(-1, length)
            # as of a tokenizer that the loop calls, of texts that are sorted by length
            own = torch.tensor([float(length)] * len(tokens))
            return tokens.sum(1) / own / torch.tensor(9.0) * torch.full((len(own),), 0.1)

    assert own_loop(tmp_path, Alike(), tiny_model()).finished


def test_a_number_that_is_drawn_for_a_batch_may_be_its_size_by_chance(tmp_path) -> None:
    class Timestep(TinyTask):
        calls = 0

        def losses(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            self.calls += 1
            found = super().losses(model, batch)
            return found * (100 + self.calls if self.calls < 5 else len(found)) / 1000

    # in a physical batch for each sample: what is drawn for one of several is refused
    assert own_loop(tmp_path, Timestep(), tiny_model(), steps=8, size=len(TinyTask().train)).finished


BY_THE_BATCH = {
    "a mean over padded rows": lambda tokens, real: tokens.mean(1),
    "padded rows, flattened": lambda tokens, real: tokens.unflatten(1, (-1, 1)).flatten(1).mean(-1),
    "a mean over shifted rows": lambda tokens, real: tokens[:, 1:].mean(1),
    "how long shifted rows are padded": lambda tokens, real: tokens[:, 1:].sum(1) / (real.shape[1] - 1),
    "how long rows are padded": lambda tokens, real: tokens.sum(1) / real.shape[1],
    "a share of how long rows are padded": lambda tokens, real: tokens.sum(1) * (real.sum(1) / real.shape[1]),
    "its tokens, counted": lambda tokens, real: tokens.sum(1) / int(real.sum()),
    "its tokens, as item": lambda tokens, real: tokens.sum(1) * (1 / real.sum().item()),
    "the longest": lambda tokens, real: tokens.sum(1) / float(real.sum(1).max()),
}
BY_ITSELF = {
    "its own tokens": lambda tokens, real: tokens.sum(1) / real.sum(1),
    "a public number": lambda tokens, real: tokens.sum(1) / 10,
    "counted for a log": lambda tokens, real: (
        tokens.sum(1),
        tokens.mean() / int(real.sum()),
        tokens.mean(1),
    )[0],
}


@pytest.mark.parametrize("weigh", BY_THE_BATCH.values(), ids=BY_THE_BATCH)
def test_losses_do_not_go_by_padding_nor_by_the_tokens_of_their_batch(tmp_path, weigh) -> None:
    with pytest.raises(UserError, match="scales losses by a number that goes by their batch"):
        own_loop(tmp_path, Texts(weigh), tiny_model())


@pytest.mark.parametrize("weigh", BY_ITSELF.values(), ids=BY_ITSELF)
def test_losses_may_go_by_their_own_tokens(tmp_path, weigh) -> None:
    assert own_loop(tmp_path, Texts(weigh), tiny_model()).finished


class Words(nn.Module):
    """Scores of each word, ``[B, T, 3]``."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.scores = nn.Embedding(20, 4), nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.scores(self.table(ids).tanh())


def of_words(
    folder: Path, losses: Callable[[Tensor, Tensor, Tensor], Tensor], longest: int = 0, left: bool = False
) -> PrivacyEngine:
    """Train on texts of 2 to 7 words, padded by 0 to the longest of a batch, or to one length for all."""
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(1, 20, (2 + i % 6,), generator=generator) for i in range(60)]

    def collate(examples: list[Tensor]) -> Tensor:
        length = longest or max(map(len, examples))
        more = [length - len(ids) for ids in examples]
        return torch.stack(
            [
                nn.functional.pad(ids, (m, 0) if left else (0, m))
                for ids, m in zip(examples, more, strict=True)
            ]
        )

    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = Words()
    engine = PrivacyEngine(
        model, torch.optim.SGD(model.parameters(), lr=0.1), texts, folder=folder, batch_size=20, steps=4,
        noise_multiplier=1.0, delta=1e-3, clip_norm=1.0, noise_seed=3,
    )  # fmt: skip
    for ids in engine.batches(collate, physical_batch_size=3):
        engine.step(losses(model(ids), ids, ids > 0))
    return engine


FEELING_PADDING = {
    "an answer anywhere": lambda scores, ids, real: nn.functional.cross_entropy(
        scores[..., 0], ids[:, 0] % 2, reduction="none"
    ),
    "the largest": lambda scores, ids, real: scores.amax(1).square().sum(1),
    "the last one": lambda scores, ids, real: scores[:, -1].square().sum(1),
    "losses of padding": lambda scores, ids, real: (
        nn.functional.cross_entropy(scores.transpose(1, 2), ids % 3, reduction="none").sum(1) / real.sum(1)
    ),
}
LEAVING_IT_OUT = {
    "an answer in the text": lambda scores, ids, real: nn.functional.cross_entropy(
        scores[..., 0].masked_fill(~real, -torch.inf), ids[:, 0] % 2, reduction="none"
    ),
    "the largest of its own": lambda scores, ids, real: (
        scores.masked_fill(~real[..., None], -torch.inf).amax(1).square().sum(1)
    ),
    "its last one": lambda scores, ids, real: scores[torch.arange(len(ids)), real.sum(1) - 1].square().sum(1),
    "losses of its own": lambda scores, ids, real: (
        nn.functional.cross_entropy(
            scores.transpose(1, 2), (ids % 3).masked_fill(~real, -100), reduction="none"
        ).sum(1)
        / real.sum(1)
    ),
    # as many classes as some batches have columns
    "classes": lambda scores, ids, real: nn.functional.cross_entropy(
        (scores * real[..., None]).sum(1), ids[:, 0] % 3, reduction="none"
    ),
}


@pytest.mark.parametrize("losses", FEELING_PADDING.values(), ids=FEELING_PADDING)
def test_losses_do_not_go_by_what_the_model_returns_for_padding(tmp_path, losses) -> None:
    with pytest.raises(UserError, match="go by padding"):
        of_words(tmp_path / "own", losses)
    assert of_words(tmp_path / "padded alike", losses, longest=7).finished
    if losses is FEELING_PADDING["the last one"]:
        assert of_words(tmp_path / "padded in front", losses, left=True).finished
    else:
        with pytest.raises(UserError, match="go by padding"):
            of_words(tmp_path / "padded in front", losses, left=True)


@pytest.mark.parametrize("losses", LEAVING_IT_OUT.values(), ids=LEAVING_IT_OUT)
def test_losses_of_what_stands_within_a_row_pass(tmp_path, losses) -> None:
    assert of_words(tmp_path, losses).finished


def of_rows_made_of_words(folder, made):
    """A loop that makes one row of features of each text, and gives that to the model."""
    draw = torch.Generator().manual_seed(2)
    texts = [torch.randint(1, 20, (length,), generator=draw) for length in [2, 5, 3, 4, 6, 2, 7, 3, 4, 5] * 8]
    table = torch.randn(20, 4, generator=draw)
    model = nn.Linear(4, 3)

    def collate(examples):
        return nn.utils.rnn.pad_sequence(examples, batch_first=True)

    engine = PrivacyEngine(
        model, torch.optim.SGD(model.parameters(), lr=0.1), texts, folder=folder, batch_size=20, steps=4,
        noise_multiplier=1.0, delta=1e-3, clip_norm=1.0, noise_seed=3,
    )  # fmt: skip
    for ids in engine.batches(collate, physical_batch_size=3):
        engine.step(model(made(table, ids, ids > 0)).square().sum(1))
    return engine


MADE_OF_PADDING = {
    "read from its end": lambda table, ids, real: table[ids.flip(1)[:, 0]],
    "the last one": lambda table, ids, real: table[ids[:, -1]],
    "the largest": lambda table, ids, real: table[ids].amax(1),
    "moved by one": lambda table, ids, real: table[ids.roll(1, 1)[:, 0]],
}
MADE_OF_WORDS = {
    "a mean of its own": lambda table, ids, real: (
        (table[ids] * real[..., None]).sum(1) / real.sum(1, keepdim=True)
    ),
    "the largest of its own": lambda table, ids, real: (
        table[ids].masked_fill(~real[..., None], -torch.inf).amax(1)
    ),
    "how many": lambda table, ids, real: real.sum(1, keepdim=True).expand(-1, 4) / 10.0,
    "its last one": lambda table, ids, real: table[ids[torch.arange(len(ids)), real.sum(1) - 1]],
}


@pytest.mark.parametrize("made", MADE_OF_PADDING.values(), ids=MADE_OF_PADDING)
def test_what_a_loop_makes_of_padding_does_not_enter_the_model(tmp_path, made) -> None:
    with pytest.raises(UserError, match="go by padding"):
        of_rows_made_of_words(tmp_path, made)


@pytest.mark.parametrize("made", MADE_OF_WORDS.values(), ids=MADE_OF_WORDS)
def test_what_a_loop_makes_of_words_alone_enters_the_model(tmp_path, made) -> None:
    assert of_rows_made_of_words(tmp_path, made).finished


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


class Paired(TinyTask):
    """Mixup, where nobody looks at losses."""

    def collate(self, examples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        batch = super().collate(examples)
        return {**batch, "x": 0.5 * (batch["x"] + batch["x"].flip(0))}


def test_a_task_that_mixes_its_batches_is_refused(tmp_path) -> None:
    with pytest.raises(UserError, match="collate_fn mixes examples"):
        look_at_task(Paired(), tiny_model(), 0)
