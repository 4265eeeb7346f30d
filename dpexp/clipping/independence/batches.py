"""Other batches that one example can stand in, made of the same examples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dpexp.clipping.independence.arguments import Inputs, changed, leaves
from dpexp.clipping.independence.end_to_end import Bundle, Ends, bundled, ends_of
from dpexp.clipping.survey.layouts import fixed_order
from dpexp.clipping.tapping.forwards import entered

# of inputs whose batch dimension the shapes leave open
READINGS = 12

# Factors of floating-point inputs in rows that are replaced: the first with which all is finite. What passes a limit only beside
# a large row (a scale of the whole batch, with a floor) sleeps until one comes
SIZES = 1e3, 3.0, 1.0
# and those of copies around each of a few examples
COPIES_SIZES = (1e6, *SIZES), (3.0, 1.0), (1e-3, 1.0)
# examples that are looked at with one copy, which costs little
PAIRS = 8
# further factors, where Python decides by a number: how far a solver steps, when an iteration ends
FAR_SIZES = 10.0, 0.1

# which dimension of every input is the batch, or how its rows lie end to end; None: shared by all
Reading = Sequence[int | Ends | None]

# (example, whether its floating-point values are scaled) for every place of a batch
Rows = list[tuple[int, bool]]


@dataclass(frozen=True)
class Arrangement:
    """Which rows of what enters a forward are whose.

    Attributes:
        examples: B.
        times: how many rows each example has.
        strided: whether these are as far apart as there are examples, and not adjacent.
    """

    examples: int
    times: int = 1
    strided: bool = False

    def row(self, example: int, number: int, examples: int | None = None) -> int:
        """Return the place of a row of an example, among ``examples`` of them."""
        examples = self.examples if examples is None else examples
        return number * examples + example if self.strided else example * self.times + number


@dataclass
class Variant:
    """Another batch.

    Attributes:
        same: (place before, place here) of the examples that must get the same.
        first: what goes before.
        sizes: factors of floating-point inputs in rows that are replaced, the last of which has to do.
    """

    when: str
    rows: Rows
    same: list[tuple[int, int]]
    first: Rows | None = None
    sizes: tuple[float, ...] = SIZES

    def __post_init__(self) -> None:
        if self.sizes[-1] == 1.0 and not any(other for _, other in (self.first or []) + self.rows):
            # nothing is replaced
            self.sizes = (1.0,)


class Batches:
    """The batches of one forward.

    Args:
        inputs: of the forward.
        arrangement: of their rows.
        names: of the positional inputs.
        bags: whether the model has bags of ids (`torch.nn.EmbeddingBag`), whose offsets may be zeros alone.
    """

    def __init__(
        self, inputs: Inputs, arrangement: Arrangement, names: Sequence[str] = (), bags: bool = False
    ):
        self.inputs, self.arrangement, self.names, self.bags = inputs, arrangement, names, bags
        self.examples = arrangement.examples
        self.total = arrangement.examples * arrangement.times
        # which lists of as many tensors as there are examples have one of each; None: all but those that are as wide as long
        self._one_each: bool | None = None
        # whether what can be taken apart is looked at as a whole, or as the tensors that it holds
        self._whole = True
        self.ends = ends_of(self._parts(), self.total)

    def variants(self, decides: bool = False) -> list[Variant]:
        """Return the batches in which examples must get what they got.

        ``decides``: whether the model decides by a number, which may pass a limit only beside very large or very small rows.
        """
        num = self.examples
        if num == 1:
            beside, both = "when another example stands beside it", [(0, False), (0, True)]
            return [
                Variant(beside, both, [(0, 0)]),
                *(Variant(beside, both, [(0, 0)], sizes=(size,)) for size in FAR_SIZES if decides),
                Variant("after another batch", [(0, False)], [(0, 0)], first=[(0, True)]),
            ]
        cut = (num + 1) // 2
        front, back = list(range(cut)), list(range(cut, num))
        replaced, alone = "when the other rows of the batch are replaced", "when a part of the batch is gone"
        order = fixed_order(num).tolist()
        kept = sorted(order[:cut]), sorted(order[cut:])
        mixed: list[Rows] = []
        for own in kept:
            others = iter(own * 2)
            mixed.append([(i, False) if i in own else (next(others), True) for i in range(num)])
        whole = [(i, False) for i in range(num)]
        # where examples share tokens, each half may hold what another one sees of the whole: a maximum, say
        lonely = order[: len(COPIES_SIZES)] if num > 2 else []
        pairs = order[::-1][:PAIRS] if num > 2 else []
        return [
            Variant(alone, whole[:cut], [(i, i) for i in front]),
            Variant(alone, whole[cut:], [(i, i - cut) for i in back]),
            Variant(replaced, mixed[0], [(i, i) for i in kept[0]]),
            Variant(replaced, mixed[1], [(i, i) for i in kept[1]]),
            *(
                Variant(replaced, [(i, j != i) for j in range(num)], [(i, i)], sizes=sizes)
                for i, sizes in zip(lonely, COPIES_SIZES, strict=False)
            ),
            *(Variant(replaced, [(i, False)] * num, [(i, i)]) for i in lonely[:1]),
            *(Variant(alone, [(i, False)] * 2, [(i, 0)]) for i in pairs),
            *(
                variant
                for i in (pairs or order if decides else [])
                for variant in self._far(i, alone, replaced)
            ),
            Variant("after another batch", whole, [(i, i) for i in range(num)], mixed[0]),
        ]

    def _far(self, i: int, alone: str, replaced: str) -> list[Variant]:
        """Example ``i`` by itself, and among rows of other sizes; a batch that does not run, or overflows, is left out."""
        others = [(j, j != i) for j in range(self.examples)]
        return [
            Variant(alone, [(i, False)], [(i, 0)], sizes=FAR_SIZES[:1]),
            *(Variant(replaced, others, [(i, i)], sizes=(size,)) for size in FAR_SIZES),
        ]

    def readings(self) -> Iterator[tuple[Reading, bool]]:
        """Yield readings of the inputs, the likeliest first, and whether the shapes themselves suggest them."""
        lists = (None, True, False) if any(map(self._may_be_list, self._containers())) else (None,)
        wholes = (True, False) if any(self._is_bundle(part) for _, part in self._parts()) else (True,)
        kinds = product((True, False), wholes, lists, (False, True)[: 1 + self.bags])
        for sure, self._whole, one_each, bags in kinds:
            self._one_each = one_each
            self.ends = ends_of(self._parts(), self.total, bags)
            parts = [self._options(part) for _, part in self._parts()]
            likely = (r for r in _likeliest(parts) if any(axis is not None for axis in r))
            for reading in islice(likely, READINGS):
                shared = any(0 in axes and a is None for axes, a in zip(parts, reading, strict=True))
                if shared != sure:
                    # the tensors that something holds are taken for what they seem to be where it cannot be taken apart
                    yield reading, sure and self._whole

    def _containers(self) -> list[Any]:
        """The lists among the inputs that may have a tensor of each example, and all other leaves."""
        return tree_leaves(self.inputs, is_leaf=self._may_be_list)

    def _parts(self) -> list[tuple[str, Any]]:
        return leaves(self.inputs, self._is_leaf, self.names)

    @property
    def ambiguous(self) -> bool:
        """Whether two dimensions of an input may be the batch: as many tokens as examples."""
        return any(len(self._possible(part)) > 1 for _, part in self._parts())

    def plain_reading(self) -> Reading | None:
        """Return the reading of which the shapes leave no doubt; None where they do."""
        inputs = [part for _, part in self._parts()]
        parts = [self._possible(part) for part in inputs]
        if self.ends or not any(parts) or any(axes not in ((), (0,)) for axes in parts):
            return None
        # by chance as many rows as examples: of numbers of nodes, [2, edges], beside what has others
        real = [axes for part, axes in zip(inputs, parts, strict=True) if _is_real(part)]
        return None if real and not any(real) else [0 if axes else None for axes in parts]

    def made(self, reading: Reading, rows: Rows, scale: float) -> Inputs:
        """Make a batch; ``scale``: factor of floating-point inputs in the rows that replace others."""
        axes = iter(reading)
        numbers = range(self.arrangement.times)
        order = [(*row, m) for row in rows for m in numbers]
        if self.arrangement.strided:
            order = [(*row, m) for m in numbers for row in rows]
        places = [self.arrangement.row(i, m) for i, _, m in order]
        scaled = [other for _, other, _ in order]

        def take(name: str, part: Any) -> Any:
            axis = next(axes)
            if axis is None:
                return part
            if isinstance(part, int):
                return len(places)
            if isinstance(axis, Bundle):
                chosen = zip([axis.examples[i] for i in places], scaled, strict=True)
                return axis.together([_larger(each, scale) if other else each for each, other in chosen])
            if isinstance(axis, Ends) and part is axis.told:
                return axis.told_of(places)
            if not isinstance(part, Tensor):
                return type(part)(part[i] for i in places)
            picked, changes = torch.tensor(places, device="cpu"), torch.tensor(scaled, device="cpu")
            if not isinstance(axis, Ends):
                return rows_of(part, axis, picked, changes, scale)
            return rows_of(part, 0, axis.rows(places), changes.repeat_interleave(axis.sizes[places]), scale)

        return changed(self.inputs, take, self._is_leaf, self.names)

    def _options(self, part: Any) -> tuple[int | Ends | None, ...]:
        """The dimensions that may be the batch, or ways to lie end to end, the likeliest first."""
        found = [ends for ends in self.ends if ends.cuts(part)]
        # of several tables with as many ids, each has its own
        own = [ends for ends in found if part is ends.told or part is ends.within]
        # as many rows as examples are theirs, rather than of as many ids by chance
        fewer = [ends for ends in found if not own and ends.within is not None]
        more = own or [ends for ends in found if ends.within is None]
        options: tuple[int | Ends | None, ...] = (*more, *self._possible(part), *fewer)
        # a list of tables: what each of them is given has rows of every example
        listed = self._one_each is False and any(
            part is item for value in self._containers() if self._may_be_list(value) for item in value
        )
        return options if listed else (*options, None)

    def _possible(self, part: Any) -> tuple[int, ...]:
        if self._is_list(part) or (type(part) is int and part == self.total and self.ends):
            return (0,)
        if not isinstance(part, Tensor) or part.is_nested:
            return ()
        return tuple(axis for axis in (0, 1) if part.dim() > axis and part.shape[axis] == self.total)

    def _is_leaf(self, value: Any) -> bool:
        return self._is_list(value) or self._is_bundle(value)

    def _is_bundle(self, value: Any) -> bool:
        return self._whole and bundled(value) == self.total

    def _is_list(self, value: Any) -> bool:
        """Whether a list has one entry for each row."""
        if self._may_be_list(value):
            square = all(item.shape[:1] == (self.total,) for item in value)
            return not square if self._one_each is None else self._one_each
        # texts, numbers, or what is said of each picture
        return (
            isinstance(value, list | tuple)
            and len(value) == self.total
            and all(isinstance(item, str | int | float | Mapping) for item in value)
        )

    def _may_be_list(self, value: Any) -> bool:
        """Whether a list has one tensor for each row; or else as many tables by chance, each with rows of all."""
        return (
            isinstance(value, list | tuple)
            and len(value) == self.total
            and all(isinstance(item, Tensor) for item in value)
        )


def _likeliest(options: Sequence[tuple[Any, ...]], lower: int | None = None) -> Iterator[list[Any]]:
    """Yield one of the options of each part, by how far behind the first ones they stand: all at once would be too many.

    ``lower``: the sum of their places; None: any, the least first.
    """
    if lower is None:
        for places in range(sum(len(own) - 1 for own in options) + 1):
            yield from _likeliest(options, places)
        return
    if not options:
        yield []
        return
    behind = sum(len(own) - 1 for own in options[1:])
    for place, option in enumerate(options[0]):
        if 0 <= lower - place <= behind:
            yield from ([option, *rest] for rest in _likeliest(options[1:], lower - place))


def arrangements(inputs: Inputs, usual: Arrangement, in_parts: bool = False) -> list[Arrangement]:
    """Return how the rows of examples may lie in inputs: as ``usual``, where any has as many rows; else there may be several of
    each, adjacent, strided, or of each as many as it has. Whoever keeps all rows apart keeps the examples apart.

    ``in_parts``: whether other forwards have other examples of the batch.
    """
    rows = usual.examples * usual.times
    tensors, shapes, lists = entered(inputs)
    tensors = [t for t in tensors if t.dim()]
    found = {len(t) for t in tensors}
    second = {t.shape[1] for t in tensors if t.dim() > 1}
    # the examples may stand in the second dimension: rows of the first are positions then, and say nothing
    behind = {t.shape[1] for t in tensors if t.dim() > 2 or (t.dim() == 2 and not t.is_floating_point())}
    # or be the tensors of a list
    listed = {shape[0] for shape in shapes[:lists]}
    whole = {bundled(part) for _, part in leaves(inputs, lambda value: bundled(value) > 0)}
    if (
        rows in found | second | listed | whole
        or not found
        or (rows > 1 and any(n and n % rows == 0 for n in behind))
    ):
        return [usual]
    several = min((n for n in found if n > rows and n % rows == 0), default=0)
    times = several // usual.examples
    blocks = [Arrangement(usual.examples, times, strided) for strided in (False, True)] if several else []
    # in fewer rows than examples a row is that of several, unless they are a part of the batch
    apart = several or min((n for n in found if in_parts or n > rows), default=0)
    return [*([Arrangement(apart)] if apart else ()), *blocks, usual]


def rows_of(part: Tensor, axis: int, chosen: Tensor, changes: Tensor, scale: float) -> Tensor:
    """Return the rows ``chosen`` of a tensor; where ``changes``, floating-point numbers that are no mask times ``scale``."""
    taken = part.index_select(axis, chosen.to(part.device))
    if part.is_floating_point() and bool(changes.any()) and not _is_mask(part):
        factor = torch.where(changes, scale, 1.0)
        taken = taken * factor.to(part).reshape([-1 if d == axis else 1 for d in range(part.dim())])
    return taken


def _larger(example: Any, scale: float) -> Any:
    """Return an example with its floating-point numbers that are no mask times ``scale``."""

    def change(name: str, part: Any) -> Any:
        return part * scale if _is_real(part) and not _is_mask(part) else part

    return changed(((example,), {}), change)[0][0]


def _is_real(part: Any) -> bool:
    return isinstance(part, Tensor) and part.dim() > 0 and part.is_floating_point()


def _is_mask(part: Tensor) -> bool:
    # a corner tells most of what is none, such as the logits of a language model
    corner = part[(slice(2),) * part.dim()]
    return all(bool(((some == 0) | (some == 1) | ~some.isfinite()).all()) for some in (corner, part))
