"""SST-2 with MiniLM: a script of the Hugging Face kind, private.

The lines marked "private" are all that differ from an ordinary script. Run it again after an interruption and it goes on.

    DPEXP_DATA=path/to/data python docs/examples/sst2_minilm.py runs/sst2_minilm 66

It reads sst2/train.tsv and sst2/dev.tsv (plain, .gz or .xz). The second word is the number of steps, of 2048
expected examples each: large batches, because noise is the same for a small one.
"""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import pandas
import transformers
from datasets import Dataset

from dpexp.integrations.transformers import Trainer  # private: instead of transformers.Trainer
from dpexp.models.pooling import PooledClassifier
from dpexp.models.sources import minilm_folder
from dpexp.provenance import command_line, git_state, versions


def read(data, split):
    (path, *_) = sorted(Path(data, "sst2").glob(f"{split}.tsv*"))
    return Dataset.from_pandas(pandas.read_csv(path, sep="\t", quoting=3))


def train(
    folder, train_rows, dev_rows, steps=66, batch=2048, pieces=32, epsilon=8.0, learning_rate=0.05, **privacy
):
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm_folder())
    # What reads the first position learns nothing in so few steps under noise: MiniLM was trained with the mean of all.
    model = PooledClassifier(transformers.AutoModel.from_pretrained(minilm_folder(), num_labels=2), "mean")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("classifier"))

    def tokenise(rows):
        return tokenizer(rows["sentence"], truncation=True, max_length=64) | {"labels": rows["label"]}

    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=batch // pieces,
        gradient_accumulation_steps=pieces, learning_rate=learning_rate, lr_scheduler_type="linear",
        train_sampling_strategy="group_by_length", remove_unused_columns=False, per_device_eval_batch_size=128,
        save_steps=10, logging_steps=10, report_to=[], use_cpu=True,
    )  # fmt: skip
    trainer = Trainer(
        model, arguments, data_collator=transformers.DataCollatorWithPadding(tokenizer),
        train_dataset=train_rows.map(tokenise, batched=True, remove_columns=["sentence", "label"]),
        eval_dataset=dev_rows.map(tokenise, batched=True, remove_columns=["sentence", "label"]),
        compute_metrics=lambda made: {"accuracy": float(np.mean(made.predictions.argmax(1) == made.label_ids))},
        privacy={"epsilon": epsilon, "delta": "half_over_n", "clip_norm": 1.0, **privacy},  # private
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=True)  # private: goes on where it was interrupted, or begins
    trainer.save_model(str(folder))  # with PRIVACY.md beside the weights
    return trainer


def record(trainer, seconds):
    """What can be said of a finished run: its scale, its epsilon, its result on the public dev set."""
    engine = trainer.engine
    return {
        "example": Path(__file__).name, "rows": len(trainer.train_dataset), "steps": engine.steps,
        "expected_batch": engine.plan.expected_batch_size, "delta": engine.plan.delta,
        "noise_multiplier": engine.plan.noise_multiplier, "epsilon": engine.ledger.epsilons(engine.plan.delta),
        "metrics": trainer.evaluate(), "seconds": round(seconds),
        "versions": versions(), "git": git_state(), "command": command_line(),
    }  # fmt: skip


if __name__ == "__main__":
    place, steps = Path(sys.argv[1]), int(sys.argv[2])
    data, began = os.environ["DPEXP_DATA"], time.time()
    found = record(train(place, read(data, "train"), read(data, "dev"), steps), time.time() - began)
    (place / "record.json").write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n")
    print(json.dumps(found["metrics"]), json.dumps(found["epsilon"]))
