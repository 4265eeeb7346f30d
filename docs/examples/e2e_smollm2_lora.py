"""E2E with SmolLM2-135M and LoRA: instruction tuning of the Hugging Face kind, private.

The lines marked "private" are all that differ from an ordinary script. Run it again after an interruption and it goes on.

    DPEXP_DATA=path/to/data python docs/examples/e2e_smollm2_lora.py runs/e2e_smollm2 100

It reads e2e/trainset.csv and e2e/devset.csv (plain, .gz or .xz), as published: columns mr and ref. The second word is
the number of steps, of 24 expected examples each.
"""

import json
import os
import sys
import time
from pathlib import Path

import pandas
import peft
import transformers
from datasets import Dataset

from dpexp.integrations.transformers import Trainer  # private: instead of transformers.Trainer
from dpexp.models.networks import forget_quantization
from dpexp.models.sources import smollm2_file
from dpexp.provenance import command_line, git_state, versions


def read(data, split, most=None):
    (path, *_) = sorted(Path(data, "e2e").glob(f"{split}.csv*"))
    return Dataset.from_pandas(pandas.read_csv(path).head(most))


def pretrained():
    file = smollm2_file()
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    forget_quantization(model)  # of 4 bits in the file, float32 here
    return model, tokenizer


def encode(row, tokenizer, longest=128):
    """The loss is that of the reference alone: the tokens of the source have no label."""
    source = tokenizer(f"{row['mr']}\n", add_special_tokens=False)["input_ids"]
    target = [*tokenizer(row["ref"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    ids = [*source, *target][:longest]
    return {
        "input_ids": ids, "attention_mask": [1] * len(ids), "labels": ([-100] * len(source) + target)[:longest]
    }  # fmt: skip


def train(
    folder, train_rows, dev_rows, model, tokenizer, steps=100, batch=24, pieces=6, epsilon=8.0, **privacy
):
    lora = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=batch // pieces,
        gradient_accumulation_steps=pieces, learning_rate=2e-3, lr_scheduler_type="constant",
        per_device_eval_batch_size=8, save_steps=2, logging_steps=2, report_to=[], use_cpu=True,
    )  # fmt: skip
    trainer = Trainer(
        peft.get_peft_model(model, lora), arguments,
        data_collator=transformers.DataCollatorForSeq2Seq(tokenizer),
        train_dataset=train_rows.map(encode, fn_kwargs={"tokenizer": tokenizer}),
        eval_dataset=dev_rows.map(encode, fn_kwargs={"tokenizer": tokenizer}),
        privacy={"epsilon": epsilon, "delta": "half_over_n", "clip_norm": 0.1, **privacy},  # private
    )  # fmt: skip
    before = trainer.evaluate()["eval_loss"]
    trainer.train(resume_from_checkpoint=True)  # private: goes on where it was interrupted, or begins
    trainer.save_model(str(folder))  # the adapter, with PRIVACY.md beside it
    return trainer, before


def record(trainer, before, seconds):
    """What can be said of a finished run: its scale, its epsilon, its loss on the public dev set."""
    engine = trainer.engine
    return {
        "example": Path(__file__).name, "rows": len(trainer.train_dataset), "steps": engine.steps,
        "expected_batch": engine.plan.expected_batch_size, "delta": engine.plan.delta,
        "noise_multiplier": engine.plan.noise_multiplier, "epsilon": engine.ledger.epsilons(engine.plan.delta),
        "metrics": {"eval_loss_before": before} | trainer.evaluate(), "dev_rows": len(trainer.eval_dataset),
        "seconds": round(seconds),
        "versions": versions(), "git": git_state(), "command": command_line(),
    }  # fmt: skip


if __name__ == "__main__":
    place, steps = Path(sys.argv[1]), int(sys.argv[2])
    data, began = os.environ["DPEXP_DATA"], time.time()
    rows = read(data, "trainset"), read(data, "devset", most=64)
    found = record(*train(place, *rows, *pretrained(), steps), time.time() - began)
    (place / "record.json").write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n")
    print(json.dumps(found["metrics"]), json.dumps(found["epsilon"]))
