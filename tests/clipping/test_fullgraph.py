"""``torch.compile(model, fullgraph=True)``: one graph that gives what the naive loop gives, or a refusal without a ``p.grad``."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dpexp.clipping import attach
from dpexp.clipping.attach import Clipper
from dpexp.errors import UserError
from tests.clipping.test_engines import check, expected, naive
from tests.clipping.zoo import ZOO, B, C, D, Problem, T, V, next_token, square

ONE_PASS = {"groups": "layer", "engine": "onepass"}
TWO_PASSES = {"groups": "flat", "engine": "ghost"}
BOTH = pytest.mark.parametrize("way", [ONE_PASS, TWO_PASSES], ids=["onepass", "ghost"])
# Compiling takes seconds: what both ways share is tried in one of them each time, in the other among the slow tests.
WAYS = pytest.mark.parametrize(
    "way",
    [pytest.param(ONE_PASS, id="onepass"), pytest.param(TWO_PASSES, id="ghost", marks=pytest.mark.slow)],
)


def first_only(names: Iterable[str], fast: int = 1) -> list:
    """Parameters of which all but the first are slow."""
    return [n if i < fast else pytest.param(n, marks=pytest.mark.slow) for i, n in enumerate(names)]


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def whole(model: nn.Module, backend: str = "aot_eager") -> nn.Module:
    """The model in one graph: the compiler raises where it would have to cut."""
    compiled: nn.Module = torch.compile(model, backend=backend, fullgraph=True)  # type: ignore[assignment]
    return compiled


def through(problem: Problem, compiled: nn.Module) -> Problem:
    """The problem with its losses computed by the compiled model; the naive loop must use the other one."""
    return Problem(problem.model, problem.batch, lambda _, batch: problem.losses(compiled, batch))


def mlp(dtype: torch.dtype = torch.float64) -> nn.Module:
    return nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, C)).to(dtype)


def losses_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - 0.3).pow(2).flatten(1).sum(1)


def numbers(size: int, *shape: int) -> Tensor:
    return torch.randn(size, *shape or (D,), dtype=torch.float64)


def compare(model: nn.Module, clipper: Clipper, report, x: Tensor, scale: Tensor | float = 1.0) -> None:
    """Norms and ``p.grad`` against the naive loop on a model whose losses are `losses_of`."""
    per_example = naive(Problem(unattached(model), {"x": x}, square))
    norms, _ = expected(per_example, clipper.groups, clipper.thresholds)
    torch.testing.assert_close(report.norms, norms, rtol=1e-9, atol=1e-12)
    for k, group in enumerate(clipper.groups):
        factors = (clipper.thresholds[k] * scale / norms[k]).clamp(max=1)
        for name, p in group.params.items():
            total = torch.tensordot(factors, per_example[name], dims=1)
            torch.testing.assert_close(p.grad, total, rtol=1e-9, atol=1e-11)


def unattached(model: nn.Module) -> nn.Module:
    """A copy of an `mlp` without a clipper."""
    twin = mlp()
    twin.load_state_dict(model.state_dict())
    return twin


# -- which models ---------------------------------------------------------------------------------------------------------


class Norms(nn.Module):
    """Every normalisation that has a layer kind."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.group = nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.layer, self.rms, self.out = nn.LayerNorm(4), nn.RMSNorm(4), nn.Linear(4, C)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.group(self.conv(x))).flatten(2).transpose(1, 2)
        return self.out(self.rms(torch.tanh(self.layer(h)))).mean(1)


def norms() -> Problem:
    return Problem(Norms().double(), {"x": numbers(B, 2, 4, 4)}, square)


def gpt2(tied: bool) -> Problem:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": V, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 20}
    config = GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, tie_word_embeddings=tied)
    model = GPT2LMHeadModel(config).double()
    assert (model.lm_head.weight is model.transformer.wte.weight) == tied

    def losses(m: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return next_token(lambda ids: m(input_ids=ids).logits, batch)  # type: ignore[arg-type]

    return Problem(model, {"ids": torch.randint(2, V, (B, T))}, losses)


def vit() -> Problem:
    """Its class token and position table are bare parameters, which stay as they are."""
    problem = ZOO["hf_vit"]()
    for name, p in problem.model.named_parameters():
        p.requires_grad_(not name.endswith(("cls_token", "position_embeddings")))
    return problem


EXACT: dict[str, Callable[[], Problem]] = {
    "mlp": ZOO["mlp"],
    "norms": norms,
    "tied_head": ZOO["tied_head"],
    "gpt2": lambda: gpt2(tied=False),
    "frozen_parts": ZOO["frozen_parts"],
    "linear_any_rank": ZOO["linear_any_rank"],
    "flattened_batch_major": ZOO["flattened_batch_major"],
    "time_first": ZOO["time_first"],
    "gpt2_tied": lambda: gpt2(tied=True),
    "peft_lora": ZOO["peft_lora"],
    "convolutions": ZOO["convolutions"],
    "weight_standardised": ZOO["weight_standardised"],
    "hf_bert": ZOO["hf_bert"],
    "hf_roberta": ZOO["hf_roberta"],
    "vit": vit,
    "wide_resnet": ZOO["wide_resnet"],
}


@WAYS
@pytest.mark.parametrize("name", first_only(EXACT, fast=3))
def test_one_graph_equals_the_naive_loop(name: str, way: dict) -> None:
    problem = EXACT[name]()
    per_example = naive(problem)
    clipper = attach(problem.model, clip_norm=0.8, **way)
    check(through(problem, whole(problem.model)), clipper, per_example)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="no C++ compiler")
@WAYS
def test_inductor_gives_the_same(way: dict) -> None:
    problem = EXACT["mlp"]()
    per_example = naive(problem)
    clipper = attach(problem.model, clip_norm=0.8, **way)
    check(through(problem, whole(problem.model, backend="inductor")), clipper, per_example)


# -- which models are refused ---------------------------------------------------------------------------------------------


def refused_by_the_compiler(problem: Problem, why: str, **way) -> None:
    attach(problem.model, **way)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=why):
        problem.losses(whole(problem.model), problem.batch)
    assert all(p.grad is None for p in problem.model.parameters())


def refused_in_the_backward(problem: Problem, why: str, **way) -> None:
    """And an uncompiled step is exact, or refused as well."""
    clipper = attach(problem.model, **way)
    losses = problem.losses(whole(problem.model), problem.batch)
    with pytest.raises(UserError, match=why):
        clipper.backward(losses)
    assert all(p.grad is None for p in problem.model.parameters())


@pytest.mark.parametrize(
    "name", ["bare_parameters", "hf_llama", "hf_vit", "lstm", "attention", "checkpointed"]
)
def test_bare_parameters_are_refused_while_tracing(name: str) -> None:
    refused_by_the_compiler(ZOO[name](), "bare parameters", **ONE_PASS)


@pytest.mark.parametrize("name", ["tied_functional_flat_positions", "prompt_network"])
def test_a_layer_without_a_batch_is_refused_while_tracing(name: str) -> None:
    refused_by_the_compiler(ZOO[name](), "no dimension of its input is the batch", **ONE_PASS)


def test_groups_of_several_layers_need_two_passes() -> None:
    refused_by_the_compiler(ZOO["mlp"](), "two passes", groups="flat", engine="onepass")


@pytest.mark.parametrize(
    "name", first_only(["positions_as_long_as_the_batch", "flattened_time_major", "time_first_square"])
)
@WAYS
def test_rows_that_are_not_one_examples_each_are_refused(name: str, way: dict) -> None:
    refused_in_the_backward(ZOO[name](), "not one example's each", **way)


@WAYS
def test_a_module_called_twice_is_refused(way: dict) -> None:
    refused_in_the_backward(ZOO["reused_module"](), "was called 3 times", **way)


@pytest.mark.slow
@WAYS
def test_two_forwards_in_one_loss_are_refused(way: dict) -> None:
    model, x = mlp(), numbers(4)
    clipper, compiled = attach(model, **way), whole(model)
    with pytest.raises(UserError, match="called 2 times"):
        clipper.backward(losses_of(compiled, x) + losses_of(compiled, -x))
    assert all(p.grad is None for p in model.parameters())


class Coupled(nn.Module):
    """Two layers around something that may look at other examples."""

    def __init__(self, mix: Callable[[Tensor], Tensor]):
        super().__init__()
        self.first, self.second, self.mix = nn.Linear(D, 6), nn.Linear(6, C), mix

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.mix(self.first(x))))


MIXES: dict[str, Callable[[Tensor], Tensor]] = {
    "centred over the batch": lambda h: h - h.mean(0),
    "exchanged": lambda h: h.flip(0),
    "normalised over the batch": lambda h: F.batch_norm(h, None, None, training=True),
    "attention across the batch": lambda h: torch.softmax(h @ h.T, 1) @ h,
    "the neighbour": lambda h: h + h.roll(1, 0),
}


@pytest.mark.parametrize("mix", first_only(MIXES, fast=2))
@WAYS
def test_examples_that_influence_each_other_are_refused(mix: str, way: dict) -> None:
    problem = Problem(Coupled(MIXES[mix]).double(), {"x": numbers(B)}, square)
    refused_in_the_backward(problem, "mixes examples", **way)


class Switched(Coupled):
    on = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.second(torch.tanh(self.mix(h) if self.on else h))


@WAYS
def test_a_coupling_that_begins_later_is_refused(way: dict) -> None:
    """Another way through the model is another graph, which has its own proof."""
    model, x = Switched(MIXES["centred over the batch"]).double(), numbers(B)
    clipper, compiled = attach(model, **way), whole(model)
    clipper.backward(losses_of(compiled, x))
    model.zero_grad()
    model.on = True
    losses = losses_of(compiled, x)
    with pytest.raises(UserError, match="mixes examples"):
        clipper.backward(losses)
    assert all(p.grad is None for p in model.parameters())


@WAYS
def test_a_loss_over_the_batch_is_refused(way: dict) -> None:
    def coupled(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        y = model(batch["x"])
        return (y - y.mean(0)).pow(2).sum(1)

    refused_in_the_backward(Problem(mlp(), {"x": numbers(B)}, coupled), "mixes examples", **way)


class Outside(nn.Module):
    """Uses a layer's weight outside of its forward, besides calling it or instead of it."""

    def __init__(self, called: bool):
        super().__init__()
        self.first, self.second, self.called = nn.Linear(D, D), nn.Linear(D, C), called

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x)) if self.called else x
        return self.second(torch.tanh(F.linear(h, self.first.weight)))


@WAYS
def test_a_parameter_also_used_outside_of_its_layer_is_refused(way: dict) -> None:
    problem = Problem(Outside(called=True).double(), {"x": numbers(B)}, square)
    per_example = naive(problem)
    clipper = attach(problem.model, clip_norm=0.8, **way)
    losses = problem.losses(whole(problem.model), problem.batch)
    with pytest.raises(UserError, match="also used outside of its forward"):
        clipper.backward(losses)
    assert all(p.grad is None for p in problem.model.parameters())
    check(problem, clipper, per_example)  # uncompiled, the same clipper is exact


def test_a_parameter_used_only_outside_of_its_layer_is_refused_in_one_pass() -> None:
    problem = Problem(Outside(called=False).double(), {"x": numbers(B)}, square)
    refused_in_the_backward(problem, "first.weight was used in a way", **ONE_PASS)


@pytest.mark.slow
def test_a_parameter_used_only_outside_of_its_layer_is_exact_once_in_two_passes() -> None:
    """By the loop, which a graph made for two passes allows; from then on the compiler refuses."""
    problem = Problem(Outside(called=False).double(), {"x": numbers(B)}, square)
    per_example = naive(problem)
    clipper = attach(problem.model, clip_norm=0.8, **TWO_PASSES)
    compiled = whole(problem.model)
    check(through(problem, compiled), clipper, per_example, times=1)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="used outside of its forward"):
        problem.losses(compiled, problem.batch)


@WAYS
def test_losses_of_other_examples_than_entered_are_refused(way: dict) -> None:
    model, x = mlp(), numbers(6)
    clipper, compiled = attach(model, **way), whole(model)
    with pytest.raises(UserError, match="saw 6 examples, but losses have 3"):
        clipper.backward(losses_of(compiled, x)[:3])
    with pytest.raises(UserError, match="mixes examples"):
        clipper.backward(losses_of(compiled, x).roll(1))
    assert all(p.grad is None for p in model.parameters())


# -- one compiled model, many steps ---------------------------------------------------------------------------------------


@BOTH
def test_batches_of_every_size_through_one_compiled_model(way: dict) -> None:
    model = mlp()
    clipper = attach(model, clip_norm=0.4, **way)
    compiled = whole(model)
    for size in (1, 5, 3, 0, 7, 1, 4):
        model.zero_grad()
        x = numbers(size)
        report = clipper.backward(losses_of(compiled, x))
        if size:
            compare(model, clipper, report, x)
        else:
            assert report.norms.shape == (len(clipper.groups), 0)
            assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in model.parameters())


def test_an_unproven_layout_is_proven_at_the_first_batch_that_can_tell() -> None:
    problem = Problem(Coupled(MIXES["centred over the batch"]).double(), {"x": numbers(B)}, square)
    clipper = attach(problem.model, **ONE_PASS)
    compiled = whole(problem.model)
    clipper.backward(problem.losses(compiled, {"x": numbers(1)}))  # an example alone is not coupled
    problem.model.zero_grad()
    with pytest.raises(UserError, match="mixes examples"):
        clipper.backward(problem.losses(compiled, problem.batch))
    assert all(p.grad is None for p in problem.model.parameters())


@BOTH
def test_settings_of_the_step_are_the_ones_that_count(way: dict) -> None:
    """Thresholds, scales and the loss scale are read when the backward runs, not when the graph was made or run forward."""
    model, x = mlp(), numbers(5)
    clipper = attach(model, clip_norm=0.4, max_clip_scale=2.0, **way)
    compiled = whole(model)
    compare(model, clipper, clipper.backward(losses_of(compiled, x)), x)
    steps: list[tuple[float, Tensor | None, float]] = [
        (0.05, None, 1.0),
        (7.0, torch.tensor([0.1, 2.0, 0.0, 1.0, 0.5]), 1.0),
        (0.3, None, 1024.0),
        (0.2, torch.tensor([1.0, 0.0, 2.0, 0.2, 0.3]), 0.25),
        (0.4, None, 1.0),
    ]
    for threshold, scale, loss_scale in steps:
        model.zero_grad()
        losses = losses_of(compiled, x)
        clipper.thresholds = [threshold + 0.01 * k for k in range(len(clipper.groups))]  # after the forward
        report = clipper.backward(losses, scale, loss_scale=loss_scale)
        compare(model, clipper, report, x, 1.0 if scale is None else scale.double())


@WAYS
@pytest.mark.parametrize("rule", first_only(["automatic", "none"], fast=0))
def test_other_rules(rule: str, way: dict) -> None:
    model, x = mlp(), numbers(5)
    per_example = naive(Problem(model, {"x": x}, square))
    clipper = attach(model, clip_norm=0.4, rule=rule, **way)
    report = clipper.backward(losses_of(whole(model), x))
    norms, _ = expected(per_example, clipper.groups, clipper.thresholds)
    torch.testing.assert_close(report.norms, norms, rtol=1e-9, atol=1e-12)
    for k, group in enumerate(clipper.groups):
        factors = torch.ones_like(norms[k]) if rule == "none" else clipper.thresholds[k] / (norms[k] + 0.01)
        for name, p in group.params.items():
            torch.testing.assert_close(p.grad, torch.tensordot(factors, per_example[name], dims=1))


@WAYS
def test_accumulation_evaluation_and_optimiser_steps_between(way: dict) -> None:
    model = mlp()
    twin = copy.deepcopy(model)
    clipper, reference = attach(model, clip_norm=0.4, **way), attach(twin, clip_norm=0.4, **way)
    compiled = whole(model)
    for step in range(3):
        parts = numbers(4), numbers(3)
        waiting = [losses_of(compiled, x) for x in parts]  # two forwards wait, then two backwards add up
        with torch.inference_mode():
            torch.testing.assert_close(compiled(parts[0]), twin(parts[0]))
        for losses, x in zip(waiting, parts, strict=True):
            clipper.backward(losses)
            reference.backward(losses_of(twin, x))
        with torch.no_grad():
            for p, q in zip(model.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(
                    p.grad, q.grad, rtol=1e-9, atol=1e-11, msg=lambda m, s=step: f"{s}: {m}"
                )
                p -= 0.1 * p.grad
                q -= 0.1 * q.grad
        model.zero_grad(set_to_none=step == 1)
        twin.zero_grad(set_to_none=step == 1)


@WAYS
@pytest.mark.parametrize("poison", ["nan", *first_only(["inf", "1e300"], fast=0)])
def test_one_bad_example_is_bounded_and_alone(poison: str, way: dict) -> None:
    model, x = mlp(), numbers(4)
    x[2, 1] = float(poison)
    clipper, compiled = attach(model, clip_norm=0.5, **way), whole(model)
    for _ in range(2):  # the first one proves the layouts, with the bad example in it
        model.zero_grad()
        report = clipper.backward(losses_of(compiled, x))
    found = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    others = clipper.backward(losses_of(compiled, x[[0, 1, 3]]))
    torch.testing.assert_close(report.norms[:, [0, 1, 3]], others.norms)
    moved_most(model, clipper, found)


def moved_most(model: nn.Module, clipper: Clipper, before: dict[str, Tensor]) -> None:
    """No group's sum has moved by more than its threshold, and something has."""
    now = dict(model.named_parameters())
    moved = [
        sum(float((before[n] - now[n].grad).pow(2).sum()) for n in group.params) ** 0.5
        for group in clipper.groups
    ]
    assert all(m <= float(c) * (1 + 1e-9) for m, c in zip(moved, clipper.thresholds, strict=True))


@WAYS
@pytest.mark.parametrize("name", first_only(["mlp", "norms", "tied_head"]))
def test_leaving_one_example_out_moves_no_group_by_more_than_its_threshold(name: str, way: dict) -> None:
    problem = EXACT[name]()
    clipper = attach(problem.model, clip_norm=0.3, **way)
    compiled = whole(problem.model)
    clipper.backward(problem.losses(compiled, problem.batch))
    before = {n: p.grad.clone() for n, p in problem.model.named_parameters() if p.grad is not None}
    problem.model.zero_grad()
    clipper.backward(problem.losses(compiled, {k: v[1:] for k, v in problem.batch.items()}))
    moved_most(problem.model, clipper, before)
    now = dict(problem.model.named_parameters())
    assert any(not torch.equal(before[n], now[n].grad) for n in before)


@WAYS
def test_bf16_autocast_agrees_with_the_uncompiled_engine(way: dict) -> None:
    model, x = mlp(torch.float32), torch.randn(6, T, D)
    twin = copy.deepcopy(model)
    clipper, reference = attach(model, clip_norm=0.4, **way), attach(twin, clip_norm=0.4, **way)
    compiled = whole(model)
    for _ in range(2):
        model.zero_grad()
        twin.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found, wanted = losses_of(compiled, x), losses_of(twin, x)
        report, other = clipper.backward(found), reference.backward(wanted)
        assert report.norms.dtype == torch.float32
        torch.testing.assert_close(report.norms, other.norms, rtol=1e-2, atol=1e-4)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert p.grad.dtype == torch.float32
            torch.testing.assert_close(p.grad, q.grad, rtol=2e-2, atol=2e-2)


@pytest.mark.slow
@WAYS
def test_several_rows_of_an_example(way: dict) -> None:
    model, x = mlp(), numbers(6)
    twin = copy.deepcopy(model)
    clipper = attach(model, clip_norm=0.4, rows_per_example=2, **way)
    reference = attach(twin, clip_norm=0.4, rows_per_example=2, engine="loop", groups=way["groups"])
    compiled = whole(model)
    for _ in range(2):
        model.zero_grad()
        twin.zero_grad()
        report = clipper.backward(losses_of(compiled, x).view(3, 2).sum(1))
        other = reference.backward(losses_of(twin, x).view(3, 2).sum(1))
        torch.testing.assert_close(report.norms, other.norms, rtol=1e-9, atol=1e-12)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-11)


@pytest.mark.slow
def test_two_models_of_one_class_have_their_own_taps() -> None:
    models = mlp(), mlp()
    clippers = [attach(model, clip_norm=c, **ONE_PASS) for model, c in zip(models, (0.4, 0.1), strict=True)]
    compiled = [whole(model) for model in models]
    for size in (4, 3):
        x = numbers(size)
        for model, clipper, graph in zip(models, clippers, compiled, strict=True):
            model.zero_grad()
            compare(model, clipper, clipper.backward(losses_of(graph, x)), x)


@pytest.mark.slow
@WAYS
def test_detaching_and_attaching_again(way: dict) -> None:
    """The compiled model follows: first the plain gradient again, then the new clipper's."""
    model, x = mlp(), numbers(4)
    clipper = attach(model, clip_norm=0.4, **way)
    compiled = whole(model)
    clipper.backward(losses_of(compiled, x))
    clipper.detach()
    model.zero_grad()
    losses_of(compiled, x).sum().backward()
    other = unattached(model)
    wanted = torch.autograd.grad(losses_of(other, x).sum(), list(other.parameters()))
    for p, g in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(p.grad, g)
    model.zero_grad()
    clipper = attach(model, clip_norm=0.1, **way)
    compare(model, clipper, clipper.backward(losses_of(compiled, x)), x)


class Around(nn.Module):
    """A model whose part may be taken from the list `inner`, compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.out = mlp(), nn.Linear(C, C).double()
        self.inner: list[nn.Module] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh((self.inner or [self.part])[0](x)))


@pytest.mark.slow
@WAYS
def test_a_compiled_part_of_a_model(way: dict) -> None:
    """Refused in the first step, which the clipper looks at; exact after an uncompiled one: taps of both kinds deliver."""
    problem = Problem(Around(), {"x": numbers(B)}, square)
    per_example = naive(problem)
    clipper = attach(problem.model, clip_norm=0.8, **way)
    inner = problem.model.inner
    inner.append(whole(problem.model.part))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="or compile the attached model as a whole"):
        problem.losses(problem.model, problem.batch)
    compiled = inner.pop()
    check(problem, clipper, per_example)
    inner.append(compiled)
    check(problem, clipper, per_example)


def test_a_plain_backward_is_not_clipped_silently() -> None:
    """``loss.backward()`` past the clipper leaves no gradient that an optimiser could take for a private one."""
    model, x = mlp(), numbers(4)
    attach(model, **ONE_PASS)
    losses_of(whole(model), x).sum().backward()
    assert all(p.grad is None for p in model.parameters())


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(D, 8), nn.Linear(8, D), nn.Linear(D, C)

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(lambda h: self.second(torch.tanh(self.first(h))), x, use_reentrant=False)
        return self.out(h)


@pytest.mark.slow
@WAYS
def test_activation_checkpointing_in_the_graph(way: dict) -> None:
    problem = Problem(Recomputed().double(), {"x": numbers(B)}, square)
    per_example = naive(problem)
    clipper = attach(problem.model, clip_norm=0.8, **way)
    check(through(problem, whole(problem.model)), clipper, per_example)


@pytest.mark.slow
def test_compiled_and_uncompiled_steps_alternate() -> None:
    problem = EXACT["norms"]()
    per_example = naive(problem)
    clipper = attach(problem.model, clip_norm=0.8, **ONE_PASS)
    compiled = through(problem, whole(problem.model))
    for turn in (compiled, problem, compiled):
        check(turn, clipper, per_example, times=1)
