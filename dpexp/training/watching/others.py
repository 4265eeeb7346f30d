"""A batch done again with some of its examples in the place of others: who stands where, and what comes of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dpexp.clipping.independence.comparison import ROUNDING, bits_of
from dpexp.clipping.operations.others import BROADCASTING
from dpexp.clipping.survey.layouts import fixed_order
from dpexp.training.watching.lines import name_of
from dpexp.training.watching.places import EndToEnd, Place, in_turn, is_order, neighbours, rows_changed
from dpexp.training.watching.trace import Trace

# factors of floating-point numbers in rows that stand in the place of others: the first with which all is finite
SCALES = 1e3, 3.0
SORTING = {"sort", "argsort"}
# where whole numbers are no places of rows
COUNTING = BROADCASTING | {"lt", "le", "gt", "ge", "eq", "ne"}
# a row in front for each example
ROW = Place(0, 1)


class Others:
    """One batch, done again with some of its examples in the place of others.

    Args:
        trace: ended.
        split: which way to cut the examples in halves, 0 or 1.

    Attributes:
        first: whether the examples are cut in the first way.
        halves: of the examples: who stays.
        changed: which rows of what enters the model, and so of what it returns, change with one half, and with the other.
        rows: which rows of what enters change with each half, by number.
        unplaced: numbers of what enters and has rows that no size tells.
        ends: numbers of what enters and is made of rows that lie end to end, and lies so itself.
        several: where the rows of each example are in what the loop has made of several of each, by how many rows there are.
        lists: calls that returned a list with an entry for each example, of whatever length.
        behind_model: no line before this one goes by what the model has returned.
    """

    def __init__(self, trace: Trace, split: int):
        self.trace, self.tape, self.examples = trace, trace.tape, trace.examples
        order = fixed_order(self.examples, trace.turn).tolist()
        cut = (self.examples + 1) // 2
        self.first = split == 0
        self.halves = [order[:cut], order[cut:]] if self.first else [order[::2], order[1::2]]
        self.changed = [torch.zeros(trace.examples, dtype=torch.bool) for _ in range(2)]
        self.several: dict[int, Place] = {}
        calls = Counter(self.tape.returned.values())
        self.lists = {call for call, entries in calls.items() if entries >= self.examples > 1}
        uneven = [
            n
            for n in self.tape.returned
            if n in self.tape.held and self.tape.held[n].shape[:1] != (self.examples,)
        ]
        # one of entries that are all as long as there are examples may be a row of each
        even = self.lists - {self.tape.returned[n] for n in uneven}
        self.tape.unsure.update(n for n, call in self.tape.returned.items() if call in even)
        self.lists -= even
        # a loop may have thousands of lines before it, with transforms of each row
        lines = enumerate(self.tape.lines)
        uses = (i for i, line in lines if not self.tape.memory.of(line.uses).isdisjoint(self.tape.returned))
        self.behind_model = next(uses, len(self.tape.lines))
        # who stands in the place of whom, with each half, where the loop sorts: its orders stay, also of rows that are as long
        self._chosen = list[list[int]]()
        self._orders: dict[int, Callable[[Tensor], Tensor]] = {}
        self._scales: tuple[float, ...] = SCALES
        if self.examples > 1 and (sorted_by := self._order()) is not None:
            self._chosen = [neighbours(sorted_by, side, wide=not self.first) for side in (0, 1)]
            self.halves = [[i for i, other in enumerate(chosen) if i == other] for chosen in self._chosen]
            self._scales = ()
        self.rows: dict[int, list[Tensor]] = {}
        self.unplaced: set[int] = set()
        self.ends: set[int] = set()
        self._held_ends = {n for n, place in self.tape.places.items() if isinstance(place, EndToEnd)}
        if trace.as_it_came:
            for changed, kept in zip(self.changed, self.halves, strict=True):
                changed[[i for i in range(self.examples) if i not in kept]] = True

    def again(
        self,
        number: int,
        kept: Sequence[int] | None = None,
        instead: Mapping[int, Tensor] | None = None,
        by: Sequence[int] = (),
    ) -> tuple[Tensor, Sequence[Tensor], bool]:
        """A tensor, with the examples ``kept`` in the place of the others; the gradients of its sum; whether it met chance.

        Args:
            number: of the tensor.
            kept: None: all stay.
            instead: what stands in the place of tensors with these numbers.
            by: numbers of the tensors that it is differentiated by.
        """
        if kept is None:
            return self.tape.again(number, self.tape.held | dict(instead or {}), by)
        moved = self._orders if list(kept) in self.halves else {}
        return self._scaled(lambda scale: self.tape.again(number, self._with_others(kept, scale), by, moved))

    def with_rows(self, number: int, returned: Sequence[int], kept: Sequence[int]) -> Tensor:
        """A tensor, with rows in the place of others in what the model has ``returned`` alone, which has one for each example."""
        chosen = in_turn(kept, self.examples)

        def again(scale: float) -> tuple[Tensor, Sequence[Tensor], bool]:
            return self.again(
                number, instead={n: ROW.replaced(self.tape.held[n], chosen, scale) for n in returned}
            )

        return self._scaled(again)[0]

    def _scaled(
        self, again: Callable[[float], tuple[Tensor, Sequence[Tensor], bool]]
    ) -> tuple[Tensor, Sequence[Tensor], bool]:
        """Do something again with the first factor of rows that stand in the place of others with which all is finite."""
        for scale in self._scales:
            try:
                found = again(scale)
            except Exception:
                # a target that must be between 0 and 1
                continue
            if scale == self._scales[-1] or bool(found[0].isfinite().all()):
                return found
        return again(1.0)

    def _with_others(self, kept: Sequence[int], scale: float) -> dict[int, Tensor]:
        """What is held, with the examples ``kept`` in the place of the others; ``scale``: of floating-point numbers there."""
        there = dict(self.tape.held)
        half = self.halves.index(list(kept)) if list(kept) in self.halves else None
        chosen = in_turn(kept, self.examples) if half is None or not self._chosen else self._chosen[half]
        for n, held in self.tape.held.items():
            told = [] if half is None else self.told_rows(n)
            if half is not None and told:
                # rows that the model was given in another order come back in that order
                there[n] = rows_changed(held, [rows[half] for rows in told], scale)
            elif (place := self.place_of(n)) is not None:
                rows = chosen
                if half is not None and n in self.tape.returned:
                    rows = in_turn(self.rows_left(half), self.examples)
                there[n] = place.replaced(held, rows, scale)
            elif self.tape.entries.get(n, kept[0]) not in kept:
                there[n] = self._other_entry(held, scale)
        return there

    def place_of(self, number: int) -> Place | EndToEnd | None:
        """Where the rows of each example are in a tensor that was not computed by what is written down."""
        tensor = self.tape.held[number]
        if self.tape.returned.get(number) in self.lists or number in self.tape.entries:
            return None
        if number in self.tape.returned and tensor.dim() and len(tensor) in self.several:
            return self.several[len(tensor)]
        place = self.tape.places.get(number)
        return None if isinstance(place, EndToEnd) and number not in self._held_ends else place

    def told_rows(self, number: int) -> list[list[Tensor]]:
        """Which rows of what the model was given, before it returned a tensor, change with each half; none where sizes tell."""
        if self.tape.returned.get(number) in {None, *self.lists}:
            return []
        held, call = self.tape.held[number], self.trace.calls[self.tape.returned[number]]
        found = {n: self.rows[n] for n in call if n in self.rows}
        alike = [rows for rows in found.values() if held.dim() and len(rows[0]) == len(held)]
        return alike or (list(found.values()) if self.unplaced.issuperset(call) else [])

    def note_rows(self, number: int, whole: Tensor, others: Sequence[Tensor]) -> bool:
        """Note which rows in front change with each half, and tell whether none does with both."""
        rows, *changed = (t.reshape(len(t) if t.dim() else 1, -1) for t in (whole, *others))
        found = [self.unlike(rows, other) for other in changed]
        apart = not bool((found[0] & found[1]).any())
        if apart:
            self.rows[number] = found
        return apart

    @property
    def sorted(self) -> bool:
        """Whether the loop sorts its examples before they enter the model."""
        return bool(self._chosen)

    def of_ends(self, number: int) -> bool:
        """Whether a tensor is made of rows that lie end to end in the batch."""
        needed = set[int]()
        if self._held_ends:
            self.tape.behind([number], needed)
        return not self._held_ends.isdisjoint(needed)

    def by_half(self, number: int, tensor: Tensor) -> Tensor:
        """``[2, …]``: the rows in front that change with one half, and with the other."""
        rows = [tensor[changed.to(tensor.device)].flatten() for changed in self.rows[number]]
        return pad_sequence(rows, batch_first=True)

    def settle(self, entered: Sequence[int]) -> None:
        """Leave rows that lie end to end as they are where, with others in their place, another number of them would enter."""
        for number in filter(self.of_ends, entered):
            try:
                sizes = {self.again(number, kept)[0].shape for kept in (None, *self.halves)}
            except Exception:
                sizes = set()
            if len(sizes) != 1:
                self._held_ends.clear()

    def is_blind(self) -> bool:
        """Whether no row that enters the model has changed: they are made of others, of which no size tells whose these are."""
        entered = [*chain(*self.rows.values())]
        return bool(entered) and not any(bool(rows.any()) for rows in chain(self.changed, entered))

    def in_any_order(self, entered: Sequence[int]) -> bool:
        """Whether nothing tells in which order a call has returned a row for each example; ``entered``: what it was given."""
        each = any(len(self.rows[n][0]) == self.examples for n in entered if n in self.rows)
        return not self.ends.isdisjoint(entered) or (each and self.is_blind())

    def rows_left(self, half: int) -> list[int]:
        """The examples of one half, as they stand where the model was given them."""
        return (~self.changed[half]).nonzero().flatten().tolist()

    def unlike(self, a: Tensor, b: Tensor) -> Tensor:
        """``[b]``, on the CPU as all that says which rows are whose: which rows are not equal, up to rounding."""
        a, b = a.double().reshape(len(a), -1), b.double().reshape(len(a), -1)
        size = a.abs().nan_to_num(posinf=0.0)
        allowed = ROUNDING[bits_of(self.tape.held.values())][1] * torch.maximum(size, 1e-3 * size.amax(0))
        return ~((a - b).abs().le(allowed) | (a == b) | (a.isnan() & b.isnan())).all(1).cpu()

    def _order(self) -> list[int] | None:
        """In which order the loop sorts its examples before they enter the model."""
        found, derived = list[Tensor](), set[int]()
        for line in self.tape.lines[: self.behind_model]:
            name = name_of(line.func)
            if name in SORTING and line.made and line.own is None:
                order = self.tape.again(line.made[-1], dict(self.tape.held))[0]
                if len(order) == self.examples and is_order(order):
                    found.append(order)
                    self._orders[line.made[-1]] = partial(_instead, other=order)
                    derived.add(line.made[-1])
                    continue
            used = derived.intersection(line.slots)
            if used and (name.strip("_") in COUNTING or (line.targets and not used <= self._orders.keys())):
                # a rank, or the first of all, is what others make it
                self._orders.clear()
                return None
            if line.slots and line.slots[0] in derived:
                derived.update(line.made)
        return list(found[0].tolist()) if found else None

    def _other_entry(self, held: Tensor, scale: float) -> Tensor:
        """What stands in the place of an entry of a list: the same rows in reverse order, or labels that other entries have."""
        if held.is_floating_point():
            return scale * held.flip(0) if held.dim() else scale * held
        entries = [self.tape.held[n] for n in self.tape.entries]
        low, high = torch.cat([t.flatten() for t in entries if t.dtype == held.dtype]).aminmax()
        return torch.where(held == high, low, high)


def _instead(tensor: Tensor, other: Tensor) -> Tensor:
    return other
