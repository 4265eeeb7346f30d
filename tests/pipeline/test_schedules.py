"""Two processes against one: sums, norms and counts under each schedule, each way to clip, full and LoRA."""

import itertools
import math
import os

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from dpexp.clipping import attach
from dpexp.clipping.devices import device_groups
from dpexp.errors import UserError
from dpexp.parallel import Ranks
from dpexp.pipeline.clipper import StageClipper, WholeModel
from dpexp.pipeline.flat import WAYS
from dpexp.pipeline.runner import Pipeline, check_schedule
from dpexp.pipeline.split import keep_stage
from dpexp.tasks.target_loss import example_losses
from tests.parallel.pool import run_ranks
from tests.pipeline.models import batch_of, language_model
from tests.versions import needs_torch

pytestmark = needs_torch(2, 14)

EXAMPLES = 8


def test_schedules_that_are_not_exact_are_refused_by_name() -> None:
    for name, words in (
        ("interleaved1f1b", "several stages"),
        ("zbv_zero_bubble", "1f1b or gpipe"),
        ("x", "not known"),
    ):
        with pytest.raises(UserError, match=words):
            check_schedule(name)


# kind, LoRA, schedule, examples in a microbatch, groups, way of flat clipping, rematerialise, park, precision
CASES: list[tuple] = [
    ("gpt2", False, "1f1b", 3, "device", None, False, False, "fp64"),
    ("gpt2", True, "gpipe", 3, "device", None, False, False, "fp64"),
    ("llama", True, "1f1b", 3, "device", None, True, True, "fp64"),
    ("llama", False, "gpipe", 8, "device", None, False, False, "fp32"),
    ("llama", False, "1f1b", 3, "device", None, False, False, "bf16"),
    ("llama", False, "1f1b", 3, "layer", None, False, False, "fp64"),
    *[("llama", way != "last", "1f1b", 3, "flat", way, False, False, "fp64") for way in WAYS],
    ("gpt2", False, "gpipe", 3, "flat", "second_backward", True, False, "fp64"),
    ("gpt2", False, "1f1b", 8, "flat", "microbatch", False, False, "fp32"),
]


if os.environ.get("DPEXP_ALL_RANKS"):  # make test-ranks
    WAYS_TO_CLIP = [("device", None), *(("flat", way) for way in WAYS)]
    CASES += [
        (kind, lora, schedule, size, *way, False, False, precision)
        for kind, lora, schedule, size, way, precision in itertools.product(
            ("gpt2", "llama"), (False, True), ("gpipe", "1f1b"), (3, 8), WAYS_TO_CLIP, ("fp32", "bf16")
        )
    ]


def groups_of(model: torch.nn.Module, name: str) -> object:
    return device_groups(model, 2) if name == "device" else name


def context_of(precision: str) -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16")


def dtype_of(precision: str) -> torch.dtype:
    return torch.float64 if precision == "fp64" else torch.float32


def in_stages(ranks: Ranks, cases: list[tuple], thresholds: list[list[float]]) -> list[dict]:
    found = []
    norms = dist.new_group([0, 1])
    for case, values in zip(cases, thresholds, strict=True):
        kind, lora, schedule, size, groups, way, again, park, precision = case
        model = language_model(kind, lora, dtype_of(precision))
        plan = WholeModel(model, groups_of(model, groups), 2)
        model = keep_stage(model, ranks.rank, 2)
        clipper = StageClipper(model, plan, engine="auto")
        clipper.thresholds = values
        pipeline = Pipeline(
            model, ranks.rank, 2, example_losses, ranks.group,
            schedule=schedule, clipper=clipper.clipper, flat=way, norms=norms, rematerialise=again, park=park,
            context=lambda precision=precision: context_of(precision),
        )  # fmt: skip
        for _ in range(2):  # the first backward passes look closely, the next do not
            model.zero_grad()
            losses, reports = pipeline.run(batch_of(EXAMPLES), size)
        whole = [clipper.whole(report) for report in reports]
        found.append(
            {
                "losses": losses,
                "norms": torch.cat([r.norms for r in whole], 1),
                "clipped": torch.stack([r.clipped for r in whole]).sum(0),
                "grads": {n: p.grad for n, p in model.named_parameters() if p.requires_grad},
                "bytes": dict(pipeline.traffic.bytes),
                "batches": len(reports),
            }
        )
    # numbers without storages, which end with this process
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().numpy(), found)


def in_one(case: tuple) -> dict:
    """Expected of one process; thresholds are the medians of the norms, so that some examples are clipped and some not."""
    kind, lora, *_, groups, _, _, _, precision = case
    whole = language_model(kind, lora, dtype_of(precision))
    clipper = attach(whole, groups=groups_of(whole, groups))
    for _ in range(2):
        whole.zero_grad()
        with context_of(precision):
            losses = example_losses(whole, batch_of(EXAMPLES))
        report = clipper.backward(losses)
        thresholds = clipper.thresholds.tolist()
        clipper.thresholds = report.norms.median(1).values * 1.001
    return {
        "thresholds": thresholds,
        "losses": losses.detach(),
        "norms": report.norms,
        "clipped": report.clipped,
        "grads": {n: p.grad for n, p in whole.named_parameters() if p.requires_grad},
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, tuple, dict, dict, dict]]:
    """Of each case its name, what one process finds, and the first and the last stage; the stages are started once for all."""
    expected = [in_one(case) for case in CASES]
    thresholds = [one["thresholds"] for one in expected]
    answers = run_ranks(2, tmp_path_factory.mktemp("stages"), in_stages, CASES, thresholds)
    stages = zip(*tree_map_only(np.ndarray, torch.from_numpy, answers), strict=True)
    return [
        ("-".join(map(str, case)), case, one, first, last)
        for case, one, (first, last) in zip(CASES, expected, stages, strict=True)
    ]


def test_two_stages_sum_what_one_process_sums(found: list[tuple[str, tuple, dict, dict, dict]]) -> None:
    """Every case in one test: each worker that is given one makes them all."""
    for name, case, one, first, last in found:
        check_sums(case, one, first, last, name)


def check_sums(case: tuple, one: dict, first: dict, last: dict, name: str) -> None:
    size, way, precision = case[3], case[5], case[-1]
    tolerance = {"fp64": 1e-9, "fp32": 1e-5, "bf16": 1e-3}[precision]
    close = {"rtol": tolerance, "atol": tolerance, "msg": lambda said: f"{name}: {said}"}
    torch.testing.assert_close(last["losses"].to(one["losses"]), one["losses"], **close)
    # a group that spans the stages has its whole norm in both
    norms = first["norms"] if way else first["norms"] + last["norms"]
    torch.testing.assert_close(norms, one["norms"], **close)
    clipped = first["clipped"] if way else first["clipped"] + last["clipped"]
    assert precision == "bf16" or clipped.tolist() == one["clipped"].tolist(), name
    assert 0 < int(one["clipped"].sum()) < one["norms"].numel(), name
    sums = first["grads"] | last["grads"]
    assert set(sums) == set(one["grads"]), name
    largest = max(float(g.abs().max()) for g in one["grads"].values())
    for parameter, gradient in one["grads"].items():
        assert float((sums[parameter] - gradient).abs().max()) <= tolerance * largest, (name, parameter)
    assert first["batches"] == math.ceil(EXAMPLES / size), name


def test_only_flat_clipping_sends_norms(found: list[tuple[str, tuple, dict, dict, dict]]) -> None:
    for name, case, _, first, last in found:
        way, park = case[5], case[7]
        for stage in (first, last):
            sent, batches = stage["bytes"], stage["batches"]
            numbers = 2 * batches * math.ceil(EXAMPLES / batches)
            assert sent.get("norms", 0) == (8 * numbers if way else 0), name
            assert (sent.get("parked", 0) > 0) == (way == "offload" or park), name
        assert first["bytes"]["activations"] == last["bytes"]["gradients"] > 0, name
