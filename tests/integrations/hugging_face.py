"""Small models and rows of every kind for the private Trainer."""

import numpy as np
import peft
import torch
import transformers
from datasets import Dataset

from dpexp.integrations.transformers import Trainer

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
