"""Where values computed from parameters meet the batch: the operation runs with them detached, and its output gets a tap."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpexp.clipping.operations import ANY_FUNCTION, FORMULAS, spreads
from dpexp.clipping.tapping.copies import spread
from dpexp.clipping.tapping.dataflow import in_place
from dpexp.clipping.tapping.forwards import USE
from dpexp.clipping.tapping.uses import Slot, Template, Use, Value, ValueSlot, in_autocast, kind_of
from dpexp.clipping.tapping.values import Call, has_rows, origin, values_of
from dpexp.errors import UserError

INNER = (
    "the forward asks autograd for the gradient of {name} (torch.autograd.grad: a step of an inner loop), which no tap lets "
    "through: torch.func.grad of a function of the weights gives the same, and is clipped exactly"
)
RANDOM = ("dropout", "bernoulli", "rand", "multinomial", "rrelu", "gumbel")


def again(call: Call) -> Any:
    """Run an operation as it was planned before; NotImplemented where it has to be looked at more closely."""
    recorder = call.recorder
    if recorder.flow is not None or not recorder.following:
        return NotImplemented
    template = recorder.templates.get(call.key)
    if template is None or template.names is None:
        return NotImplemented
    fits = template.fits(call.func, call.args, call.kwargs, call.values)
    if not fits or not (recorder.known_role(call.key) or "").startswith(USE):
        return NotImplemented
    return _run(call, template, tuple([Value(v.param.detach(), {v.key: v.param}) for v in call.values]))


def use(call: Call) -> Any:
    """Run an operation in which values meet the batch, and tap its output.

    Returns:
        NotImplemented where ordinary autograd has to carry the gradient.

    Raises:
        UserError: the operation is a gradient of a parameter.
    """
    if call.func is torch.autograd.grad:
        raise UserError(INNER.format(name=call.values[0].key))
    met = values_of(call.recorder, call.values)
    if met is None or any(t.is_complex() for t in (*call.values, *call.others)):
        return NotImplemented
    if spreads(call.func, call.args, call.kwargs, call.values):
        return spread(call, met)
    if in_place(call.func) or any(word in call.func.__name__ for word in RANDOM):
        return NotImplemented
    if call.func is F.scaled_dot_product_attention:
        dropout = call.kwargs.get("dropout_p", call.args[4] if len(call.args) > 4 else 0.0)
        if dropout:
            # another mask would be drawn where it is repeated
            return NotImplemented
    template, nested = planned(call)
    if nested is None:
        call.recorder.templates[call.key] = template
    return _run(call, template, met, nested)


def _run(call: Call, template: Template, met: tuple[Value, ...], nested: list[Tensor] | None = None) -> Any:
    """Run an operation as its template says, and tap its output; ``nested``: see `planned`."""
    formula = template.formula
    active = None
    if torch.is_autocast_enabled(device := met[0].leaf.device.type):
        active = (device, torch.get_autocast_dtype(device))
    # what is not needed later is not kept: models may write to it
    saved: list[Tensor] = []
    rest: list[Tensor] = []
    input_shape = None
    for where, slot, main in template.tensors:
        if type(slot) is ValueSlot:
            continue
        tensor = call.args[where] if type(where) is int else call.kwargs[where]
        if main:
            input_shape = tensor.shape
            if active is not None and formula.autocast and tensor.is_floating_point():
                # what it computes with, and all that must be kept
                tensor = in_autocast(tensor)
        (rest if slot < 0 else saved).append(tensor)
    saved = saved if nested is None else nested
    y = template.call([value.leaf for value in met], saved, rest)
    if not isinstance(y, Tensor) or not y.dim() or not y.is_floating_point():
        return NotImplemented
    if formula.label is None:
        if not has_rows(call, y.shape):
            return NotImplemented
        # a tap marks what it passes on as written to, and the operation may have kept its output
        y = y.clone()
        flags = tuple(
            b and t.dim() > 0 and t.shape[0] == y.shape[0]
            for b, t in zip(template.from_batch, saved, strict=True)
        )
    else:
        flags = template.from_batch
        if y._is_view():
            # an in-place operation may follow, which a view out of a custom function does not allow
            y = torch.ops.aten._unsafe_view(y, y.shape)
    names = template.names or tuple(dict.fromkeys(name for value in met for name in value.reached))
    found = Use(
        template, call.recorder.place(call.key), met, names, flags, input_shape, y.shape,
        *origin(call.recorder, call.batched), active, [(t.shape, t.dtype, t.device) for t in rest],
    )  # fmt: skip
    return call.recorder.tap(y, found, tuple(saved))


def planned(call: Call) -> tuple[Template, list[Tensor] | None]:
    """Find the formula of an operation, and which of its arguments the formula needs.

    Returns:
        the template; and all saved tensors where some stand in lists, for such a template is for one call alone.
    """
    args, kwargs, values = call.args, call.kwargs, call.values
    formula = FORMULAS.get(call.func, ANY_FUNCTION)
    if formula.label and not formula.applies(formula.bind(args, kwargs), values, call.batched):
        formula = ANY_FUNCTION
    needed, main = formula.needs(args, kwargs, values), formula.main(args, kwargs)
    index = {id(value): i for i, value in enumerate(values)}
    tensors: list[tuple[int | str, Any, bool]] = []
    literals: list[tuple[int | str, Any]] = []
    from_batch: list[bool] = []
    saved: list[Tensor] = []
    rest, nested = 0, False

    def slot_of(tensor: Tensor, keep: bool) -> Any:
        nonlocal rest
        if id(tensor) in index:
            return ValueSlot(index[id(tensor)])
        if not keep:
            rest += 1
            return Slot(-rest)
        from_batch.append(any(tensor is t for t in call.batched) and (tensor is main or not formula.by_place))
        saved.append(tensor)
        return Slot(len(saved) - 1)

    def put(where: int | str, item: Any) -> Any:
        nonlocal nested
        keep = needed is None or where in needed
        if isinstance(item, Tensor):
            tensors.append((where, slot_of(item, keep), item is main))
            return tensors[-1][1]
        if isinstance(item, list | tuple) and any(isinstance(part, Tensor) for part in item):
            nested = True
            # an index in a list is not what it is in a tuple
            kind = tuple if isinstance(item, tuple) else list
            return kind(slot_of(part, True) if isinstance(part, Tensor) else part for part in item)
        if isinstance(item, list):
            # the model may write to it before the gradient comes
            item = list(item)
        literals.append((where, item))
        return item

    arguments = tuple(put(i, item) for i, item in enumerate(args))
    keywords = {name: put(name, item) for name, item in kwargs.items()}
    known = formula.label is not None and not nested and all(value.param is not None for value in values)
    names = tuple(dict.fromkeys(value.key or "" for value in values)) if known else None
    kind = kind_of(main) if isinstance(main, Tensor) else None
    seen = tuple(tensors), tuple(literals), tuple(from_batch)
    template = Template(formula, call.func, arguments, keywords, *seen, names, kind)
    return template, saved if nested else None
