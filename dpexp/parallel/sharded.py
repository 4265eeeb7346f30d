"""Models whose parameters, gradients and optimiser states lie in parts on the ranks: FSDP2, `fully_shard`."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dpexp.parallel.shards import is_sharded, part_here
from dpexp.torch_versions import check_fully_shard


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a model: the members of every list of modules of one class, as transformers have."""
    found = []
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) > 1 and len({type(m) for m in module}) == 1:
            found += [m for m in module if any(p.requires_grad or p.numel() for p in m.parameters())]
    inner = {id(m) for block in found for m in block.modules() if m is not block}
    return [block for block in found if id(block) not in inner]


def shard(model: nn.Module) -> nn.Module:
    """Shard a model over all ranks, block by block, and let FSDP add gradients up instead of averaging them.

    Shared weights must not lie in two blocks; an embedding that is also the head lies outside of them.

    Raises:
        UserError: torch is too old for it.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    check_fully_shard()
    kind = next(model.parameters()).device.type
    # torch would take a mesh of the machine's GPUs, also for a model on the CPU; weights without numbers go where it says
    mesh = None if kind == "meta" else init_device_mesh(kind, (torch.distributed.get_world_size(),))
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # the device at hand may know sums alone (gloo)
            module.set_force_sum_reduction_for_comms(True)
    return model


def skeleton_of(model: nn.Module) -> nn.Module:
    """Return a copy of a model without the memory of its parameters, to be filled by `filled` when training is over."""
    bare = {id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in model.parameters()}
    return copy.deepcopy(model, bare)


def filled(skeleton: nn.Module, model: nn.Module, keep: bool) -> nn.Module | None:
    """Gather a sharded model into its skeleton on the CPU; all ranks call it, and None is returned where `keep` is false."""
    parts: Any = [*model.named_parameters(), *model.named_buffers()]
    values = {}
    for name, tensor in parts:
        value = tensor.detach()
        value = value.full_tensor() if is_sharded(value) else value
        if keep:
            values[name] = value.cpu()
    if not keep:
        return None
    for name, parameter in list(skeleton.named_parameters()):
        _replace(skeleton, parameter, nn.Parameter(values[name], parameter.requires_grad))
    for name, buffer in skeleton.named_buffers():
        buffer.copy_(values[name])
    return skeleton


def _replace(model: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    for module in model.modules():
        module._parameters.update({name: new for name, p in module._parameters.items() if p is old})


@contextmanager
def held_whole(model: nn.Module) -> Iterator[None]:
    """Inside, every rank holds all weights, and forwards need no other rank: evaluation and decoding go their own ways."""
    from torch.distributed.fsdp import FSDPModule

    modules: list[Any] = [m for m in model.modules() if isinstance(m, FSDPModule)]
    states = [module._get_fsdp_state() for module in modules]
    for state in states:
        # else the first forward does it, and changes what is put back at the end
        state._lazy_init()
    groups = [group for state in states for group in state._fsdp_param_groups]
    before = [group.post_forward_mesh_info for group in groups]
    try:
        for group in groups:
            group.post_forward_mesh_info = None
        for module in modules:
            module.unshard()
        yield
    finally:
        for group, info in zip(groups, before, strict=True):
            group.post_forward_mesh_info = info
        for module in modules:
            module.reshard()


@torch.no_grad()
def write_into(target: Any, whole: Tensor) -> None:
    """Overwrite a tensor, or the part of it that lies here, with the values of a whole one."""
    if is_sharded(target) == is_sharded(whole):
        target.copy_(whole)
        return
    part, place, _ = part_here(target)
    part.copy_(whole.reshape(-1)[place : place + part.numel()].view(part.shape))


def like(target: Any, whole: Tensor) -> Tensor:
    """Return a whole tensor as `target` lies: sharded in the same way, or as it is."""
    if not is_sharded(target) or is_sharded(whole) or whole.shape != target.shape:
        return whole
    made = torch.empty_like(target, dtype=whole.dtype)
    write_into(made, whole)
    return made
