"""Handing the clipped sums to ``p.grad``, also where a wrapper reduces gradients over ranks."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dpexp.errors import UserError


def refuse_sharded(model: nn.Module) -> None:
    """Sharded parameters would need the clipped sums in shards."""
    for name, param in model.named_parameters():
        if type(param.data).__name__ == "DTensor":
            raise UserError(
                f"{name} is sharded (FSDP2 or tensor parallel): not supported; use DistributedDataParallel, or attach on every "
                "rank and sum p.grad with all_reduce"
            )


def deliver(model: nn.Module, params: dict[str, nn.Parameter], sums: dict[str, Tensor]) -> None:
    """``p.grad += sum``; a parameter without a sum gets zeros, because it is noised like every other.

    Under `DistributedDataParallel` the sums go through its reducer, which averages over ranks: multiplied by the world size
    first, ``p.grad`` ends as the sum over all ranks.
    """
    complete = {name: sums[name] if name in sums else torch.zeros_like(p) for name, p in params.items()}
    if isinstance(model, DistributedDataParallel):
        world = torch.distributed.get_world_size(model.process_group)
        torch.autograd.backward(list(params.values()), [complete[name] * world for name in params])
        return
    for name, param in params.items():
        if param.grad is None:
            param.grad = complete[name]
        else:
            param.grad += complete[name]
