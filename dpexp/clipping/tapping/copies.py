"""Values that are copied to the rows of the batch: each copy has a gradient of its own, and they get the tap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpexp.clipping.operations import SPREAD
from dpexp.clipping.tapping.dataflow import in_place
from dpexp.clipping.tapping.taps import Recorder
from dpexp.clipping.tapping.uses import Template, Use, Value
from dpexp.clipping.tapping.values import OF_PARAMETERS, Origin, Values, has_rows, origin, values_of

EXPANSIONS = frozenset({"expand", "expand_as", "broadcast_to", "repeat"})


def expansion(
    recorder: Recorder, func: Any, args: tuple, kwargs: dict, key: str, values: Values
) -> Tensor | None:
    """Tap copies of a value, one for each row of the batch; None where it is a function of parameters like any other."""
    rows = recorder.rows
    if (
        not rows
        or args[0] is not values[0]
        or values[0].changed
        or not (met := values_of(recorder, values[:1]))
    ):
        return None
    leaf = met[0].leaf
    y = func(leaf, *args[1:], **kwargs)
    base = (1,) * (y.dim() - leaf.dim()) + tuple(leaf.shape)
    if not y.dim():
        return None
    if base[0] > 1 and base[1:] == y.shape[1:] and y.shape[0] % (base[0] * rows) == 0:
        # [H, …] to [B * H, …], as disentangled attention wants a table of its heads; many rows of each example are no copies
        many = leaf.expand(y.shape[0] // base[0], *leaf.shape)
        return _tap_copies(recorder, many, met[0], key).flatten(0, 1)
    copied = [one != other for one, other in zip(base, y.shape, strict=False)]
    if y.dim() < leaf.dim() or any(c and one != 1 for c, one in zip(copied, base, strict=True)):
        return None
    if base[0] == 1 and y.shape[0] % rows == 0:
        return _tap_copies(recorder, y, met[0], key)
    if leaf.dim() == y.dim() > 1 and y.shape[1] == rows and base[1] == 1 and sum(copied) <= 1:
        # [L, 1, d] to [L, B, d], as recurrent layers want their first states: with the batch in front, and turned back
        turned = type(values[0]).made(
            values[0].as_subclass(Tensor).transpose(0, 1), f"{key}.turned", recorder
        )
        (value,) = values_of(recorder, (turned,)) or (None,)
        if value is not None:
            front = value.leaf.expand(rows, *value.leaf.shape[1:])
            return _tap_copies(recorder, front, value, key).transpose(0, 1)
    return None


def spread(
    recorder: Recorder,
    func: Any,
    args: tuple,
    kwargs: dict,
    key: str,
    values: Values,
    met: tuple[Value, ...],
    others: list[Tensor],
    batched: list[Tensor],
) -> Any:
    """Run an operation that broadcasts its arguments: each value gets a row for every row of the batch, and the rows a tap.

    Returns:
        NotImplemented where ordinary autograd has to carry the gradient.
    """
    shape = _broadcast_shape(func, args, kwargs, met, others)
    if not has_rows(recorder, shape):
        return NotImplemented
    wider = [t.dtype for t in others if t.dim() and t.is_floating_point()]
    copies = []
    for value in met:
        leaf = value.leaf
        if leaf.dim() > len(shape):
            return NotImplemented
        if not leaf.dim() and wider and leaf.is_floating_point():
            # a number has no say in the dtype of the result
            leaf = leaf.to(wider[0])
        aligned = leaf.view((1,) * (len(shape) - leaf.dim()) + tuple(leaf.shape))
        in_second = len(shape) > 1 and shape[1] == recorder.rows
        if aligned.shape[0] != 1 and not (in_second and aligned.shape[1] == 1):
            return NotImplemented
        second = shape[1:2] if in_second else aligned.shape[1:2]
        copies.append(aligned.expand(shape[0], *second, *aligned.shape[2:]))
    of = origin(recorder, batched)
    names = [key] if len(met) == 1 else [f"{key}#{i}" for i in range(len(met))]
    tapped = {
        id(value): _tap_copies(recorder, y, one, name, of)
        for value, y, one, name in zip(values, copies, met, names, strict=True)
    }

    def put(item: Any) -> Any:
        return tapped.get(id(item), item)

    return func(*(put(a) for a in args), **{k: put(v) for k, v in kwargs.items()})


def _broadcast_shape(
    func: Any, args: tuple, kwargs: dict, met: Sequence[Value], others: Sequence[Tensor]
) -> torch.Size:
    """The shape that the values are broadcast to."""
    if func.__name__ == "__setitem__":
        return args[0][args[1]].shape
    if in_place(func):
        return args[0].shape
    if func is F.scaled_dot_product_attention:
        query, key = others[:2]
        return torch.Size([*query.shape[:-1], key.shape[-2]])
    return torch.broadcast_shapes(*(value.leaf.shape for value in met), *(t.shape for t in others))


def _tap_copies(recorder: Recorder, y: Tensor, value: Value, key: str, of: Origin = OF_PARAMETERS) -> Tensor:
    template = Template(SPREAD, None)
    names = tuple(value.reached)
    copies = Use(template, recorder.place(key), (value,), names, (), None, y.shape, *of, None, [])
    return recorder.tap(y, copies, ())
