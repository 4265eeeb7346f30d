"""Hugging Face's Trainer, private: the steps of `PrivacyEngine` and `dpexp.train`, its own features, and what is refused."""

import itertools
import json
import os
from typing import NamedTuple

import numpy as np
import peft
import pytest
import torch
import transformers
from datasets import Dataset
from torch import nn
from torch.utils.data import DataLoader

from dpexp import PrivacyEngine
from dpexp.clipping.engines import ENGINES, Engine
from dpexp.errors import UserError
from dpexp.integrations.transformers import Trainer
from dpexp.models.adapters import add_adapters
from dpexp.schemas import PeftConfig
from dpexp.training import release
from tests.killing import in_child
from tests.parallel.cases import NumberedNoise
from tests.parallel.pool import run_ranks
from tests.training.tiny import TinyTask, run_to_end, tiny_run

ROWS, LONGEST, VOCABULARY = 48, 7, 40
# transformers below 5.12 knows it by its older name
CHECKPOINTING = next(
    name
    for name in ("activation_checkpointing", "gradient_checkpointing")
    if name in transformers.TrainingArguments.__dataclass_fields__
)
PRIVACY = {"noise_multiplier": 0.8, "delta": 1e-3, "noise_seed": 11, "clip_norm": 0.5}


def rows(kind):
    generator = np.random.default_rng(0)
    made = []
    for _ in range(ROWS):
        tokens = generator.integers(1, VOCABULARY, generator.integers(3, LONGEST + 1)).tolist()
        label = int(generator.integers(3)) if kind == "classifier" else [-100, *tokens[1:]]
        made.append({"input_ids": tokens, "labels": label})
    return made


def collate(examples):
    longest = max(len(example["input_ids"]) for example in examples)

    def padded(name, value):
        return torch.tensor([e[name] + [value] * (longest - len(e[name])) for e in examples])

    ids = padded("input_ids", 0)
    labels = examples[0]["labels"]
    labels = (
        torch.tensor([e["labels"] for e in examples]) if isinstance(labels, int) else padded("labels", -100)
    )
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}


def network(kind, lora=False, checkpointing=False):
    sizes = dict(vocab_size=VOCABULARY, num_labels=3, pad_token_id=0)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        if kind == "classifier":
            config = transformers.BertConfig(
                **sizes, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=20,
                max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            )  # fmt: skip
            model = transformers.BertForSequenceClassification(config)
        else:
            config = transformers.GPT2Config(
                **sizes, n_embd=16, n_layer=2, n_head=2, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
                bos_token_id=1, eos_token_id=1,
            )  # fmt: skip
            model = transformers.GPT2LMHeadModel(config)
        if lora:
            task = "SEQ_CLS" if kind == "classifier" else "CAUSAL_LM"
            model = peft.get_peft_model(model, peft.LoraConfig(task_type=task, r=2, lora_dropout=0.0))
    if checkpointing:
        base = model.get_base_model() if lora else model
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def make(
    folder,
    kind="classifier",
    model=None,
    accumulation=1,
    privacy=None,
    trainer=Trainer,
    named=None,
    **arguments,
):
    settings = dict(
        output_dir=str(folder), per_device_train_batch_size=16 // accumulation, gradient_accumulation_steps=accumulation,
        max_steps=20, learning_rate=0.5, optim="sgd", lr_scheduler_type="constant", save_strategy="no", logging_steps=5,
        report_to=[], disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    args = transformers.TrainingArguments(**(settings | arguments))
    return trainer(
        model or network(kind), args, train_dataset=Dataset.from_list(rows(kind)), data_collator=collate,
        privacy=PRIVACY if privacy is None else privacy, **(named or {}),
    )  # fmt: skip


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters() if p.requires_grad]).numpy().copy()


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
    run = tiny_run(steps=20, batch_size=16, adaptive=False)
    run.clip.groups, run.clip.clip_norm, run.privacy.noise_multiplier = "flat", 0.5, 0.8
    run.optim.name, run.optim.lr, run.runtime.precision, run.engine.name = "sgd", 0.5, cell.precision, "auto"
    run.runtime.physical_batch_size = str(16 // cell.accumulation)
    trainer = run_to_end(folder, run, task=SameTask(cell.kind), model=cell.network())
    return flat(trainer.model), trainer.ledger


def by_engine(folder, cell):
    model, task = cell.network().train(), SameTask(cell.kind)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    engine = PrivacyEngine(model, optimizer, task.train, folder=folder, batch_size=16, steps=20, **PRIVACY)
    for batch in engine.batches(collate, 16 // cell.accumulation):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=cell.precision == "bf16"):
            losses = task.losses(model, batch)
        engine.step(losses)
    return flat(model), engine.ledger


def by_trainer(folder, cell):
    trainer = make(
        folder, cell.kind, network(cell.kind, cell.lora), cell.accumulation,
        bf16=cell.precision == "bf16", **{CHECKPOINTING: cell.checkpointing},
        train_sampling_strategy="group_by_length",
    )  # fmt: skip
    trainer.train()
    return flat(trainer.model), trainer.engine.ledger


class Cell(NamedTuple):
    precision: str
    accumulation: int
    checkpointing: bool
    lora: bool

    @property
    def kind(self):
        """Each kind of model meets every accumulation, with and without checkpointing and LoRA."""
        return ("classifier", "causal")[(self.accumulation.bit_length() + self.checkpointing + self.lora) % 2]

    def network(self):
        return network(self.kind, self.lora, self.checkpointing)


SWITCH = (False, True)
CELLS = [
    Cell(precision, *rest)
    for precision in ("fp32", "bf16")
    for rest in itertools.product((1, 2, 8), SWITCH, SWITCH)
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
    assert f"({trainer.engine.epsilon():.4f}, 0.001)" in (tmp_path / "model/PRIVACY.md").read_text()
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
    assert [round(line["epsilon"], 6) for line in history] == [
        round(trainer.engine.plan.epsilon(n), 6) for n in (2, 4)
    ]
    assert not {"loss", "grad_norm"} & {name for line in history for name in line}
    assert all((0.5 < line.get("not_private/loss", 0) < 3) == show for line in history)


def test_epochs_evaluation_and_early_stopping_are_hugging_faces_own(tmp_path):
    class Stop(transformers.TrainerCallback):
        def on_evaluate(self, args, state, control, **named):
            control.should_training_stop = state.global_step >= 6

    trainer = make(
        tmp_path, max_steps=-1, num_train_epochs=4, eval_strategy="epoch",
        named={"eval_dataset": Dataset.from_list(rows("classifier")), "callbacks": [Stop()]},
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


def test_killed_and_resumed(tmp_path):
    def session(folder, at=None):
        def work():
            trainer = make(folder, max_steps=30, save_strategy="steps", save_steps=3, save_total_limit=2)
            trainer.train(resume_from_checkpoint=True)
            np.save(folder / "weights.npy", flat(trainer.model))

        return in_child(work, at)

    make(tmp_path / "warm", max_steps=1).train()  # imports, before the forks
    status, calls = session(tmp_path / "whole")
    assert status == 0
    for share in (0.5, 0.4):
        assert os.WIFSIGNALED(session(tmp_path / "cut", int(calls * share))[0])
    assert session(tmp_path / "cut")[0] == 0
    assert np.array_equal(np.load(tmp_path / "cut/weights.npy"), np.load(tmp_path / "whole/weights.npy"))
    assert (tmp_path / "cut.privacy/ledger.jsonl").read_text().count('"step"') == 30


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


def test_a_head_of_ones_own_brings_its_losses(tmp_path):
    class Own(Trainer):
        def per_example_losses(self, model, inputs):
            hidden = model.bert(inputs["input_ids"], inputs["attention_mask"]).pooler_output
            return nn.functional.mse_loss(
                model.classifier(hidden)[:, 0], inputs["labels"].float(), reduction="none"
            )

    trainer = make(tmp_path, trainer=Own, max_steps=2)
    trainer.train()
    assert trainer.engine.finished


def test_losses_of_ones_own_that_go_by_the_batch_are_refused(tmp_path):
    class Balanced(Trainer):
        def per_example_losses(self, model, inputs):
            shares = torch.bincount(inputs["labels"], minlength=2) / len(inputs["labels"])
            return super().per_example_losses(model, inputs) * shares[inputs["labels"]]

    trainer = make(tmp_path, trainer=Balanced, max_steps=2)
    with pytest.raises(UserError, match=r"Balanced\.per_example_losses: .*mixes examples"):
        trainer.train()
    assert trainer.engine.steps_taken == 0


def test_labels_of_every_kind_give_one_loss_per_row():
    trainer = object.__new__(Trainer)

    class Head(nn.Module):
        def __init__(self, logits):
            super().__init__()
            self.logits, self.config = logits, transformers.BertConfig()

        def forward(self, **features):
            return {"logits": self.logits}

    def losses(logits, labels):
        return trainer.per_example_losses(Head(logits), {"labels": labels})

    assert losses(torch.zeros(4, 3), torch.zeros(4, dtype=torch.long)).tolist() == pytest.approx(
        [np.log(3)] * 4
    )
    assert losses(torch.zeros(4, 3), torch.zeros(4, 3)).tolist() == pytest.approx([np.log(2)] * 4)
    assert losses(torch.full((4, 1), 3.0), torch.ones(4)).tolist() == [4.0] * 4
    labels = torch.tensor([[1, -100, 2], [-100, -100, -100]])
    assert losses(torch.zeros(2, 3, 5), labels).tolist() == pytest.approx([np.log(5), 0.0])
    with pytest.raises(UserError, match="per_example_losses"):
        losses(torch.zeros(2, 3, 4, 5), torch.zeros(2))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"fp16": True, "use_cpu": False}, "bf16=True"),
        ({"torch_compile": True}, "torch_compile"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"dataloader_num_workers": 2}, "dataloader_num_workers"),
        ({"train_sampling_strategy": "sequential"}, "Poisson"),
        ({"include_num_input_tokens_seen": "all"}, "private samples"),
        ({"optim": "lomo"}, "within the backward pass"),
        ({"per_device_train_batch_size": 128}, "a batch of 128 .* is more than the"),
    ],
)
def test_what_does_not_go_together_with_privacy_is_refused_by_name(tmp_path, arguments, named):
    with pytest.raises(UserError, match=named):
        make(tmp_path, **arguments)


def test_answers_by_spans_have_hugging_face_s_losses_row_by_row():
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=16,
    )  # fmt: skip
    model = transformers.BertForQuestionAnswering(config).eval()
    generator = torch.Generator().manual_seed(1)
    inputs = {
        "input_ids": torch.randint(1, VOCABULARY, (3, 6), generator=generator),
        "attention_mask": torch.ones(3, 6, dtype=torch.long),
        # the last answer ends beyond its text
        "start_positions": torch.tensor([0, 2, 4]),
        "end_positions": torch.tensor([1, 2, 9]),
    }
    losses = Trainer.per_example_losses(None, model, inputs)
    for i in range(2):
        alone = model(**{name: value[i : i + 1] for name, value in inputs.items()}).loss
        assert losses[i].item() == pytest.approx(alone.item(), rel=1e-5)
    start = model(inputs["input_ids"], inputs["attention_mask"]).start_logits
    cut = nn.functional.cross_entropy(start[2:], torch.tensor([4])).item() / 2
    assert losses[2].item() == pytest.approx(cut, rel=1e-5)


def test_a_batch_without_labels_is_named():
    with pytest.raises(UserError, match="a batch has no labels, it has input_ids, targets"):
        Trainer.per_example_losses(None, None, {"input_ids": 1, "targets": 2})


@pytest.mark.parametrize(
    ("privacy", "says"),
    [
        ({"noise_multiplier": 1.0, "max_grad_norm": 1.0}, "it is called clip_norm here"),
        ({"noise_multiplier": 1.0, "clip_nrom": 1.0}, "did you mean clip_norm"),
        ({"noise_multiplier": 1.0, "batch_size": 16}, "per_device_train_batch_size"),
        ({"delta": 1e-3}, "not both and not neither"),
        (8, "give a dictionary"),
    ],
)
def test_settings_of_privacy_that_are_none_are_refused_when_the_trainer_is_made(tmp_path, privacy, says):
    with pytest.raises(UserError, match=says):
        make(tmp_path, privacy=privacy)


def test_a_stream_is_refused(tmp_path):
    stream = Dataset.from_list(rows("causal")).to_iterable_dataset()
    args = transformers.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, max_steps=2)
    with pytest.raises(UserError, match="without streaming=True"):
        Trainer(network("causal"), args, train_dataset=stream, privacy=PRIVACY)


def test_packed_rows_and_losses_for_whole_batches_are_refused(tmp_path):
    def build(trainer=Trainer, **named):
        args = transformers.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
        data = named.pop("train_dataset", Dataset.from_list(rows("causal")))
        return trainer(network("causal"), args, train_dataset=data, privacy=PRIVACY, **named)

    with pytest.raises(UserError, match="packed"):
        build(data_collator=transformers.DataCollatorWithFlattening())
    with pytest.raises(UserError, match="packed"):
        build(train_dataset=Dataset.from_list([{"input_ids": [1, 2], "seq_lengths": [1, 1]}]))
    with pytest.raises(UserError, match="compute_loss_func"):
        build(compute_loss_func=lambda outputs, labels, num_items_in_batch=None: outputs.logits.mean())

    class Own(Trainer):
        def compute_loss(self, model, inputs, **named):
            return model(**inputs).loss

    with pytest.raises(UserError, match="compute_loss is not asked"):
        build(Own)
    with pytest.raises(UserError, match="hyperparameter search"):
        build().hyperparameter_search()


def test_a_step_may_be_added_to_and_not_replaced(tmp_path):
    class Timed(Trainer):
        def training_step(self, *inputs):
            return super().training_step(*inputs)

    class Decorated(Timed):
        @torch.enable_grad()
        def training_step(self, *inputs):
            return super().training_step(*inputs)

    class Replaced(Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            loss = self.compute_loss(model, self._prepare_inputs(inputs))
            self.accelerator.backward(loss)
            return loss.detach()

    class Loader(Trainer):
        def get_train_dataloader(self):
            return DataLoader(self.train_dataset, batch_size=4, collate_fn=self.data_collator)

    args = transformers.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    for kind in (Timed, Decorated):
        kind(network("causal"), args, train_dataset=Dataset.from_list(rows("causal")), privacy=PRIVACY)
    for kind, name in ((Replaced, "training_step"), (Loader, "get_train_dataloader")):
        with pytest.raises(UserError, match=rf"{name} of {kind.__name__} does not call super\(\)\.{name}"):
            kind(network("causal"), args, train_dataset=Dataset.from_list(rows("causal")), privacy=PRIVACY)


def test_clipping_of_the_noiseless_sum_is_switched_off_with_a_word(tmp_path, caplog):
    trainer = make(tmp_path, max_grad_norm=1.0)
    assert trainer.args.max_grad_norm == 0
    assert "max_grad_norm=1.0 is set to 0" in caplog.text
    caplog.clear()
    make(tmp_path, max_grad_norm=0.0)
    assert not caplog.text


def test_nothing_to_train_is_refused(tmp_path):
    with pytest.raises((UserError, ValueError), match=r"nothing to train|empty parameter list"):
        make(tmp_path, model=network("classifier").requires_grad_(False)).train()


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
            named={"eval_dataset": Dataset.from_list(rows("classifier"))},
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
