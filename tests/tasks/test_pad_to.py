"""One length for all batches: the same losses, shapes that say nothing of the texts, and settings that must fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rich.console import Console

from dpexp.config import compose
from dpexp.errors import UserError
from dpexp.models import build_model, build_tokenizer
from dpexp.schemas import RunConfig
from dpexp.tasks import Task, build_task

SETTINGS = ("scale=demo", "data.num_examples=40", "data.cache=null", "optim.batch_size=8")


def run_of(task: str, *more: str) -> RunConfig:
    return compose([f"task={task}", *SETTINGS, *more])


def built(run: RunConfig) -> Task:
    return build_task(run.task, run.data, run.scale.name, build_tokenizer(run.model, scale="demo"), run.seed)


@pytest.mark.parametrize(("task", "length"), [("sst2", 32), ("sst2_infilling", 48), ("e2e", 160)])
def test_every_batch_has_one_shape_and_the_losses_are_the_same(task: str, length: int) -> None:
    run = run_of(task, "data.max_length=32" if task == "sst2" else f"data.max_length={length}")
    fixed = built(run_of(task, f"data.max_length={length}", f"task.pad_to={length}"))
    usual = built(run)
    tokenizer = build_tokenizer(run.model, scale="demo")
    model = build_model(
        run.model, run.peft, head=usual.head, num_labels=2, scale="demo", seed=0, tokenizer=tokenizer
    ).model
    model.double().eval()
    shapes = set()
    for rows in ([0], [1, 2], [3, 4, 5]):
        losses = []
        for one in (usual, fixed):
            batch = one.collate([one.train[i] for i in rows])
            losses.append(one.losses(model, batch))
        shapes.add(tuple((name, tensor.shape[1:]) for name, tensor in batch.items()))
        torch.testing.assert_close(*losses, rtol=1e-9, atol=0)
    assert len(shapes) == 1
    assert batch["input_ids"].shape[1] == length
    assert fixed.collate([])["input_ids"].shape == (0, length)


@pytest.mark.parametrize(
    ("task", "setting", "words"),
    [
        ("sst2", "task.pad_to=8", "shorter than the 32 tokens"),
        ("mnist", "task.pad_to=8", "is for texts"),
        ("sst2", "task.pad_to=0", "task.pad_to"),
    ],
)
def test_a_length_that_cannot_be_kept_is_refused(task: str, setting: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        run_of(task, setting)


def test_more_than_the_model_can_read_is_refused() -> None:
    with pytest.raises(UserError, match="that the model can read"):
        built(run_of("sst2", "task.pad_to=100000"))


def test_the_trainer_keeps_the_promise(tmp_path: Path) -> None:
    from dpexp.train import train

    run = run_of(
        "sst2", "task.pad_to=32", "data.max_length=32", "runtime=cpu", "optim.epochs=null", "optim.steps=2",
        f"runtime.runs_dir={tmp_path}", "model.config.num_hidden_layers=1",
    )  # fmt: skip
    folder = tmp_path / "run"
    folder.mkdir()
    assert train(run, folder, Console(record=True))["privacy"]["steps"] == 2
