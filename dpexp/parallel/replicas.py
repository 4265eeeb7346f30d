"""Models that are whole on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dpexp.errors import UserError
from dpexp.parallel.environment import current, started_by_torchrun
from dpexp.parallel.ranks import Ranks


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module that trains, without a DistributedDataParallel around it."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def ranks_of(wrappers: Sequence[DistributedDataParallel]) -> Ranks:
    """Return the processes that train together: those of the wrappers, or of the default process group.

    Raises:
        UserError: torchrun has started several, and they have not met; or the wrappers are of several groups.
    """
    groups = {id(wrapper.process_group): wrapper.process_group for wrapper in wrappers}
    if len(groups) > 1:
        raise UserError(
            "parts of the model are wrapped in DistributedDataParallel over different groups: take one"
        )
    for group in groups.values():
        if group is not torch.distributed.group.WORLD:
            return Ranks.of(group)
    if started_by_torchrun() > 1 and not torch.distributed.is_initialized():
        raise UserError(
            f"torchrun has started {started_by_torchrun()} processes that do not know each other yet: put the script into "
            "`with dpexp.parallel.joined():`, or call torch.distributed.init_process_group() before PrivacyEngine(...)"
        )
    return current()


def made_same(ranks: Ranks, model: nn.Module) -> None:
    """Give all ranks the weights and buffers of rank 0.

    Raises:
        UserError: they have not made one model: tensors of other names or shapes, or in another order, by which sums meet and
            noise is drawn (a network that was made by walking through a set has another one in each process).
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    places = {
        name: f"{list(t.shape)} {t.dtype} in place {place}" for place, (name, t) in enumerate(tensors.items())
    }
    ranks.agree("the model", places)
    ranks.copy_(tensors.values())
