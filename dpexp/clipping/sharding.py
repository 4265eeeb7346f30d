"""Models sharded by ``fully_shard`` (FSDP2): a clipped sum goes to the shards by FSDP's own reduce-scatter.

Outside of its own computation a module holds shards (`DTensor`s), inside the whole parameter, always the same object. Taps follow
the whole one; groups, thresholds and optimiser know the shard. FSDP gathers weights for the forward and again for the backward,
as it does without privacy. Its reduction waits until the clipped sums are there: they become the gradients of the whole
parameters, and FSDP adds them up over ranks, each rank keeping its shards. Where all sums of a sharded module are there when
its back-propagation ends (per-layer and per-block clipping), that is the moment, as without privacy; else the end of all.

Gathering takes all ranks at once, so all of them must go through a graph equally often, and through its modules in one order:
gloo and NCCL pair what comes next, and would make one module of parts of two. Ranks tell each other the order before a backward
pass, and in the first passes each module before it is gathered, because who gathers one more waits for ever.

All this holds for what is known. Whatever proves something goes through a graph as often as it likes: where any rank is about to,
all of them keep the model whole for this backward pass. These are the first steps, and the 16th, 64th, 256th.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.contract import _get_registry

from dpexp.clipping.compiling import uncompiled
from dpexp.clipping.groups import trainable_parameters
from dpexp.errors import UserError
from dpexp.parallel import current
from dpexp.parallel.ranks import said_who_is_gone
from dpexp.torch_versions import check_fully_shard

# settings of FSDP's groups of parameters that hold for a clipped pass alone
OF_A_PASS = (
    "post_forward_mesh_info", "reshard_after_backward", "gradient_divide_factor", "force_sum_reduction_for_comms",
)  # fmt: skip

# what a rank says that gathers no module, but begins its backward pass
BACKWARD = -1
# passes in which ranks say which module comes next
WATCHED_PASSES = 3

WAY_OUT = "shard the plain module with torch.distributed.fsdp.fully_shard (blocks first, then the whole model), then attach"


def shards_of(model: nn.Module) -> Shards | None:
    """Return what `fully_shard` has made of a model; None where nothing is sharded.

    Raises:
        UserError: it is sharded in another way, or in part; or torch is too old for it.
    """
    parts = parts_of(model)
    return None if parts is None else Shards(model, *parts)


def parts_of(model: nn.Module) -> tuple[list[Any], dict[str, nn.Parameter]] | None:
    """Return the modules that `fully_shard` was called on, and what trains, by name; None where nothing is sharded.

    Raises:
        UserError: it is sharded in another way, or in part; or torch is too old for it.
    """
    for name, module in model.named_modules():
        kinds = {c.__name__: c.__module__ for c in type(module).__mro__}
        where = name or "the model"
        if "fsdp" in kinds.get("FullyShardedDataParallel", ""):
            raise UserError(
                f"{where} is wrapped in FullyShardedDataParallel (FSDP1), whose flat parameters hide from whom a gradient comes: "
                f"{WAY_OUT}"
            )
        if "replicate" in (_get_registry(module) or {}):
            raise UserError(
                f"{where} was given to replicate(), which adds up gradients in hooks that no clipped sum passes: take "
                "torch.nn.parallel.DistributedDataParallel, or give PrivacyEngine the plain module"
            )
        if any("deepspeed" in place for place in kinds.values()):
            raise UserError(
                f"{where} belongs to DeepSpeed, whose ZeRO moves gradients before they are clipped: {WAY_OUT}"
            )
    if any(hasattr(p, "ds_id") for p in model.parameters()):
        raise UserError(
            f"the parameters are partitioned by DeepSpeed (ZeRO 3), which gathers them by itself: {WAY_OUT}"
        )
    modules = sharded_modules(model)
    trained = trainable_parameters(model)
    sharded = [name for name, p in trained.items() if is_shard(p)]
    if not modules and not sharded:
        return None
    odd = next((name for name in sharded if not _is_data_parallel(trained[name])), None)
    if odd is not None or not modules:
        raise UserError(
            f"{odd or sharded[0]} is split by tensor parallelism: every rank then has a part of each example's gradient, and no "
            f"rank its norm. Leave it out; for memory, {WAY_OUT}"
        )
    if not any(module is model for module in modules) or len(sharded) < len(trained):
        alone = next((name for name in trained if name not in sharded), "the model itself")
        raise UserError(
            f"{alone} is not sharded, and other parts are: call fully_shard(model) on the whole model too, after its blocks"
        )
    check_fully_shard()
    return modules, trained


def sharded_modules(model: nn.Module) -> list[Any]:
    """Return the modules that `fully_shard` was called on."""
    return [m for m in model.modules() if any(c.__name__ == "FSDPModule" for c in type(m).__mro__)]


class Shards:
    """The sharded model of a clipper.

    Args:
        model: the root.
        modules: those that `fully_shard` was called on, the root among them.
        trained: shards by the parameters' names.
    """

    def __init__(self, model: nn.Module, modules: Sequence[Any], trained: dict[str, nn.Parameter]):
        self.root = cast("Any", model)
        self.modules = modules
        self.groups = [g for module in self.modules for g in module._get_fsdp_state()._fsdp_param_groups]
        held = {id(p.sharded_param): p for group in self.groups for p in group.fsdp_params}
        self.held = {name: held[id(p)] for name, p in trained.items()}
        for name, p in self.held.items():
            dtype = p.mp_policy.reduce_dtype or p.mp_policy.param_dtype
            if dtype is not None and dtype.itemsize < 4:
                raise UserError(
                    f"the clipped sum of {name} would be added up over ranks in {dtype}, and an example could then move it by "
                    "more than its threshold: give MixedPrecisionPolicy(..., reduce_dtype=torch.float32)"
                )
        place = {id(p): number for number, group in enumerate(self.groups) for p in group.fsdp_params}
        self.members: list[list[str]] = [[] for _ in self.groups]
        for name, p in self.held.items():
            self.members[place[id(p)]].append(name)
        # of the pass that runs: sums that are formed, where they are wanted early
        self.sums: dict[str, Any] | None = None
        # of each module: whether its sums were there in time in the last pass, on this rank, and on all; and those that are
        # reduced in this pass
        self.in_time = [False] * len(self.groups)
        self.agreed = [False] * len(self.groups)
        self.reduced: set[int] = set()
        mesh: Any = next(iter(trained.values()))
        self.mesh = mesh.device_mesh
        self.root.set_manual_backward_finalization(True)
        # the modules that were gathered for forwards since the last pass
        self.way: list[int] = []
        self.passes = 0
        self.hooks = [
            module.register_forward_pre_hook(partial(self._enters, number), prepend=True)
            for number, module in enumerate(self.modules)
        ]

    def release(self) -> None:
        """Let FSDP reduce gradients by itself again."""
        for hook in self.hooks:
            hook.remove()
        # not in the middle of a pass that was refused: to end it would take all ranks
        with suppress(RuntimeError):
            self.root.set_manual_backward_finalization(False)

    def whole(self, name: str) -> nn.Parameter | None:
        """Return the whole parameter, whose memory FSDP fills and frees; None before the first forward."""
        return getattr(self.held[name], "_unsharded_param", None)

    def name_of(self, parameter: Tensor) -> str | None:
        """Return the name of a whole parameter."""
        return next((name for name in self.held if self.whole(name) is parameter), None)

    def wholes(self) -> list[nn.Parameter]:
        """Return the whole parameters, as far as there are any yet."""
        return [whole for name in self.held if (whole := self.whole(name)) is not None]

    def outliving(self, tensor: Tensor) -> Tensor:
        """Return a tensor that outlives the gathered weights: a copy, where it lies in their memory."""
        memory = tensor.untyped_storage().data_ptr()
        theirs = any(whole.untyped_storage().data_ptr() == memory for whole in self.wholes())
        return tensor.detach().clone() if theirs else tensor

    @uncompiled
    def _enters(self, number: int, module: Any, _: Any) -> None:
        """Write down that a module is gathered for its forward."""
        if any(group.is_sharded for group in module._get_fsdp_state()._fsdp_param_groups):
            self.way.append(number)
            self._meet(number)

    def _meet(self, place: int) -> None:
        """In the first passes, tell the other ranks what comes next here."""
        if self.passes >= WATCHED_PASSES:
            return
        if self.mesh.size() == current().size:
            # who does something else meanwhile is told so
            self._refuse_ways(len(set(current().gather_for("the sharded model", place))) > 1)
            return
        most, least = self._most([place, -place])
        self._refuse_ways(most != -least)

    def _refuse_ways(self, apart: bool) -> None:
        if apart:
            raise UserError(
                "ranks do not run the same modules in the same order, and under fully_shard each is gathered by all ranks at "
                "once: run every module that is sharded by itself on every rank in every forward (an expert to which no example "
                "is sent, a layer that is dropped, a forward that one rank makes alone), or shard only the module around it, or "
                "take DistributedDataParallel"
            )

    def _most(self, numbers: list[int]) -> list[int]:
        """Return the largest of each number on any rank."""
        said = torch.tensor(numbers, dtype=torch.int32, device=self.mesh.device_type)
        with said_who_is_gone():
            for dim in range(self.mesh.ndim):
                dist.all_reduce(said, dist.ReduceOp.MAX, group=self.mesh.get_group(dim))
        return said.tolist()

    def together(self, flag: bool, examples: int, setting: int) -> bool:
        """Tell whether the flag is set on any rank.

        Raises:
            UserError: some ranks have examples and others none, where FSDP needs all of them in every forward; or they went
                other ways through the model, or clip by another `setting`.
        """
        self._meet(BACKWARD)
        way, self.way, self.passes = zlib.crc32(str(self.way).encode()) >> 1, [], self.passes + 1
        late = [not seen for seen in self.in_time]
        numbers = [flag, examples > 0, examples == 0, setting, -setting, way, -way, *late]
        anywhere, some, none, setting, other, way, another, *missed = self._most(numbers)
        self.agreed = [not flag for flag in missed]
        if some and none:
            raise UserError(
                "a rank has an empty batch and another one has not, and under fully_shard all must go through the model equally "
                "often: give an empty rank an example with clip_scale=0 (dpexp.PrivacyEngine does so)"
            )
        self._refuse_ways(way != -another)
        refuse_settings(setting != -other)
        return bool(anywhere)

    @contextmanager
    def backward(self, curious: bool) -> Iterator[None]:
        """Around a backward pass: only clipped sums are reduced inside, and where a rank is curious, the model is whole."""
        before = [{name: getattr(g, name) for name in OF_A_PASS} for g in self.groups]
        self.root.set_requires_gradient_sync(False)
        for module in self.modules:
            # FSDP divides by the number of ranks otherwise, or by what somebody has set
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        self.sums, self.reduced = None, set()
        try:
            if not curious:
                self.in_time = [False] * len(self.groups)
                ended: set[int] = set()
                for number, group in enumerate(self.groups):
                    group.post_backward = partial(self._ended, number, group.post_backward, ended)
                # whole since the forward: a second back-propagation does not gather it where losses begin within the model
                for group in self.root._get_fsdp_state()._fsdp_param_groups:
                    group.reshard_after_backward = False
            else:
                for group in self.groups:
                    group.post_forward_mesh_info, group.reshard_after_backward = None, False
                for module in self.modules:
                    module.unshard()
            yield
        finally:
            self.sums = None
            self.root.set_requires_gradient_sync(True)
            for group, settings in zip(self.groups, before, strict=True):
                vars(group).pop("post_backward", None)
                for name, value in settings.items():
                    setattr(group, name, value)
            # what stays whole would be yesterday's weights in the next forward
            for module in self.modules:
                module.reshard()

    @torch.no_grad()
    def _ended(self, number: int, post_backward: Callable[[], None], ended: set[int]) -> None:
        """Take the place of FSDP's ``post_backward`` of a module: its sums are reduced now, where all ranks have them."""
        names, sums = self.members[number], self.sums
        first = number not in ended
        ended.add(number)
        if sums is not None and first:
            self.in_time[number] = bool(names) and all(name in sums for name in names)
        if sums is None or not first or not self.agreed[number]:
            post_backward()
            return
        if not self.in_time[number]:
            raise UserError(
                f"the clipped sum of {names[0]} was there at the end of its module's back-propagation in the last step and is "
                "not in this one, and other ranks wait for it: give all ranks batches of one kind, and start again from the "
                "last checkpoint"
            )
        for name in names:
            value = sums.pop(name)
            dtype = self.held[name].sharded_param.dtype
            self._give(name, value if isinstance(value, Tensor) else value.tensor(dtype))
        self.reduced.add(number)
        group = self.groups[number]
        group.reduce_grads = group.all_reduce_grads = True
        try:
            post_backward()
        finally:
            group.reduce_grads = group.all_reduce_grads = False

    def _give(self, name: str, value: Tensor) -> None:
        whole = self.whole(name)
        assert whole is not None
        whole.grad_dtype = None
        whole.grad = value

    @torch.no_grad()
    def deliver(self, params: dict[str, nn.Parameter], sums: dict[str, Tensor]) -> None:
        """Add the sums over all ranks to the shards' gradients, as far as they are not there yet; zeros where there is none."""
        for name in list(sums) if sums else ():
            self._give(name, sums.pop(name))
        # what no rank has used must not be missing on some
        early = {name for number in self.reduced for name in self.members[number]}
        for name, parameter in params.items():
            whole = self.whole(name)
            if name not in early and whole is not None and whole.grad is None:
                self._give(name, torch.zeros(whole.shape, dtype=parameter.dtype, device=whole.device))
        self.root.set_requires_gradient_sync(True)
        for number, group in enumerate(self.groups):
            group._post_backward_pending = number not in self.reduced
        self.root.finalize_backward()
        for parameter in params.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


@contextmanager
def held_as_it_is(model: nn.Module) -> Iterator[None]:
    """Inside, forwards of a model that is held whole are plain ones, with gradients too: nothing is gathered, cut or reduced."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    states = [module._get_fsdp_state() for module in sharded_modules(model)]
    before = [state._training_state for state in states]
    try:
        for state in states:
            # in which hooks of a forward let it pass, because it is a recomputation
            state._training_state = TrainingState.PRE_BACKWARD
        yield
    finally:
        for state, own in zip(states, before, strict=True):
            state._training_state = own


def refuse_settings(apart: bool) -> None:
    """Refuse to add up sums of ranks that clip otherwise.

    Raises:
        UserError: they do.
    """
    if apart:
        raise UserError(
            "clippers of several ranks differ in their thresholds, groups, rule or max_clip_scale, and noise fits one of them "
            "alone: attach with the same on all ranks, and compute new thresholds from numbers that all have (counts that are "
            "added up over ranks)"
        )


def is_shard(parameter: Tensor) -> bool:
    """Tell whether a parameter is held in part, as it is outside of its own computation."""
    return type(parameter.data).__name__ == "DTensor"


def _is_data_parallel(parameter: Any) -> bool:
    """Whether one dimension of the mesh shards and the others, if any, hold replicas (HSDP)."""
    split = [placement for placement in parameter.placements if not placement.is_replicate()]
    return len(split) <= 1 and parameter.placements[-1:] == tuple(split[-1:]) if split else False
