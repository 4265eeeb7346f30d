"""Where values computed from parameters meet the batch: the operation runs with them detached, and its output gets a tap."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpexp.clipping.operations import formula_for, spreads
from dpexp.clipping.tapping.copies import spread
from dpexp.clipping.tapping.dataflow import in_place
from dpexp.clipping.tapping.taps import Recorder
from dpexp.clipping.tapping.uses import Slot, Template, Use, Value, ValueSlot, in_autocast, kind_of
from dpexp.clipping.tapping.values import Values, has_rows, names_of, origin, values_of
from dpexp.errors import UserError

# Roles of an operation on followed values. USE is followed by a digit for every other tensor: 1 for one of the batch.
USE = "use"
# a function of parameters; copies of a value, one for each row of the batch, are a use all the same
DERIVE = "derive"
# a function of parameters, also where its result looks like one row for each example
SHARED = "shared"
# left to ordinary autograd: now one, now the other, in places that have the same name
NATIVE = "native"

INNER = (
    "the forward asks autograd for the gradient of {name} (torch.autograd.grad: a step of an inner loop), which no tap lets "
    "through: torch.func.grad of a function of the weights gives the same, and is clipped exactly"
)
LONGEST_KEY = 200
RANDOM = ("dropout", "bernoulli", "rand", "multinomial", "rrelu", "gumbel")


def operation_key(func: Any, values: Values) -> str:
    """Name an operation by its function and what made its values."""
    made_of = values[0].key or "" if len(values) == 1 else ",".join([value.key or "" for value in values])
    if len(made_of) > LONGEST_KEY:
        made_of = hashlib.sha256(made_of.encode()).hexdigest()[:24]
    return f"{func.__name__}({made_of})"


def again(recorder: Recorder, func: Any, args: tuple, kwargs: dict, values: Values) -> Any:
    """Run an operation as it was planned before; NotImplemented where it has to be looked at more closely."""
    if recorder.flow is not None or not recorder.following:
        return NotImplemented
    key = operation_key(func, values)
    template = recorder.templates.get(key)
    if template is None or template.names is None or not template.fits(func, args, kwargs, values):
        return NotImplemented
    if not (recorder.known_role(key) or "").startswith(USE):
        return NotImplemented
    met = tuple([Value(value.param.detach(), {value.key: value.param}) for value in values])
    return _run(recorder, template, args, kwargs, key, met, ())


def use(
    recorder: Recorder,
    func: Any,
    args: tuple,
    kwargs: dict,
    key: str,
    values: Values,
    others: list[Tensor],
    batched: list[Tensor],
) -> Any:
    """Run an operation in which ``values`` meet the tensors ``batched``, and tap its output.

    Returns:
        NotImplemented where ordinary autograd has to carry the gradient.

    Raises:
        UserError: the operation is a gradient of a parameter.
    """
    if func is torch.autograd.grad:
        raise UserError(INNER.format(name=values[0].key))
    met = values_of(recorder, values)
    if met is None or any(t.is_complex() for t in (*values, *others)):
        return NotImplemented
    if spreads(func, args, kwargs, values):
        return spread(recorder, func, args, kwargs, key, values, met, others, batched)
    if in_place(func) or any(word in func.__name__ for word in RANDOM) or _drops(func, args, kwargs):
        return NotImplemented
    template, nested = planned(func, args, kwargs, values, batched)
    if nested is None:
        recorder.templates[key] = template
    return _run(recorder, template, args, kwargs, key, met, batched, nested)


def _run(
    recorder: Recorder,
    template: Template,
    args: tuple,
    kwargs: dict,
    key: str,
    met: tuple[Value, ...],
    batched: Sequence[Tensor],
    nested: list[Tensor] | None = None,
) -> Any:
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
        tensor = args[where] if type(where) is int else kwargs[where]
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
        if not has_rows(recorder, y.shape):
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
    found = Use(
        template, recorder.place(key), met, template.names or names_of(met), flags, input_shape, y.shape,
        *origin(recorder, batched), active, [(t.shape, t.dtype, t.device) for t in rest],
    )  # fmt: skip
    return recorder.tap(y, found, tuple(saved))


def planned(
    func: Any, args: tuple, kwargs: dict, values: Values, batched: Sequence[Tensor]
) -> tuple[Template, list[Tensor] | None]:
    """Find the formula of an operation, and which of its arguments the formula needs.

    Returns:
        the template; and all saved tensors where some stand in lists, for such a template is for one call alone.
    """
    formula = formula_for(func, args, kwargs, values, batched)
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
        from_batch.append(any(tensor is t for t in batched))
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
    template = Template(
        formula, func, arguments, keywords, tuple(tensors), tuple(literals), tuple(from_batch), names, kind
    )
    return template, saved if nested else None


def _drops(func: Any, args: tuple, kwargs: dict) -> bool:
    """Whether attention would draw another dropout mask when it is repeated."""
    if func is not F.scaled_dot_product_attention:
        return False
    return bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))
