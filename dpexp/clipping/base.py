"""What every clipper is to the rest of the program: groups with thresholds, and a sum whose sensitivity is known."""

from __future__ import annotations

import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from dpexp.clipping.compiling import tell_compiler, uncompiled
from dpexp.clipping.given import check_same_parameters, check_thresholds, initial_thresholds
from dpexp.clipping.groups import Group, GroupsSpec, build_groups, trainable_parameters
from dpexp.clipping.independence import Independence
from dpexp.clipping.norm_layouts import mend_norms
from dpexp.clipping.refusals import refuse_couplings, refuse_devices, refuse_hooks
from dpexp.clipping.reports import Report
from dpexp.clipping.sharding import Shards
from dpexp.errors import UserError

Rows = dict[str, Tensor]
"""Per-example gradients by parameter: name -> ``[B, *shape]``, of every trainable parameter; zeros for an example that is not
finite."""
SCALES = "thresholds for single examples (individual=scaling) need clip=flat or the like"


class AnyClipper(ABC):
    """Groups and thresholds. A subclass writes `backward` and `_enter`, and what else it needs.

    Args:
        model: its trainable parameters are clipped.
        groups, clip_norm, rule, rows_per_example, fixed_length: see `dpexp.clipping.attach`.

    Attributes:
        params: what is clipped, by first name.
        reach: by how many thresholds one example can move the sum.
        max_clip_scale: the largest factor of an example's thresholds.
        notes: what could not be looked at, in words.
    """

    reach = 1.0
    max_clip_scale = 1.0
    _shards: Shards | None = None
    _attached = True

    def __init__(
        self,
        model: nn.Module,
        groups: GroupsSpec,
        clip_norm: float | Sequence[float] | Tensor,
        rule: str,
        rows_per_example: int = 1,
        fixed_length: bool = False,
    ):
        refuse_couplings(model)
        tell_compiler()
        self.model, self.rule = model, rule
        self.params = trainable_parameters(model)
        refuse_devices(self.params)
        refuse_hooks(self.params)
        self.groups: list[Group] = build_groups(model, groups)
        device = next(iter(self.params.values())).device
        self._thresholds = initial_thresholds(clip_norm, len(self.groups)).to(device)
        self._independence = Independence(model, rows_per_example, fixed_length)
        self.notes = self._independence.notes

    @property
    def thresholds(self) -> Tensor:
        """``[K]`` thresholds C_k. Assign a sequence of K positive numbers, or write in place, between steps."""
        return self._thresholds

    @thresholds.setter
    def thresholds(self, value: Tensor | Sequence[float]) -> None:
        new = torch.as_tensor(value, dtype=self._thresholds.dtype, device=self._thresholds.device).detach()
        if new.shape != self._thresholds.shape:
            raise UserError(f"thresholds must have shape {[len(self.groups)]}, got {list(new.shape)}")
        self._thresholds = new.clone()

    @property
    def sensitivity(self) -> float:
        """How far one example can move the sum in ``p.grad``, in L2 norm: ``reach * max_clip_scale * sqrt(sum of C_k²)``.

        Infinite with ``rule="none"``, which clips nothing. Noise is this number times a noise multiplier.
        """
        if self.rule == "none":
            return math.inf
        return self.reach * self.max_clip_scale * float(self._thresholds.double().norm())

    @property
    def setting(self) -> int:
        """A number of 31 bits that two ranks have in common where they clip in the same way, to the same thresholds."""
        groups = [(group.name, list(group.params)) for group in self.groups]
        said = (groups, self.rule, self.max_clip_scale, self._thresholds.tolist())
        return zlib.crc32(repr(said).encode()) >> 1

    @abstractmethod
    def backward(
        self, losses: Tensor, clip_scale: Tensor | None = None, *, loss_scale: float = 1.0
    ) -> Report:
        """Add the clipped sum to ``p.grad``; see `dpexp.clipping.Clipper.backward`."""

    def _refuse_detached(self) -> None:
        if not self._attached:
            raise UserError("this clipper is detached, or its PrivacyEngine closed: make another one")

    def _checked_thresholds(self) -> Tensor:
        """Return the thresholds ``[K]`` of a backward pass, of a model that still has the parameters of `attach`."""
        check_same_parameters(self.model, self.params, self._shards)
        thresholds = self._thresholds.detach()
        check_thresholds(thresholds, f"thresholds {thresholds.tolist()}")
        return thresholds

    def losses_are_seen(self) -> None:
        """Take it from the caller that what stands behind the model's outputs keeps examples apart: it looked at whole losses."""
        self._independence.losses_seen = True

    def behind_forwards(self, call: Callable[[], None]) -> None:
        """Have something called where a forward of training has ended; a copy of the model does not call it."""
        self._independence.on_left = call

    @property
    def counted(self) -> str:
        """What of the model goes by how often it was called, in words, as far as a look at this batch has shown; "" if nothing.

        Harmless where each step calls it equally often, and not where the pieces of a step follow from who was drawn.
        """
        return self._independence.counted

    @property
    def shared(self) -> str:
        """What examples that go through the model together share of chance, in words, as far as looks have shown; "" if nothing.

        Harmless where each goes alone, or all of a step together, and not where who goes with whom follows from who was drawn.
        """
        return self._independence.shared

    @property
    def extra(self) -> list[nn.Parameter]:
        """Parameters that exist for the sake of their ``grad`` alone: sums that are released besides."""
        return []

    def prepare(self, seed: int, public: Callable[[], Rows]) -> None:
        """Begin a step. ``seed`` is secret and new; ``public()`` gives gradients of public examples."""

    def finish(self, stds: dict[int, float]) -> None:
        """Make of the noisy means in ``p.grad`` what an optimiser expects there. ``stds``: of their noise, by ``id(p)``."""

    @property
    def choices(self) -> dict[str, str]:
        """Parameter -> how its norms are computed, where there is a choice."""
        return {}

    def remember(self) -> dict[str, Any]:
        """Return what was measured and proven, as JSON."""
        return {}

    def recall(self, state: dict[str, Any]) -> None:
        """Take over what `remember` gave."""

    def detach(self) -> None:
        """Give the model back exactly as it was."""
        for hook in self._hooks:
            hook.remove()
        self._attached = False

    def _hook(self) -> None:
        """Take part in the model's forwards from here on."""
        # which looks repeat by itself, without the DistributedDataParallel around it
        model = self._independence.model
        self._hooks = [
            model.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True),
            model.register_forward_hook(self._leave, always_call=True),
            *mend_norms(model),
        ]

    def elsewhere(self) -> AbstractContextManager[None]:
        """Let forwards inside be none of training: nothing of them is looked at, or waits for a back-propagation."""
        return self._independence.elsewhere()

    def new_batch(self) -> None:
        """Tell that another batch begins: losses of an earlier forward are then refused, where forwards are followed."""
        self._independence.new_batch()

    def may_begin_again(self) -> None:
        """Tell that the caller begins a step again on a `LateError`: rows that a model picks are then proven at less cost."""

    @abstractmethod
    def _enter(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """The model's forward begins."""

    @uncompiled
    def _leave(self, module: nn.Module, args: tuple, output: Any) -> None:
        """The model's forward has ended."""
        # one without gradients was not begun, and may run within one that was, or beside it in another thread
        if torch.is_grad_enabled():
            self._independence.leave(output)
