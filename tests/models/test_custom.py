"""A network and a task of a person's own, from a module in the working folder."""

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from dpexp.config import compose, run_folder
from dpexp.errors import UserError
from dpexp.importing import imported
from dpexp.models import build_model
from dpexp.models.custom import custom_network
from dpexp.models.images import ImageInputs
from dpexp.schemas import DataConfig, ModelConfig, PeftConfig, TaskConfig
from dpexp.tasks import build_task
from dpexp.tasks.base import SHARED, logits_of
from dpexp.training.evaluation import evaluate
from dpexp.training.watching.functions import look_at_task
from tests.training.tiny import TinyTask

MINE = """
import numpy as np
import torch
from torch import nn
from dpexp.tasks import DataInfo, Task


def small(num_labels, image_shape, width=4):
    channels, height, side = image_shape
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(width * height * side, num_labels)
    )


def line(num_labels):
    return nn.Linear(3, num_labels)


def frozen_below(num_labels, image_shape, all=False):
    network = nn.Sequential(nn.Flatten(), nn.Linear(25, 4), nn.Linear(4, num_labels))
    (network if all else network[1]).requires_grad_(False)
    return network


def constant_norm(num_labels):
    below = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.9)).requires_grad_(False).eval()
    below[0].track_running_stats = False
    return nn.Sequential(below, nn.Linear(3, num_labels), nn.Dropout(0.1))


def no_network(num_labels):
    return "a network"


def lazy(num_labels):
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(num_labels))


class Points(Task):
    head = "image_classifier"

    def __init__(self, task, data, scale, tokenizer):
        draw = np.random.default_rng(0)
        self.name, self.num_examples, self.labels = task.name, 40, ["left", "right"]
        self.train = [(x.astype(np.float32), int(x[0] > 0)) for x in draw.normal(size=(40, 3))]
        self.dev = self.train[:4]
        self.data = DataInfo("demo", "points", {"train": 40}, {"train": "0"}, [])

    def collate(self, examples):
        x = np.stack([x for x, _ in examples]) if examples else np.empty((0, 3), np.float32)
        return {"x": torch.from_numpy(x), "labels": torch.tensor([y for _, y in examples], dtype=torch.int64)}

    def losses(self, model, batch):
        if not len(batch["x"]):
            return torch.zeros(0)
        return nn.functional.cross_entropy(model(batch["x"]), batch["labels"], reduction="none")

    def evaluate(self, model, device, batch_size, progress=None):
        with torch.no_grad():
            return {"loss": float(self.losses(model, self.collate(self.dev)).mean())}

    def length(self, i):
        return 1
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module in the working folder, which is `tmp_path`."""
    name = f"mine_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name


def test_the_function_gets_what_it_names_and_the_config(mine: str) -> None:
    asked = {"head": "image_classifier", "num_labels": 3, "image_shape": (1, 5, 5), "tokenizer": None}
    network = custom_network(ModelConfig(factory=f"{mine}:small", config={"width": 2}), **asked)
    of_file = ModelConfig(factory=f"{mine}.py:small", config={"width": 2})
    assert isinstance(custom_network(of_file, **asked), type(network))
    assert network(torch.zeros(2, 1, 5, 5)).shape == (2, 3)
    assert network[0].out_channels == 2


@pytest.mark.parametrize(
    ("factory", "config", "says"),
    [
        ("small", {}, "give package.module:name"),
        ("no_such_module_here:f", {}, "can't be imported"),
        ("no_such_file.py:f", {}, "no_such_file.py can't be imported"),
        ("{}:large", {}, "has no large"),
        ("{}:small", {"depth": 2}, "depth"),
        ("{}:no_network", {}, "made a str, and a torch.nn.Module is wanted"),
        ("{}:lazy", {}, r"1\.weight has no shape yet \(a lazy module\)"),
    ],
)
def test_a_function_that_is_not_one_is_refused(mine: str, factory: str, config: dict, says: str) -> None:
    model = ModelConfig(factory=factory.format(mine), config=config)
    with pytest.raises(UserError, match=says):
        custom_network(model, head="classifier", num_labels=2, image_shape=(1, 5, 5), tokenizer=None)


def trained(mine: str, runs: Path, console: Console, *settings: str) -> tuple[Path, dict[str, Any]]:
    """The folder and the record of a run of the points and the line."""
    from dpexp.train import train

    run = compose(
        [
            "task=custom", f"task.factory={mine}:Points", f"model.factory={mine}:line", "scale=own", "optim.epochs=2",
            "runtime=cpu", f"runtime.runs_dir={runs}", *settings,
        ]
    )  # fmt: skip
    folder = run_folder(run)
    folder.mkdir(parents=True)
    return folder, train(run, folder, console)


def test_a_task_and_a_network_of_ones_own_train(mine: str, tmp_path: Path) -> None:
    settings = "clip=flat", "data.num_examples=40", "engine.choice=rule"
    folder, summary = trained(mine, tmp_path, Console(quiet=True), *settings)
    assert summary["privacy"]["epsilon"]["rdp"] <= 8
    assert summary["details"]["model_source"] == f"{mine}:line (seed 0)"
    assert (folder / "model" / "model.pt").is_file()
    # its dev set is a part of its training data
    assert f"data: {SHARED}" in summary["privacy"]["notes"]


def test_a_batch_is_at_most_all_rows_that_were_counted(mine: str, tmp_path: Path) -> None:
    console = Console(record=True, width=300)
    _, summary = trained(mine, tmp_path, console, "clip=nonprivate", "privacy=none", "data.train=points")
    assert summary["details"]["config"]["optim"]["batch_size"] == 40
    assert (
        "note: optim.batch_size=1024 is more than the 40 examples that were counted" in console.export_text()
    )


class OnItself(TinyTask):
    def __init__(self, task, data, scale, tokenizer):
        super().__init__(40)
        self.dev = self.train


def test_a_task_of_ones_own_is_not_measured_on_its_training_data() -> None:
    task = TaskConfig(name="custom", kind="custom", factory=f"{__name__}:OnItself")
    with pytest.raises(UserError, match=r"OnItself\.dev is its train"):
        build_task(task, DataConfig(num_examples=40), "own", ImageInputs(), 0)


def test_the_documented_task_trains_without_being_about_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dpexp.train import train

    docs = Path(__file__).parents[2] / "docs"
    monkeypatch.chdir(docs / "examples")
    monkeypatch.setattr(sys, "path", list(sys.path))
    (line,) = re.findall(
        r"^dpexp train (task=custom .*)\\\n +(.*)$", (docs / "own_data.md").read_text(), re.M
    )
    run = compose([*" ".join(line).split(), "optim.epochs=1", "runtime=cpu", f"runtime.runs_dir={tmp_path}"])
    folder = run_folder(run)
    folder.mkdir(parents=True)
    assert 0 <= train(run, folder, Console(quiet=True))["metrics"]["accuracy"] <= 1


def test_a_class_that_is_no_task_and_another_number_of_examples_are_refused(
    mine: str, tmp_path: Path
) -> None:
    given = ["task=custom", f"model.factory={mine}:line", "scale=own", "clip=flat", "data.num_examples=41"]
    for name, says in {
        "small": "is no subclass of dpexp.tasks.Task",
        "Points": "41 examples are declared",
    }.items():
        run = compose([*given, f"task.factory={mine}:{name}"])
        with pytest.raises(UserError, match=says):
            build_task(run.task, run.data, "own", ImageInputs(), 0)


def test_what_the_function_has_frozen_stays_frozen(mine: str) -> None:
    """A pretrained part below a head of one's own: it was trained too, and nothing said so."""

    def names(config: ModelConfig) -> list[str]:
        asked = {
            "head": "image_classifier",
            "num_labels": 2,
            "tokenizer": ImageInputs(),
            "image_shape": (1, 5, 5),
        }
        return build_model(config, PeftConfig(), scale="own", seed=0, **asked).trainable

    config = ModelConfig(family="custom", factory=f"{mine}:frozen_below")
    assert names(config) == ["2.weight", "2.bias"]
    with pytest.raises(
        UserError, match="frozen_below freezes all parameters of its network: nothing would train"
    ):
        names(replace(config, config={"all": True}))


def test_batch_norm_that_the_function_has_made_constant_trains_above(mine: str, tmp_path: Path) -> None:
    """What a refused batch norm is told to do: the whole network was set to training behind the function's back."""
    asked = {"head": "image_classifier", "num_labels": 2, "tokenizer": None, "image_shape": None}
    network = custom_network(ModelConfig(factory=f"{mine}:constant_norm"), **asked)
    assert [module.training for module in network.modules()] == [True, False, False, False, True, True]
    settings = "clip=flat", "data.num_examples=40", f"model.factory={mine}:constant_norm"
    _, summary = trained(mine, tmp_path, Console(quiet=True), *settings)
    assert summary["privacy"]["epsilon"]["rdp"] <= 8


class Unfinished(TinyTask):
    def __init__(self, task, data, scale, tokenizer):
        super().__init__(40)
        del self.labels, self.data


class Stacked(TinyTask):
    def collate(self, examples):
        return torch.stack([x for x, _ in examples])


class Silent(TinyTask):
    def evaluate(self, *arguments, **named):
        return None


def test_what_a_task_of_ones_own_lacks_is_said() -> None:
    task = TaskConfig(name="custom", kind="custom", factory=f"{__name__}:Unfinished")
    with pytest.raises(UserError, match=r"Unfinished: once it is made it has no labels, no data; see dpexp"):
        build_task(task, DataConfig(num_examples=40), "own", ImageInputs(), 0)
    with pytest.raises(
        UserError, match=r"Stacked\.collate makes a Tensor of a list of examples: make a dictionary"
    ):
        look_at_task(Stacked(40), nn.Linear(10, 3), 0, 3)
    with pytest.raises(
        UserError, match="what Silent measures must be a dictionary from names to numbers, and is None"
    ):
        evaluate(Silent(40), nn.Linear(10, 3), torch.device("cpu"), 8)


@pytest.mark.parametrize(
    ("output", "says"),
    [
        ((torch.zeros(4, 2),), "gives a tuple and no logits"),
        (torch.zeros(4, 3), r"\[4, 3\], and the task has 2 classes"),
        (torch.zeros(4, 1, 2), r"\[4, 1, 2\], and the task has 2 classes"),
    ],
)
def test_a_network_with_other_outputs_than_the_task_has_classes_is_refused(output: Any, says: str) -> None:
    """More of them than classes trained, and were never right."""
    with pytest.raises(UserError, match=says):
        logits_of(output, 2)
    assert logits_of(torch.zeros(4, 2), 2).shape == (4, 2)


def test_what_is_imported_is_the_thing_itself() -> None:
    assert imported("x", "torch.nn:Linear") is nn.Linear
