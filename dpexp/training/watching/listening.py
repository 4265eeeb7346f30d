"""What ranks tell each other while a batch is watched: not all of it passes through a function mode of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor

from dpexp.clipping.tapping.forwards import tensors_in

# methods of a process group that write to their first argument what ranks add up or gather. What one of them tells the others
# is refused in its own losses
COLLECTIVES = (
    "allreduce", "allreduce_coalesced", "reduce", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced", "allgather", "_allgather_base", "all_gather_single",
    "allgather_coalesced", "allgather_into_tensor_coalesced", "all_gather_single_coalesced", "gather", "gather_into_tensor",
    "gather_single", "alltoall", "alltoall_base", "all_to_all_single",
)  # fmt: skip


@contextmanager
def listening(hear: Callable[[list[Tensor], list[Tensor]], None]) -> Iterator[None]:
    """Tell what ranks send each other and what they get, whoever asks them to: not all of it passes through a function mode."""
    group = dist.ProcessGroup
    kept = {name: vars(group)[name] for name in COLLECTIVES if name in vars(group)}

    def heard(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            work = method(self, *args, **kwargs)
            written, *others = [*args, *kwargs.values()]
            hear(tensors_in(others[:1]) or tensors_in([written]), tensors_in([written]))
            return work

        return call

    for name in kept:
        setattr(group, name, heard(getattr(group, name)))
    try:
        yield
    finally:
        for name, method in kept.items():
            setattr(group, name, method)
