"""Hugging Face's Trainer, private: a loss for every row, whatever the head, and what is refused by name."""

import importlib
import sys

import numpy as np
import peft
import pytest
import torch
import transformers
from datasets import Dataset, DatasetDict
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from torch.utils.data import DataLoader

from dpexp.errors import UserError
from dpexp.integrations.row_losses import losses_of_rows
from dpexp.integrations.transformers import Trainer
from tests.integrations.hugging_face import (
    PRIVACY,
    VOCABULARY,
    collate,
    make,
    network,
    rows,
)


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


@pytest.mark.parametrize("size", [2, 16])
def test_losses_of_ones_own_are_looked_at_and_trained_on(tmp_path, size):
    """What looks at them computes them on other batches, and that is not the loop's doing."""

    class Smooth(Trainer):
        def per_example_losses(self, model, inputs):
            logits = model(inputs["input_ids"], inputs["attention_mask"]).logits
            return nn.functional.cross_entropy(
                logits, inputs["labels"], reduction="none", label_smoothing=0.1
            )

    class Later(Smooth):
        def per_example_losses(self, model, inputs):
            losses = super().per_example_losses(model, inputs)
            return losses / losses.detach().mean() if self.state.global_step else losses

    trainer = make(tmp_path / "own", trainer=Smooth, max_steps=2, per_device_train_batch_size=size)
    trainer.train()
    assert trainer.engine.finished
    # what comes later is seen, too
    trainer = make(tmp_path / "mixed", trainer=Later, max_steps=8, per_device_train_batch_size=size)
    with pytest.raises(UserError, match="mixes examples"):
        trainer.train()


@pytest.mark.parametrize("masked", [True, False])
def test_losses_of_ones_own_do_not_go_by_padding(tmp_path, masked):
    class Words(Trainer):
        """Which of a text's words it is about."""

        def per_example_losses(self, model, inputs):
            hidden = model.bert(inputs["input_ids"], inputs["attention_mask"]).last_hidden_state
            scores = model.classifier(hidden)[..., 0]
            if masked:
                scores = scores.masked_fill(inputs["attention_mask"] == 0, -torch.inf)
            return nn.functional.cross_entropy(scores, inputs["labels"], reduction="none")

    trainer = make(tmp_path, trainer=Words, max_steps=2)
    if masked:
        trainer.train()
        assert trainer.engine.finished
        return
    with pytest.raises(UserError, match=r"Words\.per_example_losses: .*padded further"):
        trainer.train()
    assert trainer.engine.steps_taken == 0


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
    class Head(nn.Module):
        def __init__(self, logits):
            super().__init__()
            self.logits, self.config = logits, transformers.BertConfig()

        def forward(self, **features):
            return {"logits": self.logits}

    def losses(logits, labels):
        return losses_of_rows(Head(logits), {"labels": labels})

    assert losses(torch.zeros(4, 3), torch.zeros(4, dtype=torch.long)).tolist() == pytest.approx(
        [np.log(3)] * 4
    )
    assert losses(torch.zeros(4, 3), torch.zeros(4, 3)).tolist() == pytest.approx([np.log(2)] * 4)
    assert losses(torch.full((4, 1), 3.0), torch.ones(4)).tolist() == [4.0] * 4
    labels = torch.tensor([[1, -100, 2], [-100, -100, -100]])
    with pytest.raises(UserError, match="no per-example loss is known for Head"):
        losses(torch.zeros(2, 3, 5), labels)
    Head.loss_type = "ForTokenClassification"
    assert losses(torch.zeros(2, 3, 5), labels).tolist() == pytest.approx([np.log(5), 0.0])
    with pytest.raises(UserError, match="per_example_losses"):
        losses(torch.zeros(2, 3, 4, 5), torch.zeros(2))


@pytest.mark.parametrize("kind", ["classifier", "causal"])
def test_smoothed_labels_are_hugging_faces_row_by_row(tmp_path, kind):
    model, batch = network(kind), collate(rows(kind)[:5])
    trainer = make(tmp_path, kind, model=model, label_smoothing_factor=0.2, max_steps=1)
    plain = transformers.Trainer(model, trainer.args, train_dataset=rows(kind), data_collator=collate)
    losses = trainer.per_example_losses(model, dict(batch))
    for i, loss in enumerate(losses):
        alone = {name: value[i : i + 1] for name, value in batch.items()}
        assert loss.item() == pytest.approx(plain.compute_loss(model, alone).item(), rel=1e-5)
    trainer.train()
    assert trainer.engine.finished


def test_smoothing_that_would_change_nothing_is_refused(tmp_path):
    class Own(Trainer):
        def per_example_losses(self, model, inputs):
            return super().per_example_losses(model, inputs)

    with pytest.raises(UserError, match="would change nothing: Own has per_example_losses"):
        make(tmp_path, trainer=Own, label_smoothing_factor=0.1)
    trainer = make(tmp_path, label_smoothing_factor=0.1)
    batch = collate(rows("classifier")[:4])
    batch["labels"] = torch.eye(4)[:, :3]
    with pytest.raises(UserError, match=r"label_smoothing_factor=0\.1: targets are several labels at once"):
        trainer.per_example_losses(trainer.model, batch)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"fp16": True, "use_cpu": False}, "bf16=True"),
        ({"torch_compile": True}, "torch_compile"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"dataloader_num_workers": 2}, "dataloader_num_workers"),
        ({"enable_jit_checkpoint": True}, "has not counted yet"),
        (
            {"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 2}}},
            "gradient_accumulation_steps of the arguments alone",
        ),
        ({"train_sampling_strategy": "sequential"}, "Poisson"),
        ({"include_num_input_tokens_seen": "all"}, "private samples"),
        ({"optim": "lomo"}, "within the backward pass"),
        ({"per_device_train_batch_size": 128}, "a batch of 128 .* is more than the"),
    ],
)
def test_what_does_not_go_together_with_privacy_is_refused_by_name(tmp_path, arguments, named):
    with pytest.raises(UserError, match=named):
        make(tmp_path, **arguments)


def test_language_models_that_no_list_names_write_the_next_token_too():
    class MyModel(transformers.GPT2LMHeadModel):
        """As a repository may bring one along."""

    class MyPicturesForConditionalGeneration(transformers.GPT2LMHeadModel):
        """A model of texts and pictures: not one of the language models by Hugging Face's list."""

    batch = collate(rows("causal")[:3])
    plain = network("causal").eval()
    expected = losses_of_rows(plain, batch)
    for i in range(3):
        alone = plain(**{name: value[i : i + 1] for name, value in batch.items()}).loss
        assert expected[i].item() == pytest.approx(alone.item(), rel=1e-5)
    for kind in (MyModel, MyPicturesForConditionalGeneration):
        model = kind(plain.config).eval()
        model.load_state_dict(plain.state_dict())
        assert torch.equal(losses_of_rows(model, batch), expected)


def test_what_accelerate_launch_asks_for_is_looked_at_too(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with pytest.raises(UserError, match="mixed_precision=fp16 does not go together with privacy"):
        make(tmp_path)


def test_labels_of_tokens_are_not_taken_for_labels_of_a_row():
    """A mean over the padded length would go by the longest row of the batch."""
    config = transformers.ElectraConfig(
        vocab_size=VOCABULARY, embedding_size=16, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=16,
    )  # fmt: skip
    batch = collate(rows("causal")[:3])
    batch["labels"] = batch["input_ids"] % 2
    with pytest.raises(UserError, match="no per-example loss is known for ElectraForPreTraining"):
        losses_of_rows(transformers.ElectraForPreTraining(config), batch)
    config.problem_type, config.num_labels = "multi_label_classification", batch["input_ids"].shape[1]
    model = transformers.ElectraForSequenceClassification(config)
    assert losses_of_rows(model, batch).shape == (3,)


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
    losses = losses_of_rows(model, inputs)
    for i in range(2):
        alone = model(**{name: value[i : i + 1] for name, value in inputs.items()}).loss
        assert losses[i].item() == pytest.approx(alone.item(), rel=1e-5)
    # beside longer rows, too: no answer begins in the padding, and one that was cut off has no loss there
    inputs["attention_mask"][1, 3:] = 0
    inputs["start_positions"][2], inputs["attention_mask"][2, 4:] = 4, 0
    together = losses_of_rows(model, inputs)
    alone = model(
        **{name: value[1:2, :3] if value.dim() > 1 else value[1:2] for name, value in inputs.items()}
    )
    assert together[1].item() == pytest.approx(alone.loss.item(), rel=1e-5)
    assert together[2].item() == 0
    inputs["attention_mask"][2] = 1
    start = model(inputs["input_ids"], inputs["attention_mask"]).start_logits
    cut = nn.functional.cross_entropy(start[2:], torch.tensor([4])).item() / 2
    assert losses[2].item() == pytest.approx(cut, rel=1e-5)


SMALL = {
    "vocab_size": 20, "hidden_size": 16, "d_model": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
    "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16, "max_position_embeddings": 16, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
    "num_mel_bins": 4, "max_source_positions": 5, "max_target_positions": 16,
}  # fmt: skip
TEXTS = {"input_ids": torch.tensor([[5, 6, 7, 2], [8, 9, 4, 2], [9, 3, 6, 2]])}
SOUNDS = {"input_features": torch.rand(3, 4, 10, generator=torch.Generator().manual_seed(0))}
WORDS = torch.tensor([[4, 5, 2, -100], [6, 7, 8, 2], [9, 2, -100, -100]])


@pytest.mark.parametrize(
    ("kind", "settings", "features", "labels"),
    [
        ("BertForSequenceClassification", {"num_labels": 1}, TEXTS, torch.tensor([0, 3, 5])),
        ("BertForSequenceClassification", {"num_labels": 1}, TEXTS, torch.tensor([[0.0], [0.7], [2.0]])),
        (
            "BertForSequenceClassification",
            {"num_labels": 3, "problem_type": "regression"},
            TEXTS,
            torch.arange(9.0).view(3, 3),
        ),
        ("BertForSequenceClassification", {"num_labels": 3}, TEXTS, torch.eye(3)),
        ("BartForSequenceClassification", {"num_labels": 3}, TEXTS, torch.tensor([0, 2, 1])),
        ("BartForConditionalGeneration", {}, TEXTS, WORDS),
        ("M2M100ForConditionalGeneration", {}, TEXTS, WORDS),
        ("WhisperForConditionalGeneration", {}, SOUNDS, WORDS),
    ],
)
def test_losses_are_hugging_face_s_of_each_row_alone(kind, settings, features, labels):
    torch.manual_seed(0)
    made = getattr(transformers, kind)
    try:
        configuration = made.config_class(**SMALL | settings)
    except StrictDataclassError as error:
        pytest.skip(f"this transformers refuses its own default: {error}")
    model = made(configuration).eval()
    losses = losses_of_rows(model, features | {"labels": labels})
    for i in range(3):
        row = {name: value[i : i + 1] for name, value in features.items()}
        alone = model(**row, labels=labels[i : i + 1]).loss
        assert losses[i].item() == pytest.approx(alone.item(), rel=1e-5)


def test_behind_a_prompt_that_is_learnt_the_first_token_is_a_target_too():
    prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(network("causal"), prompt)
    inputs = TEXTS | {"attention_mask": torch.ones(3, 4, dtype=torch.long), "labels": TEXTS["input_ids"]}
    losses = losses_of_rows(model, inputs)
    for i in range(3):
        alone = model(**{name: value[i : i + 1] for name, value in inputs.items()}).loss
        assert losses[i].item() == pytest.approx(alone.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("outputs", "says"),
    [
        ({"loss": 0, "prediction_logits": 0}, "gives loss, prediction_logits and no logits"),
        ((torch.zeros(2, 3),), "gives a tuple and no logits"),
        # a sound is longer than its text (CTC)
        ({"logits": torch.zeros(2, 9, 5)}, "no per-example loss is known"),
    ],
)
def test_heads_without_a_loss_for_each_row_are_named(outputs, says):
    class Head(nn.Module):
        config = transformers.BertConfig()

        def forward(self, **features):
            return outputs

    with pytest.raises(UserError, match=says):
        losses_of_rows(Head(), {"labels": torch.zeros(2, 4, dtype=torch.long)})


def test_a_batch_without_labels_is_named():
    with pytest.raises(UserError, match="a batch has no labels, it has input_ids, targets"):
        losses_of_rows(None, {"input_ids": 1, "targets": 2})
    # of a detector, with the boxes of each picture
    with pytest.raises(UserError, match="labels of a batch are a list and no tensor"):
        losses_of_rows(None, {"pixel_values": torch.zeros(1), "labels": [{"boxes": 1}]})


@pytest.mark.parametrize(
    ("privacy", "says"),
    [
        ({"noise_multiplier": 1.0, "max_grad_norm": 1.0}, "it is called clip_norm here"),
        ({"noise_multiplier": 1.0, "clip_nrom": 1.0}, "did you mean clip_norm"),
        ({"noise_multiplier": 1.0, "batch_size": 16}, "per_device_train_batch_size"),
        ({"delta": 1e-3}, "give exactly one of"),
        (8, "give a dictionary"),
    ],
)
def test_settings_of_privacy_that_are_none_are_refused_when_the_trainer_is_made(tmp_path, privacy, says):
    with pytest.raises(UserError, match=says):
        make(tmp_path, privacy=privacy)


def test_a_trainer_that_is_given_no_privacy_says_what_to_give(tmp_path):
    with pytest.raises(UserError, match="the plain Trainer trains without"):
        Trainer(network("classes"), transformers.TrainingArguments(str(tmp_path), report_to=[]))


def test_a_stream_is_refused(tmp_path):
    stream = Dataset.from_list(rows("causal")).to_iterable_dataset()
    args = transformers.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, max_steps=2)
    with pytest.raises(UserError, match="without streaming=True"):
        Trainer(network("causal"), args, train_dataset=stream, privacy=PRIVACY)


def test_texts_that_nobody_has_cut_into_tokens_are_told(tmp_path):
    texts = Dataset.from_dict({"text": ["a b"] * 8, "labels": [0, 1] * 4})
    args = transformers.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, max_steps=2)
    with pytest.raises(UserError, match="labels and nothing that the model reads: cut the texts into tokens"):
        Trainer(network("causal"), args, train_dataset=texts, privacy=PRIVACY).train()


def test_several_splits_are_no_training_data(tmp_path):
    splits = DatasetDict(train=Dataset.from_list(rows("causal")), test=Dataset.from_list(rows("causal")))
    args = transformers.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, max_steps=2)
    with pytest.raises(UserError, match=r"holds several data sets \(train, test\): give one of them"):
        Trainer(network("causal"), args, train_dataset=splits, privacy=PRIVACY)


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

    with pytest.raises(UserError, match="compute_loss is not called"):
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
    trainer = make(tmp_path, max_grad_norm=0.5)
    assert trainer.args.max_grad_norm == 0
    assert "max_grad_norm=0.5 is set to 0" in caplog.text
    caplog.clear()
    # transformers' default, which nobody has asked for
    assert make(tmp_path, max_grad_norm=1.0).args.max_grad_norm == 0
    make(tmp_path, max_grad_norm=0.0)
    assert not caplog.text


def test_the_balance_of_experts_is_left_out_with_a_word(tmp_path, caplog):
    config = transformers.MixtralConfig(**SMALL | {"num_key_value_heads": 1, "num_local_experts": 2})
    model = transformers.MixtralForCausalLM(config)
    make(tmp_path, "causal", model)
    assert not caplog.text
    model.config.output_router_logits = True
    make(tmp_path, "causal", model)
    assert "router_aux_loss_coef=0.001 of the model's configuration is left out" in caplog.text


def test_nothing_to_train_is_refused(tmp_path):
    with pytest.raises((UserError, ValueError), match=r"nothing to train|empty parameter list"):
        make(tmp_path, model=network("classifier").requires_grad_(False)).train()


@pytest.mark.parametrize(
    "given",
    [
        lambda data: data,
        lambda data: {"seen": data},
        lambda data: data.select(range(3, 9)),
        lambda data: {"new": Dataset.from_list(rows("classifier")), "seen": data.shuffle(seed=0)},
        lambda data: torch.utils.data.Subset(data, [7]),
    ],
)
def test_private_rows_are_not_evaluated_on(tmp_path, given):
    data = Dataset.from_list(rows("classifier"))
    args = transformers.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    parts = data.train_test_split(0.2, seed=0)
    train, held_out = parts["train"], parts["test"]
    for other in (held_out, {"new": held_out}, Dataset.from_list(rows("classifier")), None):
        Trainer(network("classifier"), args, train_dataset=train, eval_dataset=other, privacy=PRIVACY)
    model = network("classifier")
    for seen in (data, train):
        with pytest.raises(UserError, match=r"eval_dataset (is|holds rows of) train_dataset"):
            Trainer(model, args, None, seen, given(seen), privacy=PRIVACY)
    trainer = Trainer(model, args, collate, train, held_out, privacy=PRIVACY)
    assert "eval_loss" in trainer.evaluate()
    with pytest.raises(UserError, match=r"eval_dataset (is|holds rows of) train_dataset"):
        trainer.evaluate(given(train))
    trainer.eval_dataset = given(train)
    with pytest.raises(UserError, match=r"eval_dataset (is|holds rows of) train_dataset"):
        trainer.evaluate()


def test_training_rows_that_were_mapped_again_are_told(tmp_path, caplog):
    """As a script does that cuts texts into tokens split by split: they are new rows, and nothing tells where they come from."""
    data = Dataset.from_list(rows("classifier"))

    def told(data, measured):
        args = transformers.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
        caplog.clear()
        with caplog.at_level("WARNING"):
            Trainer(network("classifier"), args, train_dataset=data, eval_dataset=measured, privacy=PRIVACY)
        return "most rows of eval_dataset are equal to rows of train_dataset" in caplog.text

    train, held_out = (data.select(part).map(lambda row: {"cut": 1}) for part in (range(40), range(40, 48)))
    seen = data.select(range(6)).map(lambda row: {"cut": 1})
    assert told(train, {"new": held_out, "seen": seen})
    assert not told(train, held_out)
    # equal labels alone are no equal rows
    assert not told(train, held_out.remove_columns("cut"))


def test_rows_of_a_list_are_not_evaluated_on(tmp_path):
    private = rows("classifier")
    args = transformers.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    with pytest.raises(UserError, match="holds rows of train_dataset"):
        Trainer(network("classifier"), args, train_dataset=private, eval_dataset=private[:5], privacy=PRIVACY)


@pytest.mark.parametrize(
    ("kind", "row", "says"),
    [
        ("classifier", {"labels": 3}, "labels of the training data hold 3, and the model knows 0 to 2: number the classes"),
        ("causal", {"labels": [-100, 1, VOCABULARY]}, "labels of the training data hold 40, and the model knows 0 to 39"),
        ("classifier", {"input_ids": [1, VOCABULARY, 2]}, "input_ids of the training data hold 40, .*tokenizer"),
        ("causal", {"input_ids": [1] * 17, "labels": [1] * 17}, "a row has 17 tokens, .*places for 16: truncate"),
    ],
)  # fmt: skip
def test_numbers_that_the_model_has_no_place_for_are_named(tmp_path, kind, row, says):
    trainer = make(tmp_path, kind, max_steps=4)
    wrong = {"input_ids": [1, 2, 3], "labels": rows(kind)[0]["labels"]} | row
    trainer.train_dataset = Dataset.from_list([wrong] * 48)
    with pytest.raises(UserError, match=says):
        trainer.train()
    assert trainer.engine.ledger.steps_charged == 0


def test_an_error_of_another_kind_keeps_its_own_words(tmp_path):
    class Own(Trainer):
        def per_example_losses(self, model, inputs):
            raise IndexError("my own mistake")

    with pytest.raises(IndexError, match="my own mistake"):
        make(tmp_path, trainer=Own, max_steps=1).train()


def test_rows_of_several_lengths_need_a_collator_that_pads(tmp_path):
    trainer = make(tmp_path, max_steps=4)
    trainer.data_collator = transformers.default_data_collator
    with pytest.raises(
        UserError, match=r"default_data_collator cannot .*lengths differ.*DataCollatorWithPadding"
    ):
        trainer.train()
    assert trainer.engine.ledger.steps_charged == 0


def test_without_trl_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    monkeypatch.delitem(sys.modules, "dpexp.integrations.trl", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'dpexp\[sft\]'"):
        importlib.import_module("dpexp.integrations.trl")
