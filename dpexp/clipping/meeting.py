"""Where values computed from parameters meet the batch: the operation runs with them detached, and its output gets a tap."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpexp.clipping.operations import SPREAD, formula_for, spreads
from dpexp.clipping.taps import Recorder
from dpexp.clipping.uses import Formula, Slot, Template, Use, Value, ValueSlot, in_autocast

# of `following.Followed`, which dispatches to this module
Values = Sequence[Any]

# Roles of an operation on followed values. USE is followed by a digit for every other tensor: 1 for one of the batch.
USE = "use"
# a function of parameters; copies of a value, one for each row of the batch, are a use all the same
DERIVE = "derive"
# a function of parameters, also where its result looks like one row for each example
SHARED = "shared"
# left to ordinary autograd: now one, now the other, in places that have the same name
NATIVE = "native"

LONGEST_KEY = 200
EXPANSIONS = frozenset({"expand", "expand_as", "broadcast_to", "repeat"})
RANDOM = ("dropout", "bernoulli", "rand", "multinomial", "rrelu", "gumbel")
WRITING = frozenset(
    f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "div", "floordiv", "pow", "mod", "and", "or", "xor")
) | {"__setitem__"}  # fmt: skip


def in_place(func: Any) -> bool:
    """Tell whether a function writes to its first argument."""
    name = func.__name__
    return name in WRITING or (name[-1] == "_" and name[-2:] != "__")


def operation_key(func: Any, values: Values) -> str:
    """Name an operation by its function and what made its values."""
    made_of = values[0].key or "" if len(values) == 1 else ",".join([value.key or "" for value in values])
    if len(made_of) > LONGEST_KEY:
        made_of = hashlib.sha256(made_of.encode()).hexdigest()[:24]
    return f"{func.__name__}({made_of})"


@dataclass(frozen=True, slots=True)
class Plan:
    """How an operation runs that was seen before with arguments of the same kind.

    Attributes:
        template: of the operation's arguments.
        tensors: where each tensor stands (a position or a keyword), what it becomes (a `ValueSlot`, a `Slot`, or None where its
            contents are not needed later), and whether the formula maps it row by row.
        literals: every other argument, by position or keyword.
        from_batch: of the saved tensors, which are of the batch.
        names: of the parameters, where the plan may be used again: the formula is known and the values are parameters themselves.
        kind: of the tensor that the formula maps row by row, see `kind_of`.
    """

    formula: Formula
    template: Template
    tensors: tuple[tuple[int | str, Any, bool], ...]
    literals: tuple[tuple[int | str, Any], ...]
    from_batch: tuple[bool, ...]
    names: tuple[str, ...] | None
    kind: tuple[Any, ...] | None

    def fits(self, func: Any, args: tuple, kwargs: dict, values: Values) -> bool:
        """Tell whether the arguments are of the same kind."""
        same = func is self.template.func and len(args) + len(kwargs) == len(self.tensors) + len(
            self.literals
        )
        if not same:
            return False
        for where, literal in self.literals:
            given = args[where] if type(where) is int else kwargs.get(where)
            if given is not literal and (type(given) is not type(literal) or given != literal):
                return False
        for where, slot, main in self.tensors:
            given = args[where] if type(where) is int else kwargs.get(where)
            if not isinstance(given, Tensor) or (main and kind_of(given) != self.kind):
                return False
            if (
                (given is not values[slot])
                if isinstance(slot, ValueSlot)
                else any(given is value for value in values)
            ):
                return False
        return True


def kind_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return what a formula's conditions look at: the rank, and whether these are numbers, an index or a mask."""
    return tensor.dim(), tensor.dtype.is_floating_point, tensor.dtype is torch.bool


def again(recorder: Recorder, func: Any, args: tuple, kwargs: dict, values: Values) -> Any:
    """Run an operation as it was planned before; NotImplemented where it has to be looked at more closely."""
    if recorder.flow is not None or not recorder.following:
        return NotImplemented
    key = operation_key(func, values)
    plan = recorder.plans.get(key)
    if plan is None or plan.names is None or not plan.fits(func, args, kwargs, values):
        return NotImplemented
    if not (recorder.known_role(key) or "").startswith(USE):
        return NotImplemented
    met = tuple([Value(value.param.detach(), {value.key: value.param}) for value in values])
    return _run(recorder, plan, func, args, kwargs, key, met, values, ())


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
    """
    met = values_of(recorder, values)
    if met is None or any(t.is_complex() for t in (*values, *others)):
        return NotImplemented
    if spreads(func, args, kwargs, values):
        return spread(recorder, func, args, kwargs, key, values, met, others, batched)
    if in_place(func) or any(word in func.__name__ for word in RANDOM) or _drops(func, args, kwargs):
        return NotImplemented
    plan = planned(func, args, kwargs, values, batched)
    recorder.plans[key] = plan
    return _run(recorder, plan, func, args, kwargs, key, met, values, batched)


def _run(
    recorder: Recorder,
    plan: Plan,
    func: Any,
    args: tuple,
    kwargs: dict,
    key: str,
    met: tuple[Value, ...],
    values: Values,
    batched: Sequence[Tensor],
) -> Any:
    """Run an operation by its plan, and tap its output."""
    formula = plan.formula
    active = None
    if torch.is_autocast_enabled(device := met[0].leaf.device.type):
        active = (device, torch.get_autocast_dtype(device))
    given, named = list(args), dict(kwargs)
    saved: list[Tensor] = []
    # shapes of what is not needed later: models may write to it
    absent: list[tuple[torch.Size, torch.dtype, torch.device]] = []
    input_shape = None
    for where, slot, main in plan.tensors:
        if type(slot) is ValueSlot:
            tensor = met[slot].leaf
        else:
            tensor = args[where] if type(where) is int else kwargs[where]
            if main:
                input_shape = tensor.shape
                if active is not None and formula.autocast and tensor.is_floating_point():
                    # what it computes with, and all that must be kept
                    tensor = in_autocast(tensor)
            if slot is not None:
                saved.append(tensor)
            else:
                absent.append((tensor.shape, tensor.dtype, tensor.device))
        if type(where) is int:
            given[where] = tensor
        else:
            named[where] = tensor
    if plan.template.nested:
        given, named = _nested(given, named, values, met, saved)
    y = func(*given, **named)
    if not isinstance(y, Tensor) or not y.dim() or not y.is_floating_point():
        return NotImplemented
    if formula.label is None:
        if not _has_rows(recorder, y.shape):
            return NotImplemented
        # a tap marks what it passes on as written to, and the operation may have kept its output
        y = y.clone()
        flags = tuple(
            b and t.dim() > 0 and t.shape[0] == y.shape[0]
            for b, t in zip(plan.from_batch, saved, strict=True)
        )
    else:
        flags = plan.from_batch
        if y._is_view():
            # an in-place operation may follow, which a view out of a custom function does not allow
            y = torch.ops.aten._unsafe_view(y, y.shape)
    from_batch, routed = origin(recorder, batched)
    found = Use(
        plan.template, recorder.place(key), met, plan.names or names_of(met), flags, input_shape, y.shape, from_batch, routed,
        active, absent,
    )  # fmt: skip
    return recorder.tap(y, found, tuple(saved))


def planned(func: Any, args: tuple, kwargs: dict, values: Values, batched: Sequence[Tensor]) -> Plan:
    """Find the formula of an operation, and which of its arguments the formula needs."""
    formula = formula_for(func, args, kwargs, values, batched)
    needed, main = formula.needs(args, kwargs, values), formula.main(args, kwargs)
    index = {id(value): i for i, value in enumerate(values)}
    tensors: list[tuple[int | str, Any, bool]] = []
    literals: list[tuple[int | str, Any]] = []
    from_batch: list[bool] = []
    nested = False

    def slot_of(tensor: Tensor, keep: bool) -> Any:
        if id(tensor) in index:
            return ValueSlot(index[id(tensor)])
        if not keep:
            return None
        from_batch.append(any(tensor is t for t in batched))
        return Slot(len(from_batch) - 1)

    def put(where: int | str, item: Any) -> Any:
        nonlocal nested
        keep = needed is None or where in needed
        if isinstance(item, Tensor):
            slot = slot_of(item, keep)
            tensors.append((where, slot, item is main))
            return Slot(-1 - sum(1 for _, s, _ in tensors[:-1] if s is None)) if slot is None else slot
        if isinstance(item, list | tuple) and any(isinstance(part, Tensor) for part in item):
            nested = True
            return [slot_of(part, True) if isinstance(part, Tensor) else part for part in item]
        literals.append((where, item))
        return item

    arguments = tuple(put(i, item) for i, item in enumerate(args))
    keywords = {name: put(name, item) for name, item in kwargs.items()}
    template = Template(formula, func, arguments, keywords, nested)
    known = formula.label is not None and all(value.param is not None for value in values)
    names = tuple(dict.fromkeys(value.key or "" for value in values)) if known else None
    kind = kind_of(main) if isinstance(main, Tensor) else None
    return Plan(formula, template, tuple(tensors), tuple(literals), tuple(from_batch), names, kind)


def _nested(
    args: list[Any], kwargs: dict[str, Any], values: Values, met: Sequence[Value], saved: list[Tensor]
) -> tuple[list[Any], dict[str, Any]]:
    """Arguments with lists of tensors: values are replaced, the others saved."""

    def put(item: Any) -> Any:
        if not isinstance(item, list | tuple) or not any(isinstance(part, Tensor) for part in item):
            return item
        found = []
        for part in item:
            which = next((i for i, value in enumerate(values) if part is value), None)
            if which is None and isinstance(part, Tensor):
                saved.append(part)
            found.append(part if which is None else met[which].leaf)
        return type(item)(found)

    return [put(a) for a in args], {k: put(v) for k, v in kwargs.items()}


def values_of(recorder: Recorder, values: Values) -> tuple[Value, ...] | None:
    """Return the values at a use; None where one's graph holds something else than parameters of this clipper."""
    found = []
    for value in values:
        if value.param is not None:
            assert value.key is not None
            found.append(Value(value.param.detach(), {value.key: value.param}))
            continue
        reached = parameters_behind(recorder, value)
        if not reached:
            return None
        found.append(Value(value.detach().as_subclass(Tensor), reached, value.as_subclass(Tensor)))
    return tuple(found)


def parameters_behind(recorder: Recorder, value: Tensor) -> dict[str, nn.Parameter]:
    """Return the parameters that a value is a function of; none where it is a function of anything else, too."""
    reached: dict[str, nn.Parameter] = {}
    waiting, seen = [value.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            if id(node.variable) not in recorder.names:
                return {}
            reached[recorder.names[id(node.variable)]] = node.variable
        elif type(node).__name__ == "TapBackward":
            return {}
        waiting.extend(following for following, _ in node.next_functions)
    return {name: reached[name] for name in recorder.params if name in reached}


def names_of(values: Sequence[Value]) -> tuple[str, ...]:
    """Return the parameters that values reach."""
    return tuple(dict.fromkeys(name for value in values for name in value.reached))


def origin(recorder: Recorder, batched: Sequence[Tensor]) -> tuple[bool | None, bool]:
    """Tell whether tensors were computed from the model's inputs (None where that is not watched), and by picking rows."""
    flow = recorder.flow
    if flow is None:
        return None, False
    return any(t in flow for t in batched), any(flow.routed(t) for t in batched)


def _has_rows(recorder: Recorder, shape: torch.Size) -> bool:
    """Whether a tensor of this shape can have the examples in its first or second dimension."""
    rows = recorder.rows
    return len(shape) > 0 and (not rows or shape[0] % rows == 0 or (len(shape) > 1 and shape[1] == rows))


def _drops(func: Any, args: tuple, kwargs: dict) -> bool:
    """Whether attention would draw another dropout mask when it is repeated."""
    if func is not F.scaled_dot_product_attention:
        return False
    return bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))


# -- values that are copied to the rows of the batch ------------------------------------------------------------------


def expansion(
    recorder: Recorder, func: Any, args: tuple, kwargs: dict, key: str, values: Values
) -> Tensor | None:
    """Tap copies of a value, one for each row of the batch; None where it is a function of parameters like any other."""
    rows = recorder.rows
    if args[0] is not values[0] or values[0].changed or (met := values_of(recorder, values[:1])) is None:
        return None
    leaf = met[0].leaf
    y = func(leaf, *args[1:], **kwargs)
    if not rows or y.dim() < leaf.dim() or y.shape[0] % rows:
        return None
    base = (1,) * (y.dim() - leaf.dim()) + tuple(leaf.shape)
    if base[0] != 1 or any(one not in (1, other) for one, other in zip(base[1:], y.shape[1:], strict=True)):
        return None
    return _tap_copies(recorder, y, met[0], key, from_batch=False)


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
    if not _has_rows(recorder, shape):
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
        if aligned.shape[0] != 1:
            return NotImplemented
        second = shape[1:2] if len(shape) > 1 and shape[1] == recorder.rows else aligned.shape[1:2]
        copies.append(aligned.expand(shape[0], *second, *aligned.shape[2:]))
    from_batch, routed = origin(recorder, batched)
    names = [key] if len(met) == 1 else [f"{key}#{i}" for i in range(len(met))]
    tapped = {
        id(value): _tap_copies(recorder, y, of, name, from_batch, routed)
        for value, y, of, name in zip(values, copies, met, names, strict=True)
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


def _tap_copies(
    recorder: Recorder, y: Tensor, value: Value, key: str, from_batch: bool | None, routed: bool = False
) -> Tensor:
    template = Template(SPREAD, None, (), {}, False)
    names = tuple(value.reached)
    copies = Use(
        template, recorder.place(key), (value,), names, (), None, y.shape, from_batch, routed, None, []
    )
    return recorder.tap(y, copies, ())
