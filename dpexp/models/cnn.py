"""The small networks of the DP-SGD literature, for MNIST and CIFAR.

* *mnist*: 16 filters of 8 x 8 with stride 2, 32 of 4 x 4 with stride 2, a max-pool of 2 x 2 with stride 1 behind each, then
  32 units; 26,010 parameters. With ReLU it is the network of the tutorials of TensorFlow Privacy and Opacus, with tanh that of
  Papernot et al. 2020 ("Tempered sigmoid activations for deep learning with differential privacy", Table 1) and of
  Tramèr & Boneh 2021 (Table 8).
* *cifar*: three times two convolutions of 3 x 3 and a max-pool of 2 x 2, with 32, 64 and 128 filters, then 128 units; 550,570
  parameters (Papernot et al. 2020, Table 2; Tramèr & Boneh 2021, Table 9).
* *mlp*: hidden layers of one width with ReLU on the flattened image, then the classes (Bu et al. 2023, Figure 2, on
  CIFAR-100: deep 50 x 1000, shallow 10 x 1000, wide 10 x 5000).

Weights are drawn as torch's layers draw theirs.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from dpexp.errors import UserError

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU}
Shape = tuple[int, int, int]
"""Channels, height and width."""


class MaxPool(nn.MaxPool2d):
    """`nn.MaxPool2d`, with the channels last on a CPU: torch has no vector code for another layout there.

    What it computes is the same.
    """

    def forward(self, input: Tensor) -> Tensor:
        """`[B, C, H, W]` to `[B, C, h, w]`."""
        if input.device.type == "cpu":
            input = input.contiguous(memory_format=torch.channels_last)
        return super().forward(input)


class ConvNet(nn.Module):
    """Convolutions, then a hidden layer, then the classes.

    Args:
        features: `[B, C, H, W]` to `[B, c, h, w]`.
        shape: of an image.
        hidden: units of the hidden layer.
        classes: outputs.
        activation: behind the hidden layer.
    """

    def __init__(self, features: nn.Sequential, shape: Shape, hidden: int, classes: int, activation: str):
        super().__init__()
        self.features = features
        try:
            with torch.no_grad():
                inputs = features(torch.zeros(1, *shape)).numel()
        except RuntimeError as error:
            raise UserError(
                f"images of {shape[2]}x{shape[1]} pixels are too small for this network: take larger ones (task.image_size), or "
                "another model"
            ) from error
        self.hidden = nn.Linear(inputs, hidden)
        self.activation = ACTIVATIONS[activation]()
        self.head = nn.Linear(hidden, classes)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """`[B, C, H, W]` to logits `[B, classes]`."""
        hidden = self.activation(self.hidden(self.features(pixel_values).flatten(1)))
        logits: Tensor = self.head(hidden)
        return logits

    def get_classifier(self) -> nn.Module:
        """The output layer."""
        return self.head


def mnist(shape: Shape, classes: int, *, activation: str = "tanh", hidden: int = 32) -> ConvNet:
    """The network for MNIST."""
    act = ACTIVATIONS[activation]
    features = nn.Sequential(
        nn.Sequential(nn.Conv2d(shape[0], 16, 8, stride=2, padding=3), act(), MaxPool(2, 1)),
        nn.Sequential(nn.Conv2d(16, 32, 4, stride=2), act(), MaxPool(2, 1)),
    )
    return ConvNet(features, shape, hidden, classes, activation)


def cifar(
    shape: Shape,
    classes: int,
    *,
    activation: str = "tanh",
    widths: tuple[int, ...] = (32, 64, 128),
    hidden: int = 128,
) -> ConvNet:
    """The network for CIFAR-10; `widths` are the filters of its stages."""
    stages = []
    for before, width in pairwise((shape[0], *widths)):
        layers: list[nn.Module] = []
        for inputs in (before, width):
            layers += [nn.Conv2d(inputs, width, 3, padding=1), ACTIVATIONS[activation]()]
        stages.append(nn.Sequential(*layers, MaxPool(2)))
    return ConvNet(nn.Sequential(*stages), shape, hidden, classes, activation)


class MLP(nn.Module):
    """Fully connected layers on the flattened image.

    Args:
        shape: of an image.
        classes: outputs.
        depth: hidden layers.
        width: units of each.
        activation: behind each of them.
    """

    def __init__(self, shape: Shape, classes: int, *, depth: int, width: int, activation: str):
        super().__init__()
        sizes = [math.prod(shape), *[width] * depth]
        self.features = nn.Sequential(
            *(layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), ACTIVATIONS[activation]()))
        )
        self.head = nn.Linear(width, classes)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """`[B, C, H, W]` to logits `[B, classes]`."""
        logits: Tensor = self.head(self.features(pixel_values.flatten(1)))
        return logits

    def get_classifier(self) -> nn.Module:
        """The output layer."""
        return self.head


def mlp(shape: Shape, classes: int, *, depth: int = 10, width: int = 1000, activation: str = "relu") -> MLP:
    """The networks for flattened CIFAR-100."""
    return MLP(shape, classes, depth=depth, width=width, activation=activation)


ARCHITECTURES: dict[str, Callable[..., nn.Module]] = {"mnist": mnist, "cifar": cifar, "mlp": mlp}
"""`model.architecture` of the family "cnn"."""


def build_cnn(architecture: str | None, shape: Shape, classes: int, config: dict[str, Any]) -> nn.Module:
    """A network by the name of its architecture, drawn from torch's global generator.

    Raises:
        UserError: an unknown architecture, setting or activation; images that are too small.
    """
    if architecture not in ARCHITECTURES:
        raise UserError(
            f"model.architecture={architecture} is unknown: choose one of {', '.join(ARCHITECTURES)}"
        )
    make = ARCHITECTURES[architecture]
    settings = check_settings(make, config, f"the network {architecture}")
    if (activation := settings.get("activation", "tanh")) not in ACTIVATIONS:
        raise UserError(
            f"model.config.activation={activation} is unknown: choose one of {', '.join(ACTIVATIONS)}"
        )
    return make(shape, classes, **settings)


def check_settings(make: Callable[..., nn.Module], config: dict[str, Any], what: str) -> dict[str, Any]:
    """`model.config`, where it holds keyword arguments of `make` alone, with positive numbers.

    Raises:
        UserError: it does not.
    """
    parameters = inspect.signature(make).parameters.values()
    known = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
    for key, value in config.items():
        if key not in known:
            raise UserError(f"model.config.{key}: {what} has no such setting (it has {', '.join(known)})")
        numbers = value if isinstance(value, list | tuple) else [value]
        if any(
            isinstance(n, int | float) and not isinstance(n, bool) and not (n > 0 and n == int(n))
            for n in numbers
        ):
            raise UserError(f"model.config.{key}={value}: must be 1 or more")
    return dict(config)
