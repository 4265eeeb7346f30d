"""What a `Trace` has written down, done again with other examples beside: does what one of them loses stay what it was?

All is computed with one half of the examples in the place of the others, then with the other half. What follows from one example
alone, a loss or a row that enters the model, is what it was in one of the two, whatever the order of the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, product
from typing import Any

import torch
from torch import Tensor

from dpexp.errors import UntoldError, UserError, without_data
from dpexp.training.watching.flows import REPEATED, refuse_others, refuse_repeated
from dpexp.training.watching.others import ROW, SCALES, Others
from dpexp.training.watching.owned import WRITTEN
from dpexp.training.watching.padded import FACTORS, in_padding, padded_further
from dpexp.training.watching.places import Place
from dpexp.training.watching.trace import Trace

# bytes of what the model returns by which losses are differentiated
SMALL = 1 << 24
# lines that are done again for numbers that are made of the whole batch
WORK = 1 << 11

MIXED = (
    "the loop mixes examples: the loss of one changes when the others of its batch are replaced{where}, whether a gradient shows "
    "it or not. This voids any guarantee. Compute each loss from its own example alone: outputs and targets of one shape; no "
    "count, mean or maximum over the batch; no other examples, detached or not"
)
ENTERED = (
    "the loop mixes examples before they enter the model: what enters for one changes when the others of its batch are replaced "
    "(mixup, a mean or a spread over the batch, rows of others as negatives). This voids any guarantee. Make it of its own "
    "example alone, with public numbers"
)
UNTOLD = (
    "the loop gives the model, or gets of it, a tensor {shape} of a batch of {examples} examples, and nothing tells which of its "
    "rows are whose: one changes with several examples. Give a row for each example, or as many views of each, side by side "
    "(torch.cat); call the model for each view, or for each example; let the collate function put rows end to end"
)


BLIND = "what enters the model is made of rows of which nothing tells whose they are; what it returned was looked at"


class Mixture(UserError):
    """What belongs to one example was another thing, with others beside it.

    Attributes:
        sure: whether it is known which rows are whose in all that was compared. Else a chance may have made it.
    """

    sure = True


def told_by(trace: Trace, losses: Tensor) -> bool:
    """Compute again what enters the model, and the losses; return whether these told anything.

    Raises:
        UserError: what an example loses, or what enters the model for it, depends on others. `Mixture`, where that shows in a
            comparison, which a chance may have made where it is not `sure`.
    """
    # pairs that are in one half are apart in other halves
    splits = range(2 if trace.examples > 2 else 1)
    try:
        told = [Redone(trace, split).check(losses) for split in splits]
        return all(told)
    finally:
        trace.tape.held.clear()


class Redone:
    """The trace of one batch, of which the losses are there.

    Args:
        trace: ended.
        split: which way to cut the examples in halves, 0 or 1.
    """

    def __init__(self, trace: Trace, split: int):
        self.trace, self.tape, self.examples = trace, trace.tape, trace.examples
        self.others = Others(trace, split)
        # numbers of what enters the model, in all its calls; and of what the losses are differentiated by
        self._entered, self._by = list(chain.from_iterable(trace.calls)), list[int]()

    def check(self, losses: Tensor) -> bool:
        """Compute again what enters the model, and the losses; see `told_by`."""
        trace = self.trace
        for name, buffer in trace.model.named_buffers():
            if buffer in trace.known.private or buffer in trace.known.before:
                raise UserError(WRITTEN.format(name=name))
        refuse_repeated(self.tape, [*self._entered, self.tape.numbers.get(losses)])
        try:
            trace.failure = trace.failure or self._failure(losses)
            behind = self.tape.behind([*self._entered, self.tape.numbers.get(losses, 0)])
            scaled, numbers = trace.sizes.scaled.items(), trace.sizes.numbers.items()
            trace.sizes.scaled = {
                place: size for place, size in scaled if place[0] in behind and not self._is_chance(place)
            }
            trace.sizes.numbers = {place: number for place, number in numbers if place[0] in behind}
            if losses in trace.known.rowed:
                return True
            told = not trace.failure and self._look(self.tape.numbers[losses], losses.detach())
            if told and self.others.is_blind():
                trace.failure = "" if self.others.first else BLIND
                return False
            return told
        except UserError:
            raise
        except Exception as error:
            if any(line.repeats for line in self.tape.lines):
                raise UserError(REPEATED) from error
            trace.failure = without_data(error)
            trace.sizes.numbers = {}
            return False

    def _failure(self, losses: Tensor) -> str:
        """Why the losses cannot be looked at; what enters the model is."""
        self.others.settle(self._entered)
        if not all(map(self._enters_apart, dict.fromkeys(self._entered))):
            return "rows enter the model in an order that goes by the batch"
        if losses in self.trace.known.rowed:
            return ""
        if not self.tape.knows(losses):
            return "they are made by something else than torch's functions"
        refuse_others(self.tape, self.tape.as_it_is(losses), "losses depend")
        for n in self.tape.returned:
            held, told = self.tape.held[n], self.others.told_rows(n)
            if told and not (held.dim() and len(told[0][0]) == len(held)):
                if all(any(bool(rows[half].any()) for rows in told) for half in (0, 1)):
                    raise UserError(UNTOLD.format(shape=list(held.shape), examples=self.examples))
            elif not told and n in self.tape.untold and self.others.place_of(n) is None:
                return self.tape.untold[n]
        returned = [n for n in self.tape.returned if self.tape.held[n].is_floating_point()]
        self._by = returned if sum(self.tape.held[n].nbytes for n in returned) <= SMALL else []
        return ""

    def _look(self, number: int, losses: Tensor) -> bool:
        whole, by_chance = self._lost(number)
        others = [self._lost(number, half)[0] for half in self.others.halves]
        changed = [[self.others.unlike(*pair) for pair in zip(whole, other, strict=True)] for other in others]
        mixed = any(bool((one & other).any()) for one, other in zip(*changed, strict=True))
        for i in self._lonely():
            # a count of the classes there are, a maximum: the same in both halves, and not among copies of one example
            alone = self.others.unlike(whole[0], self._lost(number, [i])[0][0])
            mixed |= bool(alone.view(self.examples, -1)[i].any())
        if mixed and not by_chance and bool(self.others.unlike(whole[0], losses).any()):
            raise UntoldError("computed again they are others")
        if mixed:
            raise self._mixture(MIXED.format(where=self.tape.table), number)
        moved = bool((changed[0][0] | changed[1][0]).any())
        if not by_chance:
            for (lost, *_), kept in zip(changed, self.others.halves, strict=True):
                # an example that stands in the place of another has the losses of both
                if int(lost.sum()) > (self.examples - len(kept)) * (len(lost) // self.examples):
                    raise self._mixture(REPEATED, number)
            self._refuse_shared(number, whole[0])
            moved |= self._refuse_other_rows(number, whole[0])
        self._refuse_single(number, whole[0], lambda losses: losses.view(self.examples, -1), MIXED)
        if self.others.first:
            self._feel_padding(number, whole[0])
        return moved

    def _lonely(self) -> list[int]:
        """Examples that are looked at among copies of themselves, where all stand in the order of the batch."""
        left = [self.others.rows_left(number) for number in range(len(self.others.halves))]
        stays = not self.others.sorted and left == [sorted(half) for half in self.others.halves]
        found = [half[0] for half in self.others.halves] if stays and not self.others.unplaced else []
        return [i for i in found if all(self._stands(i, number) for number in self.others.rows)]

    def _stands(self, i: int, number: int) -> bool:
        """Whether an example is in its own row of what enters the model: two of a half may have changed places."""
        whole, alone = self.others.again(number)[0], self.others.again(number, [i])[0]
        return len(whole) != self.examples or not bool(self.others.unlike(whole, alone)[i])

    def _lost(self, number: int, kept: Sequence[int] | None = None) -> tuple[list[Tensor], bool]:
        """What each example loses, and the gradients of all losses at the rows of what the model returned.

        A factor of a gradient alone, as in a score function, moves no loss.
        """
        try:
            losses, gradients, by_chance = self.others.again(number, kept, by=self._by)
        except Exception:
            if kept is not None:
                raise
            # what autograd cannot go through once more
            self._by = []
            losses, gradients, by_chance = self.others.again(number)
        rows = [losses]
        for n, gradient in zip(self._by, gradients, strict=True):
            place = None if self.others.told_rows(n) else self.others.place_of(n)
            front = gradient.reshape(len(gradient) if gradient.dim() else 1, -1)
            rows.append(place.rows(gradient, self.examples) if isinstance(place, Place) else front)
        return rows, by_chance

    def _refuse_shared(self, number: int, whole: Tensor) -> None:
        """Refuse a number that the model returns or keeps, and that the losses of several examples go by: a mean, detached."""
        for n in self.tape.returned:
            held = self.tape.held[n]
            if (
                not held.is_floating_point()
                or self.others.place_of(n) is not None
                or self.others.told_rows(n)
            ):
                continue
            for place in {0, held.numel() // 2, held.numel() - 1} if held.numel() else ():
                other = held.clone(memory_format=torch.contiguous_format)
                other.view(-1)[place] = SCALES[-1] * other.view(-1)[place] + 1
                try:
                    lost = self.others.again(number, instead={n: other})[0]
                except Exception:
                    # a target that must be between 0 and 1
                    continue
                if int(self.others.unlike(whole, lost).view(self.examples, -1).any(1).sum()) > 1:
                    raise self._mixture(MIXED.format(where=self.tape.table), number)

    def _refuse_other_rows(self, number: int, whole: Tensor) -> bool:
        """Refuse losses that go by several rows of what a call of the model returned, where nothing tells their order.

        What it returned is replaced alone: in which order does not matter then. Returns whether losses have changed.
        """
        moved = False
        for call, entered in enumerate(self.trace.calls):
            if not self.others.in_any_order(entered):
                continue
            returned = [n for n in self.tape.returned if self.tape.returned[n] == call]
            found = [n for n in returned if self.others.place_of(n) == ROW]
            lost = [self.others.with_rows(number, found, half) for half in self.others.halves]
            one, other = (self.others.unlike(whole, each).view(self.examples, -1).any(1) for each in lost)
            if bool((one & other).any()):
                raise self._mixture(MIXED.format(where=self.tape.table), number)
            moved |= bool((one | other).any())
        return moved

    def _refuse_single(
        self, number: int, whole: Tensor, rows_of: Callable[[Tensor], Tensor], what: str
    ) -> None:
        """Refuse one number of the whole batch that several examples go by, if it were another: a count, a maximum with a floor.

        Rows that stand in the place of others may leave it as it is.
        """
        needed = set[int]()
        self.tape.behind([number], needed)
        found = sorted(needed & self.tape.single) if self.others.first else []
        for n in found[-max(1, WORK // len(self.tape.lines)) :]:
            for sign in (0, 1, -1):
                try:
                    moved = {n: partial(_moved, sign=sign)}
                    other = self.tape.again(number, dict(self.tape.held), moved=moved)[0]
                    changed = self.others.unlike(rows_of(whole), rows_of(other))
                except Exception:
                    # so many rows are not there
                    continue
                if int(changed.sum()) > 1:
                    raise self._mixture(what.format(where=self.tape.table), number)

    def _feel_padding(self, number: int, whole: Tensor) -> None:
        """Note for which lengths the losses are others where the model returns something else for padding."""
        trace = self.trace
        for there, factor in product(trace.padding, FACTORS):
            made = {n: in_padding(self.tape.held[n], there, factor) for n in self.tape.returned}
            instead = {n: tensor for n, tensor in made.items() if tensor is not None}
            if instead and bool(
                self.others.unlike(whole, self.others.again(number, instead=instead)[0]).any()
            ):
                trace.felt.add(there.shape[1])

    def _feel_longer(self, number: int, whole: Tensor) -> None:
        """Note for which lengths what enters the model, and has no length, is something else where rows are padded further."""
        trace = self.trace
        for there in trace.padding:
            held = [n for n in self.tape.places if n not in self.tape.returned]
            made = {n: padded_further(self.tape.held[n], there) for n in held}
            instead = {n: tensor for n, tensor in made.items() if tensor is not None}
            try:
                longer = self.others.again(number, instead=instead)[0] if instead else whole
            except Exception:
                # numbers of this length stand beside it
                continue
            if longer.shape == whole.shape and bool(self.others.unlike(whole, longer).any()):
                trace.felt.add(there.shape[1])

    def _enters_apart(self, number: int) -> bool:
        """Whether it is known which rows enter the model for which half of the examples, or they stand where their examples do.

        Raises:
            UserError: they depend on other examples.
        """
        refuse_others(self.tape, number, "what enters the model depends")
        whole = self.others.again(number)[0]
        try:
            others = [self.others.again(number, half)[0] for half in self.others.halves]
            places = self.trace.rows.possible(whole)
            rows = [[place.rows(t, self.examples) for t in (whole, *others)] for place in places]
        except Exception:
            # nothing that has rows, or that could be done again
            return True
        if whole.dim() and self.others.first:
            self._feel_longer(number, whole)
        if self.others.of_ends(number) and not self.trace.rows.fits(whole):
            if not self.others.note_rows(number, whole, others):
                raise self._mixture(ENTERED, number)
            self.others.ends.add(number)
            self._refuse_single(number, whole, partial(self.others.by_half, number), ENTERED)
            return True
        if not places:
            # rows of an example at a time, of some, or beside public ones
            self.others.unplaced.add(number)
            if not self.others.note_rows(number, whole, others):
                raise UserError(UNTOLD.format(shape=list(whole.shape), examples=self.examples))
            return True
        found, fits = [], self.trace.rows.fits(whole)
        for place, (first, *rest) in zip(places, rows, strict=True):
            changed = [self.others.unlike(first, other) for other in rest]
            for row in first[changed[0] & changed[1]]:
                if place not in fits or all(
                    self.others.unlike(row.expand_as(other), other).all() for other in rest
                ):
                    break
            else:
                found.append((place, changed))
        if not found:
            raise self._mixture(ENTERED, number)
        # what entered before, or in another call, has the same example in each row
        both = [
            [old | new for old, new in zip(self.others.changed, changed, strict=True)] for _, changed in found
        ]
        apart = [i for i, (one, other) in enumerate(both) if not bool((one & other).any())]
        if not apart and not any(bool((one & other).any()) for _, (one, other) in found):
            raise self._mixture(ENTERED, *self._entered)
        self.others.changed = both[apart[0]] if apart else self.others.changed
        place, here = found[apart[0] if apart else 0]
        self._refuse_single(number, whole, lambda t: place.rows(t, self.examples), ENTERED)
        if place.axis == 0:
            self.others.note_rows(number, whole, others)
        if place not in fits:
            self.others.several[len(whole)] = place
        if apart and not self.trace.opaque:
            return True
        return not any(bool(rows[kept].any()) for rows, kept in zip(here, self.others.halves, strict=True))

    def _mixture(self, what: str, *numbers: int) -> Mixture:
        """An error that says what the tensors with these numbers show."""
        needed = set[int]()
        self.tape.behind(numbers, needed)
        error = Mixture(what)
        error.sure = needed.isdisjoint(self.tape.unsure)
        return error

    def _is_chance(self, scaled: Any) -> bool:
        """Whether a number goes by the batch by chance: in arithmetic with an entry of a list, which is of one example; or if a
        mean is over as many numbers as there are examples, and of what the model has returned of one at a time."""
        line, name, source, _ = scaled
        needed = set[int]()
        self.tape.behind(self.tape.lines[line].uses, needed)
        returned = needed.intersection(self.tape.returned)
        listed = len(returned) == 1 and self.tape.returned[min(returned)] in self.others.lists
        if listed or not needed.isdisjoint(self.tape.entries):
            # what goes by the batch stands beside all entries
            return sum(place[1:] == scaled[1:] for place in self.trace.sizes.scaled) < self.examples
        if line < self.others.behind_model:
            return False
        if name != "mean" or source not in self.trace.sizes.times:
            return False
        return bool(returned) and all(map(self.others.told_rows, returned))


def _moved(number: Tensor, sign: int) -> Tensor:
    """A number as it might have been: another one, or, with a sign, beyond all bounds, and its square finite."""
    if number.dtype == torch.bool:
        return ~number
    if number.is_floating_point() and not number:
        # what goes through all weights may be multiplied by zero before it is added up
        return number
    if not sign or not number.is_floating_point():
        return 3 * number + 1
    return torch.full_like(number, sign * torch.finfo(number.dtype).max ** 0.5)
