"""Activations on the host between forward and backward (He et al., Algorithm 3, line 4, and Algorithm 4, line 2)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dpexp.pipeline.traffic import Traffic


def parked(model: nn.Module, traffic: Traffic) -> Any:
    """While active, what autograd saves goes to the host's memory, and comes back when it is asked for; weights stay.

    With activation checkpointing inside, only the inputs of the blocks are saved, so only they are moved.
    """
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor: Tensor) -> tuple[torch.device | None, Tensor]:
        if tensor.untyped_storage().data_ptr() in weights:
            return None, tensor
        traffic.add("parked", tensor.nbytes)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        return tensor.device, host.copy_(tensor)

    def unpack(found: tuple[torch.device | None, Tensor]) -> Tensor:
        device, tensor = found
        if device is None:
            return tensor
        traffic.add("parked", tensor.nbytes)
        return tensor.to(device, non_blocking=True)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
