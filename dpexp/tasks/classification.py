"""Text classification: one text or a pair of texts, one label."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from dpexp.durable import cache_folder
from dpexp.errors import UserError
from dpexp.metrics import METRICS, check_metric
from dpexp.tasks.base import check_num_examples, logits_of, padded_length
from dpexp.tasks.classes import Classification
from dpexp.tasks.demo import DEMO_LABELS
from dpexp.tasks.files import Table
from dpexp.tasks.sources import Found
from dpexp.tasks.tables import Columns, columns_of, find_tables
from dpexp.tasks.tokens import Tokenise, TokenTable, tokenize, tokenize_cached

if TYPE_CHECKING:
    from dpexp.schemas import DataConfig, TaskConfig


# more distinct values than this are a mistaken column, unless they are declared
MOST_CLASSES = 1000
# so many are never a mistake, and are listed in messages
FEW_CLASSES = 20
# what programs write for a missing cell
NO_LABEL = ("", "nan", "null", "none", "na", "n/a", "<na>")


class Example(NamedTuple):
    """tokens: `[T]` int32; segments: `[T]` uint8 or None; label: the number of the class."""

    tokens: np.ndarray
    segments: np.ndarray | None
    label: int


class Examples(Sequence[Example]):
    """A tokenised split.

    tokens: the texts.
    labels: `[rows]` int64.
    """

    def __init__(self, tokens: TokenTable, labels: np.ndarray) -> None:
        self.tokens = tokens
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: Any) -> Any:
        return Example(*self.tokens.row(i), int(self.labels[i]))

    @property
    def lengths(self) -> np.ndarray:
        """`[rows]`, tokens of each."""
        return self.tokens.lengths


_NO_EXAMPLES = Examples(TokenTable.of([]), np.empty(0, np.int64))


class Labelled(NamedTuple):
    """Tables that were read and checked.

    classes: split -> the number of each row's label, `[rows]` int64.
    notes: what the record must say of the labels.
    """

    found: Found[Table]
    num_examples: int
    labels: list[str]
    classes: dict[str, np.ndarray]
    notes: list[str]


def read_labelled(task: TaskConfig, data: DataConfig, scale: str) -> Labelled:
    """Find, read and check the tables of a classification of texts; all but the tokens.

    Raises:
        UserError: as `TextClassification`.
    """
    check_metric(task.metric, len(task.labels) or None)
    found = find_tables(task, data, scale)
    train = found.splits["train"]
    num_examples = check_num_examples(task, data, scale, len(train), train.where)
    columns = columns_of(task, data)
    labels, notes = _classes(task, found, columns)
    check_metric(task.metric, len(labels))
    classes = {}
    for split, table in found.splits.items():
        classes[split] = _targets(table, columns.label, labels)
        if not any(text.strip() for text in table.columns[columns.text]):
            raise UserError(
                f"{table.where}: column {columns.text} is empty in all {len(table)} rows: is it the text's?"
            )
    return Labelled(found, num_examples, labels, classes, notes)


class TextClassification(Classification):
    """A task whose configuration says `kind: text_classification`.

    Without declared `task.labels` (own data alone), the classes are the sorted distinct labels of the training file;
    the record then says that they were taken from private data and are treated as public.
    """

    def __init__(
        self, task: TaskConfig, data: DataConfig, scale: str, tokenizer: Any, make: Tokenise = tokenize, way: str = ""
    ) -> None:  # fmt: skip
        """Find, read, check and tokenise the data; ``make``: from texts to tokens, and ``way``: what it goes by.

        Raises:
            UserError: as `find_tables`; a label outside the classes; N not declared or another; a metric
                that is unknown or not for so many classes.
        """
        found, self.num_examples, self.labels, classes, notes = read_labelled(task, data, scale)
        columns = columns_of(task, data)
        self.name = task.name
        self.metric = METRICS[task.metric]
        self.metric_name = task.metric
        self.pad_token = int(tokenizer.pad_token_id)
        self.wants_segments = "token_type_ids" in tokenizer.model_input_names
        max_length = min(data.max_length or task.max_length, tokenizer.model_max_length)
        self.pad_to = padded_length(task, tokenizer)
        self.longest = max_length
        cache = cache_folder(data.cache)
        # "train", "dev", and perhaps more whose names begin with "dev"
        self.splits = {}
        for split, table in found.splits.items():
            texts = table.columns[columns.text]
            pairs = table.columns[columns.text_pair] if columns.text_pair else None
            # which cells have these names is task.columns' to say, where the file does not
            named = str(list(task.columns)) if task.columns else ""
            content = " ".join([table.sha256, str(columns.wanted), *filter(None, [table.part, named, way])])
            tokens = tokenize_cached(cache, content, tokenizer, texts, pairs, max_length, make)
            private = " (counted without noise on private data)" if split == "train" else ""
            if empty := sum(not text.strip() for text in texts):
                notes.append(
                    f"{split}: {empty} of {len(table)} rows have no text in column {columns.text}{private}"
                )
            if tokens.truncated and task.overlong == "error":
                # of those of full length the first that is cut when it is tokenised by itself
                full = [int(row) for row in np.flatnonzero(tokens.lengths == max_length)]
                alone = (make(tokenizer, [texts[i]], pairs and [pairs[i]], max_length) for i in full)
                row = next(row for row, one in zip(full, alone, strict=True) if one.truncated)
                raise UserError(
                    f"{table.at(row)}: more than the {max_length} tokens of task.max_length (or of what the model can "
                    f"read); task.overlong=cut cuts such rows, here {tokens.truncated} of {len(table)}, and counts them"
                )
            if tokens.truncated:
                notes.append(
                    f"{split}: {tokens.truncated} of {len(table)} rows were cut to {max_length} tokens{private}"
                )
            if table.skipped:
                notes.append(f"{split}: {table.skipped} malformed rows of the file were left out{private}")
            if table.part:
                notes.append(f"{split} is {table.part} of its file, not all of it")
            self.splits[split] = Examples(tokens, classes[split])
        self.train: Examples = self.splits["train"]
        self.dev: Examples = self.splits.get("dev", _NO_EXAMPLES)
        self.data = found.info(task, data, scale, notes)

    def blank(self) -> Example:
        """As many tokens as an example can have, of class 0."""
        tokens = np.full(self.longest, self.pad_token, np.int32)
        return Example(tokens, np.zeros(self.longest, np.uint8) if self.wants_segments else None, 0)

    def collate(self, examples: list[Example]) -> dict[str, Tensor]:
        """Pad on the right to the longest of the examples, or to `pad_to`.

        Returns:
            `input_ids`, `attention_mask` and, where the model asks for it, `token_type_ids`, all int64 `[B, T]`;
            `labels` int64 `[B]`. Without examples B = 0 and T = 1 (or `pad_to`).
        """
        lengths = np.array([len(example.tokens) for example in examples], dtype=np.int64)
        mask = np.arange(lengths.max(initial=self.pad_to or 1)) < lengths[:, None]
        batch = {
            "input_ids": self._padded(mask, [example.tokens for example in examples], self.pad_token),
            "attention_mask": torch.from_numpy(mask.astype(np.int64)),
            "labels": torch.tensor([example.label for example in examples], dtype=torch.int64),
        }
        if self.wants_segments:
            segments = [example.segments for example in examples if example.segments is not None]
            batch["token_type_ids"] = self._padded(mask, segments, 0)
        return batch

    def length(self, i: int) -> int:
        """Tokens of training example i, special ones included."""
        return int(self.train.tokens.offsets[i + 1] - self.train.tokens.offsets[i])

    def logits(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """`[B, K]` of a collated batch."""
        return logits_of(model(**{name: tensor for name, tensor in batch.items() if name != "labels"}))

    def _padded(self, mask: np.ndarray, rows: list[np.ndarray], padding: int) -> Tensor:
        padded = np.full(mask.shape, padding, dtype=np.int64)
        if rows:
            padded[mask] = np.concatenate(rows)
        return torch.from_numpy(padded)


def _classes(task: TaskConfig, found: Found[Table], columns: Columns) -> tuple[list[str], list[str]]:
    """The classes, and what the record must say about them."""
    if task.labels:
        return [str(label) for label in task.labels], []
    if found.source == "demo":
        return list(DEMO_LABELS), []
    train = found.splits["train"]
    column = train.columns[columns.label]
    where, labels = f"{train.where}: column {columns.label}", sorted(set(column))
    if (
        blank := next((row for row, label in enumerate(column) if label.strip().lower() in NO_LABEL), None)
    ) is not None:
        raise UserError(
            f"{train.at(blank)}: column {columns.label} holds no label: repair the row, take it out, or declare the classes with "
            "task.labels=[...]"
        )
    if len(labels) < 2:
        raise UserError(f"{where} holds one class alone")
    if len(labels) > MOST_CLASSES or len(labels) > max(FEW_CLASSES, len(column) / 2):
        raise UserError(
            f"{where} holds {len(labels)} distinct values in {len(column)} rows, as numbers or texts do and classes don't: is "
            "it the label's? task.labels=[...] declares the classes"
        )
    some = ", ".join(labels[:10]) + (", ..." if len(labels) > 10 else "")
    return labels, [
        f"the classes ({some}) were taken from the private training file and are treated as public; declare them with "
        "task.labels=[...]"
    ]


def _targets(table: Table, column: str, labels: Sequence[str]) -> np.ndarray:
    number = {label: i for i, label in enumerate(labels)}
    plain = {_plain(label) for label in labels}
    targets = np.empty(len(table), dtype=np.int64)
    for row, label in enumerate(table.columns[column]):
        # which stays unsaid: it is a private value
        if label not in number and not label.strip():
            raise UserError(
                f"{table.at(row)}: column {column} holds no label: repair the row, or take it out"
            )
        if label not in number:
            known = ", ".join(labels) if len(labels) <= FEW_CLASSES else f"{labels[0]}, {labels[1]}, ..."
            alike = "; but for case, blanks or decimals it is one of them" if _plain(label) in plain else ""
            if alike and {"True", "False"} & set(labels):
                alike += ' (true and false keep their case in quotes of their own: \'task.labels=["false","true"]\')'
            raise UserError(
                f"{table.at(row)}: the label in column {column} is none of the {len(labels)} classes {known}{alike}: correct the "
                "row, or declare its class in task.labels"
            )
        targets[row] = number[label]
    return targets


def _plain(label: str) -> str:
    """A label without what is often written otherwise: case, blanks around it, and decimals (1.0 for 1)."""
    return label.strip().lower().removesuffix(".0")
