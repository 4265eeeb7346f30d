"""The small print of the engine's contract: what is zero, what is bounded, by which rules, groups and thresholds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dpexp.clipping import attach
from dpexp.clipping.methods.microbatches import MicrobatchClipper
from dpexp.clipping.rules import RULES
from dpexp.errors import UserError
from tests.clipping.small import ALL, losses_of, mlp
from tests.clipping.test_engines import OURS, check, expected, naive
from tests.clipping.zoo import ZOO, B, D, T


@pytest.mark.parametrize("engine", ALL)
def test_an_empty_batch_is_a_step_of_zeros(engine: str) -> None:
    model = mlp()
    clipper = attach(model, groups="layer", engine=engine)
    # another forward may wait, or be dropped
    losses_of(model, torch.zeros(2, D, dtype=torch.float64))
    for losses in (losses_of(model, torch.zeros(0, D, dtype=torch.float64)), torch.zeros(0)):
        report = clipper.backward(losses)
        assert report.norms.shape == (2, 0)
        assert report.clipped.tolist() == [0, 0]
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in model.parameters())


@pytest.mark.parametrize("engine", ALL)
def test_physical_batches_add_up(engine: str) -> None:
    model, x = mlp(), torch.randn(6, D, dtype=torch.float64)
    clipper = attach(model, clip_norm=0.1, engine=engine)
    clipper.backward(losses_of(model, x))
    whole = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    for part in x.split([1, 3, 2]):
        clipper.backward(losses_of(model, part))
    for p, g in zip(model.parameters(), whole, strict=True):
        torch.testing.assert_close(p.grad, g)


@pytest.mark.parametrize("engine", ALL)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e300])
def test_one_bad_example_is_bounded_and_alone(engine: str, poison: float) -> None:
    model, x = mlp(), torch.randn(4, D, dtype=torch.float64)
    x[2, 1] = poison
    clipper = attach(model, groups="layer", clip_norm=0.5, engine=engine)
    report = clipper.backward(losses_of(model, x))
    found = [p.grad.clone() for p in model.parameters()]
    assert all(g.isfinite().all() for g in found)
    model.zero_grad()
    others = clipper.backward(losses_of(model, x[[0, 1, 3]]))
    torch.testing.assert_close(report.norms[:, [0, 1, 3]], others.norms)
    per_group: dict[int, float] = {}
    for i, (g, p) in enumerate(zip(found, model.parameters(), strict=True)):
        per_group[i // 2] = per_group.get(i // 2, 0.0) + float((g - p.grad).pow(2).sum())
    for k, moved in per_group.items():
        assert moved**0.5 <= float(clipper.thresholds[k]) * (1 + 1e-9)


@pytest.mark.parametrize("engine", ["auto", "ghost", "loop"])
@pytest.mark.parametrize("huge", [1e25, 1e30, 3e38])
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm, lambda width: nn.GroupNorm(2, width)])
def test_an_example_too_large_for_an_operation_is_alone_in_the_first_batch_too(
    norm: Any, huge: float, engine: str
) -> None:
    """Its numbers are finite, and what the operation makes of them is not, in a backward pass of other examples either."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(D, 6), norm(6), nn.Linear(6, 3)), torch.randn(4, D)
    x[1] = huge
    clipper = attach(model, clip_norm=0.5, engine=engine)
    sums = []
    for rows in (x, x[[0, 2, 3]]):
        model.zero_grad()
        clipper.backward(losses_of(model, rows))
        sums.append(torch.cat([p.grad.flatten() for p in model.parameters()]).double())
    assert float((sums[0] - sums[1]).norm()) <= 0.5 * (1 + 1e-5)


def test_whether_an_infinite_example_counts_does_not_go_by_a_huge_one_in_the_first_batch() -> None:
    """A formula that overflows there is not wrong: without it the gradient of the infinite one has a number, and with it none."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"lstm": nn.LSTM(5, 6, batch_first=True), "out": nn.Linear(6, 4)})
    x, sums = torch.randn(4, 7, 5), []
    x[1, 0, 0], x[2] = torch.inf, x[2] * 1e20
    for rows in (x, x[[0, 1, 3]]):
        model.zero_grad()
        clipper = attach(model, rule="automatic")
        states, _ = model["lstm"](rows)
        clipper.backward(model["out"](states[:, -1]).square().sum(1))
        clipper.detach()
        sums.append(torch.cat([p.grad.flatten() for p in model.parameters()]).double())
    assert float((sums[0] - sums[1]).norm()) <= 1 + 1e-5


@pytest.mark.parametrize("name", [n for n in ZOO if not n.startswith(("hf_", "timm", "peft"))])
def test_leaving_one_example_out_moves_no_group_by_more_than_its_threshold(name: str) -> None:
    problem = ZOO[name]()
    clipper = attach(problem.model, groups="layer", clip_norm=0.3)
    sums = []
    for keep in (range(B), range(1, B)):
        problem.model.zero_grad()
        index = torch.tensor(list(keep))
        batch = {k: v.index_select(problem.batch_dim, index) for k, v in problem.batch.items()}
        clipper.backward(problem.losses(problem.model, batch))
        sums.append({n: p.grad.clone() for n, p in problem.model.named_parameters() if p.requires_grad})
    for k, group in enumerate(clipper.groups):
        moved = sum(float((sums[0][n] - sums[1][n]).pow(2).sum()) for n in group.params) ** 0.5
        assert moved <= float(clipper.thresholds[k]) * (1 + 1e-9)


@pytest.mark.parametrize("engine", OURS)
def test_clip_scale_scales_each_examples_threshold(engine: str) -> None:
    problem = ZOO["mlp"]()
    per_example = naive(problem)
    scale = torch.tensor([0.0, 0.5, 1.0, 2.0, 0.25], dtype=torch.float64)
    clipper = attach(problem.model, groups="layer", clip_norm=0.4, engine=engine, max_clip_scale=2.0)
    report = clipper.backward(problem.losses(problem.model, problem.batch), clip_scale=scale)
    for k, group in enumerate(clipper.groups):
        sq = sum(per_example[n].flatten(1).pow(2).sum(1) for n in group.params)
        factor = (clipper.thresholds[k] * scale / sq.sqrt()).clamp(max=1)
        for n, p in group.params.items():
            torch.testing.assert_close(p.grad, torch.tensordot(factor, per_example[n], dims=1))
        assert report.clipped[k] == int((sq.sqrt() > clipper.thresholds[k] * scale).sum())
    with pytest.raises(UserError, match="max_clip_scale"):
        clipper.backward(problem.losses(problem.model, problem.batch), clip_scale=scale * 2)


@pytest.mark.parametrize("engine", ALL)
def test_rows_per_example(engine: str) -> None:
    model, x = mlp(), torch.randn(6, D, dtype=torch.float64)
    clipper = attach(model, clip_norm=0.4, engine=engine, rows_per_example=2)
    report = clipper.backward(losses_of(model, x).view(3, 2).mean(1))
    clipper.detach()
    rows = []
    for pair in x.split(2):
        grads = torch.autograd.grad(losses_of(model, pair).mean(), list(model.parameters()))
        rows.append(torch.cat([g.flatten() for g in grads]))
    norms = torch.stack(rows).norm(dim=1)
    torch.testing.assert_close(report.norms[0], norms, rtol=1e-6, atol=0)
    total = sum(r * min(1.0, 0.4 / float(n)) for r, n in zip(rows, norms, strict=True))
    torch.testing.assert_close(
        torch.cat([p.grad.flatten() for p in model.parameters()]), total, rtol=1e-6, atol=1e-9
    )


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        (lambda sq, c: 2 * c / (sq.sqrt() + 0.01), "leaves gradients longer than their threshold"),
        (lambda sq, c: -1.01 * c / (sq.sqrt() + 1e-20), "leaves gradients longer than their threshold"),
        (lambda sq, c: torch.full_like(sq, c) / sq.sqrt().max(), "another factor in other company"),
        (
            lambda sq, c: (sq.sqrt().median().clamp(max=c) / sq.sqrt()).nan_to_num(1.0).clamp(max=1.0),
            "in other company",
        ),
    ],
    ids=["twice", "turned", "maximum", "median"],
)
def test_a_rule_of_ones_own_that_bounds_nothing_is_refused(
    monkeypatch: pytest.MonkeyPatch, rule: Any, says: str
) -> None:
    """One example moved the sum by two thresholds, and by one and a half; epsilon was that of one."""
    monkeypatch.setitem(RULES, "mine", rule)
    with pytest.raises(UserError, match=says):
        attach(mlp(), rule="mine")
    with pytest.raises(UserError, match=says):
        MicrobatchClipper(mlp(), size=2, rule="mine")


def test_a_rule_of_ones_own_clips(monkeypatch: pytest.MonkeyPatch) -> None:
    """PSAC (Xia et al. 2023), C/(norm + r/(norm + r)), with r = 0.1."""
    monkeypatch.setitem(RULES, "psac", lambda sq, c: c / (sq.sqrt() + 0.1 / (sq.sqrt() + 0.1)))
    assert attach(mlp(), rule="psac").sensitivity == 1.0


def test_a_rule_is_named_by_where_it_stands(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "def half(sq_norms, threshold):\n    return (threshold / sq_norms.sqrt()).clamp(max=1.0) / 2\n"
        "def sharp(sq_norms, threshold):\n    norms = sq_norms.sqrt()\n"
        "    return (threshold / norms).clamp(max=1.0) * (1 + ((norms > 0.9) & (norms < 1)))\n"
        "def wrong(norm):\n    return norm\n"
        "from dpexp.clipping.rules import none\n"
    )
    problem = ZOO["mlp"]()
    sums = []
    for rule in ("abadi", f"{own}:half"):
        problem.model.zero_grad()
        clipper = attach(problem.model, rule=rule)
        clipper.backward(problem.losses(problem.model, problem.batch))
        clipper.detach()
        sums.append([p.grad.clone() for p in problem.model.parameters()])
    for whole, part in zip(*sums, strict=True):
        torch.testing.assert_close(part, whole / 2)
    for name, says in (
        ("sharp", "longer than their threshold"),
        ("wrong", "takes 1 positional"),
        ("absent", "has no absent"),
        ("none", "longer than their threshold"),
    ):
        with pytest.raises(UserError, match=says):
            attach(mlp(), rule=f"{own}:{name}")
    with pytest.raises(UserError, match=r"choose abadi, .* or file\.py:function, of your own"):
        attach(mlp(), rule="mine")


@pytest.mark.parametrize("rule", ["automatic", "none"])
def test_other_rules(rule: str) -> None:
    problem = ZOO["mlp"]()
    per_example = naive(problem)
    clipper = attach(problem.model, clip_norm=0.4, rule=rule)
    clipper.backward(problem.losses(problem.model, problem.batch))
    norms, _ = expected(per_example, clipper.groups, clipper.thresholds)
    factor = torch.ones(B, dtype=torch.float64) if rule == "none" else 0.4 / (norms[0] + 0.01)
    for n, p in problem.model.named_parameters():
        torch.testing.assert_close(p.grad, torch.tensordot(factor, per_example[n], dims=1))


def test_custom_groups_and_thresholds_in_place() -> None:
    problem = ZOO["tied_head"]()
    per_example = naive(problem)
    mapping = {
        "a": ["head.weight", "wpe.weight", "body.bias"],
        "b": ["body.weight", "norm.weight", "norm.bias"],
    }
    clipper = attach(problem.model, groups=mapping, clip_norm=[0.3, 0.7])
    assert [g.name for g in clipper.groups] == ["a", "b"]
    assert repr(clipper.groups[1]) == "Group(b: body.weight, norm.weight, norm.bias)"
    check(problem, clipper, per_example)
    clipper.thresholds[0] = 5.0
    check(problem, clipper, per_example)
    clipper.thresholds = [0.01, 0.02]
    check(problem, clipper, per_example)


def test_layer_groups_follow_the_small_print() -> None:
    model = ZOO["attention"]().model
    assert [g.name for g in attach(model, groups="layer").groups] == ["mha", "mha.out_proj", "out"]


@pytest.mark.parametrize("engine", OURS)
def test_a_static_loss_scale_changes_nothing(engine: str) -> None:
    problem = ZOO["mlp"]()
    clipper = attach(problem.model, groups="layer", clip_norm=0.4, engine=engine)
    reports, grads = [], []
    for scale in (1.0, 1024.0):
        problem.model.zero_grad()
        reports.append(clipper.backward(problem.losses(problem.model, problem.batch), loss_scale=scale))
        grads.append([p.grad.clone() for p in problem.model.parameters()])
    torch.testing.assert_close(reports[0].norms, reports[1].norms)
    torch.testing.assert_close(grads[0], grads[1])
    # norms of such gradients would be zero, and the gradients be added as they are
    with pytest.raises(UserError, match="loss_scale=1e-22 must be at least 1"):
        clipper.backward(problem.losses(problem.model, problem.batch), loss_scale=1e-22)


def test_the_coverage_table_names_every_trainable_parameter() -> None:
    problem = ZOO["bare_parameters"]()
    clipper = attach(problem.model, groups="layer")
    clipper.backward(problem.losses(problem.model, problem.batch))
    text = str(clipper)
    assert all(name in text for name, _ in problem.model.named_parameters())
    assert T == 7


def test_the_sensitivity_is_that_of_all_groups_together() -> None:
    clipper = attach(mlp(), groups="layer", clip_norm=[0.3, 0.4], max_clip_scale=2.0)
    assert clipper.sensitivity == pytest.approx(1.0)
    clipper.thresholds = [3.0, 4.0]
    assert clipper.sensitivity == pytest.approx(10.0)
    clipper.detach()
    assert attach(mlp(), rule="none").sensitivity == float("inf")
