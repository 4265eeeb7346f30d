"""A pair of processes (or more) that runs many cases: forked once, because importing the libraries takes longer than they do."""

import importlib
import io
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from dpexp.parallel import current


def run_ranks(size: int, folder: Path, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call `function(ranks, *arguments)` in `size` processes with a gloo group; what each returns, in their order.

    A process that fails ends them all, and its traceback is raised here.
    """
    # what optimisers and shards would import, slowly, once in every fork
    for name in ("torch._dynamo", "torch.distributed.fsdp"):
        importlib.import_module(name)
    context = mp.get_context("fork")
    answers = [context.SimpleQueue() for _ in range(size)]
    rendezvous = folder / f"rendezvous{len(list(folder.iterdir()))}"

    def work(rank: int) -> None:
        torch.set_num_threads(1)
        try:
            dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
            # as bytes: tensors that are shared would end with this process
            torch.save(function(current(), *arguments), answer := io.BytesIO())
            answers[rank].put((None, answer.getvalue()))
        except BaseException:
            answers[rank].put((traceback.format_exc(), None))
        os._exit(0)  # no destructors of a forked interpreter

    processes = [context.Process(target=work, args=(rank,)) for rank in range(size)]
    for process in processes:
        process.start()
    found: list[Any] = [None] * size
    try:
        waiting = set(range(size))
        while waiting:
            for rank in list(waiting):
                if answers[rank].empty():
                    processes[rank].join(0.01)
                    if processes[rank].exitcode not in (None, 0):
                        raise AssertionError(f"rank {rank} was killed")
                    continue
                failed, answer = answers[rank].get()
                if failed is not None:
                    raise AssertionError(f"rank {rank}: {failed}")
                found[rank] = torch.load(io.BytesIO(answer), weights_only=False)
                waiting.discard(rank)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return found
