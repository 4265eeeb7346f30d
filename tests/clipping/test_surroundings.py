"""A clipper beside copies, moved models, 16 bits and other devices; the settings of the process stay as they were."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpexp.clipping import attach
from tests.clipping.small import ALL, losses_of, mlp
from tests.clipping.test_engines import check, naive
from tests.clipping.zoo import ZOO, C, D


def test_evaluation_copies_and_pickles() -> None:
    problem = ZOO["hf_bert"]()
    per_example = naive(problem)
    clipper = attach(problem.model)
    with torch.inference_mode():
        problem.losses(problem.model, problem.batch)
    with torch.no_grad():
        problem.losses(problem.model, problem.batch)
    twin = copy.deepcopy(problem.model)
    check(problem, clipper, per_example)
    assert isinstance(problem.model.classifier, nn.Linear)
    torch.testing.assert_close(
        problem.losses(twin, problem.batch), problem.losses(problem.model, problem.batch)
    )
    with pytest.raises(TypeError, match="detach"):
        pickle.dumps(problem.model)
    clipper.detach()
    pickle.loads(pickle.dumps(problem.model))


@pytest.mark.parametrize("groups", ["flat", "layer"])
def test_bf16_autocast_is_close_and_float32_grads(groups: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(20, 32), nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 4)
    )
    ids = torch.randint(0, 20, (6, 9))

    def losses(m):
        return F.cross_entropy(m(ids).mean(1).float(), ids[:, 0] % 4, reduction="none")

    exact = attach(model, groups=groups, clip_norm=0.5)
    reference = exact.backward(losses(model))
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = losses(model)
    report = exact.backward(value)
    assert report.norms.dtype == torch.float32
    torch.testing.assert_close(report.norms, reference.norms, rtol=0.03, atol=1e-4)
    for p, g in zip(model.parameters(), plain, strict=True):
        assert p.grad.dtype == torch.float32
        assert float((p.grad - g).norm()) <= 0.05 * float(g.norm()) + 1e-5


def test_moving_the_model_keeps_the_clipper() -> None:
    model = mlp(torch.float32)
    clipper = attach(model)
    model.double()
    clipper.backward(losses_of(model, torch.randn(3, D, dtype=torch.float64)))
    assert model[0].weight.grad.dtype == torch.float64


@pytest.mark.parametrize("engine", [engine for engine in ALL if engine != "opacus"])
def test_the_default_device_is_not_asked(engine: str) -> None:
    """``torch.set_default_device("cuda")``: what proofs and looks draw with generators of the CPU would be another device's."""
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
    model = nn.Sequential(layer, nn.Tanh(), nn.Linear(6, C))
    there, x = torch.device("meta"), torch.randn(4, 6)
    with there:
        clipper = attach(model, clip_norm=0.1, engine=engine)
        for batch in (x, x[:1], x[:3]):
            clipper.backward(losses_of(model, batch))
    assert not clipper.notes
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("engine", ALL)
def test_a_step_leaves_the_settings_of_the_process_as_they_were(engine: str) -> None:
    """Trials of norm methods, proofs, looks and C++ kernels set some of them; batches of one are not computed in a team."""

    def settings() -> tuple:
        return (
            torch.get_num_threads(),
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_rng_state().tolist(),
        )

    threads = torch.get_num_threads()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Dropout(0.5), nn.Linear(4 * 36, C))
    try:
        torch.set_num_threads(2)
        clipper = attach(model, clip_norm=0.1, engine=engine)
        for size in (4, 1, 3, 0):
            losses = losses_of(model, torch.randn(size, 3, 8, 8))
            before = settings()
            clipper.backward(losses)
            assert settings() == before
    finally:
        torch.set_num_threads(threads)
