"""Handing the clipped sums to ``p.grad``, also where a wrapper reduces gradients over ranks."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dpexp.clipping.given import modules_of
from dpexp.clipping.gradients import PerExampleGradient, numerics
from dpexp.clipping.sharding import Shards, refuse_settings
from dpexp.errors import UserError
from dpexp.parallel.ranks import said_who_is_gone
from dpexp.torch_versions import gradient_dtype

# of torch's own communication hooks all but one round, compress or leave ranks out
TORCH_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks"


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


Sums = dict[str, Tensor | LateSum]
"""Clipped sums by parameter."""


def reducers_in(model: nn.Module) -> list[DistributedDataParallel]:
    """Return each DistributedDataParallel in a model, itself among them; it may lie within a compiled or a larger module."""
    return [module for module in modules_of(model) if isinstance(module, DistributedDataParallel)]


def reducer_of(model: nn.Module) -> DistributedDataParallel | None:
    """The wrapper that reduces the gradients of ``model``: one in it, or the one whose forward is calling it now."""
    if inside := reducers_in(model):
        return inside[0]
    active = DistributedDataParallel._active_ddp_module
    return active if isinstance(active, DistributedDataParallel) else None


def reducer_around(model: nn.Module) -> DistributedDataParallel | None:
    """The wrapper that was put around ``model`` later, where no forward has shown it yet: this rank has had no examples so far.

    Raises:
        UserError: there are several.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    # a module knows nothing of what holds it; and wrappers that are gone are still there until they are collected
    gc.collect()
    wrappers = [thing for thing in gc.get_objects() if issubclass(type(thing), DistributedDataParallel)]
    around = [wrapper for wrapper in wrappers if any(module is model for module in wrapper.modules())]
    if len(around) > 1:
        raise UserError(
            "the batch of this rank is empty, and several DistributedDataParallel are around the model, of which none was called "
            "yet: attach to the one that adds up its gradients"
        )
    return around[0] if around else None


def refuse_reducer(reducer: DistributedDataParallel) -> None:
    """Refuse what a DistributedDataParallel does in its own forward and cannot be kept from doing.

    Raises:
        UserError: names the option.
    """
    if reducer.static_graph:
        raise UserError(
            "DistributedDataParallel(static_graph=True) counts the gradients of one ordinary back-propagation, and clipped sums "
            "come by another way: leave static_graph out"
        )
    if reducer.mixed_precision is not None:
        raise UserError(
            "DistributedDataParallel(mixed_precision=...) swaps parameters for copies in 16 bits, whose gradients are not "
            "followed: leave it out, and compute under torch.autocast"
        )
    if reducer._join_config.enable:
        raise UserError(
            "DistributedDataParallel.join() is for ranks with fewer batches, and there are none here: a rank without examples "
            "calls clipper.backward with no losses (dpexp.PrivacyEngine does so). Leave join() out"
        )


def check_reducer(reducer: DistributedDataParallel | None, params: dict[str, nn.Parameter]) -> None:
    """Refuse a reducer that would not add up the clipped sums, all of them and unchanged."""
    if reducer is None:
        return
    refuse_reducer(reducer)
    if reducer.find_unused_parameters:
        # taps hide them from its search
        raise UserError(
            "DistributedDataParallel(find_unused_parameters=True) cannot be combined with a clipper, and need not be: every "
            "parameter gets a gradient here, zeros where it was not used. Pass find_unused_parameters=False"
        )
    inside = reducer.module.named_parameters()
    reduced = {id(p) for name, p in inside if name not in reducer.parameters_to_ignore}
    if alone := [name for name, p in params.items() if id(p) not in reduced]:
        raise UserError(
            f"{alone[0]} lies outside of DistributedDataParallel, or is ignored by it, and other parameters lie inside: its sum "
            "would stay on each rank. Wrap the whole model"
        )
    for hook, _ in reducer._comm_hooks:
        if hook.__module__.startswith(TORCH_HOOKS) and hook.__name__ != "allreduce_hook":
            raise UserError(
                f"the communication hook {hook.__name__} of DistributedDataParallel changes clipped sums before they hold noise, "
                "and an example could then move them by more than its threshold: leave register_comm_hook out"
            )


def silence(wrappers: Sequence[DistributedDataParallel]) -> None:
    """Keep wrappers from adding up gradients or copying buffers, and so from waiting for ranks that go forward less often."""
    for wrapper in wrappers:
        wrapper.require_backward_grad_sync = wrapper.require_forward_param_sync = False


@contextmanager
def silent(wrappers: Sequence[DistributedDataParallel]) -> Iterator[None]:
    """Inside, they are silent, see `silence`."""
    before = [(w.require_backward_grad_sync, w.require_forward_param_sync) for w in wrappers]
    silence(wrappers)
    try:
        yield
    finally:
        for wrapper, (gradients, buffers) in zip(wrappers, before, strict=True):
            wrapper.require_backward_grad_sync, wrapper.require_forward_param_sync = gradients, buffers


def pass_by(reducer: DistributedDataParallel) -> None:
    """Go through the forward of a wrapper around nothing, on a rank whose batch is empty.

    There a wrapper copies buffers and makes its reducer ready. A reducer that is not ready lets sums pass as they are, and those
    of the other ranks would wait for this rank's next ones, of another batch.
    """
    module, nothing = reducer.module, nn.Identity()
    # which it copies
    nothing.named_buffers = module.named_buffers  # type: ignore[method-assign]
    reducer.module = nothing
    try:
        with torch.enable_grad():
            # its own, and not the hooks of a clipper that is attached to it
            DistributedDataParallel.forward(reducer, torch.zeros(()))
    finally:
        reducer.module = module


def refuse_settings_apart(reducer: DistributedDataParallel, setting: int) -> None:
    """Refuse to add up the sums of ranks that clip otherwise, where they are about to be.

    Args:
        reducer: of the ranks.
        setting: of this rank's clipper (`AnyClipper.setting`).

    Raises:
        UserError: they do, or one has ended.
    """
    if not reducer.require_backward_grad_sync:
        return
    device = next(reducer.module.parameters()).device
    said = torch.tensor([setting, -setting], dtype=torch.int32, device=device)
    with said_who_is_gone():
        torch.distributed.all_reduce(said, torch.distributed.ReduceOp.MAX, group=reducer.process_group)
    most, least = said.tolist()
    refuse_settings(most != -least)


def deliver(
    reducer: DistributedDataParallel | None,
    params: dict[str, nn.Parameter],
    sums: Sums,
    shards: Shards | None = None,
    apart: bool = False,
) -> bool:
    """``p.grad += sum``; a parameter without a sum gets zeros, because it is noised like every other.

    Under `DistributedDataParallel` the sums go through its reducer, which averages over ranks: multiplied by the world size
    first, ``p.grad`` ends as the sum over all ranks. So it does under `fully_shard`, where it is a shard. Under ``no_sync``
    each rank keeps its own part, so that the parts of all ranks add up to the sum.

    Args:
        apart: whether ``p.grad`` holds such a part already, from passes before.

    Returns:
        Whether it does now.

    Raises:
        UserError: a rank has ended.
    """
    device = next(iter(params.values())).device
    with numerics.in_full(device), said_who_is_gone():
        if shards is not None:
            shards.deliver(params, {name: _tensor(value, params[name]) for name, value in sums.items()})
            return False
        if reducer is not None:
            world = torch.distributed.get_world_size(reducer.process_group)
            synced = reducer.require_backward_grad_sync
            if apart == synced:
                # what all have is their common part of a sum, or the other way round
                for param in params.values():
                    if param.grad is not None:
                        param.grad *= world if synced else 1 / world
            if synced:
                values = [_tensor(sums.get(name), p) * world for name, p in params.items()]
                # no forward of the wrapper may have done so: one under no_sync() does not, nor does its module by itself
                reducer.reducer.prepare_for_backward([])
                torch.autograd.backward(list(params.values()), values)
                return False
        for name, param in params.items():
            value = sums.get(name)
            if param.grad is None:
                param.grad = _tensor(value, param)
            elif isinstance(value, LateSum):
                value.add_to(param.grad)
            elif value is not None:
                param.grad += value
        return reducer is not None


def _tensor(value: Tensor | LateSum | None, param: nn.Parameter) -> Tensor:
    if value is None:
        return torch.zeros_like(param, dtype=gradient_dtype(param))
    return value.tensor(gradient_dtype(param)) if isinstance(value, LateSum) else value
