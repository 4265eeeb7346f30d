"""The clipper of one stage, seen as that of the whole model: K groups, of which this process holds some."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dpexp.clipping import Clipper, Report, attach
from dpexp.clipping.devices import device_of
from dpexp.clipping.groups import Group, GroupsSpec, build_groups
from dpexp.errors import UserError


class SeenGroup(Group):
    """A group of the whole model. A parameter that lives in another process is a placeholder without numbers, so that parameters
    have the same places here as in one process: noise is drawn by place."""

    def __init__(self, name: str, params: dict[str, nn.Parameter], size: int):
        super().__init__(name, params)
        self._size = size

    @property
    def size(self) -> int:
        """Number of coordinates of the whole group."""
        return self._size


class WholeModel:
    """What a stage must know of the whole model, taken before it is cut.

    Args:
        model: whole.
        groups: as for `attach`.
        stages: how many.

    Raises:
        UserError: a group other than a single one for everything lies in several stages.
    """

    def __init__(self, model: nn.Module, groups: GroupsSpec, stages: int):
        where = device_of(model, stages)
        trained = {where[name] for name, p in model.named_parameters() if p.requires_grad}
        if idle := set(range(stages)) - trained:
            raise UserError(
                f"nothing trains in stage {min(idle)} of {stages}: train parameters in every block, take fewer stages, or use "
                "runtime=ddp"
            )
        self.flat = False
        self.groups: list[tuple[str, list[str], int]] = []
        for group in build_groups(model, groups):
            places = {where[name] for name in group.params}
            if len(places) > 1:
                self.flat = True
            self.groups.append((group.name, list(group.params), group.size))
        if self.flat and len(self.groups) > 1:
            raise UserError(
                "a clipping group must lie in one stage, or hold the whole model: use clip=perdevice, perlayer, perblock or flat"
            )


class StageClipper:
    """Attach to a stage, and answer for all groups.

    Args:
        model: the stage.
        plan: of the whole model.
        options: for `attach`: rule, engine and so on.
    """

    def __init__(self, model: nn.Module, plan: WholeModel, **options: Any):
        here = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.groups: list[Group] = []
        self.local: list[int] = []
        mapping: dict[str, Sequence[str]] = {}
        for k, (name, params, size) in enumerate(plan.groups):
            self.groups.append(SeenGroup(name, {n: here.get(n, _elsewhere()) for n in params}, size))
            if own := [n for n in params if n in here]:
                mapping[name] = own
                self.local.append(k)
        self._thresholds = torch.ones(len(self.groups), dtype=torch.float64)
        self.clipper: Clipper = attach(model, groups=mapping, clip_norm=[1.0] * len(mapping), **options)

    @property
    def thresholds(self) -> Tensor:
        """``[K]``, of all groups."""
        return self._thresholds

    @thresholds.setter
    def thresholds(self, value: Tensor | Sequence[float]) -> None:
        new = torch.as_tensor(value, dtype=torch.float64).detach().cpu()
        if new.shape != self._thresholds.shape:
            raise UserError(f"thresholds must have shape {[len(self.groups)]}, got {list(new.shape)}")
        self._thresholds = new.clone()
        self.clipper.thresholds = new[self.local]

    @property
    def sensitivity(self) -> float:
        """How far one example can move the sums of all stages together; see `Clipper.sensitivity`."""
        if self.clipper.rule == "none":
            return math.inf
        return self.clipper.max_clip_scale * float(self._thresholds.norm())

    def backward(
        self, losses: Tensor, clip_scale: Tensor | None = None, *, loss_scale: float = 1.0
    ) -> Report:
        """Of an empty batch: zeros for this stage's parameters, and a report of all groups."""
        return self.whole(self.clipper.backward(losses, clip_scale, loss_scale=loss_scale))

    def whole(self, report: Report) -> Report:
        """The report with a row for every group; zeros for those of other stages."""
        norms = report.norms.new_zeros(len(self.groups), report.norms.shape[1])
        norms[self.local] = report.norms
        clipped = report.clipped.new_zeros(len(self.groups))
        clipped[self.local] = report.clipped
        return Report(norms, clipped)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["clipper"], name)

    def __str__(self) -> str:
        return str(self.clipper)


def _elsewhere() -> nn.Parameter:
    empty = nn.Parameter(torch.empty(0))
    empty.grad = torch.empty(0)
    return empty
