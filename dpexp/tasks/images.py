"""Image classification: one image, one label; several augmented copies of it where the configuration asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpexp.durable import cache_folder
from dpexp.errors import UserError
from dpexp.metrics import METRICS, check_metric
from dpexp.models.images import ImageInputs
from dpexp.tasks.augmentation import AUGMENTATIONS, augment, choices
from dpexp.tasks.base import check_num_examples, logits_of
from dpexp.tasks.classes import Classification, cross_entropy
from dpexp.tasks.image_files import Images
from dpexp.tasks.image_sources import find_images

if TYPE_CHECKING:
    from dpexp.schemas import DataConfig, TaskConfig

HALF = 0.5
EVALUATION_SET = "the published test set is dev: the metrics are measured on it, as in the papers"


class Example(NamedTuple):
    """pixels: `[C, H, W]` uint8; label: the number of the class."""

    pixels: np.ndarray
    label: int


class Examples(Sequence[Example]):
    """A split."""

    def __init__(self, images: Images) -> None:
        self.pixels, self.labels = images.pixels, images.labels

        # all alike
        self.lengths = np.ones(len(self.labels), np.int64)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: Any) -> Any:
        return Example(self.pixels[i], int(self.labels[i]))


class ImageClassification(Classification):
    """A task whose configuration says `kind: image_classification`.

    Pixels in [0, 1] are normalised with public constants: the network's, where it was pretrained with some, else the task's
    `mean` and `std`, else 1/2 and 1/2.

    Augmentation multiplicity (De et al. 2022, section 4.2): with `augmentations` = M above 0 the loss of an example is the
    mean over M randomly changed copies of it, and it is this loss whose gradient is clipped. Evaluation sees the image as it is.
    """

    head = "image_classifier"

    def __init__(self, task: TaskConfig, data: DataConfig, scale: str, tokenizer: Any) -> None:
        """Find, read and check the data.

        Args:
            tokenizer: the `ImageInputs` of the network.

        Raises:
            UserError: as `find_images`; N not declared or another; unknown words; a metric that
                is not for so many classes; an image that the network can't see.
        """
        self.inputs: ImageInputs = tokenizer
        check_metric(task.metric, len(task.labels) or None)
        if task.augmentation not in AUGMENTATIONS:
            raise UserError(
                f"task.augmentation={task.augmentation} is unknown: choose one of {', '.join(AUGMENTATIONS)}"
            )
        if task.channels not in (1, 3):
            raise UserError(f"task.channels={task.channels}: images are grey (1) or have colours (3)")
        cache = cache_folder(data.cache)
        found = find_images(task, data, scale, cache)
        train = found.splits["train"]
        self.name, self.labels = task.name, found.labels
        check_metric(task.metric, len(self.labels))
        self.num_examples = check_num_examples(task, data, scale, len(train), train.where)
        self.metric, self.metric_name = METRICS[task.metric], task.metric
        self.augmentations, self.augmentation = task.augmentations, task.augmentation
        self.rows_per_example = max(1, task.augmentations)
        _, *shape = train.pixels.shape
        self.shape = (shape[0], shape[1], shape[2])
        self._check_channels()
        size, (channels, height, width) = self.inputs.size, self.shape
        self.channels = self.inputs.channels or channels
        self.image_shape = (self.channels, size or height, size or width)
        self.mean, self.std = self._constants(task)
        self.splits = {split: Examples(images) for split, images in found.splits.items()}
        self.train: Examples = self.splits["train"]
        self.dev: Examples = self.splits.get("dev") or Examples(_none_like(train))
        self.data = found.info(task, data, scale, self._notes(found.source))

    def collate(self, examples: list[Example]) -> dict[str, Tensor]:
        """Normalised pixels and labels.

        Returns:
            `pixel_values` float32 `[B, C, H, W]`, `labels` int64 `[B]`.
        """
        pixels = (
            np.stack([example.pixels for example in examples])
            if examples
            else np.empty((0, *self.shape), np.uint8)
        )
        scale, shift = 1 / (255 * self.std), -self.mean / self.std
        return {
            "pixel_values": torch.from_numpy(pixels).float() * scale + shift,
            "labels": torch.tensor([example.label for example in examples], dtype=torch.int64),
        }

    def blank(self) -> Example:
        """A black image of class 0."""
        return Example(np.zeros(self.shape, np.uint8), 0)

    def augmented(
        self, batch: dict[str, Tensor], indices: np.ndarray, seed: int, step: int
    ) -> dict[str, Tensor]:
        """The batch with M copies of every image, `pixel_values` `[B·M, C, H, W]`, those of one example adjacent."""
        if not self.augmentations or not len(batch["labels"]):
            return batch
        bits = choices(seed, step, indices, self.augmentations)
        return {**batch, "pixel_values": augment(batch["pixel_values"], bits, self.augmentation)}

    def losses(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Cross-entropy of each example, `[B]`, in float32 or better: the mean over its copies."""
        labels = batch["labels"]
        if len(labels) == 0:
            return torch.zeros(0, device=labels.device)
        logits = logits_of(self.logits(model, batch), len(self.labels))
        copies = len(logits) // len(labels)
        losses = cross_entropy(logits, labels.repeat_interleave(copies))
        return losses.view(len(labels), copies).mean(1)

    def length(self, i: int) -> int:
        """All images are of one size: 1."""
        return 1

    def logits(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """`[rows, classes]` of a batch, whose images are scaled to what the network wants to see, each by itself."""
        pixels = batch["pixel_values"]
        if (size := self.inputs.size) and pixels.shape[2:] != (size, size):
            shrinks = size < min(pixels.shape[2:])
            pixels = F.interpolate(
                pixels, size=(size, size), mode="bicubic", align_corners=False, antialias=shrinks
            )
        if pixels.shape[1] != self.channels:
            pixels = pixels.expand(-1, self.channels, -1, -1)
        first = next(model.parameters())
        return logits_of(model(pixels.to(first.dtype) if first.is_floating_point() else pixels))

    def _check_channels(self) -> None:
        wanted, there = self.inputs.channels, self.shape[0]
        if wanted is not None and wanted != there and there != 1:
            raise UserError(
                f"the network sees {wanted} channel(s), and the images have {there}: give task.channels={wanted}"
            )

    def _constants(self, task: TaskConfig) -> tuple[Tensor, Tensor]:
        """Mean and deviation of every channel, `[C, 1, 1]` float32."""
        channels = self.shape[0]
        found = []
        for name in ("mean", "std"):
            values = getattr(self.inputs, name) or tuple(getattr(task, name)) or (HALF,)
            if len(values) not in (1, channels) and len(set(values)) > 1:
                # grey images in a network of three channels
                values = (sum(values) / len(values),)
            values = values[:1] if len(values) != channels else values
            found.append(torch.tensor(values, dtype=torch.float32).expand(channels).reshape(-1, 1, 1))
        if not bool((found[1] > 0).all()):
            raise UserError(f"task.std={list(task.std)}: every deviation must be above 0")
        return found[0], found[1]

    def _notes(self, source: str) -> list[str]:
        mean, std = (
            ", ".join(f"{float(x):.4g}" for x in values.flatten()) for values in (self.mean, self.std)
        )
        notes = [f"pixels in [0, 1] are normalised with public constants: mean {mean}, deviation {std}"]
        _, height, width = self.shape
        if (size := self.inputs.size) and (size, size) != (height, width):
            notes.append(
                f"images of {width}x{height} pixels are scaled to {size}x{size} for this network (bicubic)"
            )
        if self.augmentations:
            notes.append(
                f"augmentation multiplicity {self.augmentations} ({self.augmentation}): the loss is the mean over the copies"
            )
        if source in ("files", "hub"):
            notes.append(EVALUATION_SET)
        return notes


def _none_like(images: Images) -> Images:
    return Images(images.pixels[:0], images.labels[:0], "no dev set")
