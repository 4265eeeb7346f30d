"""Handing the clipped sums to ``p.grad``, also where a wrapper reduces gradients over ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dpexp.clipping.gradients import PerExampleGradient
from dpexp.clipping.sharding import Shards
from dpexp.errors import UserError
from dpexp.torch_versions import gradient_dtype


@dataclass
class LateSum:
    """A clipped sum that touches few rows of a table: formed when it is delivered, straight into an existing gradient."""

    per_example: PerExampleGradient
    factors: Tensor

    def tensor(self, dtype: torch.dtype) -> Tensor:
        """Form the sum."""
        return self.per_example.weighted_sum(self.factors).to(dtype)

    def add_to(self, gradient: Tensor) -> None:
        """Add the sum to ``gradient`` in place."""
        if gradient.dtype == self.per_example.dtype and gradient.is_contiguous():
            self.per_example.weighted_sum(self.factors, out=gradient)
        else:
            gradient += self.tensor(gradient.dtype)


def reducer_of(model: nn.Module) -> DistributedDataParallel | None:
    """The wrapper that reduces the gradients of ``model``: itself, or the one whose forward is calling it now."""
    if isinstance(model, DistributedDataParallel):
        return model
    active = DistributedDataParallel._active_ddp_module
    return active if isinstance(active, DistributedDataParallel) else None


def check_reducer(reducer: DistributedDataParallel | None) -> None:
    """Refuse a reducer that would take every parameter for unused, because taps hide them from its search."""
    if reducer is not None and reducer.find_unused_parameters:
        raise UserError(
            "DistributedDataParallel(find_unused_parameters=True) cannot be combined with a clipper, and need not be: every "
            "parameter gets a gradient here, zeros where it was not used. Pass find_unused_parameters=False"
        )


def deliver(
    reducer: DistributedDataParallel | None,
    params: dict[str, nn.Parameter],
    sums: dict[str, Tensor | LateSum],
    shards: Shards | None = None,
) -> None:
    """``p.grad += sum``; a parameter without a sum gets zeros, because it is noised like every other.

    Under `DistributedDataParallel` the sums go through its reducer, which averages over ranks: multiplied by the world size
    first, ``p.grad`` ends as the sum over all ranks. So it does under `fully_shard`, where it is a shard.
    """
    if shards is not None:
        shards.deliver(params, {name: _tensor(value, params[name]) for name, value in sums.items()})
        return
    if reducer is not None:
        world = torch.distributed.get_world_size(reducer.process_group)
        values = [_tensor(sums.get(name), p) * world for name, p in params.items()]
        torch.autograd.backward(list(params.values()), values)
        return
    for name, param in params.items():
        value = sums.get(name)
        if param.grad is None:
            param.grad = _tensor(value, param)
        elif isinstance(value, LateSum):
            value.add_to(param.grad)
        elif value is not None:
            param.grad += value


def _tensor(value: Tensor | LateSum | None, param: nn.Parameter) -> Tensor:
    if value is None:
        return torch.zeros_like(param, dtype=gradient_dtype(param))
    return value.tensor(gradient_dtype(param)) if isinstance(value, LateSum) else value
