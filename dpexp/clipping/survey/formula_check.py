"""Whether a formula gives what autograd gives for the same operation, under random weights of the examples.

And whether the way from a value that was computed from parameters back to these is a linear map, as the formula believes: the
weighted sum of all examples goes back at once.

What was computed in 16 bits is compared in float32, on copies: the rounding of 16 bits would hide all but the grossest errors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dpexp.clipping.choice import HOPELESS_FLOPS
from dpexp.clipping.gradients import PerExampleGradient
from dpexp.clipping.gradients.memory import give_back_freed_memory
from dpexp.clipping.gradients.numerics import wide
from dpexp.clipping.loop import finite
from dpexp.clipping.operations.linear import Linear
from dpexp.clipping.survey import layouts
from dpexp.clipping.tapping.forwards import ForwardPass
from dpexp.clipping.tapping.taps import Visit
from dpexp.clipping.tapping.uses import PullBack, Use, Value

# bytes of an output, or of a gradient, from which on the check spares memory: it must need no more than a step does
LARGE = 1 << 24
# how much longer than another the gradient is by which a clamped one shows; a power of two rounds both alike
FAR = 2.0**13
# of numbers whose products have squares that can be added up in 32 bits
HUGE = 1e8


@dataclass(frozen=True, eq=False)
class Case:
    """What a formula is compared on: what arrived at a use, which of so many ``rows`` of each example are whose, and the weights
    ``[B]`` of the examples."""

    use: Use
    saved: tuple[Tensor, ...]
    gy: Tensor
    layout: layouts.Layout
    rows: int
    weights: Tensor


class Formulas:
    """Those that gave what autograd gives."""

    def __init__(self) -> None:
        self._right: set[Hashable] = set()

    def known(self, use: Use, layout: layouts.Layout, num_examples: int) -> bool:
        """Tell whether the formula of a use is one of them."""
        return _kind(use, layout, num_examples) in self._right

    def check(self, visit: Visit, uses: Set[int], layout: Mapping[int, layouts.Layout]) -> list[Use]:
        """Compare the formulas of some uses, given by id, with what autograd says of the operations.

        Args:
            visit: goes back through the graph once more.
            uses: whose formula is not known.
            layout: id of a use -> which rows belong to which example.

        Returns:
            Those whose formula is wrong.
        """
        weights = layouts.weights(visit.num_examples).to(visit.roots.device)
        wrong: list[Use] = []

        def compare(owner: ForwardPass, use: Use, saved: tuple[Tensor, ...], gy: Tensor) -> None:
            if id(use) not in uses:
                return
            known = layout[id(use)]
            each = visit.rows // visit.num_examples
            if known != layouts.UNSEEN and formula_is_right(Case(use, saved, gy, known, each, weights)):
                self._right.add(_kind(use, known, visit.num_examples))
            else:
                wrong.append(use)

        visit.back_propagate(compare, retain=True)
        give_back_freed_memory()
        return wrong


def _kind(use: Use, layout: layouts.Layout, num_examples: int) -> Hashable:
    """What the verdict on a formula holds for: a place, and where the operation is any function, its shapes; of one example
    alone, which sees no others, nothing is learnt about several."""
    alone = num_examples == 1
    if use.formula.label is not None:
        return use.place, alone, None if use.input_shape is None else len(use.input_shape)
    return use.place, alone, use.output_shape, use.batched, layout in layouts.TURNED


def formula_is_right(case: Case) -> bool:
    """Tell whether a formula's sum under the weights is autograd's own gradient of the weighted outputs.

    Autograd makes the output once more. A large one of a linear layer, as that over a vocabulary, is made for a few examples at
    a time.
    """
    use, gy, num = case.use, case.gy, len(case.weights)
    # each example goes back alone where something rounds
    if not all(
        _pulls_linearly(value) for value in use.values if value.graph is not None and not value.rounds
    ):
        return False
    few = max(1, LARGE * num // max(1, gy.nbytes))
    if few >= num or not isinstance(use.formula, Linear) or case.layout not in layouts.IN_ORDER:
        return _agrees(case)
    for start in range(0, num, few):
        examples = slice(start, min(start + few, num))
        saved = zip(case.saved, use.batched, strict=True)
        here = tuple(_part(s, examples, num) if b else s for s, b in saved)
        chosen = case.weights[examples]
        part = replace(
            use, absent=[(_cut(s, len(chosen), num, gy), dtype, device) for s, dtype, device in use.absent]
        )
        if not _agrees(replace(case, use=part, saved=here, gy=_part(gy, examples, num), weights=chosen)):
            return False
    return True


def _pulls_linearly(value: Value) -> bool:
    """Tell whether no hook and no backward of somebody's own clamps or normalises what goes back from a value to parameters."""
    assert value.graph is not None
    generator = torch.Generator().manual_seed(0)
    one, other = (
        torch.randn(value.leaf.shape, generator=generator, device="cpu").to(value.leaf) for _ in range(2)
    )
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for param in value.reached.values():
        pull = PullBack(value.graph, param)
        try:
            alone = pull(one[None])
            longer = pull(-FAR * one[None]).add_(alone, alpha=FAR)
            sum_less = pull((one + other)[None]).sub_(alone).sub_(apart := pull(other[None]))
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            return False
        found.append((_norm(alone) + _norm(apart), _norm(longer), _norm(sum_less)))
    # where a gradient vanishes for a reason (a bias before a softmax), what is left is rounding, which does not add up
    largest = max((float(size) for size, _, _ in found), default=0.0)
    floor = 1e3 * torch.finfo(wide(one.dtype)).eps * largest
    return all(
        bool((longer <= FAR * 1e-3 * size) & (sum_less <= 1e-3 * size + floor))
        for size, longer, sum_less in found
    )


def _cut(shape: torch.Size, few: int, num_examples: int, gy: Tensor) -> torch.Size:
    """The shape of a part of an input that is not there, if it has the rows of the output."""
    batched = len(shape) > 1 and shape[0] == gy.shape[0]
    return torch.Size([shape[0] // num_examples * few, *shape[1:]]) if batched else shape


def _part(tensor: Tensor, examples: slice, num_examples: int) -> Tensor:
    """The rows of some examples, where those of each are adjacent."""
    of_each = tensor.shape[0] // num_examples
    return tensor[examples.start * of_each : examples.stop * of_each]


def _agrees(case: Case) -> bool:
    # NaN hides a formula
    case = _with_numbers(case, finite)
    with suppress(OverflowError):
        return _agrees_on(case)
    # that tells nothing: which way an example takes must not go by whether somebody else is huge
    with suppress(OverflowError):
        return _agrees_on(_with_numbers(case, _moderate))
    return False


def _with_numbers(case: Case, change: Callable[[Tensor], Tensor]) -> Case:
    return replace(case, saved=tuple(map(change, case.saved)), gy=change(case.gy))


def _moderate(tensor: Tensor) -> Tensor:
    """Replace what is huge by zero."""
    if not tensor.is_floating_point() or tensor.layout != torch.strided:
        return tensor
    huge = tensor.abs() > HUGE
    return tensor.masked_fill(huge, 0) if bool(huge.any()) else tensor


def _agrees_on(case: Case) -> bool:
    use, gy = case.use, case.gy
    # zeros agree with every formula (a gate that is closed at first): any other gradient tells as much
    if not bool(gy.any()):
        gy = torch.randn(gy.shape, generator=torch.Generator().manual_seed(gy.dim()), device="cpu").to(gy)
        case = replace(case, gy=gy)
    low = use.autocast is not None or torch.finfo(gy.dtype).bits < 32
    # what is derived from parameters in 16 bits is pulled back in 16 bits
    rough = low and any(value.graph is not None for value in use.values)
    given = [(case, low)]
    if low:
        given.insert(0, (replace(_with_numbers(case, _wide), use=_widened(use)), rough))
    for each, rounded in given:
        try:
            right = _compared(each, rounded)
            return right and (use.formula.label is not None or _holds_elsewhere(each, rounded))
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, IndexError):
            # the first one may be of an operation that takes 16 bits only
            continue
    return False


def _holds_elsewhere(case: Case, rough: bool) -> bool:
    """Tell whether a function of which nothing is known also agrees on other numbers, and where each row is another example's.

    Which of its tensors have the rows of examples is a guess by their shapes. A mask that hides nothing yet, ``[T, T]`` with as
    many positions as examples, looks right as one row for each example, until it hides something. And matrices for each head,
    ``[H, d, d]``, look right where all heads are those of one example.
    """
    use, num, layout = case.use, len(case.weights), case.layout
    gy = _other_numbers(case.gy, True, torch.Generator().manual_seed(case.gy.dim()))
    if layout not in layouts.TURNED:
        layout = layouts.Owned.of(torch.arange(len(gy), device=gy.device) % num, num)
    for of_any_sign in (True, False):
        generator = torch.Generator().manual_seed(len(case.saved))
        others = tuple(_other_numbers(s, of_any_sign, generator) for s in case.saved)
        try:
            found = use.plain_gradients(others, gy, set(use.names)).values()
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, IndexError):
            # numbers that the function does not take tell nothing
            continue
        if all(bool(g.isfinite().all()) for g in found):
            return _compared(replace(case, saved=others, gy=gy, layout=layout), rough)
    return True


def _other_numbers(tensor: Tensor, of_any_sign: bool, generator: torch.Generator) -> Tensor:
    """Return a tensor of the same kind whose rows are not all alike; each number keeps its sign unless it may have any."""
    if tensor.layout != torch.strided:
        return tensor
    if tensor.is_floating_point():
        size = tensor.to(wide(tensor.dtype)).square().mean().sqrt().to(tensor)
        noise = torch.randn(tensor.shape, generator=generator, device="cpu").to(tensor)
        moved = tensor + noise * torch.where(size > 0, size, 1)
        return moved if of_any_sign else tensor * (0.5 + noise.abs())
    if tensor.dtype != torch.bool:
        return tensor.flatten().roll(1).view(tensor.shape)
    # no three in a row are alike (the sequence of Thue and Morse): a mask that hides nothing then leaves something everywhere
    number = torch.arange(tensor.numel(), device=tensor.device)
    for bits in (32, 16, 8, 4, 2, 1):
        number = number ^ (number >> bits)
    return tensor ^ (number & 1).bool().view(tensor.shape)


def _widened(use: Use) -> Use:
    """The same operation in float32, without autocast."""
    return replace(
        use,
        values=tuple(replace(value, leaf=_wide(value.leaf)) for value in use.values),
        absent=[
            (s, wide(dtype) if dtype.is_floating_point else dtype, device) for s, dtype, device in use.absent
        ],
        autocast=None,
    )


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(wide(tensor.dtype)) if tensor.is_floating_point() else tensor


def _compared(case: Case, rough: bool) -> bool:
    """Compare on these numbers; ``rough``: whether something on the way was rounded to 16 bits.

    Raises:
        OverflowError: they are too large.
    """
    use, saved, gy, layout, weights = case.use, case.saved, case.gy, case.layout, case.weights
    names, num, rows = set(use.names), len(weights), len(weights) * case.rows
    by_row = weights.repeat_interleave(case.rows)
    found = layouts.per_example(use, saved, gy, layout, rows, num, names)
    reference = use.plain_gradients(saved, layouts.weighted_rows(gy, layout, rows, by_row), names)
    tolerance = 0.05 if rough else 1e-3
    # where a gradient vanishes for a reason (the bias of keys before a softmax), rounding is all there is to see
    largest = max([1.0, *(float(_norm(s)) for s in saved if s.is_floating_point())])
    floor = 1e3 * torch.finfo(torch.bfloat16 if rough else gy.dtype).eps * _norm(gy) * largest
    for name in names:
        if name not in found:
            return name not in reference
        scale = found[name].sq_norms(_norm_method(found[name])).sum().sqrt()
        expected = reference.pop(name, None)
        if expected is not None:
            scale = scale + _norm(expected)
        difference = float(_norm(_difference(found[name], weights, expected, (gy, *saved))))
        allowed = float(tolerance * scale + floor)
        if not (math.isfinite(difference) and math.isfinite(allowed)):
            raise OverflowError
        if difference > allowed:
            return False
    return True


def _norm_method(found: PerExampleGradient) -> str:
    """One that keeps no gradient, but where Gram matrices of many positions (the pixels of a photograph) would take minutes."""
    few = found.cost("ghost").flops <= HOPELESS_FLOPS * found.cost("loop").flops
    return "ghost" if few else "loop"


def _difference(
    found: PerExampleGradient, weights: Tensor, expected: Tensor | None, others: tuple[Tensor, ...]
) -> Tensor:
    """The weighted sum less what is expected; of a large vocabulary's table there is one at this moment, and no second."""
    if expected is None:
        return found.weighted_sum(weights)
    own = all(expected.untyped_storage().data_ptr() != t.untyped_storage().data_ptr() for t in others)
    if own and expected.nbytes >= LARGE and expected.dtype == found.dtype and expected.is_contiguous():
        return found.weighted_sum(weights, out=expected.neg_())
    difference = found.weighted_sum(weights)
    return difference.sub_(expected.to(difference.dtype))


def _norm(tensor: Tensor) -> Tensor:
    """The Euclidean norm, in float32 at least."""
    return torch.linalg.vector_norm(tensor.to(wide(tensor.dtype)))
