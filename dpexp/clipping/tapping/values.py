"""Followed values at an operation: what they were computed from, and what is told of the tensors beside them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dpexp.clipping.tapping.dataflow import NONE, Sizes, in_order
from dpexp.clipping.tapping.forwards import PICKED
from dpexp.clipping.tapping.node import BY_TAP
from dpexp.clipping.tapping.roots import has_16_bits, nodes_behind
from dpexp.clipping.tapping.taps import Recorder
from dpexp.clipping.tapping.uses import Value

# `Use.from_batch`, `Use.of_examples` and `Use.routed`
Origin = tuple[bool | None, bool, Sizes]
OF_PARAMETERS: Origin = (False, False, NONE)
LONGEST_KEY = 200


@dataclass(eq=False, slots=True)
class Call:
    """A torch function with what it was called with.

    Attributes:
        recorder: of the clipper.
        values: the arguments that are followed, each a `following.Followed`.
        key: names the operation, see `operation_key`.
        others: the other tensors among the arguments.
        batched: those of them that are of the batch.
    """

    recorder: Recorder
    func: Any
    args: tuple
    kwargs: dict
    values: Sequence[Any]
    key: str
    others: Sequence[Tensor] = ()
    batched: Sequence[Tensor] = ()

    @property
    def first(self) -> Any:
        """The first argument, also where it is given by its name."""
        args, _ = in_order(self.args, self.kwargs)
        return args[0] if args else None


def operation_key(func: Any, values: Sequence[Any]) -> str:
    """Name an operation by its function and what made its values."""
    made_of = values[0].key or "" if len(values) == 1 else ",".join([value.key or "" for value in values])
    if len(made_of) > LONGEST_KEY:
        made_of = hashlib.sha256(made_of.encode()).hexdigest()[:24]
    return f"{func.__name__}({made_of})"


def values_of(recorder: Recorder, values: Sequence[Any]) -> tuple[Value, ...] | None:
    """Return the values at a use; None where one's graph holds something else than parameters of this clipper."""
    found = []
    for value in values:
        if value.param is not None:
            assert value.key is not None
            found.append(Value(value.param.detach(), {value.key: value.param}))
            continue
        reached, rounds = _behind(recorder, value)
        if not reached:
            return None
        found.append(Value(value.detach().as_subclass(Tensor), reached, value.as_subclass(Tensor), rounds))
    return tuple(found)


def _behind(recorder: Recorder, value: Tensor) -> tuple[dict[str, nn.Parameter], bool]:
    """Return the parameters that a value is a function of, none where it is one of anything else, too; and whether any number
    on the way has 16 bits."""
    reached: dict[str, nn.Parameter] = {}
    rounds = False
    for node in nodes_behind([value.grad_fn]):
        rounds |= has_16_bits(node)
        if hasattr(node, "variable"):
            name = recorder.name_of(node.variable)
            if name is None:
                return {}, rounds
            reached[name] = node.variable
        elif isinstance(node, BY_TAP):
            return {}, rounds
    return {name: reached[name] for name in recorder.params if name in reached}, rounds


def origin(recorder: Recorder, batched: Sequence[Tensor]) -> Origin:
    """Tell what the result of an operation on these tensors was computed from."""
    flow = recorder.flow
    if flow is None:
        return None, False, NONE
    # what is picked at fewer places than there are examples, as an expert's weights are, is for several
    rows = [t for t in batched if t.is_floating_point() or t.numel() >= (recorder.rows or 0)]
    return flow.of_batch(batched), flow.of_examples(rows), flow.routed(*batched)


def has_rows(call: Call, shape: torch.Size) -> bool:
    """Tell whether what an operation gives, of this shape, can have rows of examples in its first or second dimension."""
    recorder, rows = call.recorder, call.recorder.rows
    if not shape or not rows or shape[0] % rows == 0 or rows_behind(shape, rows):
        return len(shape) > 0
    if all(t.shape[:1] != shape[:1] for t in call.batched):
        return False
    # rows may have been picked, as many as there are by chance; where nobody watches, as it was found before
    key = f"{call.key}~picked"
    if recorder.flow is None or recorder.current is None:
        return recorder.known_role(key) is not None
    if recorder.flow.routed(*call.batched):
        recorder.current.roles[key] = PICKED
        return True
    return False


def rows_behind(shape: torch.Size, rows: int | None) -> int:
    """Return how many rows each example may have in the second dimension; 0 where it has another size.

    Several are tokens behind experts or positions, and have features of their own.
    """
    if not rows or len(shape) < 2 or shape[1] % rows:
        return 0
    return shape[1] // rows if len(shape) > 2 else int(shape[1] == rows)
