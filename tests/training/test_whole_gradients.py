"""Clipping of whole per-example gradients and of microbatches: exact gradients, sensitivities, formulas, events, runs."""

import json
import math

import numpy as np
import pytest
import torch
from torch import nn

from dpexp.clipping.methods.coordinates import AdaClip, Coordinates, Ellipsoid, ScaleThenPrivatise
from dpexp.clipping.methods.embedding import EMBEDDING, Embedding
from dpexp.clipping.methods.microbatches import MicrobatchClipper
from dpexp.clipping.methods.whole import VectorClipper, flatten
from dpexp.config import compose
from dpexp.errors import UserError
from dpexp.torch_versions import float32_settings
from dpexp.training import release
from dpexp.training.batching import microbatches
from tests.training.tiny import cut_short, run_to_end, tiny_model, tiny_run, train, weights

METHODS = ["adaclip", "scaled", "ellipsoid", "embedding", "microbatch"]


class Odd(nn.Module):
    """A weight used twice, a bare parameter, a recurrent layer that no formula covers, and a layer that nothing uses."""

    def __init__(self):
        super().__init__()
        self.twice, self.shift = nn.Linear(4, 4), nn.Parameter(torch.zeros(4))
        self.cell, self.unused = nn.GRUCell(4, 4), nn.Linear(2, 2)

    def forward(self, x):
        h = torch.tanh(self.twice(x)) + self.shift
        return self.cell(self.twice(h), h).sum(1)


def odd():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Odd().double(), torch.randn(6, 4, dtype=torch.float64)


def sums(model, clipper, x, y=None):
    for p in [*model.parameters(), *getattr(clipper, "extra", [])]:
        p.grad = None
    report = clipper.backward(model(x).square())
    return torch.cat([p.grad.reshape(-1).clone() for g in clipper.groups for p in g.params.values()]), report


def test_rows_are_the_gradients_of_each_example():
    model, x = odd()
    clipper = VectorClipper(model, Coordinates())
    rows = clipper.rows(model(x).square())
    clipper.detach()
    for i in range(len(x)):
        loss = model(x[i : i + 1]).square().sum()
        found = torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True)
        for (name, _), g in zip(model.named_parameters(), found, strict=True):
            torch.testing.assert_close(rows[name][i], g)


def methods():
    ada = AdaClip((0.9, 0.5), (1e-6, 10.0), first=1.0, expected_batch=6)
    return {
        "adaclip": ada,
        "scaled": ScaleThenPrivatise(0.9, 0.01),
        "ellipsoid": Ellipsoid(0.01),
        "embedding": Embedding(3, 0.2),
    }


@pytest.mark.parametrize("name", ["adaclip", "scaled", "ellipsoid", "embedding"])
@pytest.mark.parametrize("rule", ["abadi", "normalized"])
def test_an_example_moves_each_sum_by_its_threshold_at_most(name, rule):
    """Leave one out, after steps that have moved centre and scale; one example is huge, one is NaN and adds nothing."""
    model, x = odd()
    clipper = VectorClipper(model, methods()[name], 0.7, rule)
    stds = {id(p): 0.01 for p in [*model.parameters(), *clipper.extra]}
    for seed in range(3):
        clipper.method.prepare(seed, lambda: clipper.rows(model(x[:4] + 0.5).square()))
        sums(model, clipper, x)
        for p in [*model.parameters(), *clipper.extra]:
            p.grad.div_(6)
        clipper.method.finish(stds)
    clipper.method.prepare(3, lambda: clipper.rows(model(x[:4] + 0.5).square()))
    x[1] *= 1e4
    x[2, 0] = math.nan
    whole, report = sums(model, clipper, x)
    assert whole.isfinite().all()
    assert report.norms[:, 2].isnan().all()
    assert report.norms.shape == (len(clipper.groups), 6)
    sizes, most = [g.size for g in clipper.groups], [0.0] * len(clipper.groups)
    for i in range(6):
        rest, _ = sums(model, clipper, torch.cat([x[:i], x[i + 1 :]]))
        moved = [float(part.norm()) for part in (whole - rest).split(sizes)]
        assert i != 2 or max(moved) < 1e-12
        most = [max(pair) for pair in zip(most, moved, strict=True)]
    for found, limit in zip(most, clipper.thresholds.tolist(), strict=True):
        assert 0.99 * limit < found <= limit * (1 + 1e-9)
    assert clipper.sensitivity == pytest.approx(clipper.thresholds.norm())


@pytest.mark.parametrize("name", ["adaclip", "scaled", "ellipsoid", "embedding"])
def test_a_gradient_whose_scaled_form_overflows_does_not_spoil_the_sum(name):
    """Finite as it is, infinite once it is divided or projected: the rest of the batch stands, and its own part is bounded."""
    model = nn.Linear(4, 1, bias=False)
    clipper = VectorClipper(model, methods()[name], 0.7)
    x = torch.eye(4)
    # whose first direction is that of the example
    public = 1 + 0.1 * torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    clipper.method.prepare(0, lambda: clipper.rows(1e-3 * model(public)[:, 0]))
    if name != "embedding":
        clipper.method.scale = {"weight": torch.full((1, 4), 1e-6)}
    x[1] = 3e38
    with_it = sums_of(model, clipper, x)
    without = sums_of(model, clipper, torch.cat([x[:1], x[2:]]))
    assert with_it.isfinite().all()
    assert float((with_it - without).norm()) <= float(clipper.sensitivity) * (1 + 1e-6)


@pytest.mark.parametrize("size", [1.0, 1e8, 1e20])
def test_gradients_within_the_subspace_leave_no_rounding_that_goes_by_who_else_was_drawn(size):
    """What is left of long ones is rounding, longer than its threshold, and products of other sizes round otherwise."""
    d, k, limits = 97, 20, (1.0, 0.5)
    method = Embedding(k, limits[1])
    method.setup({"weight": nn.Parameter(torch.zeros(1, d))}, limits[0])
    draw = torch.Generator().manual_seed(0)
    public = torch.randn(64, 1, d, generator=draw)
    method.prepare(0, lambda: {"weight": public})
    rows = size * (torch.randn(9, k, generator=draw).double() @ method.directions.double()).float()

    def summed(chosen):
        def factors(group, squares):
            return (squares.rsqrt() * limits[group]).clamp(max=1)

        keep = torch.ones(len(chosen), dtype=torch.bool)
        return method.clip({"weight": rows[chosen][:, None]}, keep, factors)[1]

    for count in range(2, 10):
        for left_out in range(count):
            everybody = list(range(count))
            whole, rest = summed(everybody), summed([i for i in everybody if i != left_out])
            assert float((whole["weight"] - rest["weight"]).norm()) <= limits[1] * (1 + 1e-6)
            assert float((whole[EMBEDDING] - rest[EMBEDDING]).norm()) <= limits[0] * (1 + 1e-6)


class Remembers(nn.Module):
    """What its forward leaves behind: in a buffer that nothing uses, or in an attribute that the next forward uses."""

    def __init__(self, buffer):
        super().__init__()
        self.layer, self.last, self.buffer = nn.Linear(4, 1), torch.zeros(4), buffer
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        if not self.buffer:
            x, self.last = x - self.last, x.detach().mean(0)
        elif self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return self.layer(x)


@pytest.mark.parametrize("buffer", [True, False])
def test_what_a_microbatch_leaves_in_the_model_is_refused(buffer):
    """Running statistics of private rows would lie in every checkpoint and in the exported model, without noise."""
    model = Remembers(buffer)
    clipper = MicrobatchClipper(model, 3.0)
    with pytest.raises(UserError, match="buffer 'mean'" if buffer else "after another batch"):
        clipper.backward(model(torch.randn(3, 4))[:, 0])
    clipper.detach()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


@pytest.mark.parametrize(("clip_norm", "size"), [(1e-6, 3e37), (1e-10, 1e32)])
def test_a_microbatch_near_overflow_is_clipped_too(clip_norm, size):
    """The factor has few bits below 1e-38, where 32-bit numbers are no longer normal, and may be rounded up."""
    model = nn.Linear(40, 1, bias=False)
    clipper = MicrobatchClipper(model, 2.0, clip_norm)
    clipper.backward(model(torch.full((1, 40), size))[:, 0])
    assert float(model.weight.grad.double().norm()) <= clip_norm * (1 + 1e-5)


def sums_of(model, clipper, x):
    for p in [*model.parameters(), *clipper.extra]:
        p.grad = None
    clipper.backward(model(x)[:, 0])
    return torch.cat([p.grad.reshape(-1).clone() for g in clipper.groups for p in g.params.values()])


def test_whole_gradients_are_added_in_full_inside_of_autocast():
    model = nn.Linear(4, 3, bias=False)
    clipper = VectorClipper(model, Coordinates())
    x = torch.zeros(257, 4)
    x[:, 0] = 1
    losses = 10 * model(x)[:, 0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        clipper.backward(losses)
    # 256 in 16 bits
    assert float(model.weight.grad[0, 0]) == pytest.approx(257, abs=1e-3)


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_whole_gradients_are_added_in_full_whatever_the_model_multiplies_in(precision):
    """With 11 bits for a factor and for a gradient, one example would add up to 1.001 C."""
    (matmul,), seen = float32_settings()["matmul", "cpu"], []

    class Seen(Coordinates):
        def clip(self, *arguments):
            seen.append(matmul.fp32_precision)
            return super().clip(*arguments)

    model = nn.Linear(4, 3)
    clipper = VectorClipper(model, Seen())
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        asked = matmul.fp32_precision
        clipper.backward(model(torch.ones(2, 4)).sum(1))
        assert matmul.fp32_precision == asked
    finally:
        torch.set_float32_matmul_precision(before)
    assert seen[-1] == "ieee"


def test_an_empty_batch_adds_zeros():
    model, x = odd()
    for name, method in methods().items():
        clipper = VectorClipper(model, method, 1.0)
        method.prepare(0, lambda: clipper.rows(model(x[:4]).square()))  # noqa: B023
        for p in [*model.parameters(), *clipper.extra]:
            p.grad = None
        report = clipper.backward(torch.zeros(0))
        assert report.norms.shape == (len(clipper.groups), 0), name
        assert all(not p.grad.any() for p in [*model.parameters(), *clipper.extra])
        clipper.detach()


def test_nothing_is_lost_where_nothing_is_clipped():
    model, x = odd()
    plain = torch.autograd.grad(model(x).square().sum(), list(model.parameters()), materialize_grads=True)
    for name, method in (methods() | {"embedding": Embedding(3, 1e9)}).items():
        clipper = VectorClipper(model, method, 1e9)
        method.prepare(0, lambda: clipper.rows(model(x[:4] + 0.5).square()))  # noqa: B023
        sums(model, clipper, x)
        count = 6 if name == "adaclip" else 1  # the centre comes back once for the mean, so take the mean
        for p in [*model.parameters(), *clipper.extra]:
            p.grad.div_(count)
        method.finish({id(p): 0.0 for p in [*model.parameters(), *clipper.extra]})
        clipper.detach()
        for p, g in zip(model.parameters(), plain, strict=True):
            torch.testing.assert_close(p.grad * count, g)


def test_adaclip_by_hand_and_its_scale_makes_the_noise_least():
    parameter, rng = nn.Parameter(torch.zeros(5, dtype=torch.float64)), np.random.default_rng(0)
    method = AdaClip((0.8, 0.5), (1e-3, 2.0), first=2.0, expected_batch=10)
    method.setup({"p": parameter}, 1.0)
    a, v = np.zeros(5), np.full(5, 4 / 5)
    b = np.sqrt(np.sqrt(v) * np.sqrt(v).sum())
    assert float((method.scale["p"] ** -2).max()) ** -0.5 == pytest.approx(2.0)  # the first step clips at 2
    for _ in range(6):
        w, tau = rng.standard_normal(5), 0.05
        parameter.grad = torch.tensor(w)
        method.finish({id(parameter): tau})
        g = b * w + a
        np.testing.assert_allclose(parameter.grad, g, rtol=1e-12)
        seen = np.clip(10 * ((g - a) ** 2 - (b * tau) ** 2), 1e-3, 2.0)
        v, a = 0.5 * v + 0.5 * seen, 0.8 * a + 0.2 * g
        b = np.sqrt(np.sqrt(v) * np.sqrt(v).sum())
        np.testing.assert_allclose(method.scale["p"], b, rtol=1e-12)
        np.testing.assert_allclose(method.centre["p"], a, rtol=1e-12)
    assert (v / b**2).sum() == pytest.approx(1)
    for _ in range(200):
        other = b * np.exp(0.3 * rng.standard_normal(5))
        other *= math.sqrt((v / other**2).sum())
        assert (b**2).sum() <= (other**2).sum()


def test_scale_then_privatise_and_ellipsoids_by_hand():
    parameter, rng = nn.Parameter(torch.zeros(5, dtype=torch.float64)), np.random.default_rng(1)
    method = ScaleThenPrivatise(0.9, 0.1)
    method.setup({"p": parameter}, 1.0)
    b, history = np.ones(5), []
    for _ in range(5):
        w = rng.standard_normal(5)
        parameter.grad = torch.tensor(w)
        method.finish({id(parameter): 0.0})
        history.append(b * w)
        np.testing.assert_allclose(parameter.grad, b * w)
        share = 0.1 * 0.9 ** np.arange(len(history) - 1, -1, -1)
        root = np.sqrt(share @ np.square(history) / share.sum())
        b = root / math.sqrt((root**2).mean()) + 0.1
        b /= math.sqrt((b**2).mean())
        np.testing.assert_allclose(method.scale["p"], b)
    ellipsoid = Ellipsoid(0.5)
    ellipsoid.setup({"p": parameter}, 1.0)
    public = rng.standard_normal((30, 5)) * [1, 2, 3, 4, 0]
    for rows in (public, 100 * public):  # the second time nothing is measured
        ellipsoid.prepare(0, lambda: {"p": torch.tensor(rows)})  # noqa: B023
    r = np.sqrt((public**2).mean(0))
    r = np.maximum(r, 0.5 * math.sqrt((r**2).mean()))
    b = ellipsoid.scale["p"].numpy()
    np.testing.assert_allclose(b, r ** (2 / 3) * math.sqrt((r ** (2 / 3)).sum()))
    for _ in range(200):  # the sum of the deviations is least
        other = b * np.exp(0.3 * rng.standard_normal(5))
        other *= math.sqrt((r**2 / other**2).sum())
        assert b.sum() <= other.sum()


def test_the_public_subspace_is_that_of_the_public_gradients():
    model, x = odd()
    clipper = VectorClipper(model, Embedding(4, 1.0))
    public = clipper.rows(model(x[:4]).square())
    clipper.method.prepare(0, lambda: public)
    directions, anchors = clipper.method.directions, flatten(public)
    torch.testing.assert_close(directions @ directions.T, torch.eye(4, dtype=torch.float64))
    torch.testing.assert_close(anchors @ directions.T @ directions, anchors)
    _, report = sums(model, clipper, x[:4])
    assert report.norms[1].max() < 1e-6 * report.norms[0].min()
    assert EMBEDDING in clipper.method.extra()
    wrong = Embedding(9, 1.0)
    wrong.setup(dict(model.named_parameters()), 1.0)
    with pytest.raises(UserError, match="basis=9 directions cannot come from 4 public examples"):
        wrong.prepare(0, lambda: public)


def test_a_microbatch_is_clipped_as_one_gradient_and_an_example_can_move_it_by_more_than_c():
    model, x = (
        nn.Linear(2, 1, bias=False).double(),
        torch.tensor([[8.0, 0.0], [-9.0, 0.0]], dtype=torch.float64),
    )
    clipper = MicrobatchClipper(model, size=2, clip_norm=0.4)

    def total(pieces):
        model.weight.grad = None
        for piece in pieces:
            clipper.backward(model(x[piece]).squeeze(1))
        return model.weight.grad.clone()

    both, one = total([[0, 1]]), total([[0]])
    assert both.tolist() == [[pytest.approx(-0.4), 0.0]]
    assert one.tolist() == [[pytest.approx(0.4), 0.0]]
    assert float((both - one).norm()) == pytest.approx(0.8) == pytest.approx(clipper.sensitivity)
    assert total([[]]).tolist() == [[0.0, 0.0]]
    assert float(total([[0], [1]]).norm()) == pytest.approx(0.0)


def test_one_example_more_changes_one_microbatch():
    drawn = np.arange(0, 300, 3)
    with_all = microbatches(drawn, 300, 7, seed=5)
    assert sorted(np.concatenate(with_all)) == drawn.tolist()
    for lost in drawn[::10]:
        rest = microbatches(drawn[drawn != lost], 300, 7, seed=5)
        kept = {tuple(piece) for piece in with_all} & {tuple(piece) for piece in rest}
        assert len(kept) == 6


def whole_run(name, steps=4):
    run = tiny_run(steps=steps, adaptive=False)
    run.clip.name = run.clip.method = name
    run.clip.groups, run.engine.name, run.optim.name, run.optim.lr = "flat", "auto", "adagrad", 0.1
    run.clip.basis, run.clip.public_examples, run.clip.microbatch = 4, 12, 5
    run.clip.allocation = "equal_budget" if name == "embedding" else "global"
    return run


@pytest.mark.parametrize("name", METHODS)
def test_a_run_charges_what_flat_clipping_does_and_goes_on_after_a_kill(name, tmp_path, monkeypatch):
    asked, real = [], release.add_gaussian_

    def watched(tensors, std, generator=None):
        asked.append(list(std))
        real(tensors, std, generator=generator)

    monkeypatch.setattr(release, "add_gaussian_", watched)
    whole = run_to_end(tmp_path / "whole", whole_run(name))
    stds = {"embedding": {math.sqrt(2) * 1.0, math.sqrt(2) * 0.2}, "microbatch": {2.0}}.get(name, {1.0})
    assert {round(std, 9) for std in asked[0]} == {round(std, 9) for std in stds}
    flat = tiny_run(steps=4, adaptive=False)
    flat.clip.groups = "flat"
    run_to_end(tmp_path / "flat", flat)
    events = [
        [json.loads(line)["event"] for line in (tmp_path / folder / "ledger.jsonl").read_text().splitlines()]
        for folder in ("whole", "flat")
    ]
    assert events[0] == events[1]
    again = cut_short(tmp_path / "killed", whole_run(name), steps=2)
    train(again)
    np.testing.assert_array_equal(weights(again), weights(whole))
    assert again.ledger.steps_charged == 4
    start = torch.cat([p.detach().reshape(-1) for p in tiny_model().parameters()]).numpy()
    assert np.abs(weights(whole) - start).max() > 1e-3


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["clip=adaclip", "clip.groups=layer"], "says itself what is clipped"),
        (["clip=embedding", "clip.adaptive=true", "clip.quantile_budget=0.1"], "says itself what is clipped"),
        (["clip=scaled", "engine=ghost"], "leave engine=auto"),
        (["clip=scaled", "optim=adam_bc"], "another optim than adam_bc"),
        (["clip=adaclip", "clip.variance_range=[1,0.1]"], "the smaller one first"),
        (["clip=embedding", "clip.basis=65"], "basis=65 directions need public examples"),
        (["clip=embedding", "clip.public_examples=0"], "public_examples=0 must be above 0"),
        (["clip=norm_perlayer", "clip.norm_factor=0"], r"norm_factor=0\.0 must be above 0"),
        (["clip=microbatch", "clip.microbatch=100000"], "microbatch=100000 must be between 1 and optim"),
    ],
)
def test_bad_settings_get_one_sentence(overrides, message):
    with pytest.raises(UserError, match=message) as caught:
        compose(["task=sst2", "scale=demo", *overrides])
    assert "\n" not in str(caught.value)
