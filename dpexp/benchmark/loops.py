"""What a step costs in each loop: that of `dpexp.train`, one's own around `PrivacyEngine`, and Hugging Face's Trainer.

``python -m dpexp.benchmark.loops results/examples/loops.json`` trains a small BERT on made-up rows by each of the three, in
turns, on one thread. What is compared is a whole turn of the loop, from the beginning of one step to that of the next: reading,
clipping, ledger, noise, optimiser, and what the loop does besides. All three draw the same batches, for batches differ in size
and so in time. The processor's time counts, which other programs disturb least.
"""

from __future__ import annotations

import json
import operator
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from datasets import Dataset
from rich.console import Console
from torch import Tensor, nn

from dpexp import PrivacyEngine, provenance, record
from dpexp.durable import make_folder, write_json
from dpexp.integrations import transformers as private
from dpexp.models import ModelBundle
from dpexp.privacy.keys import open_keys
from dpexp.schemas import RunConfig
from dpexp.tasks import DataInfo, Task
from dpexp.training.batching import sampler_for
from dpexp.training.loop import Trainer
from dpexp.training.planning import build_plan
from dpexp.training.progress import Progress

ROWS, LENGTH, VOCABULARY = 512, 64, 1000
BATCH, PIECE, CLIP, SIGMA, DELTA, LR = 64, 16, 0.1, 1.0, 1e-5, 0.01
SHAPE = {"hidden": 128, "layers": 4, "steps": 14, "rounds": 5}
"""Of the network, and how often it is trained how long."""


class Rows(Task):
    """Made-up token rows of one length in two classes."""

    name = "rows"

    def __init__(self) -> None:
        ids = torch.randint(1, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
        self.labels = ["0", "1"]
        self.train = [{"input_ids": row, "labels": row[0] % 2} for row in ids]
        self.dev = self.train[:2]
        self.num_examples = ROWS
        self.data = DataInfo("demo", "made up", {"train": ROWS}, {"train": "0" * 64}, [])

    def collate(self, examples: Sequence[Any]) -> dict[str, Tensor]:
        """Stack rows, which have one length."""
        return {name: torch.stack([row[name] for row in examples]) for name in ("input_ids", "labels")}

    def losses(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Cross-entropy of each row."""
        if not len(batch["labels"]):
            return torch.zeros(0)
        return F.cross_entropy(model(input_ids=batch["input_ids"]).logits, batch["labels"], reduction="none")

    def evaluate(self, model: nn.Module, device: torch.device, batch_size: int, progress: Any = None) -> dict:
        """Nothing: steps are measured."""
        return {}

    def length(self, i: int) -> int:
        """The same for all."""
        return LENGTH


def network(hidden: int, layers: int) -> nn.Module:
    """A BERT with two classes, the same weights every time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = transformers.BertConfig(
            vocab_size=VOCABULARY, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=4,
            intermediate_size=4 * hidden, max_position_embeddings=LENGTH,
        )  # fmt: skip
        return transformers.BertForSequenceClassification(config).train()


def by_train(folder: Path, model: nn.Module, steps: int, begin: Callable[[], None], seed: int) -> None:
    """The loop of `dpexp.train`."""
    run, task = RunConfig(), Rows()
    run.clip.clip_norm, run.privacy.noise_multiplier, run.privacy.delta = CLIP, SIGMA, str(DELTA)
    run.optim.name, run.optim.lr, run.optim.steps, run.optim.batch_size = "sgd", LR, steps, BATCH
    run.runtime.physical_batch_size, run.runtime.device = str(PIECE), "cpu"
    run.runtime.checkpoint_every = run.runtime.eval_every = 0
    folder.mkdir()
    keys, plan = open_keys(folder, seed), build_plan(run, ROWS, steps)

    class Timed(Trainer):
        def take_step(self, interrupts: Any) -> Any:
            begin()
            return super().take_step(interrupts)

    trainer = Timed(
        run, task, ModelBundle(model, None, "random"), plan,
        steps=steps, sampler=sampler_for("poisson", ROWS, BATCH, keys.draws), keys=keys,
        signature="loops", folder=folder, device=torch.device("cpu"),
        metrics=record.Metrics(folder / "metrics.jsonl", False),
    )  # fmt: skip
    with Progress(steps, 0, DELTA, trainer.device, Console(quiet=True, force_terminal=False)) as progress:
        trainer.train(progress)


def by_engine(folder: Path, model: nn.Module, steps: int, begin: Callable[[], None], seed: int) -> None:
    """A loop of one's own around `PrivacyEngine`."""
    task = Rows()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    engine = PrivacyEngine(
        model, optimizer, task.train, folder=folder, batch_size=BATCH, steps=steps, noise_multiplier=SIGMA, delta=DELTA,
        clip_norm=CLIP, checkpoint_every=0, noise_seed=seed,
    )  # fmt: skip
    begin()
    for batch in engine.batches(task.collate, PIECE):
        if engine.step(task.losses(model, batch)) and not engine.finished:
            begin()


def by_trainer(folder: Path, model: nn.Module, steps: int, begin: Callable[[], None], seed: int) -> None:
    """Hugging Face's Trainer, private."""

    class Timed(private.Trainer):
        def training_step(self, *arguments: Any, **named: Any) -> Tensor:
            begin()
            return super().training_step(*arguments, **named)

    arguments = transformers.TrainingArguments(
        str(folder), max_steps=steps, per_device_train_batch_size=PIECE, gradient_accumulation_steps=BATCH // PIECE,
        learning_rate=LR, optim="sgd", lr_scheduler_type="constant", save_strategy="no", report_to=[], disable_tqdm=True,
        use_cpu=True, logging_strategy="no",
    )  # fmt: skip
    rows = Dataset.from_list(
        [{name: value.tolist() for name, value in row.items()} for row in Rows().train]
    ).with_format("torch")
    privacy = {"noise_multiplier": SIGMA, "delta": DELTA, "clip_norm": CLIP, "noise_seed": seed}
    Timed(model, arguments, train_dataset=rows, data_collator=Rows().collate, privacy=privacy).train()


WAYS = {"dpexp.train": by_train, "PrivacyEngine": by_engine, "transformers.Trainer": by_trainer}


def measure(hidden: int, layers: int, steps: int, rounds: int) -> list[dict[str, Any]]:
    """Time every way in turns.

    Returns:
        One row for each: the median of the processor's seconds for a step, and the median of its multiples of what `dpexp.train`
        takes for the same batch.
    """
    spent: dict[str, list[float]] = {name: [] for name in WAYS}
    for seed in range(rounds):
        for name, way in WAYS.items():
            stamps: list[float] = []

            def begin(stamps: list[float] = stamps) -> None:
                stamps.append(time.process_time())

            with tempfile.TemporaryDirectory() as place:
                way(Path(place, "run"), network(hidden, layers), steps, begin, seed)
            # in the first steps the engine measures and looks
            spent[name] += [end - start for start, end in list(pairwise(stamps))[2:]]
    return [
        {
            "way": name, "step_s": statistics.median(times), "steps": len(times),
            "relative": statistics.median(map(operator.truediv, times, spent["dpexp.train"])),
        }
        for name, times in spent.items()
    ]  # fmt: skip


def main(arguments: Sequence[str], shape: Mapping[str, int] = SHAPE) -> int:
    """Measure, print, and write the record where a path is given.

    Args:
        arguments: of the command line.
        shape: what `measure` takes.
    """
    torch.set_num_threads(1)
    record_file = Path(arguments[0]) if arguments else None
    if record_file is not None:
        make_folder(record_file.parent, "its argument")
    found = {
        "kind": "loops", "settings": dict(shape) | {"rows": ROWS, "length": LENGTH, "batch": BATCH, "piece": PIECE},
        "rows": measure(**shape), "hardware": provenance.hardware(torch.device("cpu")), "versions": provenance.versions(),
        "git": provenance.git_state(),
    }  # fmt: skip
    print(json.dumps(found["rows"], indent=1))
    if record_file is not None:
        write_json(record_file, found)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
