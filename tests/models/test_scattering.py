"""Scattering coefficients against convolutions in space, and the network on them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn

from dpexp.config import compose
from dpexp.errors import UserError
from dpexp.models import ModelBundle, build_model, build_tokenizer
from dpexp.models.scattering import ANGLES, Scattering, ScatteringClassifier, fourier_filters
from dpexp.schemas import ModelConfig, PeftConfig
from dpexp.tasks import build_task, features
from dpexp.train import train

CPU = torch.device("cpu")


def _convolved(image: np.ndarray, transform: torch.Tensor) -> np.ndarray:
    """On a torus, pixel by pixel."""
    filters = np.fft.ifft2(transform.double().numpy())
    return sum(
        filters[y, x] * np.roll(image, (y, x), (0, 1)) for y in range(len(image)) for x in range(len(image))
    )


def test_wavelets_have_no_mean_and_the_low_pass_keeps_it() -> None:
    wavelets, passes = fourier_filters(24)
    assert max(float(of_scale[:, 0, 0].abs().max()) for of_scale in wavelets) < 1e-6
    assert [float(low[0, 0]) for low in passes] == pytest.approx([1.0, 1.0], abs=1e-3)
    assert wavelets[1].shape == (ANGLES, 24, 24)


def test_coefficients_are_moduli_of_convolutions() -> None:
    scattering = Scattering((1, 16, 16))
    image = torch.rand(1, 16, 16, generator=torch.Generator().manual_seed(0))
    found = scattering(image)[0].double().numpy()
    padded = np.pad(image[0].double().numpy(), 4, mode="reflect")
    (fine, coarse), (low, half) = fourier_filters(24)

    def at_grid(values: np.ndarray, step: int) -> np.ndarray:
        return values.real[::step, ::step][1:-1, 1:-1]

    first = np.abs(_convolved(padded, fine[3]))
    np.testing.assert_allclose(found[0], at_grid(_convolved(padded, low), 4), atol=1e-5)
    np.testing.assert_allclose(found[1 + 3], at_grid(_convolved(first, low), 4), atol=1e-5)
    wide = np.abs(_convolved(padded, coarse[5]))[::2, ::2]
    np.testing.assert_allclose(found[1 + ANGLES + 5], at_grid(_convolved(wide, half), 2), atol=1e-5)
    second = np.abs(_convolved(first, coarse[6]))[::2, ::2]
    at = 1 + 2 * ANGLES + 3 * ANGLES + 6
    np.testing.assert_allclose(found[at], at_grid(_convolved(second, half), 2), atol=1e-5)
    assert found.shape == (1 + 2 * ANGLES + ANGLES**2, 4, 4)


def test_the_constants_are_the_same_every_time_and_an_image_is_seen_by_itself() -> None:
    first, second = (ScatteringClassifier((3, 16, 16), 3, grid=2) for _ in range(2))
    assert torch.equal(first.get_buffer("shift"), second.get_buffer("shift"))
    images = torch.rand(3, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    together = first.pooled(images)
    assert together.shape == (3, 3 * 81 * 4)
    torch.testing.assert_close(together[1:2], first.pooled(images[1:2]), rtol=1e-4, atol=1e-4)
    assert [name.split(".")[0] for name, _ in first.named_parameters()] == ["classifier", "classifier"]


def _made(tmp_path: Path, *more: str) -> tuple[Any, Any, ModelBundle]:
    run = compose(
        ["task=cifar10", "scale=demo", "model=scattering", "clip=perlayer", "runtime=cpu", f"data.cache={tmp_path}",
         "optim=sgd", "optim.epochs=null", "optim.steps=2", "task.num_examples.demo=40", "optim.batch_size=8", *more]
    )  # fmt: skip
    task = build_task(run.task, run.data, "demo", build_tokenizer(run.model, scale="demo"), 0)
    bundle = build_model(
        run.model, run.peft, head=task.head, num_labels=10, scale="demo", seed=0, image_shape=task.image_shape
    )
    return run, task, bundle


@pytest.mark.parametrize("config", ["{grid: 4}", "{grid: 2, widths: [4, 5]}"])
def test_losses_on_features_are_those_of_the_whole_network(config: str, tmp_path: Path) -> None:
    run, task, bundle = _made(tmp_path, f"model.config={config}")
    small, learner = features.freeze(task, bundle, run.data, CPU)
    examples = range(5)
    torch.testing.assert_close(
        small.losses(learner.model, small.collate([small.train[i] for i in examples])),
        task.losses(bundle.model, task.collate([task.train[i] for i in examples])),
    )
    assert small.evaluate(learner.model, CPU, 64) == pytest.approx(
        task.evaluate(bundle.model, CPU, 64), rel=1e-5
    )
    again, _ = features.freeze(task, bundle, run.data, CPU)
    assert torch.equal(again.train.values, small.train.values)


def test_a_private_run_of_three_layers(tmp_path: Path) -> None:
    run, _, _ = _made(tmp_path, "model.config={grid: 2, widths: [4, 5]}")
    folder = tmp_path / "run"
    folder.mkdir()
    summary = train(run, folder, Console(quiet=True))
    assert summary["details"]["plan"]["steps"] == 2
    assert summary["privacy"]["epsilon"]["rdp"] <= run.privacy.epsilon + 1e-6
    assert "scattering coefficients, then [4, 5]" in str(summary)


def test_what_it_cannot_see_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"multiple of 4, and these are 28x30"):
        ScatteringClassifier((3, 30, 28), 10)
    config = ModelConfig(family="scattering", config={"depth": 3})
    with pytest.raises(UserError, match=r"model.config.depth: .* \(it has grid, widths\)"):
        build_model(
            config, PeftConfig(name="full"), head="image_classifier", num_labels=10, scale="demo", seed=0
        )
    run, task, bundle = _made(tmp_path)
    task.rows_per_example = 2
    with pytest.raises(UserError, match=r"task\.augmentations"):
        features.freeze(task, bundle, run.data, CPU)
    assert isinstance(bundle.model, nn.Module)
