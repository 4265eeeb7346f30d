"""How a step is taken: without privacy, by an engine of ours, or by another library as its users would call it.

A step is everything from the forward pass to the changed weights: one loss per example, clipping, Gaussian noise, plain SGD.
Each library draws noise its own way; ours uses `add_gaussian_`. METHOD+lean computes the losses of a language model as the
tasks of this project do; nonprivate+lean shows what that alone is worth.
"""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dpexp.clipping import attach
from dpexp.clipping.engines import ENGINES
from dpexp.clipping.groups import GroupsSpec
from dpexp.errors import LateError, UserError, did_you_mean
from dpexp.privacy.noise import add_gaussian_

NONPRIVATE = "nonprivate"
# written into records; raised when the clipping engine is built anew, so that older speeds are told apart
ENGINE = 2
LEAN = "+lean"
# small: the weights hardly move, and every step does the same work
LEARNING_RATE = 1e-4

# network -> [B], the batch being fixed
Losses = Callable[[Callable[..., Any]], Tensor]


class Method(ABC):
    """One way to train.

    groups: which parameters share a norm, as `attach` takes it, or "param" (one group for each), or None (nothing clipped).
    mean: `p.grad` after a step is divided by B.
    """

    groups: str | None
    mean: bool
    # what the forward pass calls
    network: Any

    @abstractmethod
    def step(self, losses: Losses) -> None:
        """Forward, backward, noise, update. `p.grad` stays until the next step."""


@dataclass
class Settings:
    """What every method needs: the model, its batch size, C, the noise multiplier and the learning rate."""

    model: nn.Module
    batch_size: int
    clip_norm: float
    noise: float
    lr: float

    def __post_init__(self) -> None:
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]

    def sgd(self, lr: float | None = None) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters, lr=self.lr if lr is None else lr)


class NonPrivate(Method):
    """Ordinary training on the mean of the losses: what everything is compared with."""

    groups: str | None = None
    mean = True

    def __init__(self, settings: Settings):
        self.network = settings.model
        self.optimizer = settings.sgd()

    def step(self, losses: Losses) -> None:
        self.optimizer.zero_grad()
        losses(self.network).mean().backward()
        self.optimizer.step()


class Ours(Method):
    """`attach`, then noise on the sum. The division by the batch size is in the learning rate, so it costs nothing."""

    mean = False

    def __init__(self, settings: Settings, engine: str, groups: str):
        self.groups = groups
        self.settings, self.network = settings, settings.model
        spec: GroupsSpec = groups
        if groups == "param":
            spec = {name: [name] for name, p in settings.model.named_parameters() if p.requires_grad}
        self.clipper = attach(settings.model, groups=spec, clip_norm=settings.clip_norm, engine=engine)
        self.clipper.may_begin_again()
        self.optimizer = settings.sgd(settings.lr / settings.batch_size)
        self.generator = torch.Generator().manual_seed(0)

    def step(self, losses: Losses) -> None:
        self.optimizer.zero_grad()
        try:
            self.clipper.backward(losses(self.network))
        except LateError:
            # as in training
            self.clipper.backward(losses(self.network))
        # the thresholds' sum of squares is C², whatever the number of groups
        gradients = [p.grad for p in self.settings.parameters if p.grad is not None]
        add_gaussian_(gradients, self.settings.noise * self.settings.clip_norm, self.generator)
        self.optimizer.step()


class Opacus(Method):
    """Opacus itself: its module wrapper and its optimizers; "layer" gives each parameter a threshold of its own."""

    VARIANTS = ("flat", "layer", "ghost")
    mean = True

    def __init__(self, settings: Settings, variant: str):
        from opacus import GradSampleModule
        from opacus.grad_sample import GradSampleModuleFastGradientClipping
        from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
        from opacus.optimizers.perlayeroptimizer import DPPerLayerOptimizer

        self.groups = "param" if variant == "layer" else "flat"
        self.ghost = variant == "ghost"
        common: dict[str, Any] = {
            "optimizer": settings.sgd(),
            "noise_multiplier": settings.noise,
            "expected_batch_size": settings.batch_size,
        }
        norm = settings.clip_norm
        # its hooks forbid activations in place, and its users are asked to set them so
        for module in settings.model.modules():
            if hasattr(module, "inplace"):
                module.inplace = False  # type: ignore[assignment]
        self.optimizer: Any
        if self.ghost:
            self.network = GradSampleModuleFastGradientClipping(
                settings.model, max_grad_norm=norm, use_ghost_clipping=True
            )
            self.optimizer = DPOptimizerFastGradientClipping(max_grad_norm=norm, **common)
        else:
            self.network = GradSampleModule(settings.model)
            if variant == "layer":
                count = len(settings.parameters)
                self.optimizer = DPPerLayerOptimizer(max_grad_norm=[norm / count**0.5] * count, **common)
            else:
                self.optimizer = DPOptimizer(max_grad_norm=norm, **common)
        # self.network may come to be compiled
        self.wrapper = self.network

    def step(self, losses: Losses) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        values = losses(self.network)
        if self.ghost:
            from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping

            DPTensorFastGradientClipping(self.wrapper, self.optimizer, values, "mean").backward()
        else:
            values.mean().backward()
        self.optimizer.step()


class FastDP(NonPrivate):
    """fastDP (Bu et al.): book-keeping with its hybrid of ghost norms and instantiation."""

    VARIANTS = ("flat", "layer")

    def __init__(self, settings: Settings, variant: str):
        from fastDP import PrivacyEngine  # type: ignore[import-not-found]

        super().__init__(settings)
        self.groups = variant
        engine = PrivacyEngine(
            settings.model,
            batch_size=settings.batch_size,
            sample_size=100 * settings.batch_size,
            epochs=1,
            noise_multiplier=settings.noise,
            max_grad_norm=settings.clip_norm,
            clipping_fn="Abadi",
            clipping_mode="MixOpt",
            clipping_style="all-layer" if variant == "flat" else "layer-wise",
        )
        engine.attach(self.optimizer)


# name -> class, module to import
LIBRARIES: dict[str, tuple[type[Opacus] | type[FastDP], str]] = {
    "opacus": (Opacus, "opacus"),
    "fastdp": (FastDP, "fastDP"),
}
OURS = tuple(f"{engine}/{groups}" for engine in ENGINES for groups in ("flat", "layer"))
OTHERS = tuple(
    f"{name}:{variant}" for name, (made_by, _) in LIBRARIES.items() for variant in made_by.VARIANTS
)
METHODS = (NONPRIVATE, *OURS, *OTHERS)


def chosen_methods(names: list[str]) -> list[str]:
    """The methods to compare, non-private first; "all" stands for every one, "ours" and "libraries" for a part.

    Raises:
        UserError: an unknown name.
    """
    short = {"all": METHODS, "ours": OURS, "libraries": OTHERS}
    wanted = [method for name in names for method in short.get(name, (name,))]
    for method in wanted:
        plain = method.removesuffix(LEAN) if ":" not in method else method
        engine, _, groups = plain.partition("/")
        if plain not in METHODS and not (engine in ENGINES and groups in ("block", "param")):
            raise UserError(
                f"methods=[{method}] is not known{did_you_mean(method, list(METHODS))}: nonprivate, ENGINE/GROUPS with "
                f"the engines {', '.join(ENGINES)} and the groups flat, block, layer, param (and {LEAN}); {', '.join(OTHERS)}; "
                f"all, ours, libraries"
            )
    return list(dict.fromkeys([NONPRIVATE, *wanted]))


def make_method(name: str, settings: Settings) -> Method:
    """The method of this name around a model.

    Raises:
        UserError: the library is not installed, or refuses the model.
    """
    name = name.removesuffix(LEAN)
    if name == NONPRIVATE:
        return NonPrivate(settings)
    if ":" in name:
        library, variant = name.split(":")
        made_by, module = LIBRARIES[library]
        if importlib.util.find_spec(module) is None:
            raise UserError("not installed")
        return made_by(settings, variant)
    engine, groups = name.split("/")
    return Ours(settings, engine, groups)
