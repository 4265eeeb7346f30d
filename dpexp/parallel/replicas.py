"""Models that are whole on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dpexp.errors import UserError
from dpexp.parallel.environment import current, started_by_torchrun
from dpexp.parallel.ranks import Ranks


def unwrapped(model: nn.Module) -> tuple[nn.Module, DistributedDataParallel | None]:
    """Return the module that trains, and the DistributedDataParallel around it where there is one."""
    if isinstance(model, DistributedDataParallel):
        return model.module, model
    return model, None


def ranks_of(wrapper: DistributedDataParallel | None) -> Ranks:
    """Return the processes that train together: those of the wrapper, or of the default process group.

    Raises:
        UserError: torchrun has started several, and they have not met.
    """
    if wrapper is not None and wrapper.process_group is not torch.distributed.group.WORLD:
        return Ranks.of(wrapper.process_group)
    if started_by_torchrun() > 1 and not torch.distributed.is_initialized():
        raise UserError(
            f"torchrun has started {started_by_torchrun()} processes that do not know each other yet: call "
            "torch.distributed.init_process_group() before PrivacyEngine(...)"
        )
    return current()


@contextmanager
def silent(wrapper: DistributedDataParallel | None) -> Iterator[None]:
    """Keep a wrapper from adding up gradients or copying buffers: `Steps` adds up once for each logical batch.

    Its reducer would do so in every backward pass, and wait for ranks that have fewer physical batches.
    """
    if wrapper is None:
        yield
        return
    before = wrapper.require_backward_grad_sync, wrapper.require_forward_param_sync
    wrapper.require_backward_grad_sync = wrapper.require_forward_param_sync = False
    try:
        yield
    finally:
        wrapper.require_backward_grad_sync, wrapper.require_forward_param_sync = before
