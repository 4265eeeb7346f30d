"""Every way to fine-tune × engine equals the naive loop in float64: gradients, norms, counts."""

from __future__ import annotations

import copy
import functools

import pytest
import torch

from dpexp.clipping import attach
from tests.clipping.test_engines import check, expected, naive
from tests.clipping.zoo import Problem

from .ways import WAYS, problem_of

ENGINES = ("auto", "loop", "ghost", "bk", "onepass", "opacus")
NOT_THERE = {
    ("gpt2", "head"),
    ("llama", "head"),
    ("llama", "bitfit"),
    ("vit", "prefix"),
    ("vit", "prefix_direct"),
    ("vit", "prompt"),
    ("vit", "p_tuning"),
}
PAIRS = [(network, way) for network in ("bert", "gpt2") for way in WAYS if (network, way) not in NOT_THERE]
# The default meets each way in both networks; each other engine meets it in one of them, by turns, and in the other where the
# first one does not have it.
CASES = [
    (network, way, engine)
    for network, way in PAIRS
    for place, engine in enumerate(ENGINES)
    if engine == "auto"
    or len(both := [pair for pair in PAIRS if pair[1] == way]) == 1
    or (network, way) == both[([*WAYS].index(way) + place) % 2]
]
OTHERS = [
    (network, way)
    for network in ("roberta", "llama", "bert_mlm", "vit")
    for way in WAYS
    if (network, way) not in NOT_THERE
]


@functools.cache
def naive_of(network: str, way: str) -> dict[str, torch.Tensor]:
    return naive(problem_of(network, way))


def compare(network: str, way: str, engine: str, groups: str) -> None:
    problem = problem_of(network, way)
    frozen = {name: p for name, p in problem.model.named_parameters() if not p.requires_grad}
    clipper = attach(problem.model, groups=groups, clip_norm=0.3, engine=engine)
    assert {name for group in clipper.groups for name in group.params}.isdisjoint(frozen)
    per_example = naive_of(network, way)
    if engine == "opacus":
        report = clipper.backward(problem.losses(problem.model, problem.batch))
        norms, sums = expected(per_example, clipper.groups, clipper.thresholds)
        torch.testing.assert_close(report.norms, norms.float(), rtol=1e-5, atol=1e-7, check_dtype=False)
        for name, p in problem.model.named_parameters():
            if p.requires_grad:
                torch.testing.assert_close(p.grad, sums[name], rtol=1e-5, atol=1e-8)
    else:
        check(problem, clipper, per_example)
    assert all(p.grad is None for p in frozen.values())
    clipper.detach()


@pytest.mark.parametrize(("network", "way", "engine"), CASES)
def test_every_engine_equals_the_naive_loop(network: str, way: str, engine: str) -> None:
    if engine == "opacus" and way in ("prompt", "p_tuning"):
        pytest.skip("refused by the configuration: it cannot follow what is looked up inside the model")
    # the default meets both groupings in each way, each other engine one of them, and both over the ways
    both, turn = ("flat", "layer"), CASES.index((network, way, engine))
    for groups in both if engine == "auto" else [both[turn % 2]]:
        compare(network, way, engine, groups)


@pytest.mark.parametrize(("network", "way"), OTHERS)
def test_other_families(network: str, way: str) -> None:
    compare(network, way, "auto", "layer")


@pytest.mark.parametrize(("network", "way"), PAIRS)
def test_all_trainable_parameters_reach_the_loss(network: str, way: str) -> None:
    for name, gradients in naive_of(network, way).items():
        # softmax does not see what is added to all keys
        assert bool(gradients.abs().sum() > 0) or name.endswith("key.bias"), name


@pytest.mark.parametrize(("network", "way"), PAIRS)
def test_no_way_needs_one_back_propagation_per_example(network: str, way: str) -> None:
    problem = problem_of(network, way)
    clipper = attach(problem.model, groups="layer")
    for _ in range(3):
        clipper.backward(problem.losses(problem.model, problem.batch))
    assert [n for n, method in clipper.choices.items() if method.startswith("one back-propagation")] == []


@pytest.mark.parametrize(
    "way", ["lora", "prefix", "prompt", "p_tuning", "rgp", "rgp_history", "adapters", "bitfit"]
)
def test_copies_stand_alone(way: str) -> None:
    problem = problem_of("bert", way)
    copied = Problem(copy.deepcopy(problem.model), problem.batch, problem.losses)
    clipper = attach(problem.model, groups="layer", clip_norm=0.3)
    while_attached = copy.deepcopy(problem.model)
    before = problem.losses(problem.model, problem.batch)
    with torch.no_grad():
        for tensor in [*problem.model.parameters(), *problem.model.buffers()]:
            tensor.zero_()
    torch.testing.assert_close(problem.losses(while_attached, problem.batch), before)
    clipper.detach()
    check(copied, attach(copied.model, groups="layer", clip_norm=0.3), naive_of("bert", way))


@pytest.mark.parametrize("way", ["bitfit", "full", "head"])
def test_opacus_takes_a_masked_language_model_and_gives_it_back(way: str) -> None:
    """The head owns the bias of its decoder under a second name."""
    model = problem_of("bert_mlm", way).model
    names = [[name for name, _ in m.named_parameters(remove_duplicate=False)] for m in model.modules()]
    compare("bert_mlm", way, "opacus", "layer")
    clipper = attach(model, engine="opacus")
    clipper.detach()
    assert names == [[n for n, _ in m.named_parameters(remove_duplicate=False)] for m in model.modules()]
