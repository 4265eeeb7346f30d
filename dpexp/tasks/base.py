"""What the training loop knows of a task, and how a task is chosen.

A new kind of task is one file with a subclass of `Task` and one line in `KINDS`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from inspect import get_annotations
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from dpexp.errors import UserError
from dpexp.importing import imported
from dpexp.models import ModelBundle, build_model
from dpexp.models.images import ImageInputs
from dpexp.tasks.origins import rows_in_common

if TYPE_CHECKING:
    from dpexp.schemas import DataConfig, ModelConfig, PeftConfig, TaskConfig

KINDS = {
    "text_classification": "dpexp.tasks.classification:TextClassification",
    "text_infilling": "dpexp.tasks.infilling:TextInfilling",
    "image_classification": "dpexp.tasks.images:ImageClassification",
    "generation": "dpexp.tasks.generation:Generation",
}
"""`task.kind` -> module and class, which is made of (task, data, scale, tokenizer)."""

Progress = Callable[[int, int], object]
"""Called with (examples done, examples in all)."""


@dataclass(frozen=True)
class DataInfo:
    """Where the data came from, for the record.

    source: "files", "hub", "demo" or "own files".
    name: a path, a hub id, or the plain words that it is synthetic.
    rows: split -> number of rows.
    sha256: split -> hash of the uncompressed bytes of its file, so that plain, .gz and .xz copies agree (for data sets
        in Hugging Face's format, of the rows read, as JSON lines; for images, of the decoded pixels and the labels);
        hexadecimal.
    notes: what a reader of the record must know: truncation, labels taken from private data.
    """

    source: str
    name: str
    rows: dict[str, int]
    sha256: dict[str, str]
    notes: list[str] = field(default_factory=list)


class Task(ABC):
    """Private training data, public dev data, one loss per example, metrics.

    name: as in `task=NAME`.
    num_examples: N, declared by the configuration and equal to `len(train)`; public.
    labels: the names of the classes; empty where there are none.
    train, dev: sequences of examples, each of them whatever `collate` takes.
    data: for the record.
    head: what the model must end in: "classifier", "image_classifier", "masked_lm" or "causal_lm".
    rows_per_example: M adjacent rows of a batch belong to one example (augmentation multiplicity); `losses` stays `[B]`.
    image_shape: channels, height and width of what the model sees; None for text.
    pad_to: tokens that every text is padded to; None for the longest of its batch.
    """

    head: ClassVar[str] = "classifier"
    rows_per_example: int = 1
    image_shape: tuple[int, int, int] | None = None
    pad_to: int | None = None

    name: str
    num_examples: int
    labels: list[str]
    train: Sequence[Any]
    dev: Sequence[Any]
    data: DataInfo

    def build_network(self, model: ModelConfig, peft: PeftConfig, **given: Any) -> ModelBundle:
        """Build the network with what this task asks of it; ``given``: the rest, see `dpexp.models.build_model`."""
        return build_model(
            model, peft, head=self.head, num_labels=len(self.labels), image_shape=self.image_shape, **given
        )

    @abstractmethod
    def collate(self, examples: list[Any]) -> dict[str, Tensor]:
        """A batch, padded to its longest example; of no examples, tensors with a first dimension of 0."""

    def blank(self) -> Any | None:
        """A made-up example of the largest size that training can meet, to try with where dev is empty; None: not known."""
        return None

    def augmented(
        self, batch: dict[str, Tensor], indices: np.ndarray, seed: int, step: int
    ) -> dict[str, Tensor]:
        """The collated batch as training sees it: `rows_per_example` rows of every example. Here it is left as it is.

        Random choices are functions of (seed, step, index) alone. With one that depended on an example's place in the
        batch, `losses[i]` would depend on which other examples were drawn.

        Args:
            batch: what `collate` gave.
            indices: `[B]` the examples' numbers in `train`.
            seed: public.
            step: of the training.
        """
        return batch

    @abstractmethod
    def losses(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """One loss per example, `[B]`, float32 (float64 in a float64 model), unreduced.

        `losses[i]` depends on example i alone: the sensitivity of the clipped sum rests on it. An empty batch gives
        `[0]` without a forward pass, which Hugging Face's models do not survive.
        """

    @abstractmethod
    def evaluate(
        self, model: nn.Module, device: torch.device, batch_size: int, progress: Progress | None = None
    ) -> dict[str, float]:
        """The metrics on dev. The model's mode, training or evaluation, is left as it is found."""

    def evaluate_at_end(
        self,
        model: nn.Module,
        device: torch.device,
        batch_size: int,
        progress: Progress | None = None,
        folder: Path | None = None,
    ) -> dict[str, float]:
        """The metrics of a finished run: those of `evaluate`, and what takes too long to be done in between.

        Args:
            folder: for predictions and other by-products, so that an interrupted evaluation can go on; None: kept nowhere.
        """
        return self.evaluate(model, device, batch_size, progress)

    @abstractmethod
    def length(self, i: int) -> int:
        """The length of training example i (tokens), for batches of similar length."""


class WrappedTask(Task):
    """Another task, but for what a subclass overrides: all attributes that a `Task` has are copied, all methods asked of it.

    Args:
        task: the other one.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        for name in get_annotations(Task):
            setattr(self, name, getattr(task, name))

    def collate(self, examples: list[Any]) -> dict[str, Tensor]:
        """As the other task."""
        return self.task.collate(examples)

    def blank(self) -> Any | None:
        """As the other task."""
        return self.task.blank()

    def augmented(
        self, batch: dict[str, Tensor], indices: np.ndarray, seed: int, step: int
    ) -> dict[str, Tensor]:
        """As the other task."""
        return self.task.augmented(batch, indices, seed, step)

    def losses(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """As the other task."""
        return self.task.losses(model, batch)

    def evaluate(
        self, model: nn.Module, device: torch.device, batch_size: int, progress: Progress | None = None
    ) -> dict[str, float]:
        """As the other task."""
        return self.task.evaluate(model, device, batch_size, progress)

    def evaluate_at_end(
        self,
        model: nn.Module,
        device: torch.device,
        batch_size: int,
        progress: Progress | None = None,
        folder: Path | None = None,
    ) -> dict[str, float]:
        """As the other task."""
        return self.task.evaluate_at_end(model, device, batch_size, progress, folder)

    def length(self, i: int) -> int:
        """As the other task."""
        return self.task.length(i)


COUNTED = (
    "N was counted in the training file and is taken to be public, with the sampling rate and delta that follow from it; "
    "data.num_examples=N declares it instead"
)


SHARED = "dev holds rows of train: what is measured on these rows is published without noise, and nothing protects them"


def declared_num_examples(task: TaskConfig, data: DataConfig, scale: str) -> int | None:
    """N as the configuration declares it, or None. The task knows N of its own data alone, and `data` wins."""
    if data.num_examples is not None or data.train is not None:
        return data.num_examples
    return task.num_examples.get(scale)


def check_num_examples(task: TaskConfig, data: DataConfig, scale: str, found: int, where: str) -> int:
    """N, after comparing what is declared with what is there.

    A published data set declares its N. For a person's own file N may be left to be counted; the record then says so
    (`COUNTED`), because the count is a fact about private data that is taken to be public.

    Raises:
        UserError: another N is declared than found, or a published data set declares none.
    """
    declared = declared_num_examples(task, data, scale)
    why = (
        "N is public: it fixes the sampling rate and delta, and with them the guarantee, before the private data is "
        "read"
    )
    if declared is None and data.train is not None:
        return found
    if declared is None:
        raise UserError(
            f"task={task.name}: the number of examples N is not declared, and {where} has {found}. {why}. Add "
            f"data.num_examples={found}"
        )
    if task.held_out and declared == found + task.held_out:
        raise UserError(
            f"task={task.name}: {where} has {declared} rows, of which task.held_out takes {task.held_out}: declare "
            f"data.num_examples={found}"
        )
    if declared != found:
        raise UserError(
            f"task={task.name}, scale={scale}: {declared} examples are declared, and {where} has {found}. {why}. "
            f"Give the complete file, or say data.num_examples={found} if this other data set is meant"
        )
    return declared


def build_task(task: TaskConfig, data: DataConfig, scale: str, tokenizer: Any, seed: int) -> Task:
    """The task that the configuration describes, with its data read, checked and prepared.

    Args:
        task, data: see their schemas.
        scale: "paper", "small" or "demo".
        tokenizer: of the model, for text; see `dpexp.models.build_tokenizer`.
        seed: for public random choices of a task. Data sets are the same for every seed.

    Raises:
        UserError: data that can't be found, is malformed, or is not of the declared size.
    """
    if task.kind == "custom":
        made_of = imported("task.factory", task.factory)
        if not (isinstance(made_of, type) and issubclass(made_of, Task)):
            raise UserError(f"task.factory={task.factory} is no subclass of dpexp.tasks.Task")
    elif task.kind in KINDS:
        made_of = imported("task.kind", KINDS[task.kind])
    else:
        raise UserError(f"task.kind={task.kind} is unknown: choose one of {', '.join(KINDS)}, custom")
    # a network of one's own without a tokenizer sees whatever a task of one's own makes
    if not (task.kind == "custom" and tokenizer == ImageInputs()):
        _check_model(task, made_of.head, tokenizer)
    made: Task = made_of(task, data, scale, tokenizer)
    if task.kind == "custom":
        if missing := [name for name in get_annotations(Task) if not hasattr(made, name)]:
            raise UserError(
                f"task.factory={task.factory}: once it is made it has no {', no '.join(missing)}; see dpexp.tasks.Task"
            )
        check_num_examples(task, data, scale, len(made.train), f"task.factory={task.factory}")
        _look_at_dev(made)
    return made


def _look_at_dev(made: Task) -> None:
    """Say in the record where dev holds rows of train, as far as that can be told.

    Raises:
        UserError: dev is train.
    """
    if made.dev is made.train:
        raise UserError(
            f"{type(made).__name__}.dev is its train: what is measured on dev is published without noise, as if it were public. "
            "Give it other rows, or none: dev = []"
        )
    if rows_in_common(made.train, made.dev):
        made.data = replace(made.data, notes=[*made.data.notes, SHARED])


def logits_of(output: Any, classes: int | None = None) -> Tensor:
    """Find the logits, `[rows, classes]`, in what a network returned.

    Args:
        output: a tensor, or an object with ``logits``.
        classes: how many there must be; None: whatever there are.

    Raises:
        UserError: there are none, or of another shape.
    """
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise UserError(f"the network gives a {type(output).__name__} and no logits: return a tensor of them")
    if classes is not None and logits.shape[1:] != (classes,):
        raise UserError(
            f"the network gives logits of the shape {list(logits.shape)}, and the task has {classes} classes: its last "
            f"layer must give one number for each class, [rows, {classes}]"
        )
    return logits


def padded_length(task: TaskConfig, tokenizer: Any) -> int | None:
    """`task.pad_to`, where the model can read so many tokens.

    Raises:
        UserError: it cannot.
    """
    if task.pad_to is not None and task.pad_to > tokenizer.model_max_length:
        raise UserError(
            f"task.pad_to={task.pad_to} is more than the {tokenizer.model_max_length} tokens that the model can read: give at "
            "most so many, and task.max_length no more"
        )
    return task.pad_to


def _check_model(task: TaskConfig, head: str, tokenizer: Any) -> None:
    """A network that sees images for a task of images, and one that reads text for the others."""
    if (head == "image_classifier") == isinstance(tokenizer, ImageInputs):
        return
    if head == "image_classifier":
        raise UserError(
            f"task={task.name} has images, and this model reads text: take one that sees images, such as model=cnn_papernot, "
            "wrn16_4 or vit_base"
        )
    raise UserError(f"task={task.name} has text, and this model sees images: take one that reads text")
