"""What `Clipper` is to the rest of the program, for ways to clip that attach nothing to the model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from dpexp.clipping.attach import Report
from dpexp.clipping.given import initial_thresholds
from dpexp.clipping.groups import Group, GroupsSpec, build_groups
from dpexp.clipping.refusals import refuse_couplings
from dpexp.clipping.rules import RULES
from dpexp.errors import UserError


class PlainClipper(ABC):
    """Groups, thresholds, and nothing to remember. A subclass writes `backward`.

    Args:
        model: its trainable parameters are clipped.
        groups: see `dpexp.clipping.attach`.
        clip_norm: C, the threshold of all groups together.
        rule: how a norm becomes a factor.
    """

    reach = 1.0
    max_clip_scale = 1.0

    def __init__(
        self, model: nn.Module, groups: GroupsSpec = "flat", clip_norm: float = 1.0, rule: str = "abadi"
    ):
        if rule not in RULES or rule == "none":
            raise UserError(f"rule={rule!r} bounds nothing here: choose abadi, automatic or normalized")
        refuse_couplings(model)
        self.model, self.rule = model, rule
        self.groups: list[Group] = build_groups(model, groups)
        self.params = [p for group in self.groups for p in group.params.values()]
        first = initial_thresholds(clip_norm, len(self.groups)).double()
        self.thresholds = first.to(self.params[0].device)
        self.choices: dict[str, str] = {}
        self.notes: list[str] = []

    @property
    def sensitivity(self) -> float:
        """How far one example can move the sum: `reach` times the norm of the thresholds."""
        return self.reach * float(self.thresholds.double().norm())

    @abstractmethod
    def backward(
        self, losses: Tensor, clip_scale: Tensor | None = None, *, loss_scale: float = 1.0
    ) -> Report:
        """As `Clipper.backward`."""

    def refuse_scales(self, clip_scale: Tensor | None) -> None:
        """Raise `UserError` where single examples have thresholds of their own."""
        if clip_scale is not None:
            raise UserError("thresholds for single examples (individual=scaling) need clip=flat or the like")

    def remember(self) -> dict[str, Any]:
        """Nothing is measured."""
        return {}

    def recall(self, state: dict[str, Any]) -> None:
        """See `remember`."""

    def detach(self) -> None:
        """Nothing was attached."""


def zero_gradients(params: list[nn.Parameter]) -> None:
    """Give every parameter without a gradient one of zeros."""
    for p in params:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
