"""Every engine × group × model equals the naive loop in float64: gradients, norms, counts."""

from __future__ import annotations

import copy
import functools

import pytest
import torch

from dpexp.clipping import attach
from dpexp.clipping.engines import ENGINES
from dpexp.errors import UserError
from tests.clipping.zoo import ZOO, Problem
from tests.versions import needs_torch

OURS = [name for name in ENGINES if name != "opacus"]
# The engines differ in when they sum, not in what a layer is: the rest of the zoo sees one of each way.
ALL_WAYS = ("auto", "ghost", "loop")
EVERYWHERE = (
    "mlp", "convolutions", "tied_head", "reused_module", "bare_parameters", "lstm", "checkpointed",
    "hf_bert", "hf_roberta", "hf_gpt2", "wide_resnet",
)  # fmt: skip
PAIRS = [(name, engine) for name in ZOO for engine in (OURS if name in EVERYWHERE else ALL_WAYS)]


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


@functools.cache
def naive_of(name: str) -> dict[str, torch.Tensor]:
    return naive(ZOO[name]())


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


@pytest.mark.parametrize(("name", "engine"), PAIRS)
def test_equals_the_naive_loop(name: str, engine: str) -> None:
    problem = ZOO[name]()
    per_example = naive_of(name)
    before = {k: v.clone() for k, v in problem.model.state_dict().items()}
    classes = [type(m) for m in problem.model.modules()]
    every = ["flat", "layer", *(["block"] if problem.block else [])]
    # the default meets all of them in each model, each other engine one in each model, and all of them over the models
    turn = list(ZOO).index(name) + OURS.index(engine)
    for groups in every if engine == "auto" else [every[turn % len(every)]]:
        clipper = attach(problem.model, groups=groups, clip_norm=0.8, engine=engine)
        check(problem, clipper, per_example)
        clipper.detach()
    assert [type(m) for m in problem.model.modules()] == classes
    for key, value in problem.model.state_dict().items():
        torch.testing.assert_close(value, before[key])


SLOW_PATH = {"parametrized_and_rare", "prompt_network", "packed_sequence"}


@pytest.mark.parametrize("name", [name for name in ZOO if name not in SLOW_PATH])
def test_ordinary_models_need_no_loop(name: str) -> None:
    problem = ZOO[name]()
    clipper = attach(problem.model, groups="layer")
    for _ in range(3):  # a use that the first step shows is followed from the second one on
        clipper.backward(problem.losses(problem.model, problem.batch))
    assert [n for n, method in clipper.choices.items() if method.startswith("one back-propagation")] == []


@pytest.mark.parametrize(
    "name", ["linear_any_rank", "frozen_parts", "hf_bert", "hf_roberta", "hf_gpt2", "timm_vit"]
)
@pytest.mark.parametrize("groups", ["flat", "layer"])
def test_opacus_itself_agrees_where_it_is_right(name: str, groups: str) -> None:
    problem = ZOO[name]()
    clipper = attach(problem.model, groups=groups, clip_norm=0.8, engine="opacus")
    report = clipper.backward(problem.losses(problem.model, problem.batch))
    norms, sums = expected(naive_of(name), clipper.groups, clipper.thresholds)
    torch.testing.assert_close(report.norms, norms.float(), rtol=1e-5, atol=1e-7, check_dtype=False)
    for n, p in problem.model.named_parameters():
        if p.requires_grad:
            torch.testing.assert_close(p.grad, sums[n], rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(
    "name", ["tied_head", "positions_as_long_as_the_batch", "bare_parameters", "flattened_batch_major"]
)
def test_opacus_is_refused_where_it_is_wrong(name: str) -> None:
    problem = ZOO[name]()

    def step() -> None:
        attach(problem.model, engine="opacus").backward(problem.losses(problem.model, problem.batch))

    with pytest.raises(UserError):
        step()
    assert all(p.grad is None for p in problem.model.parameters())


@pytest.mark.parametrize("name", ["mlp", "tied_head", "bare_parameters"])
@pytest.mark.parametrize("compiled_first", [False, True])
def test_compiled_models_are_cut_at_the_taps_and_exact(name: str, compiled_first: bool) -> None:
    torch._dynamo.reset()
    problem = ZOO[name]()
    if compiled_first:
        compiled = torch.compile(problem.model, backend="aot_eager")
        clipper = attach(problem.model, groups="layer", clip_norm=0.8)
    else:
        clipper = attach(problem.model, groups="layer", clip_norm=0.8)
        compiled = torch.compile(problem.model, backend="aot_eager")
    report = clipper.backward(problem.losses(compiled, problem.batch))
    norms, sums = expected(naive_of(name), clipper.groups, clipper.thresholds)
    torch.testing.assert_close(report.norms, norms, rtol=1e-9, atol=1e-12)
    for n, p in problem.model.named_parameters():
        torch.testing.assert_close(p.grad, sums[n], rtol=1e-9, atol=1e-11)


def test_the_compiler_compiles_nothing_of_the_clipper_itself() -> None:
    """Else it compiles each place for each kind of arguments, and warns after eight of them."""
    torch._dynamo.reset()
    nn = torch.nn
    parts = nn.Embedding(9, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.Flatten(), nn.Linear(12, 2, bias=False)
    model = nn.Sequential(*parts)
    clipper = attach(model)
    compiled = torch.compile(model, backend="eager")
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        clipper.backward(compiled(torch.randint(0, 9, (3, 3))).square().sum(1))


def test_compiling_the_full_graph_is_refused_by_the_compiler() -> None:
    torch._dynamo.reset()
    problem = ZOO["mlp"]()
    clipper = attach(problem.model)
    compiled = torch.compile(problem.model, backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        clipper.backward(problem.losses(compiled, problem.batch))
    assert all(p.grad is None for p in problem.model.parameters())


class InOnePiece(torch.nn.Module):
    """A part that holds no parameter, or one, and is compiled as a whole."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self.layer, self.part = torch.nn.Linear(4, 2), part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.part == "cond":
            return torch.cond(torch.tensor(True), lambda z: z @ self.layer.weight.T, self.layer, (x,))
        whole = torch.compile(lambda z: z.tanh() * 2, backend="aot_eager", fullgraph=True)
        return whole(self.layer(x))


# torch 2.8 says of cond that it cannot be cut, and not why
@pytest.mark.parametrize("part", [pytest.param("cond", marks=needs_torch(2, 9)), "compiled"])
def test_what_cannot_be_cut_is_refused_with_a_way_out(part: str) -> None:
    torch._dynamo.reset()
    model = InOnePiece(part)
    clipper = attach(model)
    with pytest.raises(RuntimeError, match=r"leave fullgraph=True out.* give them no parameter of the model"):
        clipper.backward(model(torch.randn(3, 4)).square().sum(1))


def test_a_step_that_is_compiled_whole_clips_uncompiled() -> None:
    torch._dynamo.reset()
    problem = ZOO["mlp"]()
    clipper = attach(problem.model, groups="layer", clip_norm=0.8)

    def step() -> torch.Tensor:
        return clipper.backward(problem.losses(problem.model, problem.batch)).norms

    found = torch.compile(step, backend="aot_eager")()
    norms, sums = expected(naive_of("mlp"), clipper.groups, clipper.thresholds)
    torch.testing.assert_close(found, norms, rtol=1e-9, atol=1e-12)
    for n, p in problem.model.named_parameters():
        torch.testing.assert_close(p.grad, sums[n], rtol=1e-9, atol=1e-11)
