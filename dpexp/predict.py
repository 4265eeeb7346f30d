"""``python -m dpexp.predict``: what the exported model of a run says of new texts, pairs or images.

The rows are read, cut into tokens or normalised by the run's own task, with its settings, so that they look to the model as its
training data did. Predictions are computed from the weights alone: they cost no privacy of the training data, and give none to
the new rows.
"""

from __future__ import annotations

import csv
import io
import json
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from torch import nn

from dpexp.config import hydra_entry
from dpexp.durable import make_folder, write_atomic
from dpexp.errors import UserError
from dpexp.models import adapters, build_tokenizer
from dpexp.models.networks import auto_class
from dpexp.models.pooling import load_pooled
from dpexp.schemas import DataConfig, PeftConfig, RunConfig, TaskConfig
from dpexp.tasks import Task, build_task
from dpexp.tasks.classification import TextClassification
from dpexp.tasks.decoding import Context, decode
from dpexp.tasks.files import read_table
from dpexp.tasks.generation import Generation
from dpexp.tasks.image_folders import SUFFIXES, shown_files
from dpexp.tasks.images import ImageClassification
from dpexp.tasks.tables import columns_of
from dpexp.training.export import WEIGHTS
from dpexp.training.planning import choose_device

# columns of the tables that are made for the task
TEXT, PAIR, LABEL = "text", "text_pair", "label"
# what a task's configuration says of its own files, and not of new ones
OF_THE_DATA = (
    "files", "hub_id", "hub_config", "num_examples", "format", "columns", "malformed", "held_out", "drop_over", "text",
    "text_pair", "label", "augmentations",
)  # fmt: skip


@dataclass
class PredictArguments:
    """The settings of ``conf/predict.yaml``."""

    run: str = MISSING
    data: str = MISSING
    out: str = "predictions.csv"
    keep: list[str] = field(default_factory=list)
    labels: list[str] | None = None
    batch_size: int = 64
    device: str = "auto"


@hydra_entry("predict", PredictArguments)
def main(arguments: PredictArguments) -> None:
    """Apply the model of a finished run to new rows, and write a CSV file with a line for each."""
    out = Path(arguments.out)
    count = predict(arguments, out)
    Console(highlight=False, soft_wrap=True).print(f"{count} predictions: {out}", markup=False)


def predict(arguments: PredictArguments, out: Path) -> int:
    """Read the rows, ask the model, write the answers.

    Args:
        arguments: of the command.
        out: the CSV file: for classes ``prediction`` and a probability for each class, ``P(class)``, for texts ``prediction``;
            before them what is kept and what was read, or the image's path.

    Returns:
        The number of rows.

    Raises:
        UserError: no finished run, a kind of task that is not known here, rows that cannot be read, classes that the run took
            from its training data; or the file is there already.
    """
    if arguments.batch_size < 1:
        raise UserError(f"batch_size={arguments.batch_size}: give 1 or more")
    folder, data = Path(arguments.run).expanduser(), Path(arguments.data).expanduser()
    run = read_run(folder)
    run.task.labels = _classes(run, arguments.labels)
    if not data.exists():
        raise UserError(f"data={data}: no such file or folder")
    if out.exists() and out.samefile(data):
        raise UserError(f"out={out} is data={data}, which would be lost: give another file")
    if out.is_dir():
        raise UserError(
            f"out={out} is a folder: give the name of a file in it, such as out={out / 'predictions.csv'}"
        )
    if out.exists():
        raise UserError(
            f"out={out} is there already, and would be lost: give the name of a new file, or move it"
        )
    if out.suffix.lower() != ".csv":
        raise UserError(f"out={out}: predictions are written as CSV: give a name that ends in .csv")
    # before the work, not behind it
    make_folder(out.parent, "out")
    device = choose_device(arguments.device)
    with tempfile.TemporaryDirectory() as place:
        task, rows = read_rows(run, data, Path(place), arguments.keep)
        model = exported(run, folder / "model", task).to(device).eval()
        header, answers = _answers(task, model, device, arguments.batch_size, len(rows))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*rows[0], *header])
    writer.writerows([*row.values(), *answer] for row, answer in zip(rows, answers, strict=True))
    write_atomic(out, text.getvalue())
    return len(rows)


def _classes(run: RunConfig, labels: list[str] | None) -> list[str]:
    """The classes in the order of the training; those of the command where the run took them from its data.

    Raises:
        UserError: the command names others, or in another order.
    """
    known = run.task.labels or list(run.task.label_words)
    if labels and labels != (known or sorted(labels)):
        order = f"the run has {known}: leave labels out" if known else f"give labels={sorted(labels)}"
        raise UserError(
            f"labels={labels} are not the classes in the order of the training, where they are sorted or declared: {order}"
        )
    return known or labels or []


def read_run(folder: Path) -> RunConfig:
    """The settings of a finished run.

    Raises:
        UserError: there is none, or of a version whose settings were others.
    """
    if not (folder / "config.yaml").is_file() or not (folder / "model").is_dir():
        raise UserError(
            f"run={folder}: no finished run of dpexp.train; give its folder, such as runs/TASK/SIGNATURE/seed0, which holds "
            "config.yaml and model"
        )
    settings = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    try:
        run: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(RunConfig), settings))
    except OmegaConfBaseException as error:
        raise UserError(f"run={folder}: its config.yaml is of another version of dpexp ({error})") from error
    assert isinstance(run, RunConfig)
    return run


def read_rows(
    run: RunConfig, data: Path, place: Path, keep: Sequence[str] = ()
) -> tuple[Task, list[dict[str, str]]]:
    """Make the run's task of new rows, which stand in its training split with a label that means nothing.

    Args:
        run: its settings.
        data: a table with the columns that the run read, but for the label or target; or a folder of images, or one image.
        place: a temporary folder.
        keep: further columns of the table.

    Returns:
        The task, and of each row what was read, by column.

    Raises:
        UserError: rows that cannot be read, or another kind of task.
    """
    task, kind = run.task, run.task.kind
    if kind == "custom":
        raise UserError(
            "task=custom: the run's task is your own class; load the weights in its model folder as you made the network"
        )
    if kind != "generation" and not task.labels:
        raise UserError(
            "the run took its classes from its training data and kept no list of them: give labels=[...], in the order of the "
            "training (sorted)"
        )
    if kind == "image_classification":
        if keep:
            raise UserError("keep: images have no columns; each line begins with the name of its file")
        rows, made = _images(data, place, task.labels)
    else:
        rows, made = _texts(run, data, place, keep)
    plain = TaskConfig()
    asked = replace(task, **{name: getattr(plain, name) for name in OF_THE_DATA}, overlong="cut")
    if kind == "generation":
        if task.generation.shots:
            raise UserError(
                "task.generation.shots: the prompts of this run hold pairs of its training data, which are not read here"
            )
        # nothing is scored
        asked.generation = replace(task.generation, when="never", examples=None, candidates=0)
    mine = DataConfig(
        train=str(made), text=TEXT, label=LABEL, text_pair=PAIR if columns_of(task, run.data).text_pair else None,
        cache=str(place / "cache"), max_length=run.data.max_length,
    )  # fmt: skip
    tokenizer = build_tokenizer(run.model, scale=run.scale.name)
    try:
        return build_task(asked, mine, "own", tokenizer, run.seed), rows
    except UserError as error:
        # an image is known to its owner by its own name
        links = {str(path): str(path.readlink()) for path in made.rglob("*") if path.is_symlink()}
        said = re.sub("|".join(map(re.escape, links)) or "(?!)", lambda found: links[found[0]], str(error))
        raise UserError(said.replace(str(made), str(data))) from error


def _texts(run: RunConfig, data: Path, place: Path, keep: Sequence[str]) -> tuple[list[dict[str, str]], Path]:
    """What was read, and a table with the columns `TEXT`, `PAIR` and `LABEL`."""
    columns = columns_of(run.task, run.data)
    names = [columns.text] + ([columns.text_pair] if columns.text_pair else [])
    read = list(dict.fromkeys([*keep, *names]))
    table = read_table(data, read)
    rows = [
        dict(zip(read, cells, strict=True)) for cells in zip(*(table.columns[n] for n in read), strict=True)
    ]
    made = place / "rows.jsonl"
    # a target that is empty would be refused
    label = next(iter(run.task.labels), "-")
    lines = (dict(zip((TEXT, PAIR), map(row.get, names), strict=False)) | {LABEL: label} for row in rows)
    made.write_text("\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
    return rows, made


def _images(data: Path, place: Path, labels: Sequence[str]) -> tuple[list[dict[str, str]], Path]:
    """The images' paths, and a folder that holds them in this order as those of the first class."""
    files = [data] if data.is_file() else shown_files(data)
    found = [path for path in files if path.suffix.lower() in SUFFIXES]
    if not found:
        raise UserError(f"data={data}: no image there ({', '.join(sorted(SUFFIXES))})")
    made = place / "images"
    for number, label in enumerate(labels):
        (made / label).mkdir(parents=True)
        # a class without an image would be refused: behind our images, all others have the first one
        for at, path in enumerate(found if number == 0 else found[:1]):
            (made / label / f"{at:09d}{path.suffix}").symlink_to(path.resolve())
    return [{"file": str(path)} for path in found], made


def exported(run: RunConfig, folder: Path, task: Task) -> nn.Module:
    """The network of a run with the weights that `dpexp.training.export` wrote.

    Args:
        run: its settings.
        folder: of the export.
        task: says which head, and how many classes.
    """

    def network() -> Any:
        return task.build_network(run.model, PeftConfig(), scale=run.scale.name, seed=run.seed).model

    if (folder / WEIGHTS).is_file():
        model = network()
        model.load_state_dict(torch.load(folder / WEIGHTS, map_location="cpu", weights_only=True))
        return model
    if (folder / adapters.DESCRIPTION).is_file():
        return adapters.load_adapters(network(), folder)
    if (folder / "adapter_config.json").is_file():
        import peft

        return peft.PeftModel.from_pretrained(network(), str(folder))
    if run.model.pooling != "own":
        return load_pooled(folder)
    return auto_class(task.head).from_pretrained(str(folder))


@torch.no_grad()
def _answers(
    task: Task, model: nn.Module, device: torch.device, batch_size: int, rows: int
) -> tuple[list[str], list[list[str]]]:
    """The names of the columns, and for each of the first rows of the training split what stands in them."""
    if isinstance(task, Generation):
        prompts = [Context("", [], task.train.prompt(row)) for row in range(rows)]
        written = decode(model, device, task.tokenizer, prompts, task.settings, batch_size)
        return ["prediction"], [[one.text] for one in written]
    assert isinstance(task, TextClassification | ImageClassification)
    shares = np.empty((rows, len(task.labels)))
    # of similar length together, the longest first: a lack of memory shows at once
    order = sorted(range(rows), key=lambda row: -task.length(row))
    for at in range(0, rows, batch_size):
        chosen = order[at : at + batch_size]
        batch = {name: x.to(device) for name, x in task.collate([task.train[row] for row in chosen]).items()}
        logits = task.logits(model, batch)
        if logits.shape[1] != shares.shape[1]:
            raise UserError(
                f"labels: {shares.shape[1]} classes, and the model knows {logits.shape[1]}: name them all, sorted"
            )
        shares[chosen] = logits.double().softmax(1).cpu().numpy()
    names = [task.labels[best] for best in shares.argmax(1)]
    columns = [f"P({label})" for label in task.labels]
    return ["prediction", *columns], [
        [name, *(f"{p:.6f}" for p in row)] for name, row in zip(names, shares, strict=True)
    ]


if __name__ == "__main__":
    main()
