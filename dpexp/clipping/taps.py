"""Taps: where a layer's output gradient meets its saved input.

A module's own forward runs with detached parameters, so ordinary autograd carries the input gradient and computes no weight
gradient. Its output then passes through `Tap`, an identity whose backward hands ``(input, output gradient)`` to the backward
pass of the clipper. Nothing is stored on parameters or modules. The input is kept with ``save_for_backward`` and read once,
which is what activation checkpointing, saved-tensor hooks and version counters ask for.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from dpexp.clipping.contributions.base import Contribution
from dpexp.clipping.dataflow import DataFlow

if TYPE_CHECKING:
    from dpexp.clipping.backward import BackwardPass


class Source(Protocol):
    """What knows how parameters were used at a tap: a module of a known kind, or one operation on a bare parameter."""

    label: str
    owner: str
    names: tuple[str, ...]

    def contributions(
        self, call: Call, saved: tuple[Tensor, ...], gy: Tensor, num_examples: int, names: set[str]
    ) -> dict[str, Contribution]:
        """Per-example gradients by parameter name; ``saved`` and ``gy`` are example-major."""
        ...

    def plain_gradients(
        self, call: Call, saved: tuple[Tensor, ...], gy: Tensor, names: set[str]
    ) -> dict[str, Tensor]:
        """Ordinary gradients (summed over everything) by parameter name."""
        ...


@dataclass
class Call:
    """One use of parameters in one forward pass: static facts only, never a tensor.

    ``certain``: its contributions never fail, whatever the shapes. ``key`` names the place in the model and which of its uses in
    the forward pass this is (a module that is called twice may see two layouts), so that what was verified of its layout is
    remembered. ``from_batch``: whether the input was computed from the model's inputs (None where that was not followed).
    ``routed``: whether its rows were picked by index, so that what is verified holds for this batch alone. ``batched``: which
    saved tensors have the rows of the output, where that is not the first one alone.
    """

    source: Source
    key: Hashable
    input_shape: torch.Size | None
    output_shape: torch.Size
    from_batch: bool | None
    template: Any = None
    autocast: tuple[str, torch.dtype] | None = None
    certain: bool = True
    routed: bool = False
    batched: tuple[bool, ...] = ()


@dataclass(eq=False)
class ForwardPass:
    """One forward through the model. Taps and calls belong to it, not to the clipper: several may be alive at once.

    ``shapes``: what may be the batch, see `dataflow.entered`; ``batch``: the index of what probably is.
    """

    shapes: tuple[torch.Size, ...] = ()
    batch: int = 0
    calls: list[Call] = field(default_factory=list)
    operations: dict[Hashable, int] = field(default_factory=dict)
    consumed: bool = False

    @property
    def rows(self) -> int | None:
        return self.shapes[self.batch][0] if self.shapes else None

    def may_have(self, rows: int) -> bool:
        """Whether a batch of so many rows may have entered here."""
        return not self.shapes or any(rows in shape for shape in self.shapes)

    def ordinal(self, key: Hashable) -> int:
        """How many earlier operations of this pass had the same key."""
        self.operations[key] = self.operations.get(key, -1) + 1
        return self.operations[key]


class Recorder:
    """Joins the forward passes of one clipper with its backward pass.

    The anchor is a scalar leaf that every tap takes as an input: asking autograd for the gradient of the anchor visits every
    tap, and no parameter's accumulation node.
    """

    def __init__(self) -> None:
        self.anchor = torch.zeros((), requires_grad=True)
        self.current: ForwardPass | None = None
        self.loose: ForwardPass | None = None
        self.alive: weakref.WeakSet[ForwardPass] = weakref.WeakSet()
        self.running: BackwardPass | None = None
        self.flow: DataFlow | None = None
        # which of the shapes that enter is the batch, once a backward pass has shown it
        self.batch: int | None = None

    def open(
        self, inputs: list[Tensor], shapes: tuple[torch.Size, ...], first_tensor: int, follow: bool
    ) -> None:
        """The root's forward begins. ``follow``: track which tensors are computed from ``inputs``."""
        guess = first_tensor if self.batch is None else self.batch
        self.current = ForwardPass(shapes, guess if guess < len(shapes) else 0)
        self._stop_following()  # of a forward that this one interrupts, or that was left by an interrupt
        if follow:
            self.flow = DataFlow(inputs)
            self.flow.__enter__()

    def close(self) -> None:
        self.current = None
        self._stop_following()

    def _stop_following(self) -> None:
        if self.flow is not None:
            self.flow.__exit__(None, None, None)
            self.flow = None

    def forward_pass(self) -> ForwardPass:
        """The pass that a tap belongs to. Modules called outside the root's forward share a loose one."""
        if self.current is not None:
            return self.current
        if self.loose is None or self.loose.consumed:
            self.loose = ForwardPass()
        return self.loose

    def place(self, *key: Hashable) -> Hashable:
        """The key of a call: the place in the model and its ordinal there."""
        if self.running is not None:
            return (*key, 0)  # a recomputation: its call is not registered
        return (*key, self.forward_pass().ordinal(key))

    @property
    def rows(self) -> int | None:
        """Rows of the batch that is in the model now; in a backward pass, of the forward that is recomputed."""
        if self.current is not None:
            return self.current.rows
        if self.running is not None:
            known = [p.rows for p in self.running.passes]
            return self.running.rows if self.running.rows in known else next(iter(known), None)
        return None

    def tap(self, y: Tensor, call: Call, saved: tuple[Tensor, ...]) -> Tensor:
        """Register the call and return ``y`` with a tap on it."""
        owner = self.forward_pass()
        if self.running is None:  # inside a backward pass this is a recomputation, already registered
            owner.calls.append(call)
            owner.consumed = False
            self.alive.add(owner)
        result = Tap.apply(y, self.anchor, self, owner, call, *saved)
        if self.flow is not None and call.from_batch:
            self.flow.add(result, call.routed)
        return result

    def learn_batch(self, owner: ForwardPass, rows: int) -> bool:
        """Remember which input is the batch. Returns whether it was another one than assumed in this pass."""
        if not owner.shapes or owner.rows == rows:
            return False
        found = [index for index, shape in enumerate(owner.shapes) if shape[0] == rows]
        if not found:  # the batch is the second dimension of an input
            return False
        self.batch = found[0]
        return True

    def passes(self, rows: int) -> list[ForwardPass]:
        """Forward passes that may be waiting for a backward over so many rows."""
        return [p for p in self.alive if not p.consumed and p.calls and p.may_have(rows)]

    def __deepcopy__(self, memo: dict[int, Any]) -> Recorder:
        """A copied model records for itself; graphs in flight stay with the original."""
        memo[id(self)] = twin = Recorder()
        twin.batch = self.batch
        return twin


class Tap(torch.autograd.Function):
    """Identity in forward; in backward the running backward pass sees the call, its saved tensors and the output gradient."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, anchor: Tensor, recorder: Recorder, owner: Any, call: Call, *saved: Tensor
    ) -> Tensor:
        ctx.recorder, ctx.owner, ctx.call, ctx.num_saved = recorder, owner, call, len(saved)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        if y._is_view():
            return y.view_as(
                y
            )  # marking a view dirty would make autograd copy the whole gradient of its base
        ctx.mark_dirty(y)  # an in-place identity: later in-place operations on the output stay legal
        return y

    @staticmethod
    def backward(ctx: Any, gy: Tensor | None) -> Any:
        saved = ctx.saved_tensors
        running = ctx.recorder.running
        if running is None:
            raise RuntimeError(
                "loss.backward() reached a model with a clipper attached: call clipper.backward(losses) with one loss "
                "per example, or clipper.detach() first"
            )
        if gy is not None:
            running.arrive(ctx.owner, ctx.call, saved, gy)
        return (gy,) + (None,) * (4 + ctx.num_saved)
