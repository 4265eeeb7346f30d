"""Every engine × group × model equals the naive loop in float64: gradients, norms, counts."""

from __future__ import annotations

import copy

import pytest
import torch

from dpexp.clipping import attach
from dpexp.clipping.engines import ENGINES
from tests.clipping.zoo import ZOO, Problem

OURS = [name for name in ENGINES if name != "opacus"]
NO_BLOCKS = UserWarning


def naive(problem: Problem) -> dict[str, torch.Tensor]:
    """Per-example gradients by running every example alone."""
    model = copy.deepcopy(problem.model)
    params = {n: p for n, p in model.named_parameters() if p.requires_grad}
    size = next(iter(problem.batch.values())).shape[problem.batch_dim]
    rows = []
    for i in range(size):
        loss = problem.losses(model, problem.example(i))
        grads = torch.autograd.grad(loss.sum(), list(params.values()), allow_unused=True)
        rows.append(
            [torch.zeros_like(p) if g is None else g for p, g in zip(params.values(), grads, strict=True)]
        )
    return {name: torch.stack([row[j] for row in rows]) for j, name in enumerate(params)}


def expected(per_example, groups, thresholds):
    norms, sums = [], {}
    for group, threshold in zip(groups, thresholds, strict=True):
        sq = sum(per_example[n].reshape(len(per_example[n]), -1).pow(2).sum(1) for n in group.params)
        factor = (threshold / sq.sqrt()).clamp(max=1)
        norms.append(sq.sqrt())
        for n in group.params:
            sums[n] = torch.tensordot(factor, per_example[n], dims=1)
    return torch.stack(norms), sums


def check(problem: Problem, clipper, per_example, times: int = 2) -> None:
    for _ in range(times):  # the second pass relies on what the first one has learnt
        problem.model.zero_grad()
        report = clipper.backward(problem.losses(problem.model, problem.batch))
        norms, sums = expected(per_example, clipper.groups, clipper.thresholds)
        torch.testing.assert_close(report.norms, norms, rtol=1e-9, atol=1e-12)
        for name, p in problem.model.named_parameters():
            if p.requires_grad:
                torch.testing.assert_close(
                    p.grad, sums[name], rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}"
                )
        assert report.clipped.tolist() == (norms > clipper.thresholds[:, None]).sum(1).tolist()


@pytest.mark.parametrize("engine", OURS)
@pytest.mark.parametrize("name", ZOO)
def test_equals_the_naive_loop(name: str, engine: str) -> None:
    problem = ZOO[name]()
    per_example = naive(problem)
    before = {k: v.clone() for k, v in problem.model.state_dict().items()}
    classes = [type(m) for m in problem.model.modules()]
    for groups in ["flat", "layer", *(["block"] if problem.block else [])]:
        clipper = attach(problem.model, groups=groups, clip_norm=0.8, engine=engine)
        check(problem, clipper, per_example)
        clipper.detach()
    assert [type(m) for m in problem.model.modules()] == classes
    for key, value in problem.model.state_dict().items():
        torch.testing.assert_close(value, before[key])
