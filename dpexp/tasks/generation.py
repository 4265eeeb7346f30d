"""Text generation: a source, a target to write, and often several references for one source.

The loss of an example is the mean over its target tokens, the end token included. The papers clip the gradient of one loss per
example (Li et al. section 4) and measure it per token (Figure 3); they don't say whether it is a mean or a sum. The mean is
per token too, and it keeps the gradients of long and short targets of one size, as clipping to one norm wants it. Everything
before the target is read and not learnt: no loss, no gradient.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from dpexp.durable import cache_folder
from dpexp.errors import UserError
from dpexp.models.causal import check_types
from dpexp.models.trainable import evaluation_mode
from dpexp.parallel.sharing import by_one, shared_out
from dpexp.privacy.sampling import generator_from
from dpexp.tasks.base import Progress, Task, check_num_examples, padded_length
from dpexp.tasks.decoding import Context, decode
from dpexp.tasks.files import Table
from dpexp.tasks.formats import GROUP, SOURCE, TARGET
from dpexp.tasks.pairs import find_pairs, without
from dpexp.tasks.sequences import NO_TOKENS, Example, Sequences, make_frame, tokenize_pairs
from dpexp.tasks.target_loss import IGNORED, example_losses, token_losses, vocabulary

if TYPE_CHECKING:
    from dpexp.models import ModelBundle
    from dpexp.schemas import DataConfig, GenerationConfig, ModelConfig, PeftConfig, TaskConfig

SUITES = ("e2e", "dart", "summarization", "dialogue")
"""`task.metric`: the suites of `dpexp.metrics.text`."""

# numbers at once while the loss is measured: 256 MiB in float32
EVALUATED_LOGITS = 1 << 26
# between the pairs of in-context learning
BETWEEN = "\n\n"


class Generation(Task):
    """A task whose configuration says `kind: generation`."""

    head = "causal_lm"

    def __init__(self, task: TaskConfig, data: DataConfig, scale: str, tokenizer: Any) -> None:
        """Find, read, check and tokenise the data.

        Raises:
            UserError: as `find_pairs`; N not declared or another; an unknown suite of metrics; no room for sources.
        """
        if task.metric not in SUITES:
            raise UserError(f"task.metric={task.metric} is unknown: choose one of {', '.join(SUITES)}")
        found = find_pairs(task, data, scale)
        train = found.splits["train"]
        self.name, self.labels, self.suite = task.name, [], task.metric
        if task.drop_over is None:
            self.num_examples = check_num_examples(task, data, scale, len(train), train.where)
        self.tokenizer = tokenizer
        max_length = min(data.max_length or task.max_length, tokenizer.model_max_length)
        self.pad_to = padded_length(task, tokenizer)
        self.settings = with_shots(task.generation, train) if task.generation.shots else task.generation
        if self.settings.stop and self.settings.beam_length == "whole" and self.settings.top_p is None:
            raise UserError(
                "task.generation.beam_length=whole knows no text that ends at task.generation.stop (or before another "
                "demonstration, with task.generation.shots): set it to target"
            )
        frame = make_frame(tokenizer, self.settings, max_length)
        self.speakers = frame.speakers
        cache = cache_folder(data.cache)
        dropped: list[str] = []
        if task.drop_over is not None:
            long = tokenize_pairs(cache, train, tokenizer, frame).longer_than(task.drop_over)
            if long.all():
                raise UserError(
                    f"{train.where}: all {len(train)} rows have more than {task.drop_over} tokens: raise task.drop_over"
                )
            train = without(train, set(np.flatnonzero(long).tolist()))
            found = replace(found, splits={**found.splits, "train": train})
            self.num_examples = check_num_examples(task, data, scale, len(train), train.where)
            dropped.append(
                f"train: {int(long.sum())} of {len(long)} rows of more than {task.drop_over} tokens were left out, and N counts "
                "the others (counted without noise on private data)"
            )
        self.tables = found.splits
        self.splits = {s: tokenize_pairs(cache, table, tokenizer, frame) for s, table in found.splits.items()}
        self.train: Sequences = self.splits["train"]
        self.dev: Sequences = self.splits.get("dev", Sequences(frame, NO_TOKENS, NO_TOKENS))
        if task.overlong == "error":
            for split, sequences in self.splits.items():
                _refuse_cuts(found.splits[split], sequences)
        notes = dropped + [
            note for split in self.splits for note in _notes(split, found.splits[split], self.splits[split])
        ]
        notes += self._prompt_notes()
        if task.generation.shots:
            notes.append(
                f"in-context learning: every prompt holds {task.generation.shots} pairs of the training file as they are (set "
                f"{task.generation.prompt_set})"
            )
        if task.generation.when != "never":
            # heavy, and only needed for generated text
            from dpexp.metrics import text

            models = task.generation.metric_models
            # what is missing is said now, not after an hour of training
            text.check(task.metric, models)
            notes += text.notes(task.metric, models)
        self.data = found.info(task, data, scale, notes)

    def build_network(self, model: ModelConfig, peft: PeftConfig, **given: Any) -> ModelBundle:
        """As any task; with `generation.speakers`, of a network that reads tokens as types."""
        bundle = super().build_network(model, peft, **given)
        if self.speakers is not None:
            check_types(bundle.model, self.speakers.tokens.tolist())
        return bundle

    def collate(self, examples: list[Example]) -> dict[str, Tensor]:
        """Pad on the right to the longest of the examples; see `dpexp.tasks.target_loss`. With `pad_to`: to that, and to the
        longest allowed target.

        Returns:
            int64 `input_ids` `[B, T]`, `positions` and `targets` `[B, L]`; with `generation.speakers` also `token_type_ids`
            `[B, T]`. Without examples B = 0, T = 1 and L = 1.
        """
        rows = len(examples)
        longest = max((len(x.prompt) + len(x.target) - 1 for x in examples), default=1)
        most = max((len(x.target) for x in examples), default=1)
        if self.pad_to is not None:
            longest, most = self.pad_to, self.settings.max_target
        # Any token will do for the padding, which nothing sees; transformers would warn of its own padding token without a mask.
        input_ids = np.full((rows, longest), int(self.tokenizer.pad_token_id == 0), np.int64)
        positions = np.zeros((rows, most), np.int64)
        targets = np.full((rows, most), IGNORED, np.int64)
        for row, (prompt, target) in enumerate(examples):
            start, count = len(prompt), len(target)
            input_ids[row, :start] = prompt
            input_ids[row, start : start + count - 1] = target[:-1]
            positions[row, :count] = np.arange(start - 1, start - 1 + count)
            targets[row, :count] = target
        batch = {"input_ids": input_ids, "positions": positions, "targets": targets}
        if self.speakers is not None:
            batch["token_type_ids"] = self.speakers.types(input_ids)
        return {name: torch.from_numpy(array) for name, array in batch.items()}

    def losses(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """The mean negative log-likelihood of each example's target tokens, `[B]`, in float32 or better."""
        if len(batch["targets"]) == 0:
            return torch.zeros(0, device=batch["targets"].device)
        return example_losses(model, batch)

    def evaluate(
        self, model: nn.Module, device: torch.device, batch_size: int, progress: Progress | None = None
    ) -> dict[str, float]:
        """`loss` (mean over examples), `nll` (per token), `perplexity` on dev; beam search if `generation.when=always`."""
        return self._evaluate(model, device, batch_size, progress, None, final=False)

    def evaluate_at_end(
        self,
        model: nn.Module,
        device: torch.device,
        batch_size: int,
        progress: Progress | None = None,
        folder: Path | None = None,
    ) -> dict[str, float]:
        """As `evaluate`, on test too where there is one (`..._test`), and the suite's metrics of generated text.

        `generated` counts the texts, and `unended` those that `generation.max_target` cut short. With
        `generation.candidates`, `hits1` is the share of right replies that are likelier than their rivals.

        Args:
            model: its mode is restored.
            device: where the model is.
            batch_size: examples per forward pass, and beams per step of the search.
            progress: called with (done, in all), losses and texts together.
            folder: predictions are kept there, `SPLIT.jsonl`; an interrupted evaluation goes on from them.
        """
        return self._evaluate(model, device, batch_size, progress, folder, final=True)

    def length(self, i: int) -> int:
        """Tokens of training example i, prompt and target."""
        return int(self.train.lengths[i])

    def contexts(self, split: str) -> list[Context]:
        """The sources of a split with all their references, in the order in which they first appear.

        With `generation.examples`, so many of them, spread evenly over the split.
        """
        table, sequences = self.tables[split], self.splits[split]
        sources, targets = table.columns[SOURCE], table.columns[TARGET]
        return [
            Context(sources[rows[0]], [targets[row] for row in rows], sequences.prompt(rows[0]))
            for rows in self._groups(split)
        ]

    def _rows(self, split: str) -> np.ndarray:
        """Those whose loss is measured."""
        count = len(self.splits[split])
        wanted = min(self.settings.loss_examples or count, count)
        return np.arange(wanted) * count // max(1, wanted)

    def _groups(self, split: str) -> list[list[int]]:
        groups: dict[str, list[int]] = {}
        for row, group in enumerate(self.tables[split].columns[GROUP]):
            groups.setdefault(group, []).append(row)
        chosen = list(groups.values())
        if (wanted := self.settings.examples) is not None and wanted < len(chosen):
            chosen = [chosen[i * len(chosen) // wanted] for i in range(wanted)]
        return chosen

    def _prompt_notes(self) -> Iterator[str]:
        """A prompt to go on from leaves room for the longest target, so that it may lose more than a pair that is read."""
        generated = self.settings.splits if self.settings.when != "never" else []
        for split in (s for s in generated if s in self.splits and s != "train"):
            sequences, groups = self.splits[split], self._groups(split)
            cut = sum(sequences.prompt_is_cut(rows[0]) for rows in groups)
            if cut:
                yield (
                    f"{split}: {cut} of {len(groups)} prompts that text is generated from were cut at their "
                    f"{sequences.frame.cut}, to leave room for {sequences.frame.longest_target} tokens"
                )

    def _evaluate(
        self,
        model: nn.Module,
        device: torch.device,
        batch_size: int,
        progress: Progress | None,
        folder: Path | None,
        *,
        final: bool,
    ) -> dict[str, float]:
        measured = [s for s in self.splits if s != "train" and (final or s == "dev")]
        when = self.settings.when
        wanted = self.settings.splits if when == "always" or (final and when == "end") else []
        contexts = {split: self.contexts(split) for split in wanted if split in measured}
        total = sum(len(self._rows(s)) for s in measured) + sum(map(len, contexts.values()))
        if contexts:
            from dpexp.metrics import text

            text.check(self.suite, self.settings.metric_models)
        metrics: dict[str, float] = {}
        done = 0

        def say(count: int) -> None:
            if progress is not None:
                progress(done + count, total)

        with evaluation_mode(model):
            for split in measured:
                suffix = "" if split == "dev" else f"_{split}"
                metrics |= {
                    name + suffix: x
                    for name, x in self._likelihood(model, device, batch_size, split, say).items()
                }
                done += len(self._rows(split))
                if final and self.settings.candidates and split in self.settings.splits:
                    from dpexp.tasks.ranking import hits_at_1

                    rows = [group[0] for group in self._groups(split)]
                    count = self.settings.candidates
                    metrics["hits1" + suffix] = hits_at_1(model, self, split, rows, count, device, batch_size)
            for split, asked in contexts.items():
                suffix = "" if split == "dev" else f"_{split}"
                path = None if folder is None else folder / f"{split}.jsonl"
                with torch.no_grad():
                    found = decode(model, device, self.tokenizer, asked, self.settings, batch_size, path, say)
                done += len(asked)
                texts, references = [written.text for written in found], [c.references for c in asked]
                models = self.settings.metric_models
                scores = by_one(partial(text.score, self.suite, texts, references, models, device))
                metrics |= {name + suffix: value for name, value in scores.items()}
                metrics["generated" + suffix] = float(len(asked))
                metrics["unended" + suffix] = float(sum(not written.ended for written in found))
        return metrics

    @torch.no_grad()
    def _likelihood(
        self, model: nn.Module, device: torch.device, batch_size: int, split: str, say: Any
    ) -> dict[str, float]:
        examples = self.splits[split]
        total, tokens, means, done = 0.0, 0, 0.0, 0

        def measure(chosen: Sequence[int]) -> tuple[float, int, float]:
            batch = self.collate([examples[i] for i in chosen])
            batch = {name: tensor.to(device) for name, tensor in batch.items()}
            losses = token_losses(model, batch).double()
            counts = (batch["targets"] != IGNORED).sum(1)
            return float(losses.sum()), int(counts.sum()), float((losses.sum(1) / counts).sum())

        limit = EVALUATED_LOGITS // vocabulary(model)
        batches = list(_batches(examples, self._rows(split), batch_size, limit))
        for chosen, (of_batch, its_tokens, its_means) in shared_out(batches, measure):
            total += of_batch
            tokens += its_tokens
            means += its_means
            done += len(chosen)
            say(done)
        if not done:
            return {}
        nll = total / tokens
        return {"loss": means / done, "nll": nll, "perplexity": math.exp(min(nll, 700.0))}


def with_shots(settings: GenerationConfig, train: Table) -> GenerationConfig:
    """Put demonstrations in front of the instruction: pairs of the training file, drawn by `prompt_set` (He et al., App. C.2).

    A written text ends where another demonstration would begin.

    Raises:
        UserError: there are fewer pairs than asked for.
    """
    if settings.shots > len(train):
        raise UserError(f"task.generation.shots={settings.shots}: the training file has {len(train)} pairs")
    words = hashlib.sha256(f"demonstrations {settings.prompt_set}".encode()).digest()
    rows = generator_from(words).choice(len(train), size=settings.shots, replace=False)
    sources, targets = train.columns[SOURCE], train.columns[TARGET]
    shown = "".join(
        f"{settings.prefix}{sources[r]}{settings.suffix}{settings.before_target}{targets[r]}{BETWEEN}"
        for r in rows
    )
    return replace(settings, prefix=shown + settings.prefix, stop=[*settings.stop, BETWEEN])


def _batches(examples: Sequences, rows: np.ndarray, size: int, most: int) -> Iterator[Sequence[int]]:
    """Those rows, of similar length together, longest first; at most `size`, and at most `most` targets after padding."""
    order = rows[np.argsort(-examples.lengths[rows], kind="stable")]
    start = 0
    while start < len(order):
        stop, longest = start, 0
        while stop < len(order) and stop - start < size:
            longest = max(longest, int(examples.target_lengths[order[stop]]))
            if stop > start and longest * (stop - start + 1) > most:
                break
            stop += 1
        yield [int(i) for i in order[start:stop]]
        start = stop


def _refuse_cuts(table: Table, sequences: Sequences) -> None:
    """Stop at the first row that would lose a part of its source or target."""
    frame = sequences.frame
    for rows, what in zip(
        sequences.cut(),
        (
            f"with its target more than the {frame.longest} tokens of task.max_length (or of what the model can read)",
            f"a target of more than task.generation.max_target={frame.longest_target} tokens, the end included",
        ),
        strict=True,
    ):
        if rows.any():
            raise UserError(
                f"{table.at(int(rows.argmax()))}: {what}; task.overlong=cut cuts such rows, here {int(rows.sum())} of "
                f"{len(table)}, and counts them"
            )


def _notes(split: str, table: Table, sequences: Sequences) -> Iterator[str]:
    """What a reader of the record must know of a split."""
    private = " (counted without noise on private data)" if split == "train" else ""
    sources, targets = (int(rows.sum()) for rows in sequences.cut())
    frame = sequences.frame
    if sources:
        yield (
            f"{split}: the source of {sources} of {len(table)} rows was cut at its {frame.cut} so that prompt and target "
            f"have {frame.longest} tokens{private}"
        )
    if targets:
        yield f"{split}: the target of {targets} of {len(table)} rows was cut to {frame.longest_target} tokens{private}"
    if table.skipped:
        yield f"{split}: {table.skipped} rows that are malformed or have no target were left out{private}"
    empty = sum(not source.strip() for source in table.columns[SOURCE])
    if empty:
        yield f"{split}: {empty} of {len(table)} rows have an empty source and were kept{private}"
