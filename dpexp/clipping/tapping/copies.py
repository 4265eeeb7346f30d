"""Values that are copied to the rows of the batch: each copy has a gradient of its own, and they get the tap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpexp.clipping.operations import SPREAD
from dpexp.clipping.tapping.uses import Template, Use, Value
from dpexp.clipping.tapping.values import (
    OF_PARAMETERS,
    Call,
    Origin,
    has_rows,
    origin,
    rows_behind,
    values_of,
)

EXPANSIONS = frozenset({"expand", "expand_as", "broadcast_to", "repeat"})


def expansion(call: Call) -> Tensor | None:
    """Tap copies of a value, one for each row of the batch; None where it is a function of parameters like any other."""
    rows, value = call.recorder.rows, call.values[0]
    met = values_of(call.recorder, [value]) if rows and call.first is value and not value.changed else None
    if not rows or not met:
        return None
    leaf = met[0].leaf
    y = call.func(leaf, *call.args[1:], **{k: v for k, v in call.kwargs.items() if v is not value})
    base = (1,) * (y.dim() - leaf.dim()) + tuple(leaf.shape)
    if not y.dim():
        return None
    if base[0] > 1 and base[1:] == y.shape[1:] and y.shape[0] % (base[0] * rows) == 0:
        # [H, …] to [B * H, …], as disentangled attention wants a table of its heads; many rows of each example are no copies
        many = leaf.expand(y.shape[0] // base[0], *leaf.shape)
        return _tap_copies(call, many, met[0]).flatten(0, 1)
    copied = [one != other for one, other in zip(base, y.shape, strict=False)]
    if y.dim() < leaf.dim() or any(c and one != 1 for c, one in zip(copied, base, strict=True)):
        return None
    behind = leaf.dim() < y.dim() > 1 and y.shape[1] == rows and base[1] == 1
    if base[0] == 1 and (y.shape[0] % rows == 0 or behind):
        return _tap_copies(call, y, met[0])
    if leaf.dim() == y.dim() > 1 and y.shape[1] == rows and base[1] == 1 and sum(copied) <= 1:
        # [L, 1, d] to [L, B, d], as recurrent layers want their first states: with the batch in front, and turned back
        key = f"{call.key}.turned"
        turned = type(value).made(value.as_subclass(Tensor).transpose(0, 1), key, call.recorder)
        for one in values_of(call.recorder, [turned]) or ():
            front = one.leaf.expand(rows, *one.leaf.shape[1:])
            return _tap_copies(call, front, one).transpose(0, 1)
    return None


def spread(call: Call, met: tuple[Value, ...]) -> Any:
    """Run an operation that broadcasts its arguments: each value gets a row for every row of the batch, and the rows a tap.

    Returns:
        NotImplemented where ordinary autograd has to carry the gradient.
    """
    recorder, others = call.recorder, call.others
    strewn = _is_strewn(call, met[0].leaf.shape)
    # of what goes to places in the rows of a tensor, these rows are whose it is, as many as there may be of such places
    shape = call.args[0].shape if strewn else _broadcast_shape(call, met)
    if not has_rows(call, shape):
        return NotImplemented
    wider = [t.dtype for t in others if t.dim() and t.is_floating_point()]
    behind = rows_behind(shape, recorder.rows)
    # several rows of each example behind positions, too, unless there are as many in front as examples
    in_second = behind == 1 or (behind > 1 and shape[0] != recorder.rows)
    # where several examples share a row, each of its positions is one example's
    packed = not strewn and len(shape) > 2 and shape[0] % (recorder.rows or 1) != 0
    copies = []
    for value in met:
        leaf = value.leaf
        if leaf.dim() > len(shape):
            return NotImplemented
        if not leaf.dim() and wider and leaf.is_floating_point():
            # a number has no say in the dtype of the result
            leaf = leaf.to(wider[0])
        aligned = leaf.view((1,) * (len(shape) - leaf.dim()) + tuple(leaf.shape))
        turned = aligned.shape[0] != 1
        if turned and not (behind and aligned.shape[1] == 1):
            return NotImplemented
        second = shape[1:2] if in_second or turned else aligned.shape[1:2]
        each = (*shape[:-1], *aligned.shape[-1:]) if packed else (shape[0], *second, *aligned.shape[2:])
        copies.append(aligned.expand(each))
    of = origin(recorder, call.batched)
    if call.func.__name__ == "__setitem__" and not strewn and recorder.flow is not None:
        from_batch, of_examples, routed = of
        of = from_batch, of_examples, routed | recorder.flow.indexed(*call.args[:2])
    names = [call.key] if len(met) == 1 else [f"{call.key}#{i}" for i in range(len(met))]
    tapped = {
        id(value): _tap_copies(call, y, one, of, name)
        for value, y, one, name in zip(call.values, copies, met, names, strict=True)
    }

    def put(item: Any) -> Any:
        copy = tapped.get(id(item), item)
        return copy.expand(shape)[call.args[1]] if strewn and copy is not item else copy

    return call.func(*map(put, call.args), **{k: put(v) for k, v in call.kwargs.items()})


def _is_strewn(call: Call, shape: torch.Size) -> bool:
    """Tell whether a value goes to places that masks, or lists of places, say in the first dimensions of a tensor."""
    if call.func.__name__ != "__setitem__":
        return False
    base, index = call.args[:2]
    parts = index if isinstance(index, tuple) else (index,)
    if not all(
        isinstance(p, Tensor) and p.dim() and p.dtype in (torch.bool, torch.int64, torch.int32) for p in parts
    ):
        return False
    behind = base.dim() - sum(p.dim() if p.dtype == torch.bool else 1 for p in parts)
    return len(shape) <= base.dim() and all(n == 1 for n in shape[: max(0, len(shape) - behind)])


def _broadcast_shape(call: Call, met: Sequence[Value]) -> torch.Size:
    """The shape that the values are broadcast to."""
    if call.func.__name__ == "__setitem__":
        return call.args[0][call.args[1]].shape
    if call.func is F.scaled_dot_product_attention:
        query, key = call.others[:2]
        return torch.Size([*query.shape[:-1], key.shape[-2]])
    return torch.broadcast_shapes(*(value.leaf.shape for value in met), *(t.shape for t in call.others))


def _tap_copies(
    call: Call, y: Tensor, value: Value, of: Origin = OF_PARAMETERS, key: str | None = None
) -> Tensor:
    names, place = tuple(value.reached), call.recorder.place(key or call.key)
    copies = Use(Template(SPREAD, None), place, (value,), names, (), None, y.shape, *of, None, [])
    return call.recorder.tap(y, copies, ())
