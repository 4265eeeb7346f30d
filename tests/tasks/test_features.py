"""Features of a frozen encoder: the same losses and gradients as with the encoder in place, computed once."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dpexp.config import compose
from dpexp.errors import UserError
from dpexp.models import ModelBundle, build_model
from dpexp.schemas import DataConfig, ModelConfig, PeftConfig, TaskConfig
from dpexp.tasks import build_task, features
from dpexp.tasks.base import Task
from dpexp.train import train

from .conftest import SIZES

CPU = torch.device("cpu")
Data = Callable[..., DataConfig]
ROWS = [("the film is superb and fresh", "yes"), ("dull", "no"), ("a stale plot", "no"), ("fresh", "yes")]


def model(**values: Any) -> ModelBundle:
    config = ModelConfig(
        **{"family": "random_hf", "architecture": "bert", "config": SIZES["bert"], "tokenizer": "demo", "dropout": 0.5,
           "pooling": "mean", "trainable": "head", **values}
    )  # fmt: skip
    return build_model(config, PeftConfig(name="full"), num_labels=2, scale="small", seed=1)


@pytest.fixture
def settings(own_data: Data) -> DataConfig:
    return own_data(ROWS, ROWS[:3])


@pytest.fixture
def task(own: TaskConfig, settings: DataConfig) -> Task:
    return build_task(own, settings, "small", model().tokenizer, 0)


@pytest.mark.parametrize("head", ["linear", "unbiased", "dense"])
def test_losses_and_gradients_are_those_with_the_encoder_in_place(
    head: str, task: Task, settings: DataConfig
) -> None:
    whole = model(head=head)
    small, learner = features.freeze(task, whole, settings, CPU)
    whole.model.eval()
    expected = task.losses(whole.model, task.collate(list(task.train)))
    found = small.losses(learner.model.eval(), small.collate(list(small.train)))
    torch.testing.assert_close(found, expected)
    for a, b in zip(
        torch.autograd.grad(found[1], list(learner.model.parameters())),
        torch.autograd.grad(expected[1], [p for p in whole.model.parameters() if p.requires_grad]),
        strict=True,
    ):
        torch.testing.assert_close(a, b)
    metrics, others = small.evaluate(learner.model, CPU, 2), task.evaluate(whole.model, CPU, 2)
    assert metrics == pytest.approx(others, rel=1e-5)


def test_the_head_that_trains_is_the_head_of_the_whole_model(task: Task, settings: DataConfig) -> None:
    whole = model()
    _, learner = features.freeze(task, whole, settings, CPU)
    with torch.no_grad():
        next(learner.model.parameters()).add_(1.0)
    assert torch.equal(whole.model.classifier.weight, next(learner.model.parameters()))
    assert learner.model[0].p == 0.5  # dropout before the head still trains with it


def test_each_row_is_a_function_of_its_own_text(task: Task, settings: DataConfig) -> None:
    small, _ = features.freeze(task, model(), settings, CPU)
    for i, row in enumerate(small.train):
        batch = task.collate([task.train[i]])
        batch.pop("labels")
        torch.testing.assert_close(row.values, model().model.eval().pooled(**batch)[0])
    assert small.collate([])["features"].shape == (0, 16)
    assert small.losses(torch.nn.Linear(16, 2), small.collate([])).shape == (0,)


def test_an_encoder_that_goes_by_its_batch_is_refused_with_privacy(task: Task, settings: DataConfig) -> None:
    """As Nyströmformer's attention does, in evaluation mode too: it divides by a number of the whole batch."""
    mixing = model()
    layer = mixing.model.bert.encoder.layer[-1].output
    layer.register_forward_hook(lambda module, inputs, output: output / output.abs().max())
    features.freeze(task, mixing, settings, CPU)
    with pytest.raises(UserError, match=r"frozen_features=true: .*mixes examples"):
        features.freeze(task, mixing, settings, CPU, private=True)
    small, _ = features.freeze(task, model(), settings, CPU, private=True)
    assert not [note for note in small.data.notes if "not looked at" in note]


def test_they_are_computed_once_and_again_for_other_weights_or_texts(
    task: Task, settings: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    computed = features.features_of
    monkeypatch.setattr(features, "features_of", lambda *a: calls.append(1) or computed(*a))
    first, _ = features.freeze(task, model(), settings, CPU)
    assert len(calls) == 2  # train and dev
    again, _ = features.freeze(task, model(), settings, CPU)
    assert len(calls) == 2
    assert torch.equal(first.train.values, again.train.values)
    features.freeze(task, model(head="dense"), settings, CPU)  # another head reads the same
    assert len(calls) == 2
    features.freeze(task, model(pooling="cls"), settings, CPU)
    assert len(calls) == 4
    changed = model()
    with torch.no_grad():
        next(changed.model.parameters()).mul_(2)
    features.freeze(task, changed, settings, CPU)
    assert len(calls) == 6
    (file, *_) = (Path(str(settings.cache)) / "features").iterdir()
    assert file.stat().st_mode & 0o077 == 0  # private texts, for their owner alone


def test_what_is_no_frozen_linear_head_is_refused(task: Task, settings: DataConfig) -> None:
    with pytest.raises(UserError, match="trains the head alone"):
        features.freeze(task, model(trainable="all"), settings, CPU)
    with pytest.raises(UserError, match=r"model\.pooling"):
        features.freeze(task, model(pooling="own"), settings, CPU)


def test_another_precision_has_features_of_its_own(task: Task, settings: DataConfig) -> None:
    exact, _ = features.freeze(task, model(), settings, CPU)
    rounded, _ = features.freeze(task, model(), settings, CPU, "bf16")
    again, _ = features.freeze(task, model(), settings, CPU)
    assert not torch.equal(exact.train.values, rounded.train.values)
    torch.testing.assert_close(exact.train.values, rounded.train.values, rtol=0.05, atol=0.05)
    assert torch.equal(exact.train.values, again.train.values)


@pytest.mark.parametrize(
    ("clip", "head"),
    [("flat", "linear"), ("adaptive_perlayer", "dense"), ("perlayer", "dense"), ("nonprivate", "unbiased")],
)
def test_a_private_run_with_every_kind_of_clipping_and_the_exported_model(
    clip: str, head: str, tmp_path: Path
) -> None:
    from rich.console import Console

    from dpexp.models.pooling import load_pooled

    privacy = ["privacy=none"] if clip == "nonprivate" else []
    run = compose(
        ["task=sst2", "scale=demo", f"clip={clip}", *privacy, "model.pooling=mean", "model.frozen_features=true",
         f"model.head={head}",
         "model.trainable=head", "optim.epochs=null", "optim.steps=3", "data.num_examples=400", "optim.batch_size=40",
         f"data.cache={tmp_path}", "runtime=cpu"]
    )  # fmt: skip
    folder = tmp_path / "run"
    folder.mkdir()
    summary = train(run, folder, Console(quiet=True))
    assert any(
        "features" in note for note in summary["data"].get("notes", summary["details"].get("data_notes", []))
    )
    if clip != "nonprivate":
        assert summary["privacy"]["epsilon"]["rdp"] <= run.privacy.epsilon + 1e-6
    exported = load_pooled(folder / "model")
    from dpexp.models import build_tokenizer

    tokenizer = build_tokenizer(run.model, scale="demo")
    dev = dataclasses.replace(run)
    built = build_task(dev.task, dev.data, "demo", tokenizer, 0)
    assert built.evaluate(exported, CPU, 64)["accuracy"] == pytest.approx(summary["metrics"]["accuracy"])
    assert np.isfinite(summary["metrics"]["loss"])


def test_wrong_users_are_told_before_the_encoder_has_read_every_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rich.console import Console

    rows = "".join(f"text {i},{i % 2},user {i // 2}\n" for i in range(20))
    (file := tmp_path / "train.csv").write_text("text,label,author\n" + rows)
    run = compose(
        ["task=text_classification", "scale=own", "clip=flat", f"data.train={file}", "data.text=text", "data.label=label",
         "data.num_examples=20", "task.labels=[0,1]", "unit=user", "unit.column=author", "unit.num_users=9",
         "model=bert_tiny", "model.pooling=mean", "model.trainable=head", "model.frozen_features=true",
         "optim.batch_size=4", f"data.cache={tmp_path}", "runtime=cpu"]
    )  # fmt: skip
    monkeypatch.setattr("dpexp.train.freeze", lambda *_, **__: pytest.fail("the encoder has begun to read"))
    with pytest.raises(UserError, match=r"has 10 users and unit.num_users=9 was declared"):
        train(run, tmp_path, Console(quiet=True))
