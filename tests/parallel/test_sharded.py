"""Models that `fully_shard` has cut: sums and weights are those of one process, with replicas, offloading and bfloat16 too."""

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from dpexp import PrivacyEngine
from dpexp.clipping import attach
from dpexp.clipping.loop import LOOPED
from dpexp.parallel import Ranks
from dpexp.parallel.sharded import blocks_of, shard
from dpexp.tasks.target_loss import example_losses
from tests.parallel.cases import MODELS, Case, check_same, dataset, losses, made, run, whole
from tests.parallel.pool import run_ranks
from tests.pipeline.models import batch_of, language_model
from tests.versions import needs_torch

pytestmark = needs_torch(2, 15)

CASES = [
    Case("mlp", "flat"),
    Case("mlp", "adaptive", pieces=3),
    Case("mlp", "layer", batch_size=1.0),  # most shares are empty, and some batches
    Case("gpt2", "flat", pieces=3),
    Case("gpt2", "adaptive", precision="bf16"),
    Case("vit", "layer", engine="ghost"),
    Case("llama", "flat", "lora", pieces=3),
    Case("llama", "layer", checkpointing=True),
    Case("llama", "device", pieces=3),
]  # fmt: skip


def found_by(ranks: Ranks, folder: Path, cases: list[Case]):
    return [run(case, folder / f"sharded-{case}", shard, ranks=ranks.size) for case in cases]


def test_two_processes_with_shards_are_one(tmp_path: Path):
    alone = [run(case, tmp_path / f"alone-{case}") for case in CASES]
    for results in run_ranks(2, tmp_path, found_by, tmp_path, CASES):
        for case, found, expected in zip(CASES, results, alone, strict=True):
            check_same(found, expected, case)


def beside_a_gpu(ranks: Ranks) -> set[str]:
    """Kinds of devices over which a model on the CPU is cut, on a machine that has a GPU."""
    torch._C._get_accelerator = lambda *arguments: torch.device("cuda")
    return {p.device_mesh.device_type for p in shard(made(Case("gpt2"))).parameters()}


def test_a_model_is_cut_where_it_lies(tmp_path: Path):
    assert run_ranks(2, tmp_path, beside_a_gpu) == [{"cpu"}, {"cpu"}]


def cut(model: nn.Module, **options) -> nn.Module:
    """As somebody shards a model by hand."""
    from torch.distributed.fsdp import fully_shard

    for block in blocks_of(model):
        fully_shard(block, **options)
    return fully_shard(model, **options)


def by_hand(ranks: Ranks, folder: Path, case: Case, shapes: list[tuple[int, int]]):
    """HSDP on meshes of replicas × shards, and parameters that stay on the host."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy

    ways = {
        f"{shape}": {"mesh": init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards"))}
        for shape in shapes
    }
    ways["offload"] = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
    return [
        run(case, folder / name, lambda model, way=way: cut(model, **way), ranks=ranks.size)
        for name, way in ways.items()
    ]


def test_replicas_of_shards_and_offloaded_shards_are_one_process(tmp_path: Path):
    case = Case("gpt2", "adaptive", pieces=2)
    expected = run(case, tmp_path / "alone")
    for results in run_ranks(2, tmp_path, by_hand, tmp_path, case, [(2, 1), (1, 2)]):
        for found in results:
            check_same(found, expected, case)


@pytest.mark.skipif(not os.environ.get("DPEXP_ALL_RANKS"), reason="four processes: make test-ranks")
def test_two_replicas_of_two_shards_are_one_process(tmp_path: Path):
    case = Case("gpt2", "adaptive", pieces=2)
    expected = run(case, tmp_path / "alone")
    for results in run_ranks(4, tmp_path, by_hand, tmp_path, case, [(2, 2)]):
        for found in results:
            check_same(found, expected, case)


def summed_in_bf16(ranks: Ranks, case: Case):
    """What several passes leave in the gradients, with weights in bfloat16 and sums reduced in float32."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = cut(made(case), mp_policy=policy) if ranks.several else made(case).to(torch.bfloat16)
    clipper = attach(model, "layer", 0.05)
    rows = list(range(12))[ranks.rank :: ranks.size]
    for _ in range(3):
        model.zero_grad()
        batch = [values[rows] for values in dataset(case.model).tensors]
        # FSDP casts what enters a module to the weights' type
        batch = [x.to(torch.bfloat16) if x.is_floating_point() else x for x in batch]
        clipper.backward(losses(case, model, batch))
    types = {p.grad.dtype for p in model.parameters()}
    return types, {name: whole(p.grad).float() for name, p in model.named_parameters()}


def test_a_mixed_precision_policy_clips_what_bfloat16_weights_give(tmp_path: Path):
    for case in (Case("mlp"), Case("gpt2")):
        _, expected = summed_in_bf16(Ranks(), case)
        for types, found in run_ranks(2, tmp_path, summed_in_bf16, case):
            assert types == {torch.float32}
            for name, value in expected.items():
                assert float((found[name] - value).norm()) <= 1e-2 * float(value.norm()) + 1e-4, name


def summed_by(ranks: Ranks, name: str, groups: str):
    """Parameters that go through the loop over examples, and the gradients of the last of some passes."""
    case = Case(name)
    model = shard(made(case)) if ranks.several else made(case)
    clipper = attach(model, groups, 0.05)
    rows = list(range(12))[ranks.rank :: ranks.size]
    for _ in range(4):
        model.zero_grad()
        clipper.backward(losses(case, model, [values[rows] for values in dataset(name).tensors]))
    looped = [parameter for parameter, how in clipper.choices.items() if how == LOOPED]
    return looped, {name: whole(p.grad) for name, p in model.named_parameters()}


def all_summed_by(ranks: Ranks):
    return [summed_by(ranks, name, groups) for name in MODELS for groups in ("layer", "flat")]


def test_no_parameter_of_a_known_model_goes_through_the_loop(tmp_path: Path):
    """Also where positions are looked up, classes are copied to the rows, or weights are computed from parameters."""
    expected = all_summed_by(Ranks())
    for found in run_ranks(2, tmp_path, all_summed_by):
        for (looped, ours), (alone, theirs) in zip(found, expected, strict=True):
            assert looped == alone == []
            for name, value in theirs.items():
                torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-7)


# where their blocks lie
BLOCKS = {"llama": ".layers.", "gpt2": ".h."}


def formed_in_time(ranks: Ranks, name: str, groups: str):
    """Which parameters' sums wait for the end of the back-propagation, pass by pass, and the gradients of the last one."""
    case, waiting = Case(name), []
    model = shard(made(case))
    clipper = attach(model, groups, 0.05, choice="rule")
    deliver = clipper._shards.deliver
    clipper._shards.deliver = lambda params, sums: (waiting.append(sorted(sums)), deliver(params, sums))
    rows = list(range(12))[ranks.rank :: ranks.size]
    for _ in range(5):
        model.zero_grad()
        clipper.backward(losses(case, model, [values[rows] for values in dataset(name).tensors]))
    return waiting, {name: whole(p.grad) for name, p in model.named_parameters()}


def all_formed_in_time(ranks: Ranks):
    return {
        (name, groups): formed_in_time(ranks, name, groups) for name in BLOCKS for groups in ("layer", "flat")
    }


def test_sums_of_a_block_are_reduced_when_its_back_propagation_ends(tmp_path: Path):
    """Per-layer clipping holds one block's sums at a time, not the model's; flat clipping knows none before the end."""
    for of_cases in run_ranks(2, tmp_path, all_formed_in_time):
        for (name, groups), (waiting, found) in of_cases.items():
            case, alone = Case(name), made(Case(name))
            attach(alone, groups, 0.05).backward(
                losses(case, alone, [values[:12] for values in dataset(name).tensors])
            )
            blocks = [parameter for parameter in found if BLOCKS[name] in parameter]
            assert set(waiting[0]) >= set(blocks)
            # what lies outside of the blocks is last, and in time
            assert waiting[-1] == ([] if groups == "layer" else sorted(blocks))
            for parameter, p in alone.named_parameters():
                torch.testing.assert_close(found[parameter], p.grad, rtol=1e-5, atol=1e-7)


def summed_twice(ranks: Ranks):
    """An engine of two back-propagations, whose losses do not go through the outputs of the model."""
    model = language_model("gpt2", lora=True, dtype=torch.float32)
    model = shard(model) if ranks.several else model
    clipper = attach(model, "flat", 0.05, engine="ghost")
    rows = list(range(8))[ranks.rank :: ranks.size]
    for _ in range(4):
        model.zero_grad()
        clipper.backward(example_losses(model, {name: part[rows] for name, part in batch_of(8).items()}))
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.requires_grad}


def test_what_a_second_back_propagation_needs_is_whole(tmp_path: Path):
    expected = summed_twice(Ranks())
    for found in run_ranks(2, tmp_path, summed_twice):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-7)


def first_weights(ranks: Ranks, folder: Path):
    """Two replicas of one shard, whose processes have drawn their weights by other seeds."""
    from torch.distributed.device_mesh import init_device_mesh

    torch.manual_seed(ranks.rank)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
    model = cut(nn.Sequential(nn.Linear(10, 4), nn.Linear(4, 3)), mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with PrivacyEngine(
        model,
        optimizer,
        dataset("mlp"),
        folder=folder,
        batch_size=9,
        steps=3,
        noise_multiplier=1.0,
        delta=1e-3,
    ):
        return [p.to_local().clone() for p in model.parameters()]


def test_replicas_of_shards_begin_with_the_same_weights(tmp_path: Path):
    (tmp_path / "ranks").mkdir()
    first, second = run_ranks(2, tmp_path / "ranks", first_weights, tmp_path / "run")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
