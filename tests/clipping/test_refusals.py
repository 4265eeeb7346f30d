"""Models, losses and arguments that a clipper refuses, when it is attached or once they change: by name, and with no gradient."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from torch.testing._internal.two_tensor import TwoTensor

from dpexp.clipping import attach
from dpexp.clipping.methods.coordinates import Coordinates
from dpexp.clipping.methods.local_training import LocalClipper
from dpexp.clipping.methods.microbatches import MicrobatchClipper
from dpexp.clipping.methods.projected import ProjectedClipper
from dpexp.clipping.methods.whole import VectorClipper
from dpexp.clipping.tapping.roots import Roots
from dpexp.errors import UserError
from tests.clipping.small import losses_of, mlp
from tests.clipping.zoo import C, D


def test_refusals_leave_every_gradient_as_it_was() -> None:
    model = mlp()
    clipper = attach(model)
    x = torch.randn(4, D, dtype=torch.float64)
    for p in model.parameters():
        p.grad = torch.full_like(p, 7.0)
    y = losses_of(model, x)
    for bad in (y.sum(), y[:, None], y.detach(), torch.zeros(3)):
        with pytest.raises(ValueError):
            clipper.backward(bad)
    with pytest.raises(ValueError):
        clipper.backward(losses_of(model, x)[:3])
    model.add_module("late", nn.Linear(2, 2).double())
    with pytest.raises(ValueError, match="late"):
        model(x)
    assert all(
        torch.equal(p.grad, torch.full_like(p, 7.0)) for n, p in model.named_parameters() if "late" not in n
    )


@pytest.mark.parametrize(
    "change",
    [
        nn.utils.parametrizations.spectral_norm,
        nn.utils.weight_norm,
        lambda layer: prune.random_unstructured(layer, "weight", 0.5),
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_weight_that_is_taken_out_of_its_module_after_attach_is_named(change: Any) -> None:
    model = mlp()
    attach(model)
    with pytest.raises(ValueError, match=r"'0\.weight' was taken out of its module after attach"):
        change(model[0])


def test_a_parametrisation_that_ends_after_attach_is_named_and_one_after_detach_is_nobodys_business() -> None:
    model = mlp()
    nn.utils.parametrizations.weight_norm(model[0])
    clipper = attach(model)
    with pytest.raises(UserError, match=r"'ParametrizedLinear\.weight' was taken out .* or put back"):
        parametrize.remove_parametrizations(model[0], "weight")
    clipper.detach()
    assert type(parametrize.remove_parametrizations(model[0], "weight")) is nn.Linear


@pytest.mark.parametrize(
    "broken",
    [
        nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D)),
        nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D, affine=False)),
        nn.Sequential(nn.Linear(D, D), nn.InstanceNorm1d(D, track_running_stats=True)),
        nn.Sequential(nn.Embedding(5, D, max_norm=1.0)),
        nn.Sequential(nn.Embedding(5, D, scale_grad_by_freq=True)),
        nn.Linear(D, D).requires_grad_(False),
        nn.ParameterList([nn.Parameter(torch.ones(D, dtype=torch.complex64))]),
        nn.ParameterList([nn.Parameter(TwoTensor(torch.ones(D), torch.ones(D)))]),
    ],
)
def test_refused_at_attach(broken: nn.Module) -> None:
    with pytest.raises(ValueError):
        attach(broken)


def test_parameters_in_the_place_of_their_names_are_told_and_not_printed() -> None:
    model = mlp()
    with pytest.raises(UserError, match=r"groups\['a'\] holds a Parameter: give names"):
        attach(model, {"a": list(model.parameters())})


def local(model: nn.Module) -> LocalClipper:
    def losses(batch: dict[str, Tensor]) -> Tensor:
        return losses_of(model, batch["x"])

    return LocalClipper(model, losses, epochs=1, batch_size=0, lr=0.1)


WAYS = {
    "norms": attach,
    "coordinates": partial(VectorClipper, method=Coordinates()),
    "projected": partial(ProjectedClipper, projections=2),
    "microbatches": partial(MicrobatchClipper, size=2),
    "local": local,
}


def freeze(model: nn.Module) -> None:
    model[0].weight.requires_grad_(False)


def add_layer(model: nn.Module) -> None:
    model.append(nn.Linear(C, C).double())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("does", "says"),
    [
        (lambda clipper: clipper.thresholds.fill_(-1.0), "must be positive and finite"),
        (lambda clipper: clipper.thresholds.fill_(torch.nan), "must be positive and finite"),
        (lambda clipper: clipper.detach(), "this clipper is detached"),
        (lambda clipper: freeze(clipper.model), "trainable parameters changed"),
        (lambda clipper: add_layer(clipper.model), "trainable parameters changed"),
    ],
    ids=["negative", "nan", "detached", "frozen", "new"],
)
def test_every_way_to_clip_looks_at_what_has_changed(way: str, does: Any, says: str) -> None:
    model = mlp()
    clipper = WAYS[way](model)
    clipper.prepare(1, dict)
    x = torch.randn(1, D, dtype=torch.float64)
    losses = clipper.see({"x": x}) if isinstance(clipper, LocalClipper) else losses_of(model, x)
    does(clipper)
    with pytest.raises(UserError, match=says):
        clipper.backward(losses)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("way", [name for name in WAYS if name != "local"])
def test_every_way_to_clip_wants_one_loss_for_each_example(way: str) -> None:
    clipper = WAYS[way](model := mlp())
    clipper.prepare(1, dict)
    x = torch.randn(3, D, dtype=torch.float64)
    for losses in (model(x), model(x).sum(), losses_of(model, x).detach(), [1.0]):
        with pytest.raises(UserError, match="losses"):
            clipper.backward(losses)
    if way != "norms":
        with pytest.raises(UserError, match="thresholds for single examples"):
            clipper.backward(losses_of(model, x), torch.ones(3))


@pytest.mark.parametrize("clipper", WAYS.values())
def test_a_model_spread_over_devices_is_refused_by_name(clipper: Any) -> None:
    model = nn.Sequential(nn.Linear(D, D), nn.Linear(D, D, device="meta"))
    with pytest.raises(UserError, match=r"0\.weight lies on cpu and 1\.weight on meta.*fully_shard"):
        clipper(model)
    # what is frozen may lie elsewhere
    model[1].requires_grad_(False)
    clipper(model)


@pytest.mark.parametrize(
    "arguments",
    [
        {"groups": "layers"}, {"groups": {"a": ["0.weight"]}}, {"groups": {"a": ["nope"]}}, {"engine": "bkk"},
        {"clip_norm": 0.0}, {"clip_norm": float("nan")}, {"clip_norm": [1.0, 2.0]}, {"rule": "abadie"},
        {"rows_per_example": 0}, {"groups": "block"}, {"max_clip_scale": -1.0}, {"choice": "ghosts"},
        {"clip_norm": "1"}, {"clip_norm": "a"}, {"clip_norm": None}, {"clip_norm": True}, {"clip_norm": ["a"] * 1},
    ],
)  # fmt: skip
def test_bad_arguments(arguments: dict) -> None:
    with pytest.raises(UserError):
        attach(mlp(), **arguments)


def test_batch_statistics_by_hand_are_refused() -> None:
    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(D, D), nn.Linear(D, C)

        def forward(self, x):
            h = self.a(x)
            return self.b(h - h.mean(0))

    model = Centred().double()
    clipper = attach(model, groups="layer")
    with pytest.raises(ValueError, match="mixes examples"):
        clipper.backward(losses_of(model, torch.randn(4, D, dtype=torch.float64)))
    assert all(p.grad is None for p in model.parameters())


def test_forgetting_the_clipper_is_loud() -> None:
    model = mlp()
    attach(model)
    with pytest.raises(RuntimeError, match=r"clipper\.backward"):
        losses_of(model, torch.randn(2, D, dtype=torch.float64)).sum().backward()


def test_a_detached_clipper_measures_nothing() -> None:
    model = nn.Linear(4, 3)
    clipper = attach(model)
    losses = model(torch.randn(5, 4)).sum(1)
    clipper.detach()
    with pytest.raises(UserError, match="this clipper is detached"):
        clipper.measure(Roots.of_losses(losses))


def test_a_step_in_inference_mode_is_refused_by_name() -> None:
    model = mlp()
    clipper = attach(model)
    losses = model(torch.randn(3, D, dtype=torch.float64)).pow(2).sum(1)
    with torch.inference_mode(), pytest.raises(UserError, match=r"outside of torch\.inference_mode"):
        clipper.backward(losses)
    clipper.backward(losses)
