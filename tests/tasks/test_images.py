"""Tasks of images: data from every place, one loss per example, and the command from its beginning to its end."""

import itertools
import json
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features
from datasets import Image as ImageFeature
from PIL import Image
from rich.console import Console
from torch import nn

from dpexp.clipping import attach
from dpexp.config import compose, run_folder
from dpexp.errors import UserError
from dpexp.models import build_model, build_tokenizer
from dpexp.models.images import ImageInputs
from dpexp.schemas import DataConfig, ModelConfig, PeftConfig, TaskConfig
from dpexp.tasks import build_task, image_files
from dpexp.tasks.image_files import Images
from dpexp.tasks.image_sources import ImageReader
from dpexp.tasks.images import ImageClassification
from dpexp.train import train
from tests.tasks import image_data

ANY = ImageInputs()  # a network that takes images as they are
QUICK = ["runtime=cpu", "engine.choice=rule", "optim.epochs=null", "data.cache=null"]


def demo(rows: int = 24, inputs: ImageInputs = ANY, **settings) -> ImageClassification:
    """Synthetic colours of ten classes, 12 x 12 pixels."""
    task = TaskConfig(
        name="mine", kind="image_classification", labels=[str(i) for i in range(10)], image_size=12,
        num_examples={"demo": rows}, **settings,
    )  # fmt: skip
    return ImageClassification(task, DataConfig(), "demo", inputs)


def network(task: ImageClassification, family: str = "cnn", **settings) -> nn.Module:
    config = {
        "cnn": {"widths": [4, 6], "hidden": 8},
        "wide_resnet": {"depth": 10, "widening": 1, "base": 4, "groups": 2},
    }
    model = ModelConfig(family=family, architecture="cifar", config={**config[family], **settings})
    return build_model(
        model, PeftConfig(), head="image_classifier", num_labels=len(task.labels), scale="demo", seed=0,
        image_shape=task.image_shape,
    ).model  # fmt: skip


def batch_of(task: ImageClassification, indices: list[int], step: int = 0) -> dict[str, torch.Tensor]:
    batch = task.collate([task.train[i] for i in indices])
    return task.augmented(batch, np.array(indices), 0, step)


# Where the images come from


def test_mnist_comes_from_its_published_files(tmp_path: Path) -> None:
    made = image_data.mnist(tmp_path)
    run = compose(
        [
            "task=mnist",
            "scale=small",
            "clip=flat",
            f"data.root={tmp_path}",
            "data.num_examples=10",
            "optim.batch_size=4",
        ]
    )
    task = build_task(run.task, run.data, "small", ImageInputs(), 0)
    assert task.data.source == "files"
    assert task.data.rows == {"train": 10, "dev": 6}
    assert task.image_shape == (1, 28, 28)
    assert any("published test set is dev" in note for note in task.data.notes)
    assert any("mean 0.1307" in note for note in task.data.notes)
    batch = task.collate([task.train[i] for i in range(10)])
    expected = (torch.from_numpy(made["train"][0]).double() / 255 - 0.1307) / 0.3081
    torch.testing.assert_close(batch["pixel_values"][:, 0].double(), expected, rtol=0, atol=2e-6)
    assert batch["labels"].tolist() == made["train"][1].tolist()


def test_another_number_of_rows_than_declared_is_refused(tmp_path: Path) -> None:
    image_data.mnist(tmp_path)
    run = compose(["task=mnist", "scale=small", "clip=flat", f"data.root={tmp_path}"])
    with pytest.raises(UserError, match=r"60000 examples are declared, and .* has 10"):
        build_task(run.task, run.data, "small", ImageInputs(), 0)


@pytest.mark.parametrize(("form", "classes"), [("cifar10", 10), ("cifar100", 100)])
def test_cifar_comes_from_its_published_files(tmp_path: Path, form: str, classes: int) -> None:
    made = image_data.cifar(tmp_path, form)
    rows = len(made["train"][1])
    run = compose(
        [
            f"task={form}",
            "scale=small",
            "clip=flat",
            f"data.root={tmp_path}",
            f"data.num_examples={rows}",
            "optim.batch_size=4",
        ]
    )
    task = build_task(run.task, run.data, "small", ImageInputs(), 0)
    assert len(task.labels) == classes
    assert task.image_shape == (3, 32, 32)
    assert "JPEG" not in task.data.name


def test_the_re_encoded_copy_is_another_task_and_says_so_everywhere(tmp_path: Path) -> None:
    (tmp_path / "cifar10").mkdir()
    labels = compose(["task=cifar10_jpeg", "scale=demo", "clip=flat"]).task.labels
    for split in ("train", "test"):
        with tarfile.open(tmp_path / f"cifar10/cifar10_jpeg_{split}.tar.xz", "w:xz") as tar:
            for i, label in enumerate(labels):
                image_data.add(tar, f"{split}/{label}/0000.jpg", image_data.jpeg(i))
    where = [
        "scale=small",
        "clip=flat",
        f"data.root={tmp_path}",
        "data.num_examples=10",
        "optim.batch_size=4",
    ]
    run = compose(["task=cifar10_jpeg", *where])
    task = build_task(run.task, run.data, "small", ImageInputs(), 0)
    assert task.data.name == "CIFAR-10 (JPEG q75)"
    assert any("lossy JPEG" in note for note in task.data.notes)
    run = compose(["task=cifar10", *where, "data.source=files"])
    with pytest.raises(UserError, match=r"no data for task=cifar10\. .*cifar-10-batches-py"):
        build_task(run.task, run.data, "small", ImageInputs(), 0)


def test_rows_of_the_hub_are_converted_and_checked(tmp_path: Path) -> None:
    pixels = [Image.fromarray(np.full((4, 4), 10 * i, np.uint8)) for i in range(3)]
    features = Features({"image": ImageFeature(), "label": ClassLabel(num_classes=3)})
    dataset = Dataset.from_dict({"image": pixels, "label": [2, 0, 1]}, features=features)
    task = TaskConfig(name="mnist", labels=["0", "1", "2"], hub_id="ylecun/mnist", channels=1)

    def read(task: TaskConfig, where: str = "hub") -> Images:
        return ImageReader(task, DataConfig(), tmp_path).from_hub(dataset, "train", where)

    images = read(task)
    assert images.pixels[:, 0, 0, 0].tolist() == [0, 10, 20]
    assert images.labels.tolist() == [2, 0, 1]
    assert read(TaskConfig(labels=["0", "1", "2"], channels=3)).pixels.shape == (3, 3, 4, 4)
    with pytest.raises(UserError, match="label 2 is outside the 2 classes"):
        read(TaskConfig(labels=["0", "1"], channels=1), "other")
    with pytest.raises(UserError, match="no column fine_label, img"):
        read(TaskConfig(labels=["0"], hub_id="uoft-cs/cifar100"))


def test_own_folders_need_no_code(tmp_path: Path) -> None:
    image_data.folder(tmp_path / "train", {"wolf": 5, "ape": 4})
    image_data.folder(tmp_path / "dev", {"wolf": 2, "ape": 1}, first=50)
    given = [
        "task=images",
        "scale=small",
        "clip=nonprivate",
        "privacy=none",
        f"data.train={tmp_path}/train",
        f"data.cache={tmp_path}/cache",
        "optim.batch_size=4",
    ]
    run = compose([*given, f"data.dev={tmp_path}/dev"])
    task = build_task(run.task, run.data, "small", ImageInputs(), 0)
    assert task.labels == ["ape", "wolf"]
    assert (task.num_examples, task.data.rows) == (9, {"train": 9, "dev": 3})
    assert any("counted in the training file" in note for note in task.data.notes)
    assert any("treated as public" in note for note in task.data.notes)
    assert not any("published test set" in note for note in task.data.notes)
    run = compose(given)
    task = build_task(run.task, run.data, "small", ImageInputs(), 0)
    assert any("nothing is measured" in note for note in task.data.notes)
    assert task.evaluate(nn.Identity(), torch.device("cpu"), 4) == {}
    shutil.copytree(tmp_path / "train", tmp_path / "copy")
    run = compose([*given, f"data.dev={tmp_path}/copy"])
    with pytest.raises(UserError, match=r"data\.dev=.*most of its rows are in data\.train too"):
        build_task(run.task, run.data, "small", ImageInputs(), 0)
    image_data.folder(tmp_path / "larger", {"wolf": 1, "ape": 1}, size=9)
    run = compose([*given, f"data.dev={tmp_path}/larger"])
    with pytest.raises(UserError, match=r"data.dev=.*9x9 pixels.*task.image_size"):
        build_task(run.task, run.data, "small", ImageInputs(), 0)


@pytest.mark.parametrize(
    ("chosen", "family", "rate"), [([], "scattering", 0.2), (["model=cnn_cifar"], "cnn", 1.0)]
)
def test_the_settings_for_own_images_suit_the_network(chosen: list[str], family: str, rate: float) -> None:
    given = ["task=images", "scale=own", "clip=flat", "data.train=photos", "task.labels=[ape,wolf]"]
    run = compose([*given, "data.num_examples=2000", *chosen])
    assert (run.model.family, run.model.frozen_features) == (family, family == "scattering")
    assert (run.optim.name, run.optim.lr, run.optim.batch_size, run.optim.epochs) == ("sgd", rate, 256, 38)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["task=images", "scale=small"], "not given: data.train"),
        (["task=mnist", "scale=small", "data.train=x"], "task=mnist reads its own files"),
        (["task=mnist", "scale=demo", "task.augmentation=turn"], r"task.augmentation=turn is not a choice"),
        (["task=mnist", "scale=demo", "task.augmentations=-1"], "task.augmentations=-1 must be 0 or more"),
        (["task=mnist", "scale=demo", "optim.ema_decay=1.0"], r"optim.ema_decay=1.0 must be in \[0, 1\)"),
    ],
)
def test_settings_that_mean_nothing_are_refused(overrides: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        compose(["clip=flat", *overrides])


def test_a_model_that_reads_text_and_a_task_that_has_images_do_not_meet() -> None:
    run = compose(["task=mnist", "scale=demo", "clip=flat", "model=bert_tiny", "model.config={}"])
    with pytest.raises(
        UserError, match=r"task=mnist has images, and this model reads text: .*model=cnn_papernot"
    ):
        build_task(run.task, run.data, "demo", build_tokenizer(run.model, scale="demo"), 0)
    run = compose(["task=sst2", "scale=demo", "clip=flat", "model=cnn_papernot"])
    with pytest.raises(UserError, match="task=sst2 has text, and this model sees images"):
        build_task(run.task, run.data, "demo", ImageInputs(), 0)
    with pytest.raises(UserError, match=r"sees 1 channel\(s\), and the images have 3"):
        demo(inputs=ImageInputs(channels=1))


# The loss


def test_no_loss_moves_with_another_example_nor_with_its_place() -> None:
    """Exactly: `losses[i]` of a batch is the loss of example i by itself, augmented copies included."""
    for family, copies in (("cnn", 0), ("cnn", 3), ("wide_resnet", 2)):
        task = demo(augmentations=copies)
        model = network(task, family).double()
        alone = torch.cat([task.losses(model, batch_of(task, [i])) for i in range(6)])
        together = task.losses(model, batch_of(task, [4, 2, 0, 3, 5]))
        torch.testing.assert_close(together, alone[[4, 2, 0, 3, 5]], rtol=1e-12, atol=1e-12)
        assert len(set(alone.tolist())) == 6


def test_the_gradient_of_a_loss_with_respect_to_other_examples_is_zero() -> None:
    task = demo(augmentations=2)
    model = network(task, "wide_resnet")
    batch = batch_of(task, [0, 1, 2])
    batch["pixel_values"].requires_grad_()
    losses = task.losses(model, batch)
    for i in range(3):
        (moved,) = torch.autograd.grad(losses[i], batch["pixel_values"], retain_graph=True)
        by_example = moved.view(3, -1).abs().sum(1) > 0
        assert by_example.tolist() == [j == i for j in range(3)]


def test_the_loss_of_an_example_is_the_mean_over_its_copies() -> None:
    task, plain = demo(augmentations=4), demo()
    model = network(task)
    batch = batch_of(task, [7, 9], step=3)
    assert batch["pixel_values"].shape == (8, 3, 12, 12)
    rows = plain.losses(model, {**batch, "labels": batch["labels"].repeat_interleave(4)})
    torch.testing.assert_close(task.losses(model, batch), rows.view(2, 4).mean(1))
    assert not torch.equal(batch["pixel_values"], batch_of(task, [7, 9], step=4)["pixel_values"])
    empty = task.augmented(task.collate([]), np.empty(0, np.int64), 0, 0)
    assert task.losses(model, empty).shape == (0,)


def test_other_sizes_and_grey_images_are_fitted_to_the_network_one_by_one() -> None:
    seen: list[torch.Tensor] = []

    class Look(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 10)

        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            seen.append(pixels)
            return self.head(pixels.mean((2, 3)))

    for channels, size in ((1, 20), (3, 7), (1, 12)):
        task = demo(
            inputs=ImageInputs(size=size, channels=3, mean=(0.5,) * 3, std=(0.25,) * 3), channels=channels
        )
        assert task.image_shape == (3, size, size)
        model = Look()
        together = task.losses(model, batch_of(task, [0, 1, 2]))
        alone = torch.cat([task.losses(model, batch_of(task, [i])) for i in range(3)])
        torch.testing.assert_close(together, alone)
        assert seen[0].shape == (3, 3, size, size)
        assert any(f"scaled to {size}x{size}" in note for note in task.data.notes) == (size != 12)
        seen.clear()


ENGINES = ["onepass", "bk", "bk_mixopt", "ghost", "loop"]


@pytest.mark.parametrize("family", ["cnn", "wide_resnet"])
@pytest.mark.parametrize("copies", [0, 3])
def test_clipped_sums_are_those_of_a_loop_over_the_examples(family: str, copies: int) -> None:
    """Against autograd on one example at a time, in float64, under every engine; the rows of an example are clipped as one."""
    task = demo(augmentations=copies)
    indices = [3, 1, 8, 5]
    for groups in ("flat", "layer"):
        model = network(task, family).double()
        names = [name for name, _ in model.named_parameters()]
        grads = [
            torch.autograd.grad(task.losses(model, batch_of(task, [i])).sum(), list(model.parameters()))
            for i in indices
        ]
        for engine in ENGINES:
            clipper = attach(
                model,
                groups=groups,
                clip_norm=0.3,
                engine=engine,
                choice="rule",
                rows_per_example=task.rows_per_example,
            )
            report = clipper.backward(task.losses(model, batch_of(task, indices)))
            expected = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
            for k, group in enumerate(clipper.groups):
                for i, grad in enumerate(grads):
                    mine = {name: g for name, g in zip(names, grad, strict=True) if name in group.params}
                    norm = torch.sqrt(sum(g.square().sum() for g in mine.values()))
                    torch.testing.assert_close(report.norms[k, i].double(), norm, rtol=1e-6, atol=1e-9)
                    for name, g in mine.items():
                        expected[name] += g * min(1.0, float(clipper.thresholds[k] / norm))
            for name, p in model.named_parameters():
                torch.testing.assert_close(
                    p.grad, expected[name], rtol=1e-6, atol=1e-9, msg=f"{engine} {groups} {name}"
                )
                p.grad = None
            clipper.detach()


@pytest.mark.parametrize("family", ["cnn", "wide_resnet"])
def test_opacus_gives_the_same_gradients(family: str) -> None:
    task = demo(augmentations=2)
    found = []
    for engine in ("opacus", "bk_mixopt"):
        model = network(task, family, **({"standardise": False} if family == "wide_resnet" else {}))
        clipper = attach(model, clip_norm=0.3, engine=engine, rows_per_example=2)
        report = clipper.backward(task.losses(model, batch_of(task, [3, 1, 8])))
        found.append((report.norms, [p.grad for p in model.parameters()]))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-6)


# Evaluation, and the command


def test_accuracy_is_counted_on_images_as_they_are() -> None:
    task, changed = demo(), demo(augmentations=3)

    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(1, 10)

        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            return nn.functional.one_hot(torch.full((len(pixels),), 4), 10).float() * 100

    model = Constant().train()
    steps: list[tuple[int, int]] = []
    metrics = task.evaluate(model, torch.device("cpu"), 64, lambda *done: steps.append(done))
    assert metrics["accuracy"] == np.mean(task.dev.labels == 4)
    assert steps[-1] == (len(task.dev), len(task.dev))
    assert model.training
    assert changed.evaluate(model, torch.device("cpu"), 500) == metrics


def test_f1_of_ten_classes_is_refused_before_any_training():
    with pytest.raises(UserError, match=r"task\.metric=f1 is of two classes, and there are 10"):
        demo(metric="f1")


def prepare(runs: Path, *overrides: str):
    run = compose([*QUICK, "scale=demo", f"runtime.runs_dir={runs}", *overrides])
    folder = run_folder(run)
    folder.mkdir(parents=True)
    return run, folder


@pytest.mark.parametrize(
    "overrides",
    [
        ["task=mnist", "clip=adaptive_perlayer"],
        ["task=mnist", "clip=flat", "model=cnn_mnist", "optim.ema_decay=0.9"],
        ["task=cifar10", "clip=adaptive_perlayer", "task.augmentations=2", "optim.ema_decay=0.9"],
        ["task=cifar10", "clip=flat", "model=vit_tiny_random", "optim.lr_schedule=cosine"],
        ["task=cifar10_jpeg", "clip=perlayer", "model=wrn16_4", "model.config={depth: 10, widening: 1}"],
        ["task=cifar100", "clip=nonprivate"],
        ["task=images", "clip=perblock", "task.augmentations=2", "task.augmentation=crop"],
    ],
    ids=" ".join,
)
def test_the_command_trains_on_the_embedded_images(tmp_path: Path, overrides: list[str]) -> None:
    run, folder = prepare(
        tmp_path, *overrides, "data.num_examples=400", "optim.steps=3", "optim.batch_size=24"
    )
    summary = train(run, folder, Console(quiet=True))
    assert json.loads((folder / "summary.json").read_text())["status"] == "finished"
    assert "synthetic" in summary["data"]["name"]
    assert summary["data"]["rows"] == {"train": 400, "dev": 500}
    assert 0 <= summary["metrics"]["accuracy"] <= 1
    assert (folder / "model" / "PRIVACY.md").is_file()
    copies = "task.augmentations=2" in overrides
    assert any("augmentation multiplicity 2" in note for note in summary["details"]["data_notes"]) == copies


@pytest.mark.slow
@pytest.mark.parametrize("task", ["mnist", "cifar10"])
def test_the_embedded_images_can_be_learnt_privately(tmp_path: Path, task: str) -> None:
    quick = ["engine.choice=rule", "optim.epochs=3"]
    run = compose(
        [f"task={task}", "scale=demo", "clip=adaptive_perlayer", "runtime=cpu", f"runtime.runs_dir={tmp_path}", *quick]
    )  # fmt: skip
    folder = run_folder(run)
    folder.mkdir(parents=True)
    summary = train(run, folder, Console(quiet=True))
    # 0.5 to 1.0 with one noise or another, which goes by the code too, and 0.1 by chance
    assert summary["metrics"]["accuracy"] > 0.3
    assert 7.9 < summary["privacy"]["epsilon"]["rdp"] <= 8.0


def test_real_images_of_every_kind_are_found_below_data_root(real_data: Path) -> None:
    run = compose(["task=mnist", "scale=small", "clip=flat", f"data.root={real_data}"])
    task = build_task(run.task, run.data, "small", ImageInputs(), 0)
    assert (task.num_examples, len(task.dev)) == (60000, 10000)
    batch = task.collate([task.train[i] for i in range(2000)])
    assert abs(float(batch["pixel_values"].mean())) < 0.02


def test_the_real_re_encoded_files_are_found_and_named(
    real_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of a hundred images is decoded; the others are that one with a number in its corner."""
    decode, count = image_files.decode, itertools.count()
    known: list[np.ndarray] = []

    def some(data: bytes, where: str, *, channels: int) -> np.ndarray:
        number = next(count)
        if number % 100 == 0:
            known[:] = [decode(data, where, channels=channels)]
        pixels = known[0].copy()
        pixels[0, 0, :4] = list(number.to_bytes(4, "big"))
        return pixels

    monkeypatch.setattr(image_files, "decode", some)
    run = compose(
        ["task=cifar10_jpeg", "scale=small", "clip=flat", f"data.root={real_data}", f"data.cache={tmp_path}"]
    )
    task = build_task(run.task, run.data, "small", ImageInputs(), 0)
    assert task.data.name == "CIFAR-10 (JPEG q75)"
    assert np.bincount(task.train.labels).tolist() == [5000] * 10
    assert np.bincount(task.dev.labels).tolist() == [1000] * 10
