"""Training a head on features of a frozen encoder, which are computed once.

With the encoder frozen, what it makes of an example never changes, and depends on this example and on public weights alone. So it
is computed once, without dropout, and kept; the head is then trained like any other model, with every way to clip and every
accountant. It is linear probing, as fast as logistic regression. Texts have features of a pretrained encoder, images those of
wavelets (`dpexp.models.scattering`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from dpexp.clipping.independence.batches import Arrangement
from dpexp.clipping.independence.look import Look
from dpexp.clipping.independence.replay import Replay
from dpexp.durable import cache_folder, keep_cached
from dpexp.errors import UserError, either
from dpexp.models.precision import autocast
from dpexp.models.trainable import evaluation_mode
from dpexp.schemas.choices import POOLINGS
from dpexp.tasks.base import Task, logits_of
from dpexp.tasks.classes import Classification
from dpexp.tasks.classification import Examples, TextClassification
from dpexp.tasks.images import Examples as Pictures
from dpexp.tasks.images import ImageClassification

if TYPE_CHECKING:
    from dpexp.models import ModelBundle
    from dpexp.schemas import DataConfig

log = logging.getLogger(__name__)
# that go through the encoder together
BATCH, IMAGES = 256, 32
# rows of which it is asked whether the encoder keeps them apart
LOOKED_AT = 8
FORMAT = 1
NOTE = "features: computed once by the frozen encoder, without dropout; the head alone is trained"


class Features(NamedTuple):
    """values: `[d]` float32; label: the number of the class."""

    values: Tensor
    label: int


class FeatureRows(Sequence[Features]):
    """A split: values `[rows, d]` float32, labels `[rows]` int64."""

    def __init__(self, values: Tensor, labels: np.ndarray) -> None:
        self.values, self.labels = values, labels
        # all alike
        self.lengths = np.ones(len(labels), np.int64)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: Any) -> Any:
        return Features(self.values[i], int(self.labels[i]))


class FrozenFeatures(Classification):
    """A classification whose examples are features of a frozen encoder.

    Args:
        task: what they are features of; its metric, classes and data stay.
        values: split -> `[rows, d]` float32.
    """

    def __init__(self, task: TextClassification | ImageClassification, values: dict[str, Tensor]) -> None:
        self.name, self.num_examples, self.labels = task.name, task.num_examples, task.labels
        self.metric, self.metric_name = task.metric, task.metric_name
        self.width = values["train"].shape[1]
        self.splits = {
            split: FeatureRows(values[split].reshape(-1, self.width), rows.labels)
            for split, rows in task.splits.items()
        }
        self.train = self.splits["train"]
        self.dev = self.splits.get("dev", FeatureRows(torch.zeros(0, self.width), np.zeros(0, np.int64)))
        self.data = dataclasses.replace(task.data, notes=[*task.data.notes, NOTE])

    def collate(self, examples: list[Features]) -> dict[str, Tensor]:
        """`features` float32 `[B, d]`, `labels` int64 `[B]`."""
        return {
            "features": torch.stack([e.values for e in examples]) if examples else torch.zeros(0, self.width),
            "labels": torch.tensor([e.label for e in examples], dtype=torch.int64),
        }

    def logits(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """`[B, K]` of a collated batch."""
        return logits_of(model(batch["features"]))

    def length(self, i: int) -> int:
        """1: all are alike."""
        return 1


def freeze(
    task: Task,
    bundle: ModelBundle,
    data: DataConfig,
    device: torch.device,
    precision: str = "fp32",
    *,
    private: bool = False,
) -> tuple[FrozenFeatures, ModelBundle]:
    """Compute the features of all splits, or take them from the cache.

    Args:
        task: of texts or images.
        bundle: a `dpexp.models.pooling.PooledClassifier` whose head alone trains, or, for images, a
            `dpexp.models.scattering.ScatteringClassifier`.
        data: its cache is where features lie; they are private like the data they come from, and for their owner alone.
        device: where to compute.
        precision: of the encoder's pass: fp32, bf16 or fp16. The features are kept as float32.
        private: whether the head is trained with privacy, which needs features that depend on their own row alone.

    Returns:
        The task on features, and the head as the model to train. It is the head of ``bundle``, which is whole when it is trained.

    Raises:
        UserError: a task or a model of another kind, or, with privacy, an encoder that mixes the rows of a batch.
    """
    model = bundle.model
    if not isinstance(task, TextClassification | ImageClassification) or not hasattr(model, "pooled"):
        raise UserError(
            f"model.frozen_features=true needs a text classification and model.pooling={either(POOLINGS)}, or images and "
            "model=scattering"
        )
    if task.rows_per_example > 1:
        raise UserError("task.augmentations: features are computed once, of each image as it is; set it to 0")
    if not all(name.startswith("classifier.") for name in bundle.trainable):
        raise UserError("model.frozen_features=true trains the head alone: set model.trainable=head")
    cache = cache_folder(data.cache) / "features"
    model.to(device)
    unproven = _look(model, task, device) if private else None
    weights = _weights_hash(model) + ("" if precision == "fp32" else f" {precision}")
    values = {
        split: _cached(cache, f"{weights} {_content_hash(task, rows)}", model, task, rows, device, precision)
        for split, rows in task.splits.items()
    }
    head = nn.Sequential(model.get_submodule("dropout"), model.get_submodule("classifier"))
    names = [name for name, _ in head.named_parameters()]
    frozen = FrozenFeatures(task, values)
    if unproven is not None:
        log.warning("not proven: %s", unproven)
        frozen.data.notes.append(unproven)
    return frozen, dataclasses.replace(bundle, model=head, trainable=names)


class _Pooled(nn.Module):
    """The encoder and its pooling as a module, whose forward can be run again."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> Tensor:
        return self.model.pooled(**inputs)  # type: ignore[operator]


@torch.no_grad()
def _look(
    model: nn.Module, task: TextClassification | ImageClassification, device: torch.device
) -> str | None:
    """Make the features of a few rows again among other rows: no clipper ever sees the encoder.

    The rows are public where the dev set has two; else nothing is told of them but that they mix. No padding is added to them:
    features are made of texts of one length.

    Returns:
        Why nothing could be compared, in words; None where it could.

    Raises:
        UserError: what a row gets out of the encoder depends on the others of its batch.
    """
    rows = task.dev if len(task.dev) > 1 else task.train
    count = min(LOOKED_AT, len(rows))
    if count < 2:
        return "the frozen encoder was not looked at: fewer than two examples"
    batch = task.collate([rows[i] for i in range(count)])
    inputs = {name: tensor.to(device) for name, tensor in batch.items() if name != "labels"}
    with evaluation_mode(model):
        look = Look(Replay(_Pooled(model), (), inputs), Arrangement(count))
        try:
            look.run(padding=False)
        except UserError as error:
            raise UserError(f"model.frozen_features=true: {error}") from None
    return None if look.compared else f"the frozen encoder was not looked at: {look.failure}"


@torch.no_grad()
def features_of(
    model: nn.Module,
    task: TextClassification | ImageClassification,
    rows: Examples | Pictures,
    device: torch.device,
    precision: str = "fp32",
) -> Tensor:
    """What the head reads, `[rows, d]` float32 on the CPU. Texts of one length go together, so that none is padded."""
    found: Tensor | None = None
    lengths, size = rows.lengths, BATCH if isinstance(rows, Examples) else IMAGES
    with evaluation_mode(model):
        for length in np.unique(lengths):
            alike = np.flatnonzero(lengths == length)
            for start in range(0, len(alike), size):
                chosen = alike[start : start + size]
                batch = task.collate([rows[i] for i in chosen])
                inputs = {name: tensor.to(device) for name, tensor in batch.items() if name != "labels"}
                with autocast(precision, device):
                    values = model.pooled(**inputs).float().cpu()  # type: ignore[operator]
                found = torch.empty(len(rows), values.shape[1]) if found is None else found
                found[torch.from_numpy(chosen)] = values
    return torch.zeros(0, 0) if found is None else found


def _cached(
    cache: Path,
    content: str,
    model: nn.Module,
    task: TextClassification | ImageClassification,
    rows: Examples | Pictures,
    device: torch.device,
    precision: str,
) -> Tensor:
    key = hashlib.sha256(json.dumps([FORMAT, content]).encode()).hexdigest()
    path = cache / f"{key}.safetensors"
    try:
        found = load_file(path)["features"]
        if len(found) == len(rows):
            return found
    except (OSError, SafetensorError, KeyError):
        # not there, or not readable: made anew
        pass
    log.info("computing the features of %d examples once, and keeping them in %s", len(rows), cache)
    values = features_of(model, task, rows, device, precision)
    keep_cached(path, save({"features": values.contiguous()}), "features")
    return values


def _weights_hash(model: nn.Module) -> str:
    """Of what makes the features: the way to pool, and every tensor but the head's."""
    # half of the time that a command takes to start, where nothing is pooled
    from dpexp.models.pooling import HEAD_SETTING

    digest = hashlib.sha256(f"{type(model).__name__} {getattr(model, 'pooling', '')}".encode())
    config = getattr(model, "encoder_settings", None) or model.config.to_diff_dict()  # type: ignore[union-attr,operator]
    # Dropout is off here, and the head reads what is computed.
    said = {key: value for key, value in config.items() if "drop" not in key and key != HEAD_SETTING}
    digest.update(json.dumps(said, sort_keys=True, default=str).encode())
    for name, tensor in model.state_dict().items():
        if not name.startswith("classifier."):
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _content_hash(task: TextClassification | ImageClassification, rows: Examples | Pictures) -> str:
    digest = hashlib.sha256()
    if isinstance(rows, Pictures):
        assert isinstance(task, ImageClassification)
        for values in (rows.pixels, task.mean.numpy(), task.std.numpy()):
            digest.update(str(values.shape).encode() + np.ascontiguousarray(values).tobytes())
        return digest.hexdigest()
    for array in (rows.tokens.tokens, rows.tokens.offsets, rows.tokens.segments):
        digest.update(b"none" if array is None else array.tobytes())
    return digest.hexdigest()
