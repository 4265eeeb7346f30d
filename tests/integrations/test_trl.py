"""TRL's SFTTrainer, private; run where TRL is installed."""

import numpy as np
import peft
import pytest
import torch
import transformers
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers

from dpexp.errors import UserError
from tests.integrations.hugging_face import PRIVACY, flat, network

trl = pytest.importorskip("trl")
from dpexp.integrations.trl import SFTTrainer  # noqa: E402

WORDS = [f"w{i}" for i in range(30)]


def tokenizer():
    words = {word: i for i, word in enumerate(["<pad>", "<eos>", *WORDS])}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", bos_token="<eos>", unk_token="<pad>"
    )


def conversations():
    generator = np.random.default_rng(0)

    def text(longest):
        return " ".join(generator.choice(WORDS, generator.integers(2, longest)))

    return Dataset.from_list([{"prompt": text(5), "completion": " " + text(6)} for _ in range(40)])


def make(folder, model=None, named=None, **arguments):
    settings = dict(
        output_dir=str(folder), per_device_train_batch_size=4, gradient_accumulation_steps=4, max_steps=6, learning_rate=0.1,
        save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True, bf16=False, max_length=14,
    )  # fmt: skip
    return SFTTrainer(
        model or network("causal"), trl.SFTConfig(**(settings | arguments)), train_dataset=conversations(),
        processing_class=tokenizer(), privacy=PRIVACY, **(named or {}),
    )  # fmt: skip


@pytest.mark.parametrize("lora", [False, True])
def test_it_trains_on_completions_alone_in_steps_of_the_engine(tmp_path, lora):
    named = {"peft_config": peft.LoraConfig(task_type="CAUSAL_LM", r=2)} if lora else {}
    trainer = make(tmp_path / "out", named=named)
    before, seen = flat(trainer.model), []
    losses_of = trainer.per_example_losses

    def watched(model, inputs):
        losses = losses_of(model, inputs)
        seen.append((inputs, losses.detach()))
        return losses

    trainer.per_example_losses = watched
    trainer.train()
    assert not np.array_equal(flat(trainer.model), before)
    assert trainer.engine.finished
    assert trainer.engine.epsilon() == trainer.engine.plan.epsilon()
    for inputs, losses in seen:
        assert losses.shape == (len(inputs["input_ids"]),)
        masked = (inputs["labels"] == -100).sum(1)
        assert (masked > (inputs["attention_mask"] == 0).sum(1)).all()  # prompts are no targets
    logged = {name for line in trainer.state.log_history for name in line}
    assert not {"loss", "entropy", "num_tokens", "mean_token_accuracy"} & logged


@pytest.mark.parametrize(
    "argument",
    [{"packing": True}, {"padding_free": True}, {"loss_type": "dft"}, {"router_aux_loss_coef": 0.1}],
)
def test_what_mixes_rows_is_refused(tmp_path, argument):
    with pytest.raises(UserError, match=next(iter(argument))):
        make(tmp_path, **argument)


def test_a_resumed_run_ends_with_the_same_weights(tmp_path):
    named = {"save_strategy": "steps", "save_steps": 2}
    whole = make(tmp_path / "whole", **named)
    whole.train()
    cut = make(tmp_path / "cut", **named)
    real = cut.training_step

    def dying(*arguments, **more):
        if cut.state.global_step == 3:
            raise KeyboardInterrupt
        return real(*arguments, **more)

    cut.training_step = dying
    with pytest.raises(KeyboardInterrupt):
        cut.train()
    resumed = make(tmp_path / "cut", **named)
    resumed.train(resume_from_checkpoint=True)
    assert torch.equal(torch.from_numpy(flat(resumed.model)), torch.from_numpy(flat(whole.model)))
    assert resumed.engine.ledger.steps_charged == 6


def test_private_rows_are_not_evaluated_on_although_trl_makes_new_ones_of_them(tmp_path):
    data = conversations()
    with pytest.raises(UserError, match="eval_dataset holds rows of train_dataset"):
        SFTTrainer(
            network("causal"), trl.SFTConfig(str(tmp_path), report_to=[], use_cpu=True, bf16=False), train_dataset=data,
            eval_dataset=data.select(range(5)), processing_class=tokenizer(), privacy=PRIVACY,
        )  # fmt: skip
