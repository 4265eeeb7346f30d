"""Bare parameters: following a parameter that a module uses in its own forward, until it meets the batch.

A class token, a position table, a layer scale or a hand-written RMSNorm has no layer kind. `Tracked` is a view of such a
parameter that keeps its ordinary autograd history. Shape operations give another `Tracked`. Where it meets a batch in one of a
few row-wise operations, that operation is given a tap, and the per-example gradients come from ``vmap`` over the vjp of this one
operation. Every other use is left to ordinary autograd: the gradient then reaches the parameter itself, the backward pass sees
that, and the parameter is handed to the per-example loop. So an operation that is missing here costs time, never correctness.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpexp.clipping.contributions import Contribution, Dense, Lookup, Outer
from dpexp.clipping.contributions.numerics import by_example, wide
from dpexp.clipping.taps import Call, Recorder

T = torch.Tensor
SHAPE_OPERATIONS = {
    T.view, T.reshape, T.unsqueeze, T.squeeze, T.transpose, T.permute, T.__getitem__, T.flatten, T.contiguous, T.to,
    T.float, T.type_as, T.t, T.narrow, T.neg, T.__neg__, T.exp, T.unflatten, T.swapaxes, T.movedim, T.T.__get__,  # type: ignore[attr-defined]
    torch.reshape, torch.unsqueeze, torch.squeeze, torch.transpose, torch.permute, torch.flatten, torch.narrow,
    torch.t, torch.exp, torch.swapaxes, torch.movedim, torch._weight_norm, T.clone, torch.cat, F.interpolate,
}  # fmt: skip
# Deterministic functions that give one new tensor: gates, mixing weights, temperatures, normalised prototypes.
FUNCTIONS = {
    T.sigmoid, torch.sigmoid, F.sigmoid, T.tanh, torch.tanh, F.tanh, T.softmax, torch.softmax, F.softmax, F.softplus,
    T.log_softmax, torch.log_softmax, F.log_softmax, F.logsigmoid, F.normalize, T.abs, torch.abs, T.pow, T.__pow__, torch.pow,
    T.square, torch.square, T.sqrt, torch.sqrt, T.rsqrt, torch.rsqrt, T.log, torch.log, T.clamp, torch.clamp, T.sum,
    torch.sum, T.mean, torch.mean, torch.stack, T.matmul, T.__matmul__, torch.matmul,
}  # fmt: skip
LOOKUPS = {
    T.__getitem__,
    F.embedding,
    torch.where,
    T.where,
}  # with an index or a mask that every example shares
ELEMENTWISE = {
    T.add, T.__add__, T.__radd__, T.sub, T.__sub__, T.__rsub__, T.mul, T.__mul__, T.__rmul__, T.div, T.__truediv__,
    T.true_divide, T.__rtruediv__, torch.add, torch.sub, torch.mul, torch.div, torch.true_divide,
}  # fmt: skip
ADDITIONS = {T.add, T.__add__, T.__radd__, torch.add}
IN_PLACE_ADDITIONS = {T.add_, T.__iadd__}
EXPANSIONS = {T.expand, T.expand_as, torch.broadcast_to, T.broadcast_to, T.repeat}
ROW_WISE = ELEMENTWISE | {
    F.linear, T.matmul, T.__matmul__, torch.matmul, F.layer_norm, F.rms_norm, F.group_norm, F.prelu,
    F.conv1d, F.conv2d, F.conv3d, torch.conv1d, torch.conv2d, torch.conv3d, torch.rms_norm,
    F.scaled_dot_product_attention, F.embedding, torch.where, T.where, torch.einsum, F.batch_norm,
}  # fmt: skip
PRODUCTS = {T.matmul, T.__matmul__, torch.matmul}


class Tracked(torch.Tensor):
    """A value that depends on parameters alone; ``recipe`` rebuilds it from them."""

    names: tuple[str, ...]
    params: tuple[nn.Parameter, ...]
    recipe: Callable[..., Tensor]
    recorder: Recorder
    version: int  # of its memory when the recipe described it

    @staticmethod
    def of(param: nn.Parameter, name: str, recorder: Recorder) -> Tracked:
        return _tracked(param, (name,), (param,), _unchanged, recorder)

    @classmethod
    @torch.compiler.disable
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        flat = [
            part for a in (*args, *kwargs.values()) for part in (a if isinstance(a, list | tuple) else (a,))
        ]
        tracked = [a for a in flat if isinstance(a, Tracked)]
        if tracked and all(a._unchanged_since_made() for a in tracked) and not _random(func, args, kwargs):
            others = [a for a in flat if isinstance(a, Tensor) and not isinstance(a, Tracked)]
            if not others and (func in SHAPE_OPERATIONS or func in ELEMENTWISE or func in FUNCTIONS):
                return derive(func, args, kwargs, tracked)
            if not kwargs and _constant(func, args, others, tracked):
                return derive(func, tuple(_copied(a) for a in args), {}, tracked)
            if func in LOOKUPS and others and _shared_index(others, tracked[0].recorder.rows):
                return derive(func, args, kwargs, tracked)
            if func is T.__getitem__ and _rows_picked(args, tracked):
                table, ids = args  # rows of a table by indices of the batch, which may count from the end
                func, args = F.embedding, (torch.where(ids < 0, ids + table.shape[0], ids), table)
                others = [args[0]]
            if (
                func in EXPANSIONS
                or (
                    func in IN_PLACE_ADDITIONS and len(args) == 2 and not kwargs and args[0] is not tracked[0]
                )
            ) or (
                others
                and func in ROW_WISE
                and not _unusual_lookup(func, args, kwargs)
                and not _batch_statistics(func, args, kwargs)
                and (func is not torch.einsum or _over_rows(args, tracked))
            ):
                result = _tap_operation(func, args, kwargs, tracked, others)
                if result is not None:
                    return result
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def _unchanged_since_made(self) -> bool:
        """Whether the recipe still describes the value: nothing wrote to it in place."""
        with torch._C.DisableTorchFunctionSubclass():
            return hasattr(self, "recipe") and self._version == self.version

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.as_subclass(torch.Tensor).__deepcopy__(memo)


def _random(func: Any, args: tuple, kwargs: dict) -> bool:
    """Whether the operation would draw another dropout mask when it is repeated."""
    if func is not F.scaled_dot_product_attention:
        return False
    return bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))


def _lookup_arguments(args: tuple, kwargs: dict) -> dict[str, Any]:
    names = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    return dict(zip(names, args, strict=False)) | kwargs


def _unusual_lookup(func: Any, args: tuple, kwargs: dict) -> bool:
    """Whether an embedding does more than pick rows of an unchanged table."""
    if func is not F.embedding:
        return False
    given = _lookup_arguments(args, kwargs)
    table = given["weight"]
    changed = not isinstance(table, Tracked) or table.recipe is not _unchanged
    return changed or any(given.get(option) for option in ("max_norm", "scale_grad_by_freq", "sparse"))


def _batch_statistics(func: Any, args: tuple, kwargs: dict) -> bool:
    """Whether a batch norm uses more than constants."""
    return func is F.batch_norm and bool(kwargs.get("training", args[5] if len(args) > 5 else False))


def _unchanged(param: Tensor) -> Tensor:
    """The recipe of a parameter that is used as it is."""
    return param


def _tracked(
    value: Tensor, names: tuple, params: tuple, recipe: Callable[..., Tensor], recorder: Recorder
) -> Tracked:
    with torch._C.DisableTorchFunctionSubclass():
        result = value.as_subclass(Tracked)
        result.version = value._version
    result.names, result.params, result.recipe, result.recorder = names, params, recipe, recorder
    return result


def _shared_index(others: list[Tensor], rows: int | None) -> bool:
    """Whether these can be an index that is the same for every example."""
    return all(not o.is_floating_point() and o.dim() > 0 and o.shape[0] != rows for o in others)


def _constant(func: Any, args: tuple, others: list[Tensor], tracked: list[Tracked]) -> bool:
    """Whether the other arguments are the same for every example: numbers, single rows or what has the parameter's shape.

    None that a gradient goes to, because the rest of the model sees the result only through taps.
    """
    rows = tracked[0].recorder.rows
    if not others or rows is None or any(o.requires_grad for o in others):
        return False
    several = rows > 1  # else a single row may be the batch
    if func is torch.cat:
        return all(o.dim() == 1 or (several and o.shape[:1] == (1,)) for o in others)
    if func not in ELEMENTWISE or len(args) != 2:
        return False
    own, other = tracked[0].shape, others[0].shape
    if other == () or not several:
        return other == ()
    return other[0] == 1 or (len(other) <= len(own) and torch.broadcast_shapes(own, other) == own)


def _copied(argument: Any) -> Any:
    """A constant as it is now, whatever is written to it later."""
    if isinstance(argument, list | tuple):
        return [_copied(part) for part in argument]
    constant = isinstance(argument, Tensor) and not isinstance(argument, Tracked)
    return argument.clone() if constant else argument


def _over_rows(args: tuple, tracked: list[Tracked]) -> bool:
    """Whether an einsum multiplies each row of one tensor with one parameter: ``btd,dhk->bthk``."""
    if len(args) != 3 or not isinstance(args[0], str) or len(tracked) != 1:
        return False
    inputs, arrow, output = args[0].replace(" ", "").partition("->")
    terms = inputs.split(",")
    if not arrow or not output or "." in inputs or len(terms) != 2:
        return False
    of_parameter, of_rows = terms if args[1] is tracked[0] else reversed(terms)
    return of_rows[:1] == output[0] and output[0] not in of_parameter


def _rows_picked(args: tuple, tracked: list[Tracked]) -> bool:
    """Whether ``table[ids]`` is the lookup of an embedding: whole rows of an unchanged table, by one index per position."""
    table, ids = args
    return (
        table is tracked[0]
        and table.recipe is _unchanged
        and table.dim() == 2
        and isinstance(ids, Tensor)
        and ids.dtype in (torch.int32, torch.int64)
        and ids.dim() > 0
    )


def _union(tracked: list[Tracked]) -> tuple[tuple[str, ...], tuple[nn.Parameter, ...]]:
    union = {name: param for t in tracked for name, param in zip(t.names, t.params, strict=True)}
    return tuple(union), tuple(union.values())


def _rebuild(func: Any, args: tuple, kwargs: dict, names: tuple[str, ...]) -> Callable[..., Tensor]:
    """A function of the parameters that repeats ``func`` with every `Tracked` argument rebuilt by its recipe."""
    frozen = [_freeze(a) for a in args], {k: _freeze(v) for k, v in kwargs.items()}

    def recipe(*values: Tensor) -> Tensor:
        by_name = dict(zip(names, values, strict=True))

        def put(item: Any) -> Any:
            if isinstance(item, list):
                return [put(part) for part in item]
            return item.value(by_name) if isinstance(item, _Recipe) else item

        return func(*(put(a) for a in frozen[0]), **{k: put(v) for k, v in frozen[1].items()})

    return recipe


class _Recipe:
    """A `Tracked` argument without its graph."""

    def __init__(self, tracked: Tracked):
        self.names, self.recipe = tracked.names, tracked.recipe

    def value(self, by_name: dict[str, Tensor]) -> Tensor:
        return self.recipe(*(by_name[name] for name in self.names))


def _freeze(item: Any) -> Any:
    if isinstance(item, list | tuple) and any(isinstance(part, Tracked) for part in item):
        return [_freeze(part) for part in item]
    return _Recipe(item) if isinstance(item, Tracked) else item


def derive(func: Any, args: tuple, kwargs: dict, tracked: list[Tracked]) -> Any:
    """The result of ``func`` as a `Tracked`: its other arguments are the same for every example."""
    names, params = _union(tracked)
    with torch._C.DisableTorchFunctionSubclass():
        value = func(*args, **kwargs)
    if not isinstance(value, Tensor):
        return value
    return _tracked(value, names, params, _rebuild(func, args, kwargs, names), tracked[0].recorder)


def _tap_operation(
    func: Any, args: tuple, kwargs: dict, tracked: list[Tracked], others: list[Tensor]
) -> Tensor | None:
    recorder = tracked[0].recorder
    rows, flow = recorder.rows, recorder.flow
    names, params = _union(tracked)
    with torch._C.DisableTorchFunctionSubclass():
        detached = [a.detach() if isinstance(a, Tracked) else a for a in args]
        detached_kwargs = {k: v.detach() if isinstance(v, Tracked) else v for k, v in kwargs.items()}
        in_place = func in IN_PLACE_ADDITIONS
        y = detached[1].expand_as(detached[0]) if in_place else func(*detached, **detached_kwargs)
        if rows is None or y.dim() == 0 or y.shape[0] % rows:
            return None  # no batch here: ordinary autograd carries the gradient on
        expanded = func in EXPANSIONS or in_place
        if expanded and not _broadcast(tracked[0], y):
            return None
        device = y.device.type
        active = (device, torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None
        added = func in ADDITIONS and not kwargs
        broadcast = all(
            t.dim() < y.dim() or t.shape[0] == 1 for t in tracked
        )  # else a mask may have given it rows
        source = _Operation(func, args, kwargs, names, params, y.shape[1:] if added or expanded else None)
        saved = () if expanded or added else tuple(others)
        call = Call(
            source=source,
            key=recorder.place(str(getattr(func, "__name__", func)), names),
            input_shape=None,
            output_shape=y.shape,
            from_batch=None if flow is None else any(o in flow for o in others),
            routed=flow is not None and any(flow.routed(o) for o in others),
            autocast=active,
            batched=tuple(
                func is torch.einsum or (s.dim() == y.dim() and s.shape[0] == y.shape[0]) for s in saved
            ),
            # a single example's rows are those of any tensor whose first dimension is 1
            certain=rows > 1 and ((added and broadcast) or expanded or func is F.embedding),
        )
        if func is F.scaled_dot_product_attention:
            y = y.clone()  # its backward keeps the output, and a tap marks what it passes on as written to
        tapped = recorder.tap(y, call, saved)
        return func(args[0], tapped) if in_place else tapped


def _broadcast(base: Tensor, y: Tensor) -> bool:
    """Whether every row of ``y`` is the same copy of ``base``."""
    padded = (1,) * (y.dim() - base.dim()) + tuple(base.shape)
    pairs = zip(padded[1:], y.shape[1:], strict=True)
    return len(padded) == y.dim() and padded[0] == 1 and all(one in (1, other) for one, other in pairs)


class _Operation:
    """The `Source` of one row-wise operation on bare parameters."""

    label = "operation"

    def __init__(
        self, func: Any, args: tuple, kwargs: dict, names: tuple, params: tuple, added_to: torch.Size | None
    ):
        self.func, self.names, self.params, self.added_to = func, names, params, added_to
        self.owner = f"{names[0]}: {getattr(func, '__name__', func)}"
        counter = iter(range(len(args) + len(kwargs)))

        def freeze(item: Any) -> Any:
            if isinstance(item, Tensor) and not isinstance(item, Tracked):
                return _Saved(next(counter))
            return _freeze(item)

        self.args = [freeze(a) for a in args]
        self.kwargs = {k: freeze(v) for k, v in kwargs.items()}

    def apply(self, values: tuple[Tensor, ...], saved: tuple[Tensor, ...], rows: int) -> Tensor:
        """The operation as a function of the parameters and of ``rows`` rows of the batch."""
        by_name = dict(zip(self.names, values, strict=True))

        def put(item: Any) -> Any:
            if isinstance(item, _Recipe):
                return item.value(by_name)
            return saved[item] if isinstance(item, _Saved) else item

        if (
            self.added_to is not None
        ):  # the gradient of a sum needs no other summand, that of an expansion nothing
            return next(put(a) for a in self.args if isinstance(a, _Recipe)).expand(rows, *self.added_to)
        return self.func(*(put(a) for a in self.args), **{k: put(v) for k, v in self.kwargs.items()})

    def contributions(
        self, call: Call, saved: tuple[Tensor, ...], gy: Tensor, num_examples: int, names: set[str]
    ) -> dict[str, Contribution]:
        from dpexp.clipping.swap import autocast_like

        if (found := self._linear(saved, gy, num_examples, names)) is not None:
            return found
        if self.func is F.embedding:
            return self._lookup(saved, gy, num_examples)
        per_example = gy.shape[0] // max(num_examples, 1)
        batched = call.batched
        split = [
            s.unflatten(0, (num_examples, per_example)) if b else s
            for s, b in zip(saved, batched, strict=True)
        ]
        values = tuple(p.detach() for p in self.params)
        grads: Any

        def one(gradient: Tensor, *rows: Tensor) -> tuple[Tensor, ...]:
            y, vjp = torch.func.vjp(lambda *v: self.apply(v, rows, per_example), *values)  # type: ignore[misc]
            return vjp(gradient.to(y.dtype))

        in_dims: Any = (0, *(0 if b else None for b in batched))
        with autocast_like(call):
            grads = torch.func.vmap(one, in_dims=in_dims)(
                gy.unflatten(0, (num_examples, per_example)), *split
            )
        return {name: Dense(g) for name, g in zip(self.names, grads, strict=True) if name in names}

    def _linear(
        self, saved: tuple[Tensor, ...], gy: Tensor, num_examples: int, names: set[str]
    ) -> dict[str, Contribution] | None:
        """``F.linear`` with an unchanged weight is what `nn.Linear` is, ``x @ weight`` the same; None for anything else."""
        if self.func in PRODUCTS:
            return self._product(saved, gy, num_examples)
        given = dict(zip(("input", "weight", "bias"), self.args, strict=False)) | self.kwargs
        weight, bias = given.get("weight"), given.get("bias")
        whole = [item for item in (weight, bias) if isinstance(item, _Recipe)]
        if (
            self.func is not F.linear
            or not isinstance(weight, _Recipe)
            or not isinstance(given["input"], _Saved)
        ):
            return None
        if any(item.recipe is not _unchanged for item in whole) or (bias is not None and len(whole) == 1):
            return None
        x, g = by_example(saved[given["input"]], num_examples, 1), by_example(gy, num_examples, 1)
        found: dict[str, Contribution] = {weight.names[0]: Outer(x, g)}
        if isinstance(bias, _Recipe):
            found[bias.names[0]] = Dense(g.sum(1, dtype=wide(g.dtype)))
        return {name: contribution for name, contribution in found.items() if name in names}

    def _product(
        self, saved: tuple[Tensor, ...], gy: Tensor, num_examples: int
    ) -> dict[str, Contribution] | None:
        x, weight = self.args
        if not isinstance(weight, _Recipe) or weight.recipe is not _unchanged or self.params[0].dim() != 2:
            return None
        x = saved[x]
        if x.dim() != gy.dim():
            return None
        x, g = by_example(x, num_examples, 1), by_example(gy, num_examples, 1)
        return {weight.names[0]: Outer(g, x)}

    def _lookup(self, saved: tuple[Tensor, ...], gy: Tensor, num_examples: int) -> dict[str, Contribution]:
        """An embedding with a forward of its own, like the scaled ones of BART and Gemma."""
        given = _lookup_arguments(tuple(self.args), self.kwargs)
        count, skipped = self.params[0].shape[0], given.get("padding_idx")
        skipped = None if skipped is None else skipped % count
        ids = saved[given["input"]].reshape(num_examples, -1)
        return {self.names[0]: Lookup(ids, by_example(gy, num_examples, 1), count, skipped)}

    def plain_gradients(
        self, call: Call, saved: tuple[Tensor, ...], gy: Tensor, names: set[str]
    ) -> dict[str, Tensor]:
        from dpexp.clipping.swap import autocast_like

        values = tuple(p.detach().requires_grad_() for p in self.params)
        with torch.enable_grad(), autocast_like(call):
            y = self.apply(values, saved, gy.shape[0])
        grads = torch.autograd.grad(y, values, gy.to(y.dtype), allow_unused=True)
        return {name: g for name, g in zip(self.names, grads, strict=True) if name in names and g is not None}


class _Saved(int):
    """Where a saved tensor stands."""
