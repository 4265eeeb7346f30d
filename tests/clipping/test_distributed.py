"""Two processes: after ``clipper.backward`` each rank's ``p.grad`` is the sum over the examples of both."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

from dpexp.clipping import attach
from dpexp.errors import UserError
from tests.clipping.zoo import ZOO, Problem

SHARES = {0: slice(0, 2), 1: slice(2, 5)}  # unequal: averages would show


def gradients(problem: Problem) -> dict[str, torch.Tensor]:
    return {
        n: p.grad.clone()
        for n, p in problem.model.named_parameters()
        if p.requires_grad and p.grad is not None
    }


def worker(rank: int, port_file: str, name: str, engine: str, groups: str, order: str, unused: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{port_file}", rank=rank, world_size=2)
    alone = ZOO[name]()
    clipper = attach(alone.model, groups=groups, clip_norm=0.5, engine=engine)
    clipper.backward(alone.losses(alone.model, alone.batch))
    clipper.backward(alone.losses(alone.model, alone.batch))
    reference = gradients(alone)

    shared = ZOO[name]()
    batch = {k: v[SHARES[rank]] for k, v in shared.batch.items()}
    if order == "attach first":
        clipper = attach(shared.model, groups=groups, clip_norm=0.5, engine=engine)
        wrapped = DistributedDataParallel(shared.model, find_unused_parameters=unused)
    else:
        wrapped = DistributedDataParallel(shared.model, find_unused_parameters=unused)
        clipper = attach(wrapped, groups=groups, clip_norm=0.5, engine=engine)
    if unused:
        losses = shared.losses(wrapped, batch)
        with pytest.raises(UserError, match="find_unused_parameters=False"):
            clipper.backward(losses)
        assert gradients(shared) == {}
        dist.destroy_process_group()
        return
    for _ in range(2):  # the second accumulates
        clipper.backward(shared.losses(wrapped, batch))
    found = gradients(shared)
    for key, value in reference.items():
        torch.testing.assert_close(found[key], value, msg=lambda m, k=key: f"rank {rank}, {k}: {m}")
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("name", "engine", "groups", "order", "unused"),
    [
        ("tied_head", "auto", "layer", "attach first", False),
        ("bare_parameters", "bk", "flat", "attach last", False),
        ("reused_module", "ghost", "flat", "attach first", False),
        ("mlp", "auto", "flat", "attach last", True),
    ],
)
def test_ddp_sums_over_ranks(
    name: str, engine: str, groups: str, order: str, unused: bool, tmp_path: Path
) -> None:
    arguments = (str(tmp_path / "rendezvous"), name, engine, groups, order, unused)
    mp.start_processes(
        worker, arguments, nprocs=2, start_method="fork" if sys.platform == "linux" else "spawn"
    )


def sharded(rank: int, port_file: str) -> None:
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{port_file}", rank=rank, world_size=1)
    problem = ZOO["mlp"]()
    clipper = attach(problem.model)
    for layer in (problem.model[0], problem.model[2], problem.model):
        fully_shard(layer)
    with pytest.raises(UserError, match="sharded after attach"):
        clipper.backward(problem.losses(problem.model, problem.batch))
    assert gradients(problem) == {}
    dist.destroy_process_group()


def test_a_model_that_is_sharded_later_is_refused(tmp_path: Path) -> None:
    """In the other order it works: tests/parallel/test_sharded.py."""
    mp.start_processes(
        sharded,
        (str(tmp_path / "rendezvous"),),
        nprocs=1,
        start_method="fork" if sys.platform == "linux" else "spawn",
    )
