"""One use of parameters: an operation in which values computed from parameters meet the batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from dpexp.clipping.contributions import Contribution, Outer, Pulled

if TYPE_CHECKING:
    from dpexp.clipping.operations.base import Formula


class Slot(int):
    """Where a saved tensor stands among the arguments of an operation."""


class ValueSlot(int):
    """Where a value computed from parameters stands."""


@dataclass(eq=False)
class Value:
    """What an operation was given: a parameter itself, or a function of parameters.

    Attributes:
        leaf: detached; what the operation computed with.
        reached: parameters by name.
        graph: the value with its own autograd graph, which holds nothing of the batch; None for a parameter itself.
    """

    leaf: Tensor
    reached: dict[str, nn.Parameter]
    graph: Tensor | None = None

    def per_parameter(self, of_value: Contribution, names: set[str]) -> Iterator[tuple[str, Contribution]]:
        """Pull the per-example gradients of the value back to those of the parameters ``names``."""
        for name, param in self.reached.items():
            if name not in names:
                continue
            if self.graph is None:
                yield name, of_value
            elif isinstance(of_value, Outer) and self.is_transpose:
                yield name, of_value.transposed()
            else:
                yield name, Pulled(of_value, _PullBack(self.graph, param), param.shape)

    @property
    def is_transpose(self) -> bool:
        """Whether the value is nothing but one parameter, a matrix, transposed."""
        node = None if self.graph is None or self.graph.dim() != 2 else self.graph.grad_fn
        if node is None or node.name() not in ("TBackward0", "TransposeBackward0", "PermuteBackward0"):
            return False
        alias, (param,) = node.next_functions[0][0], self.reached.values()
        if alias is None or alias.name() != "AliasBackward0" or self.leaf.shape != param.shape[::-1]:
            return False
        return hasattr(alias.next_functions[0][0], "variable") and self.leaf.stride() == param.stride()[::-1]

    def gradients(self, of_value: Tensor, names: set[str]) -> Iterator[tuple[str, Tensor]]:
        """Pull one gradient of the value back."""
        for name, param in self.reached.items():
            if name not in names:
                continue
            if self.graph is None:
                yield name, of_value
            else:
                yield name, _PullBack(self.graph, param)(of_value[None])[0]


@dataclass(frozen=True, eq=False)
class _PullBack:
    """The transposed Jacobian of a value with respect to one parameter, applied to a batch of gradients."""

    graph: Tensor
    param: nn.Parameter

    def __call__(self, grads: Tensor) -> Tensor:
        if grads.shape[0] == 0:
            return grads.new_zeros(0, *self.param.shape)
        asked: dict[str, Any] = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
        given = grads.to(self.graph.dtype)
        with torch.enable_grad():
            if given.shape[0] > 1:
                try:
                    (found,) = torch.autograd.grad(
                        self.graph, self.param, given, is_grads_batched=True, **asked
                    )
                    return found.to(grads.dtype).contiguous()
                except RuntimeError as error:
                    # a function whose derivative has no batched form
                    if isinstance(error, torch.OutOfMemoryError):
                        raise
            rows = [torch.autograd.grad(self.graph, self.param, row, **asked)[0] for row in given]
        return torch.stack(rows).to(grads.dtype)


class Template:
    """An operation and its arguments, with a slot in the place of each tensor.

    Args:
        formula: how per-example gradients are found.
        func: the operation.
        args, kwargs: with a `ValueSlot` or a `Slot` for each tensor; slots below zero are of tensors whose contents
            are not needed.
        nested: whether tensors stand in lists.
    """

    def __init__(
        self, formula: Formula, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], nested: bool
    ):
        self.formula, self.func, self.args, self.kwargs, self.nested = formula, func, args, kwargs, nested
        self.given = formula.bind(args, kwargs)


@dataclass(eq=False)
class Use:
    """Static facts of one use, never a tensor of the batch.

    Attributes:
        template: the operation.
        place: the operation with what it was given, and which of its uses in the forward pass this is: what is verified of its
            layout is remembered by it.
        values: what it was given of parameters.
        names: of all parameters that these reach.
        batched: which saved tensors have the rows of the output.
        input_shape: of what the operation maps row by row; None where only its output tells about rows.
        output_shape: of the tapped tensor.
        from_batch: whether it was computed from the model's inputs (None where that was not followed).
        routed: whether its rows were picked by index, so that what is verified holds for this batch alone.
        autocast: device and dtype, where autocast was on.
        absent: shape, dtype and device of the tensors whose contents are not needed.
    """

    template: Template
    place: tuple[str, int]
    values: tuple[Value, ...]
    names: tuple[str, ...]
    batched: tuple[bool, ...]
    input_shape: torch.Size | None
    output_shape: torch.Size
    from_batch: bool | None
    routed: bool
    autocast: tuple[str, torch.dtype] | None
    absent: list[tuple[torch.Size, torch.dtype, torch.device]]

    @property
    def formula(self) -> Formula:
        """How its per-example gradients are found."""
        return self.template.formula

    @property
    def label(self) -> str:
        """The operation, for the coverage table."""
        return self.formula.label or self.template.func.__name__.strip("_")

    @property
    def owner(self) -> str:
        """The module whose parameter is used, for messages."""
        return self.names[0].rpartition(".")[0] or "(root)"

    def per_example(
        self, saved: tuple[Tensor, ...], gy: Tensor, num_examples: int, names: set[str]
    ) -> dict[str, Contribution]:
        """Find the per-example gradients of the parameters ``names``; ``saved`` and ``gy`` are example-major."""
        wanted = {i for i, value in enumerate(self.values) if not names.isdisjoint(value.reached)}
        found: dict[str, Contribution] = {}
        for i, of_value in self.formula.per_example(self, saved, gy, num_examples, wanted).items():
            for name, gradient in self.values[i].per_parameter(of_value, names):
                found[name] = found[name].merge(gradient) if name in found else gradient
        return found

    def plain_gradients(self, saved: tuple[Tensor, ...], gy: Tensor, names: set[str]) -> dict[str, Tensor]:
        """Find the ordinary gradients, summed over everything, by autograd on this operation alone."""
        leaves = [value.leaf.detach().requires_grad_() for value in self.values]
        with torch.enable_grad(), self.in_autocast():
            y = self.formula.repeat(self, tuple(leaves), saved)
        grads = torch.autograd.grad(y, leaves, gy.to(y.dtype).reshape(y.shape), allow_unused=True)
        found: dict[str, Tensor] = {}
        for value, g in zip(self.values, grads, strict=True):
            if g is None:
                continue  # type: ignore[unreachable]
            for name, gradient in value.gradients(g, names):
                found[name] = found[name] + gradient if name in found else gradient
        return found

    def call(self, values: tuple[Tensor, ...], saved: tuple[Tensor, ...]) -> Tensor:
        """Repeat the operation."""

        def put(item: Any) -> Any:
            if isinstance(item, ValueSlot):
                return values[item]
            if not isinstance(item, Slot):
                return item
            if item >= 0:
                return saved[item]
            shape, dtype, device = self.absent[-1 - item]
            return torch.zeros((), dtype=dtype, device=device).expand(shape)

        args, kwargs = tree_map(put, (self.template.args, self.template.kwargs))
        return self.template.func(*args, **kwargs)

    def in_autocast(self) -> torch.autocast:
        """Return the autocast state in which the operation ran."""
        device, dtype = self.autocast or ("cpu", torch.bfloat16)
        return torch.autocast(device, dtype=dtype, enabled=self.autocast is not None)
