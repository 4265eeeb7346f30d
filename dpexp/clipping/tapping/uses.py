"""One use of parameters: an operation in which values computed from parameters meet the batch, and what a formula for it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dpexp.clipping.gradients import Grouped, Outer, PerExampleGradient, Pulled, merge, numerics
from dpexp.clipping.gradients.numerics import by_example
from dpexp.clipping.tapping.dataflow import SHARED_ROWS, Sizes, by_torch_names


class Slot(int):
    """Where a tensor that is none of the values stands: among the saved ones, or counted from -1 on, among the rest."""


class ValueSlot(int):
    """Where a value computed from parameters stands."""


# of autograd, what gives back a part of a parameter as it is, or transposed
VIEWS = ("AliasBackward0", "TBackward0", "TransposeBackward0", "PermuteBackward0", "SelectBackward0")


@dataclass(eq=False)
class Value:
    """What an operation was given: a parameter itself, or a function of parameters.

    Attributes:
        leaf: detached; what the operation computed with.
        reached: parameters by name.
        graph: the value with its own autograd graph, which holds nothing of the batch; None for a parameter itself.
        rounds: whether anything in that graph has 16 bits, to which gradients on their way back are rounded.
    """

    leaf: Tensor
    reached: dict[str, nn.Parameter]
    graph: Tensor | None = None
    rounds: bool = False

    def per_parameter(
        self, of_value: PerExampleGradient, names: set[str]
    ) -> Iterator[tuple[str, PerExampleGradient]]:
        """Pull the per-example gradients of the value back to those of the parameters ``names``."""
        for name, param in self.reached.items():
            if name not in names:
                continue
            if self.graph is None:
                yield name, of_value
            elif (seen := self._seen_as(param, of_value)) is not None:
                yield name, seen
            else:
                yield name, Pulled(of_value, PullBack(self.graph, param), param.shape, self.rounds)

    def _seen_as(self, param: nn.Parameter, of_value: PerExampleGradient) -> PerExampleGradient | None:
        """The gradients of a parameter of which the value is a view: transposed, or one of the matrices that it stacks.

        None where it is another function of it.
        """
        node, leaf = None if self.graph is None else self.graph.grad_fn, self.leaf
        while node is not None and node.name() in VIEWS:
            node = node.next_functions[0][0]
        if not (isinstance(of_value, Outer | Grouped) and hasattr(node, "variable")):
            return None
        # where the numbers lie tells which view it is
        rest = param.dim() - leaf.dim()
        of_one = param.shape[rest:], param.stride()[rest:]
        turned = tuple((*sizes[:-2], sizes[-1], sizes[-2]) for sizes in of_one) if leaf.dim() > 1 else of_one
        if (tuple(leaf.shape), leaf.stride()) == turned:
            of_value = of_value.transposed()
        elif (leaf.shape, leaf.stride()) != of_one:
            return None
        if rest == 0:
            return of_value
        if rest > 1 or not isinstance(of_value, Outer):
            return None
        number = (leaf.storage_offset() - param.storage_offset()) // param.stride(0)
        a, g = of_value.parts
        return Grouped(a, g, torch.full(a.shape[:2], number, device=a.device), len(param))


@dataclass(frozen=True, eq=False)
class PullBack:
    """The transposed Jacobian of a value with respect to one parameter, applied to a batch of gradients."""

    graph: Tensor
    param: nn.Parameter

    def __call__(self, grads: Tensor) -> Tensor:
        asked: dict[str, Any] = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
        given = grads.to(self.graph.dtype)
        # of a sum, the rounding of TF32 would be an error of all examples
        with torch.enable_grad(), numerics.all_full_precision():
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


class Formula:
    """How an operation's output gradient becomes the per-example gradients of the values it was given. Stateless.

    Attributes:
        label: shown in the coverage table; None for a function of which nothing is known.
        autocast: whether autocast runs the operation in 16 bits.
        by_place: whether what it does to a row goes by where the row lies; nothing but its input has rows then.
        names: of the operation's arguments, in their order. ``input`` is the one that is mapped row by row.
        keywords: of arguments that torch calls otherwise, and their names here.
    """

    label: str | None = None
    autocast = False
    by_place = False
    names: tuple[str, ...] = ()
    keywords: ClassVar[dict[str, str]] = {}

    def bind(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the given arguments by name."""
        named = {self.keywords.get(name, name): item for name, item in by_torch_names(kwargs).items()}
        return dict(zip(self.names, args, strict=False)) | named

    def main(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the argument that is mapped row by row; None where there is none."""
        return self.bind(args, kwargs).get("input") if self.names else None

    def applies(self, given: dict[str, Any], values: Sequence[Tensor], batched: Sequence[Tensor]) -> bool:
        """Tell whether the formula is right: it is where the input, and nothing else, comes from the batch."""
        rest = [item for name, item in given.items() if name != "input"]
        one = not is_one_of(given["input"], values) and not any(is_one_of(t, rest) for t in batched)
        return one and self.covers(given)

    def covers(self, given: dict[str, Any]) -> bool:
        """Tell whether the formula is right for arguments of these kinds."""
        return True

    def needs(self, args: Sequence[Any], kwargs: dict[str, Any], values: Sequence[Tensor]) -> set[Any] | None:
        """Return the positions and keywords of the arguments that the gradients depend on; None for all of them."""
        given = self.bind(args, kwargs)
        wanted = self.reads({name for name, item in given.items() if is_one_of(item, values)})
        keywords = {keyword for keyword in kwargs if wanted.intersection(self.bind((), {keyword: None}))}
        return {i for i, name in enumerate(self.names[: len(args)]) if name in wanted} | keywords

    def reads(self, valued: set[str]) -> set[str]:
        """Return the arguments that the gradients of the arguments ``valued`` depend on."""
        return {"input"} if "weight" in valued else set()

    def per_example(self, arrived: Arrival, wanted: set[int]) -> dict[int, PerExampleGradient]:
        """Find the per-example gradients of the values ``wanted``, by their index."""
        slots = arrived.slots.items()
        return {slot: self.gradient(name, arrived) for name, slot in slots if slot in wanted}

    def gradient(self, name: str, arrived: Arrival) -> PerExampleGradient:
        """Find the per-example gradients of the argument ``name``."""
        raise NotImplementedError

    def repeat(self, use: Use, values: tuple[Tensor, ...], saved: tuple[Tensor, ...]) -> Tensor:
        """Compute the tapped tensor again, from other values."""
        return use.call(values, saved)


@dataclass(eq=False)
class Template:
    """How an operation runs, and runs again with arguments of the same kind. It holds no tensor.

    Attributes:
        formula: how per-example gradients are found.
        func: the operation.
        args, kwargs: with a `ValueSlot` or a `Slot` for each tensor; slots below zero are of tensors whose contents
            are not needed.
        tensors: where each tensor stands (a position or a keyword), its slot, and whether the formula maps it row by row.
        literals: every other argument, by position or keyword.
        from_batch: of the saved tensors, which are of the batch.
        names: of the parameters, where it may be used again: the formula is known and the values are parameters themselves.
        kind: of the tensor that the formula maps row by row, see `kind_of`.
    """

    formula: Formula
    func: Any
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    tensors: tuple[tuple[int | str, Any, bool], ...] = ()
    literals: tuple[tuple[int | str, Any], ...] = ()
    from_batch: tuple[bool, ...] = ()
    names: tuple[str, ...] | None = None
    kind: tuple[Any, ...] | None = None

    def __post_init__(self) -> None:
        self.given = self.formula.bind(self.args, self.kwargs)
        self.slots = {name: int(item) for name, item in self.given.items() if isinstance(item, ValueSlot)}

    def call(self, values: Sequence[Tensor], saved: Sequence[Tensor], rest: Sequence[Tensor]) -> Any:
        """Run the operation on ``values``, what is ``saved`` of it, and the ``rest``, whose contents are not needed later."""
        tensors = values, saved, rest
        kwargs = {name: _filled(item, *tensors) for name, item in self.kwargs.items()}
        return self.func(*[_filled(item, *tensors) for item in self.args], **kwargs)

    def fits(self, func: Any, args: tuple, kwargs: dict, values: Sequence[Any]) -> bool:
        """Tell whether the arguments are of the same kind."""
        same = func is self.func and len(args) + len(kwargs) == len(self.tensors) + len(self.literals)
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
            right = given is values[slot] if isinstance(slot, ValueSlot) else not is_one_of(given, values)
            if not right:
                return False
        return True


def _filled(item: Any, values: Sequence[Tensor], saved: Sequence[Tensor], rest: Sequence[Tensor]) -> Any:
    """Put tensors into the slots of an argument."""
    # no function within `Template.call`: one that calls itself is a cycle, which keeps the tensors until garbage is collected
    kind = type(item)
    if kind is ValueSlot:
        return values[item]
    if kind is Slot:
        return saved[item] if item >= 0 else rest[-1 - item]
    return kind([_filled(part, values, saved, rest) for part in item]) if kind in (tuple, list) else item


def kind_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return what a formula's conditions look at: the rank, and whether these are numbers, an index or a mask."""
    return tensor.dim(), tensor.dtype.is_floating_point, tensor.dtype is torch.bool


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
        of_examples: whether it was computed from an input with a row for each example.
        routed: the sizes of the dimensions along which rows may have been picked by index, see `is_routed`.
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
    of_examples: bool
    routed: Sizes
    autocast: tuple[str, torch.dtype] | None
    absent: list[tuple[torch.Size, torch.dtype, torch.device]]

    def is_routed(self, rows: int) -> bool:
        """Tell whether the rows of a batch of so many were picked, so that what is verified holds for this batch alone."""
        return not self.routed.isdisjoint((0, rows))

    @property
    def is_shared(self) -> bool:
        """Whether several examples may share a row, as equal ones that are computed once."""
        return not self.routed.isdisjoint(SHARED_ROWS)

    @property
    def in_float16(self) -> bool:
        """Whether it computed with numbers of 16 bits that overflow beyond 65504."""
        low = self.autocast is not None and self.autocast[1] == torch.float16
        return low or any(value.leaf.dtype == torch.float16 for value in self.values)

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

    def plain_gradients(self, saved: tuple[Tensor, ...], gy: Tensor, names: set[str]) -> dict[str, Tensor]:
        """Find the ordinary gradients, summed over everything, by autograd on this operation alone."""
        leaves = [value.leaf.detach().requires_grad_() for value in self.values]
        with torch.enable_grad(), self.in_autocast():
            y = self.formula.repeat(self, tuple(leaves), saved)
        with numerics.all_full_precision():
            grads = torch.autograd.grad(y, leaves, gy.to(y.dtype).reshape(y.shape), allow_unused=True)
        found: dict[str, Tensor] = {}
        for value, g in zip(self.values, grads, strict=True):
            if g is None:
                continue  # type: ignore[unreachable]
            # in the order of the parameters: sums of norms are to be the same in every process
            for name, param in value.reached.items():
                if name in names:
                    of_param = g if value.graph is None else PullBack(value.graph, param)(g[None])[0]
                    found[name] = found[name] + of_param if name in found else of_param
        return found

    def call(self, values: tuple[Tensor, ...], saved: tuple[Tensor, ...]) -> Tensor:
        """Repeat the operation."""
        rest = [torch.zeros((), dtype=dtype, device=at).expand(shape) for shape, dtype, at in self.absent]
        return self.template.call(values, saved, rest)

    def in_autocast(self) -> torch.autocast:
        """Return the autocast state in which the operation ran."""
        device, dtype = self.autocast or ("cpu", torch.bfloat16)
        return torch.autocast(device, dtype=dtype, enabled=self.autocast is not None)


@dataclass(eq=False, slots=True)
class Arrival:
    """What reached a use in back-propagation; the rows of one example are adjacent in all of it.

    Attributes:
        use: the operation and its arguments.
        saved: what was saved of them.
        gy: gradient of the sum of losses with respect to the output.
        num_examples: B; may be 0.
        turned: whether the rows stand in the second dimension of the operation's own tensors.
        places: ``[B * m]``, where the rows lay in the operation's own tensors, for a formula that goes by it.
    """

    use: Use
    saved: tuple[Tensor, ...]
    gy: Tensor
    num_examples: int
    turned: bool = False
    places: Tensor | None = None

    def per_example(self, names: set[str]) -> dict[str, PerExampleGradient]:
        """Find the per-example gradients of the parameters ``names``."""
        values = self.use.values
        wanted = {i for i, value in enumerate(values) if not names.isdisjoint(value.reached)}
        found: dict[str, PerExampleGradient] = {}
        for i, of_value in self.use.formula.per_example(self, wanted).items():
            for name, gradient in values[i].per_parameter(of_value, names):
                found[name] = merge(found[name], gradient) if name in found else gradient
        return found

    @property
    def slots(self) -> dict[str, int]:
        """The arguments that were computed from parameters, and which of the use's values each is."""
        return self.use.template.slots

    def option(self, name: str, default: Any = None) -> Any:
        """Return an argument that is no tensor."""
        return self.use.template.given.get(name, default)

    def tensor(self, name: str) -> Tensor:
        """Return an argument that was saved."""
        return self.saved[self.use.template.given[name]]

    def value(self, name: str) -> Tensor:
        """Return an argument that was computed from parameters."""
        return self.use.values[self.slots[name]].leaf

    def rows(self, name: str) -> Tensor:
        """Return a saved argument as ``[B, positions, features]``."""
        return by_example(self.tensor(name), self.num_examples, 1)

    def output_gradient(self, dims: int) -> Tensor:
        """Return the output gradient as ``[B, positions, …]`` with ``dims`` dimensions of features."""
        return by_example(self.gy, self.num_examples, dims)


def is_one_of(item: Any, tensors: Sequence[Tensor]) -> bool:
    """Tell whether ``item`` is, not equals, one of the tensors."""
    return any(item is t for t in tensors)


def in_autocast(x: Tensor) -> Tensor:
    """Return ``x`` as autocast hands it to a matrix product, which leaves float64 as it is."""
    return x if x.dtype == torch.float64 else x.to(torch.get_autocast_dtype(x.device.type))
