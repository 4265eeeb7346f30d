"""Operations that need no formula of their own: those that broadcast, and any function that `torch.func.vmap` understands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpexp.clipping.gradients import Dense, PerExampleGradient
from dpexp.clipping.gradients.numerics import wide
from dpexp.clipping.tapping.uses import Arrival, Formula, Use

# Functions that broadcast their tensors against each other, by name without underscores; of operators also the reflected
# ("radd") and the in-place form ("iadd").
BROADCASTING = frozenset(
    {
        *(f"{prefix}{name}" for prefix in ("", "r", "i") for name in ("add", "sub", "mul", "div", "truediv", "pow")),
        "true_divide", "divide", "multiply", "subtract", "where", "maximum", "minimum", "lerp", "addcmul", "addcdiv",
        "atan2", "hypot", "logaddexp", "clamp", "clip", "copysign",
    }
)  # fmt: skip


def spreads(func: Any, args: Sequence[Any], kwargs: dict[str, Any], values: Sequence[Tensor]) -> bool:
    """Tell whether an operation broadcasts the values, so that each row of the batch can be given a copy."""
    name = getattr(func, "__name__", "")
    if name == "__setitem__":
        return len(args) == 3 and all(value is args[2] for value in values)
    if func is F.scaled_dot_product_attention:
        mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
        return len(args) > 2 and all(value is mask for value in values)
    return name.strip("_") in BROADCASTING and not any(isinstance(a, list | tuple) for a in args)


class Spread(Formula):
    """A value with a copy for each row of the batch: what arrives there are the gradients of the copies."""

    label = "broadcast"

    def per_example(self, arrived: Arrival, wanted: set[int]) -> dict[int, PerExampleGradient]:
        leaf, gy, num_examples = arrived.use.values[0].leaf, arrived.gy, arrived.num_examples
        shape = [1] * (gy.dim() - leaf.dim()) + list(leaf.shape)
        if num_examples == 1:
            return {0: Dense(gy.to(wide(gy.dtype)).sum_to_size(shape).reshape(1, *leaf.shape))}
        g = gy.unflatten(0, (num_examples, -1)).sum(1, dtype=wide(gy.dtype))
        # less the dimension in which the rows stand
        del shape[1 if arrived.turned else 0]
        return {0: Dense(g.sum_to_size(num_examples, *shape).reshape(num_examples, *leaf.shape))}

    def repeat(self, use: Use, values: tuple[Tensor, ...], saved: tuple[Tensor, ...]) -> Tensor:
        (leaf,), shape = values, use.output_shape
        return leaf.view((1,) * (len(shape) - leaf.dim()) + tuple(leaf.shape)).expand(shape)


class AnyFunction(Formula):
    """``vmap`` of the operation's own vector-Jacobian product, example by example."""

    def needs(self, args: Sequence[Any], kwargs: dict[str, Any], values: Sequence[Tensor]) -> set[Any] | None:
        return None

    def per_example(self, arrived: Arrival, wanted: set[int]) -> dict[int, PerExampleGradient]:
        use, gy, num_examples = arrived.use, arrived.gy, arrived.num_examples
        rows = gy.shape[0] // max(num_examples, 1)
        saved = zip(arrived.saved, use.batched, strict=True)
        split = [s.unflatten(0, (num_examples, rows)) if b else s for s, b in saved]
        leaves = tuple(value.leaf for value in use.values)

        def back(tensor: Tensor) -> Tensor:
            return tensor.transpose(0, 1) if arrived.turned else tensor

        def one(gradient: Tensor, *of_rows: Tensor) -> tuple[Tensor, ...]:
            given = tuple(back(t) if b else t for t, b in zip(of_rows, use.batched, strict=True))
            y, vjp = torch.func.vjp(lambda *values: use.call(values, given), *leaves)  # type: ignore[misc]
            return vjp(back(gradient).to(y.dtype))

        in_dims: Any = (0, *(0 if b else None for b in use.batched))
        with use.in_autocast():
            grads = torch.func.vmap(one, in_dims=in_dims)(gy.unflatten(0, (num_examples, rows)), *split)
        return {i: Dense(g) for i, g in enumerate(grads) if i in wanted}
