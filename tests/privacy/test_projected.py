"""Norms that are estimated: what an example can do to a sum, and the accountant that covers it."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from dp_accounting import ComposedDpEvent, GaussianDpEvent, SelfComposedDpEvent
from scipy.integrate import quad
from scipy.stats import chi2, norm
from torch import Tensor, nn

from dpexp.clipping.methods.projected import ProjectedClipper
from dpexp.config import compose
from dpexp.errors import UserError
from dpexp.privacy.accountants import epsilon, epsilons
from dpexp.privacy.caveats import caveats
from dpexp.privacy.events import composed, decode, encode, step_event
from dpexp.privacy.mechanisms import ProjectedGaussianDpEvent
from dpexp.privacy.plan import make_plan
from dpexp.privacy.projected import one_step, projected, sensitivities
from tests.training.tiny import NUM_EXAMPLES, run_to_end, tiny_run


def step(q: float, sigma: float, r: int):
    return step_event(q, (), [ProjectedGaussianDpEvent(sigma, r)])


def hockey_stick(eps: float, q: float, sigma: float, added: bool) -> float:
    """Of N(0, σ²) against (1 - q)·N(0, σ²) + q·N(1, σ²), either way round: the set where the ratio exceeds e^ε is a half-line."""
    inside = (math.exp(-eps if added else eps) - (1 - q)) / q
    if inside <= 0:
        return 0.0 if added else -math.expm1(eps)
    x = sigma**2 * math.log(inside) + 0.5
    if added:
        return norm.cdf(x / sigma) - math.exp(eps) * (
            (1 - q) * norm.cdf(x / sigma) + q * norm.cdf((x - 1) / sigma)
        )
    return (1 - q) * norm.sf(x / sigma) + q * norm.sf((x - 1) / sigma) - math.exp(eps) * norm.sf(x / sigma)


def exact_delta(eps: float, q: float, sigma: float, r: int) -> float:
    """E_T[δ_T(ε)] by numerical integration over the quantiles of T, the worse of both directions."""

    def at(p: float, added: bool) -> float:
        return max(0.0, hockey_stick(eps, q, sigma / math.sqrt(r / chi2.ppf(p, r)), added))

    edges = [0.0, 1e-8, 1e-6, 1e-4, 1e-2, 0.1, 0.5, 1.0]
    pairs = list(itertools.pairwise(edges))
    return max(sum(quad(at, a, b, args=(added,), limit=60)[0] for a, b in pairs) for added in (False, True))


@pytest.mark.parametrize(("q", "sigma", "r"), [(1.0, 2.0, 8), (0.1, 1.0, 20), (0.02, 0.8, 30)])
def test_the_loss_distribution_of_a_step_is_the_mixture_and_never_below_it(q: float, sigma: float, r: int):
    found = one_step(q, sigma, r, 1e-9, 5e-3)
    for eps in (0.0, 0.3, 1.0, 2.0):
        truth = exact_delta(eps, q, sigma, r)
        assert truth * (1 - 1e-6) <= found.get_delta_for_epsilon(eps) <= truth * 1.2 + 2e-9


def test_the_sensitivities_are_rounded_upwards():
    limits, shares = sensitivities(10, 1e-7)
    assert shares.sum() == pytest.approx(1)
    assert (shares > 0).all()
    assert (np.diff(limits) > 0).all()
    for limit, beyond in zip(limits, 1 - np.cumsum(shares[:-1]), strict=True):
        # P(T > t) = P(χ² < r/t²)
        assert chi2.cdf(10 / limit**2, 10) == pytest.approx(beyond, rel=1e-6, abs=1e-12)
    with pytest.raises(UserError, match="0 projections"):
        sensitivities(0, 1e-7)


def test_pretending_that_norms_are_exact_undercounts():
    event = SelfComposedDpEvent(step(0.01, 1.0, 10), 1000)
    exact = SelfComposedDpEvent(step_event(0.01, [1.0]), 1000)
    assert epsilon(event, 1e-5, "pld") > 1.15 * epsilon(exact, 1e-5, "pld")
    # with many projections norms are nearly exact
    many = SelfComposedDpEvent(step(0.01, 1.0, 3000), 1000)
    assert epsilon(many, 1e-5, "pld") == pytest.approx(epsilon(exact, 1e-5, "pld"), rel=0.05)
    assert epsilon(many, 1e-5, "pld") >= epsilon(exact, 1e-5, "pld") * (1 - 1e-3)


def test_no_other_accountant_speaks_of_it():
    event = step(0.1, 1.0, 10)
    found = epsilons(event, 1e-5)
    assert [name for name, value in found.items() if value is None] == ["rdp", "gdp", "prv"]
    with pytest.raises(UserError, match="which may be too small by any factor"):
        epsilon(event, 1e-5, "rdp")
    # one direction estimates next to nothing, and without noise there is nothing to speak of
    assert epsilon(step(0.5, 1.0, 1), 1e-5, "pld") == math.inf
    assert epsilon(step(0.5, 0.0, 10), 1e-5, "pld") == math.inf
    assert projected(ComposedDpEvent([event, GaussianDpEvent(1.0)])) is None


def test_the_event_survives_the_ledger_and_calibration_keeps_the_target():
    plan = make_plan(
        num_examples=1000, expected_batch_size=20, steps=50, delta=1e-4, epsilon=2.0, accountant="pld", projections=20
    )  # fmt: skip
    assert plan.epsilon() <= 2.0
    assert plan.epsilon() == pytest.approx(2.0, rel=1e-3)
    assert decode(encode(plan.step_event(3))) == plan.step_event(3)
    assert epsilon(composed([(plan.step_event(0), 50)]), 1e-4, "pld") == plan.epsilon()
    exact = make_plan(
        num_examples=1000, expected_batch_size=20, steps=50, delta=1e-4, epsilon=2.0, accountant="pld"
    )
    assert plan.noise_multiplier > exact.noise_multiplier
    assert "may move a sum by more than the threshold" in " ".join(caveats(plan))


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(7, 5, generator=generator, dtype=torch.float64) * torch.logspace(-1, 1.3, 7)[:, None]
    return x, torch.arange(7) % 3


def per_example(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    rows = []
    for i in range(len(x)):
        loss = nn.functional.cross_entropy(model(x[i : i + 1]), y[i : i + 1])
        rows.append(torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(model.parameters()))]))
    return torch.stack(rows)


def test_the_sum_is_that_of_the_projections():
    model, (x, y) = network(), data()
    gradients = per_example(model, x, y)
    clipper = ProjectedClipper(model, 6, clip_norm=0.5)
    sums = []
    for pieces in ([x, y],), ([x[:3], y[:3]], [x[3:], y[3:]]):
        model.zero_grad()
        clipper.prepare(99)
        reports = [
            clipper.backward(nn.functional.cross_entropy(model(a), b, reduction="none")) for a, b in pieces
        ]
        sums.append(torch.cat([p.grad.reshape(-1) for p in model.parameters()]))
        norms = torch.cat([report.norms[0] for report in reports])
    directions = torch.stack(
        [torch.cat([d[id(p)].reshape(-1) for p in model.parameters()]) for d in clipper._directions()]
    )
    estimated = (gradients @ directions.T).square().mean(1).sqrt()
    assert torch.allclose(norms, estimated)
    wanted = ((0.5 / estimated).clamp(max=1)[:, None] * gradients).sum(0)
    # physical batches share the projections: the sum does not depend on how it was cut
    assert all(torch.allclose(found, wanted) for found in sums)
    clipper.backward(torch.zeros(0))
    assert torch.equal(torch.cat([p.grad.reshape(-1) for p in model.parameters()]), sums[-1])


def test_leave_one_out_moves_the_sum_as_far_as_the_accountant_says():
    """An audit with the exact divergences: T of 400 steps of the real clipper, put into δ of the Gaussian that each makes."""
    model, (x, y) = network(), data()
    r, sigma, reach = 6, 1.5, []
    clipper = ProjectedClipper(model, r, clip_norm=0.01)
    for seed in range(400):
        found = []
        for rows in (slice(0, 7), slice(0, 6)):
            model.zero_grad()
            clipper.prepare(seed)
            clipper.backward(nn.functional.cross_entropy(model(x[rows]), y[rows], reduction="none"))
            found.append(torch.cat([p.grad.reshape(-1) for p in model.parameters()]))
        reach.append(float((found[0] - found[1]).norm()) / 0.01)
    assert max(reach) > 1.5, "C is no bound"
    mean_square = np.mean(np.square(reach))
    # E[r/χ²_r] = r/(r - 2)
    assert mean_square == pytest.approx(r / (r - 2), rel=0.15)
    claimed = one_step(1.0, sigma, r, 1e-9)
    for eps in (0.0, 0.5, 1.0):
        audited = np.mean([hockey_stick(eps, 1.0, sigma / t, added=False) for t in reach])
        assert audited <= claimed.get_delta_for_epsilon(eps) * 1.05
        assert audited >= claimed.get_delta_for_epsilon(eps) * 0.75


def test_a_run_is_charged_for_it(tmp_path: Path):
    run = tiny_run(steps=3, adaptive=False)
    run.clip.method, run.clip.groups, run.clip.projections, run.accountant.name = "jl", "flat", 8, "pld"
    trainer = run_to_end(tmp_path / "run", run)
    event = SelfComposedDpEvent(step(20 / NUM_EXAMPLES, 1.0, 8), 3)
    assert trainer.ledger is not None
    assert trainer.ledger.epsilon(1e-3, "pld") == pytest.approx(epsilon(event, 1e-3, "pld"))
    assert trainer.step == 3


def test_what_it_cannot_do_is_refused_in_one_sentence():
    with pytest.raises(UserError, match="use accountant=pld, or clip=flat, whose norms are exact") as caught:
        compose(["task=sst2", "scale=demo", "clip=jl", "accountant=rdp"])
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="differentiates losses twice, and those of texts"):
        compose(["task=e2e", "scale=demo", "clip=jl"])
    with pytest.raises(UserError, match="thresholds fixed"):
        compose(
            [
                "task=sst2",
                "scale=demo",
                "clip=jl",
                "accountant=pld",
                "clip.adaptive=true",
                "clip.quantile_budget=0.1",
            ]
        )
    model, (x, y) = network(), data()
    clipper = ProjectedClipper(model, 4)
    losses = nn.functional.cross_entropy(model(x), y, reduction="none")
    with pytest.raises(UserError, match="call prepare"):
        clipper.backward(losses)
    clipper.prepare(1)
    with pytest.raises(UserError, match="is NaN or infinite"):
        clipper.backward(nn.functional.cross_entropy(model(x * torch.nan), y, reduction="none"))
    coupled = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)).double()
    with pytest.raises(UserError, match="statistics of the whole batch"):
        ProjectedClipper(coupled, 4)

    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x - x.mean(0))

    centred = Centred()
    clipper = ProjectedClipper(centred, 4)
    clipper.prepare(1)
    with pytest.raises(UserError, match="mixes examples"):
        clipper.backward(nn.functional.cross_entropy(centred(x), y, reduction="none"))


def test_sums_in_16_bits_are_refused():
    """Autograd adds the examples up: 257 that add 1 each are 256 in bfloat16."""
    with pytest.raises(UserError, match="adds examples up in the precision"):
        compose(["task=sst2", "scale=demo", "clip=jl", "accountant=pld", "runtime.precision=bf16"])
    model, x = nn.Linear(5, 3), torch.randn(6, 5)
    clipper = ProjectedClipper(model, 4)
    clipper.prepare(1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = model(x).float().square().sum(1)
    with pytest.raises(UserError, match="in 16 bits"):
        clipper.backward(losses)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
        losses = model(x).square().sum(1)
    clipper.prepare(2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        clipper.backward(losses)
    inside, model.weight.grad = model.weight.grad, None
    clipper.prepare(2)
    clipper.backward(model(x).square().sum(1))
    assert torch.equal(inside, model.weight.grad)


class Hooked(nn.Module):
    """A gradient is divided by the norm of the whole batch's on its way."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: grad / grad.norm())
        return self.second(hidden.tanh())


@pytest.mark.parametrize(
    ("made", "coupled", "message"),
    [
        (lambda: nn.Linear(5, 3), lambda values: values / values.mean(), "mixes examples"),
        (Hooked, lambda values: values, "do not grow in proportion"),
    ],
)
def test_couplings_that_gradients_show_are_refused(made, coupled, message):
    torch.manual_seed(0)
    model = made()
    clipper = ProjectedClipper(model, 4)
    clipper.prepare(1)
    with pytest.raises(UserError, match=message):
        clipper.backward(coupled(model(torch.randn(6, 5)).square().sum(1)))


class Fused(torch.autograd.Function):
    """A product whose backward is a kernel: autograd sees no operation in it."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.detach().T @ x.detach()


class FusedLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return Fused.apply(x, self.weight)


class Detached(Hooked):
    """A hook that gives a copy of the gradient which has no graph."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: grad.detach().clone())
        return self.second(hidden.tanh())


class Hidden(torch.autograd.Function):
    """A scale whose gradient autograd does not see in full: a part of it has no graph."""

    @staticmethod
    def forward(ctx, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, scale = ctx.saved_tensors
        each = grad * x
        return grad * scale, (0.5 * each + 0.5 * each.detach()).sum(0)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        return Hidden.apply(x, self.scale)


@pytest.mark.parametrize(
    "made",
    [
        lambda: FusedLinear(5, 3, bias=False),
        lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), FusedLinear(4, 3)),
        lambda: nn.Sequential(FusedLinear(5, 4), nn.Tanh(), nn.Linear(4, 3)),
        Detached,
        Scaled,
    ],
)
def test_what_cannot_be_differentiated_twice_is_not_left_out_of_the_norms(made):
    torch.manual_seed(0)
    model = made()
    clipper = ProjectedClipper(model, 4)
    clipper.prepare(1)
    with pytest.raises(UserError, match="its norm would be left out"):
        clipper.backward(model(torch.randn(6, 5)).square().sum(1))
    assert all(p.grad is None for p in model.parameters())


def test_projections_follow_from_every_bit_of_the_seed_and_no_gradient_escapes_many_of_them():
    """Of a generator that keeps 32 bits a gradient can be made to which thousands of seeds are blind: T is infinite there."""
    model = nn.Linear(120, 1, bias=False)
    clipper = ProjectedClipper(model, 2)

    def directions(seed: int) -> Tensor:
        clipper.prepare(seed)
        return torch.stack([next(iter(v.values())).flatten() for v in clipper._directions()]).double()

    low = range(50)
    assert torch.equal(directions(3), directions(3))
    assert not torch.equal(directions(3), directions(3 + (1 << 40)))
    assert not torch.equal(directions(3), directions(3 + (1 << 32)))
    blind = torch.linalg.svd(torch.cat([directions(seed) for seed in low]))[2][-1]
    for seed in low:
        assert directions(seed + (5 << 32)).matmul(blind).norm() > 1e-3


@pytest.mark.parametrize("size", [1e32, 3e37])
def test_a_factor_that_32_bits_cannot_hold_lets_nothing_through(size: float):
    """C/M below the smallest normal number has few bits left, and was rounded up by a third of itself."""
    model = nn.Linear(40, 1, bias=False)
    clipper = ProjectedClipper(model, 8, clip_norm=1e-6 if size > 1e35 else 1e-10)
    clipper.prepare(1)
    clipper.backward(model(torch.full((1, 40), size))[:, 0])
    estimated = float(clipper._squared_norms(model(torch.full((1, 40), size))[:, 0]).sqrt())
    assert model.weight.grad is not None
    moved = float(model.weight.grad.double().norm())
    assert moved <= float(clipper.thresholds) * size * math.sqrt(40) / estimated * (1 + 1e-5)


@pytest.mark.parametrize("kind", ["pairs", "equal"])
@pytest.mark.parametrize("size", [1e5, 1e9])
def test_a_gradient_whose_terms_cancel_adds_no_more_than_its_threshold(kind: str, size: float):
    """What is left is rounding, in the sum and in the estimate, of the same size at best: it added 2.3 C at the median."""
    draw, steps = torch.Generator().manual_seed(0), 40
    x, weights = torch.randn(1, 128, 64, generator=draw), size * torch.randn(1, 128, generator=draw)
    if kind == "pairs":
        x[0, 1::2], weights[0, 1::2] = x[0, 0::2], -weights[0, 0::2]
    else:
        x[:], weights = x[:, :1].clone(), weights - weights.mean()
    order = torch.randperm(128, generator=draw)
    found = []
    for seed in range(steps):
        model = nn.Linear(64, 33, bias=False)
        clipper = ProjectedClipper(model, 10)
        clipper.prepare(seed)
        clipper.backward((model(x[:, order]).sum(-1) * weights[:, order]).sum(1))
        clipper.detach()
        assert model.weight.grad is not None
        found.append(float(model.weight.grad.norm()))
    allowed = math.sqrt(10 / chi2.ppf(1e-3, 10))
    assert np.median(found) <= 1
    assert max(found) <= allowed


def test_rounding_raises_no_ordinary_norm():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(144, 3))
    clipper = ProjectedClipper(model, 5)
    clipper.prepare(2)
    x = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(1))

    def losses() -> Tensor:
        return nn.functional.cross_entropy(model(x), torch.arange(6) % 3, reduction="none")

    estimated = clipper._squared_norms(losses())
    plain = torch.zeros(6, dtype=torch.float64)
    for directions in clipper._directions():
        for i in range(6):
            found = torch.autograd.grad(losses()[i], list(model.parameters()))
            pairs = zip(model.parameters(), found, strict=True)
            plain[i] += sum((directions[id(p)] * g).double().sum() for p, g in pairs).square() / 5
    torch.testing.assert_close(estimated, plain, rtol=1e-4, atol=0)
