"""From torchrun's environment to a process group, and back to a clean end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from dpexp.errors import UserError
from dpexp.parallel.meeting import fresh
from dpexp.parallel.ranks import ALONE, Ranks, ToldElsewhere, said_who_is_gone

# A rank waits so long for the others: while rank 0 reads the data, or one of them measures its engine.
TIMEOUT = timedelta(minutes=30)
_known: dict[int, Ranks] = {}


def started_by_torchrun() -> int:
    """How many processes torchrun (or what sets its environment variables) has started together; 1 without it."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return int(os.environ["WORLD_SIZE"]) if all(name in os.environ for name in names) else 1


def told_by_submitit() -> None:
    """Set torchrun's environment variables in a task of a submitit job that has several tasks; nothing elsewhere.

    A GPU for each task is chosen by `joined`, from the task's number on its machine.
    """
    if "SUBMITIT_EXECUTOR" not in os.environ or started_by_torchrun() > 1:
        return
    from submitit import JobEnvironment
    from submitit.helpers import TorchDistributedEnvironment

    if JobEnvironment().num_tasks > 1:
        TorchDistributedEnvironment().export(set_cuda_visible_devices=False, overwrite=True)


def given_one_gpu() -> bool:
    """Tell whether what started this process has chosen GPUs for it alone (``srun --gpus-per-task=1``): torchrun's processes all
    see what torchrun sees."""
    return "CUDA_VISIBLE_DEVICES" in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ


@contextmanager
def joined(device: str = "auto") -> Iterator[Ranks]:
    """Join the other processes that torchrun has started, for as long as the context lasts; alone without torchrun.

    One process that torchrun has started gets a group of its own: a script wraps its model whatever their number.

    A process group that exists already is used, and left alone. On GPUs, each process of a machine takes the one with its local
    number, or the only one that it was given.

    Args:
        device: ``auto``, ``cpu`` or ``cuda``; with one process also ``cuda:NUMBER``.

    Raises:
        UserError: there are fewer GPUs than processes on this machine, or all of them are to compute on one.
    """
    together = dist.get_world_size() if dist.is_initialized() else started_by_torchrun()
    if device.startswith("cuda:") and together > 1:
        raise UserError(
            f"runtime.device={device} names one GPU for all {together} processes of this run: choose runtime.device=cuda, with "
            "which each takes its own (CUDA_VISIBLE_DEVICES says among which), or start one process"
        )
    if dist.is_initialized():
        with said_who_is_gone():
            yield current()
        return
    if together == 1 and "TORCHELASTIC_RUN_ID" not in os.environ:
        yield ALONE
        return
    gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    if gpu and together > 1:
        local, there = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if there == 1 and given_one_gpu():
            local = 0
        if local >= there:
            raise UserError(
                f"process {local} of this machine finds {there} GPUs: start one process for each GPU (torchrun "
                f"--nproc-per-node {max(1, there)}), or choose runtime.device=cpu"
            )
        torch.cuda.set_device(local)
    store, rank, size = next(rendezvous("env://", timeout=TIMEOUT))
    store.set_timeout(TIMEOUT)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if gpu else "gloo",
        store=fresh(store, rank, size, TIMEOUT), rank=rank, world_size=size, timeout=TIMEOUT,
    )  # fmt: skip
    try:
        with said_who_is_gone():
            yield current()
    except ToldElsewhere:
        # torchrun ends all as soon as one has ended, also a rank 0 that has not yet said why
        with suppress(UserError):
            current().broadcast()
        raise
    finally:
        _known.clear()
        dist.destroy_process_group()


def current() -> Ranks:
    """The processes of the default process group; `ALONE` where there is none.

    The first call is for all processes together.
    """
    if not dist.is_available() or not dist.is_initialized():
        return ALONE
    world = id(dist.group.WORLD)
    if world not in _known:
        _known.clear()
        _known[world] = Ranks.of()
    return _known[world]
