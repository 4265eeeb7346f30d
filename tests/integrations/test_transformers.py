"""Hugging Face's Trainer, private: the steps of `PrivacyEngine` and `dpexp.train`, and its own features."""

import itertools
import json
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import peft
import pytest
import torch
import transformers
from datasets import Dataset
from torch import nn

from dpexp import PrivacyEngine
from dpexp.clipping.engines import ENGINES, Engine
from dpexp.errors import UserError
from dpexp.models.adapters import add_adapters
from dpexp.own_runs.reading import read
from dpexp.privacy.shown import upwards
from dpexp.schemas import PeftConfig
from dpexp.training import release
from tests.integrations.hugging_face import (
    CHECKPOINTING,
    PRIVACY,
    ROWS,
    collate,
    flat,
    make,
    network,
    rows,
)
from tests.killing import in_child
from tests.parallel.cases import NumberedNoise
from tests.parallel.pool import run_ranks
from tests.training.tiny import TinyTask, run_to_end, tiny_run

# of the ways to one result: an epoch and two steps of the next
STEPS = 5


class SameTask(TinyTask):
    """The rows as a task of dpexp; the losses are written here once more, on purpose."""

    def __init__(self, kind):
        super().__init__()
        self.train = rows(kind)
        self.num_examples = len(self.train)

    def collate(self, examples):
        return collate(examples)

    def length(self, i):
        return len(self.train[i]["input_ids"])

    def losses(self, model, batch):
        if not len(batch["input_ids"]):
            return torch.zeros(0)
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.float()
        if logits.dim() == 2:
            return nn.functional.cross_entropy(logits, batch["labels"], reduction="none")
        per_row = zip(logits[:, :-1], batch["labels"][:, 1:], strict=True)
        return torch.stack([nn.functional.cross_entropy(one, targets) for one, targets in per_row])

    def evaluate(self, model, device, batch_size, progress=None):
        return {"accuracy": 0.0}


@pytest.fixture
def same_noise(monkeypatch):
    """The same noise for the n-th release of every run: sums that differ by rounding would otherwise get other noise."""
    # a norm method that is measured goes by the load of the machine, and in 16 bits the methods round differently
    monkeypatch.setitem(ENGINES, "auto", Engine("auto", norm="rule"))

    def reset():
        counter = itertools.count()

        def add(tensors, std, generator=None):
            own = torch.Generator().manual_seed(next(counter))
            for tensor, sigma in zip(tensors, std, strict=True):
                tensor.add_(torch.randn(tensor.shape, generator=own), alpha=sigma)

        monkeypatch.setattr(release, "add_gaussian_", add)

    return reset


def by_loop(folder, cell):
    run = tiny_run(steps=STEPS, batch_size=16, adaptive=False)
    run.clip.groups, run.clip.clip_norm, run.privacy.noise_multiplier = "flat", 0.5, 0.8
    run.optim.name, run.optim.lr, run.runtime.precision, run.engine.name = "sgd", 0.5, cell.precision, "auto"
    run.runtime.physical_batch_size = str(16 // cell.accumulation)
    trainer = run_to_end(folder, run, task=SameTask(cell.kind), model=cell.network())
    return flat(trainer.model), trainer.ledger


def by_engine(folder, cell):
    model, task = cell.network().train(), SameTask(cell.kind)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    engine = PrivacyEngine(model, optimizer, task.train, folder=folder, batch_size=16, steps=STEPS, **PRIVACY)
    for batch in engine.batches(collate, 16 // cell.accumulation):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=cell.precision == "bf16"):
            losses = task.losses(model, batch)
        engine.step(losses)
    return flat(model), engine.ledger


def by_trainer(folder, cell):
    trainer = make(
        folder, cell.kind, network(cell.kind, cell.lora), cell.accumulation,
        bf16=cell.precision == "bf16", **{CHECKPOINTING: cell.checkpointing},
        train_sampling_strategy="group_by_length", max_steps=STEPS,
    )  # fmt: skip
    trainer.train()
    return flat(trainer.model), trainer.engine.ledger


class Cell(NamedTuple):
    kind: str
    precision: str
    accumulation: int
    checkpointing: bool
    lora: bool

    def network(self):
        return network(self.kind, self.lora, self.checkpointing)


# every value of a column meets every value of every other one
CELLS = [
    Cell("classifier", "fp32", 1, True, False),
    Cell("causal", "bf16", 1, False, True),
    Cell("classifier", "fp32", 2, False, True),
    Cell("causal", "bf16", 2, True, False),
    Cell("causal", "fp32", 8, False, False),
    Cell("classifier", "bf16", 8, True, True),
]


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join(map(str, cell)))
def test_three_ways_to_the_same_weights(tmp_path, same_noise, cell):
    ways = []
    for way in (by_loop, by_engine, by_trainer):
        same_noise()
        ways.append(way(tmp_path / way.__name__, cell))
    (expected, ledger), *others = ways
    assert np.linalg.norm(expected - flat(cell.network())) > 0.1
    for found, own in others:
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6 if cell.precision == "fp32" else 1e-3)
        assert own.epsilons(1e-3) == ledger.epsilons(1e-3)


def test_the_model_comes_back_plain_and_is_saved_with_its_card(tmp_path):
    trainer = make(tmp_path / "out", lr_scheduler_type="linear", max_steps=4)
    result = trainer.train()
    assert type(trainer.model.classifier) is nn.Linear
    trainer.save_model(str(tmp_path / "model"))
    again = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "model")
    assert np.array_equal(flat(again), flat(trainer.model))
    assert f"({upwards(trainer.engine.epsilon())}, 0.001)" in (tmp_path / "model/PRIVACY.md").read_text()
    assert np.isnan(result.training_loss)
    assert trainer.lr_scheduler.last_epoch == 4
    assert not [path for path in (tmp_path / "out").rglob("*") if "key" in path.name or "ledger" in path.name]


@pytest.mark.parametrize("show", [False, True])
def test_losses_are_withheld_or_marked_and_epsilon_is_logged(tmp_path, show):
    trainer = make(
        tmp_path,
        max_steps=4,
        logging_steps=2,
        save_strategy="steps",
        save_steps=4,
        named={"show_losses": show},
    )
    trainer.train()
    history = json.loads((tmp_path / "checkpoint-4/trainer_state.json").read_text())["log_history"]
    for line, spent in zip(history, (trainer.engine.plan.epsilon(n) for n in (2, 4)), strict=True):
        # upwards, to as many digits as Hugging Face prints
        assert spent <= float(f"{line['epsilon']:.4g}") == line["epsilon"] < spent * 1.001
    assert not {"loss", "grad_norm"} & {name for line in history for name in line}
    assert all((0.5 < line.get("not_private/loss", 0) < 3) == show for line in history)


@pytest.mark.parametrize("show", [False, True])
def test_what_training_took_is_withheld_or_marked(tmp_path, show):
    """Time and memory follow from how many rows were drawn."""
    trainer = make(tmp_path, max_steps=2, skip_memory_metrics=False, named={"show_losses": show})
    result = trainer.train()
    logged = {name for line in trainer.state.log_history for name in line}
    took = {
        "train_runtime",
        "train_samples_per_second",
        "train_steps_per_second",
        "train_mem_cpu_peaked_delta",
    }
    assert not took & logged
    assert ({f"not_private/{name}" for name in took} <= logged) == show
    assert not any(name.startswith("train_") for name in result.metrics) or show


def test_epochs_evaluation_and_early_stopping_are_hugging_faces_own(tmp_path):
    class Stop(transformers.TrainerCallback):
        def on_evaluate(self, args, state, control, **named):
            control.should_training_stop = state.global_step >= 6

    trainer = make(
        tmp_path, max_steps=-1, num_train_epochs=4, eval_strategy="epoch",
        named={"eval_dataset": Dataset.from_list(rows("classifier")[1:]), "callbacks": [Stop()]},
    )  # fmt: skip
    trainer.train()
    assert trainer.engine.steps == 12
    assert trainer.engine.steps_taken == trainer.state.global_step == 6
    assert trainer.state.epoch == 2
    assert [line["epoch"] for line in trainer.state.log_history if "eval_loss" in line] == [1, 2]


def test_a_finished_run_may_be_asked_for_again_and_again(tmp_path):
    named = dict(max_steps=4, save_strategy="steps", save_steps=3)
    trainer = make(tmp_path / "out", **named)
    trainer.train(resume_from_checkpoint=True)
    ended = flat(trainer.model)
    with pytest.raises(UserError, match="finished private run"):
        trainer.train()
    for again in (trainer, make(tmp_path / "out", **named), make(tmp_path / "out", **named)):
        again.train(resume_from_checkpoint=True)
        assert again.state.global_step == again.engine.ledger.steps_charged == 4
        assert np.array_equal(flat(again.model), ended)


@pytest.mark.parametrize("checkpoint", ["checkpoint-4", "checkpoint-8"])
def test_a_resumed_run_ends_with_the_same_weights_and_pays_once(tmp_path, checkpoint):
    named = dict(
        max_steps=10,
        save_strategy="steps",
        save_steps=4,
        lr_scheduler_type="cosine",
        optim="adamw_torch",
        learning_rate=1e-2,
    )
    whole = make(tmp_path / "whole", **named)
    whole.train()
    cut = make(tmp_path / "cut", **named)
    real = cut.training_step

    def dying(*arguments, **more):
        if cut.state.global_step == 9:
            raise KeyboardInterrupt
        return real(*arguments, **more)

    cut.training_step = dying
    with pytest.raises(KeyboardInterrupt):
        cut.train()
    resumed = make(tmp_path / "cut", **named)
    resumed.train(resume_from_checkpoint=str(tmp_path / "cut" / checkpoint))
    assert np.array_equal(flat(resumed.model), flat(whole.model))
    assert resumed.engine.ledger.steps_charged == 10
    assert not list((tmp_path / "cut").rglob("rng_state*"))
    with pytest.raises(UserError, match="finished private run"):
        make(tmp_path / "cut", **named).train()


@pytest.mark.parametrize(
    "cell", [Cell("causal", "fp32", 1, False, False), Cell("classifier", "bf16", 2, True, True)], ids=str
)
def test_killed_and_resumed(tmp_path, cell):
    def made(folder, **arguments):
        return make(
            folder, cell.kind, network(cell.kind, cell.lora), cell.accumulation,
            bf16=cell.precision == "bf16", **{CHECKPOINTING: cell.checkpointing}, **arguments,
        )  # fmt: skip

    def session(folder, at=None):
        def work():
            trainer = made(folder, max_steps=6, save_strategy="steps", save_steps=2, save_total_limit=2)
            trainer.train(resume_from_checkpoint=True)
            np.save(folder / "weights.npy", flat(trainer.model))

        return in_child(work, at)

    made(tmp_path / "warm", max_steps=1).train()  # imports, before the forks
    status, calls = session(tmp_path / "whole")
    assert status == 0
    for share in (0.5, 0.4):
        assert os.WIFSIGNALED(session(tmp_path / "cut", int(calls * share))[0])
    assert session(tmp_path / "cut")[0] == 0
    assert np.array_equal(np.load(tmp_path / "cut/weights.npy"), np.load(tmp_path / "whole/weights.npy"))
    assert (tmp_path / "cut.privacy/ledger.jsonl").read_text().count('"step"') == 6


@pytest.mark.parametrize(
    "tuner",
    [
        peft.LoraConfig(task_type="CAUSAL_LM", r=2),
        peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        peft.IA3Config(task_type="CAUSAL_LM"),
    ],
    ids=lambda tuner: type(tuner).__name__,
)
def test_peft_trains_and_loads_again(tmp_path, tuner):
    model = peft.get_peft_model(network("causal"), tuner)
    before = flat(model)
    trainer = make(tmp_path / "out", "causal", model, max_steps=3)
    trainer.train()
    assert not np.array_equal(flat(trainer.model), before)
    trainer.save_model(str(tmp_path / "adapter"))
    again = peft.PeftModel.from_pretrained(network("causal"), tmp_path / "adapter")
    trained = peft.get_peft_model_state_dict(trainer.model)
    assert trained
    for name, tensor in peft.get_peft_model_state_dict(again).items():
        assert torch.equal(tensor, trained[name])


def test_bottleneck_adapters_train_alone(tmp_path):
    model, trained = add_adapters(network("causal"), PeftConfig(name="adapters", rank=2), [])
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    make(tmp_path, "causal", model, max_steps=3).train()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == set(trained)
    assert any(".up." in name for name in moved)


def together(ranks, folder):
    """What `torchrun` makes of the Trainer: the process group is there, and so are the environment variables."""
    from accelerate.state import AcceleratorState, PartialState

    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()
    who = {
        "RANK": ranks.rank,
        "LOCAL_RANK": ranks.rank,
        "WORLD_SIZE": ranks.size,
        "LOCAL_WORLD_SIZE": ranks.size,
    }
    os.environ |= {name: str(value) for name, value in who.items()}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1", "OMP_NUM_THREADS": "1"}
    return ended(folder / "together", 8, max_steps=3, save_strategy="steps", save_steps=2)


def ended(folder, size, **arguments):
    before, release.add_gaussian_ = release.add_gaussian_, NumberedNoise()
    try:
        trainer = make(
            folder,
            per_device_train_batch_size=size,
            named={"eval_dataset": Dataset.from_list(rows("classifier")[::-1])},
            **{"max_steps": 3, **arguments},
        )
        trainer.train()
        loss = trainer.evaluate()["eval_loss"]
        trainer.save_model()
        return flat(trainer.model), loss, trainer.engine.epsilon(), trainer.expected_batch
    finally:
        release.add_gaussian_ = before


def test_two_processes_under_torchrun_are_one(tmp_path):
    weights, loss, epsilon, batch = ended(tmp_path / "alone", 16)
    (tmp_path / "ranks").mkdir()
    for theirs, their_loss, their_epsilon, their_batch in run_ranks(
        2, tmp_path / "ranks", together, tmp_path
    ):
        assert (their_batch, their_epsilon) == (batch, epsilon)
        assert np.abs(theirs - weights).max() < 1e-5
        assert their_loss == pytest.approx(loss, rel=1e-5)
    lines = (tmp_path / "together.privacy" / "ledger.jsonl").read_text().splitlines()
    assert len(lines) == 3
    assert (tmp_path / "together" / "checkpoint-2" / "privacy" / "latest.json").exists()
    assert (tmp_path / "together" / "PRIVACY.md").exists()


def test_the_key_lies_beside_an_output_folder_that_is_the_one_of_the_script(tmp_path, monkeypatch):
    """An upload of ``.`` takes along what is in it."""
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    privacy = {name: value for name, value in PRIVACY.items() if name != "noise_seed"}
    make(".", max_steps=1, privacy=privacy).train()
    assert (tmp_path / "mine.privacy" / "secret.key").exists()
    assert not list((tmp_path / "mine").rglob("secret.key"))
    assert read(Path()).folder == tmp_path / "mine.privacy"


def test_epochs_of_users_are_counted_in_users(tmp_path):
    privacy = PRIVACY | {"users": [i // 3 for i in range(ROWS)], "rows_per_example": 2}
    trainer = make(
        tmp_path,
        privacy=privacy,
        max_steps=-1,
        num_train_epochs=2,
        per_device_train_batch_size=8,
        logging_steps=1,
    )
    trainer.train()
    assert trainer.state.global_step == trainer.engine.steps == 2 * (ROWS // 3) / 8
    with pytest.raises(UserError, match=r"more than the 16 rows \(or users\)"):
        make(tmp_path / "large", privacy=privacy, per_device_train_batch_size=17)


class Modal(torch.optim.SGD):
    """Like a schedule-free optimiser, which steps in one of its two modes alone."""

    ready = False

    def train(self):
        self.ready = True

    def step(self, closure=None):
        assert self.ready
        return super().step(closure)


def test_an_optimiser_with_modes_is_put_into_that_of_training(tmp_path):
    model = network("classifier")
    chosen = {"optimizers": (Modal(model.parameters(), lr=0.1), None)}
    make(tmp_path, model=model, max_steps=1, named=chosen).train()
