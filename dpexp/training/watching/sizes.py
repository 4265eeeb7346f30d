"""Numbers that go by a batch: how many examples it has, how long its rows are padded, what a loop has counted in it.

Arithmetic with one of them makes a loss depend on the other examples, though no gradient shows it. Where such a number equals a
constant of the loop, a batch of another size tells the two apart.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from dpexp.training.watching.lines import Number

# longer than numbers that somebody writes down: those that a loop has made of its batch are known by their digits
DIGITS = 12
# sizes of batches with which a number has to rise, or to fall: by chance it does so once in 181,440 loops
ENOUGH = 9


class Sizes:
    """What goes by one batch.

    Args:
        examples: how many it has.
        rows_per_example: rows that it may have of each.
        earlier: `fractions` of the batch before.

    Attributes:
        times: how many rows each example may have.
        fractions: numbers of Python that were made of the whole batch.
        scaled: where a whole number that goes by the batch stood in arithmetic, or was averaged over: (line, function, which of
            them, how many times) -> its value.
        unlike: the same without how many times -> the whole numbers that stood there and were another one.
        numbers: in arithmetic, that are no example's own: (line, function, which of its arguments) -> the number.
    """

    def __init__(self, examples: int, rows_per_example: int, earlier: Sequence[float]):
        self.scaled: dict[tuple[int, str, Hashable, int], int] = {}
        self.unlike: dict[tuple[int, str, Hashable], set[float]] = {}
        self.numbers: dict[tuple[int, str, int], float] = {}
        self._examples, self.times = examples, {1, rows_per_example}
        self._whole: dict[Hashable, int] = {times: examples * times for times in sorted(self.times)}
        self.fractions: list[float] = []
        self._earlier = earlier
        # a count, or a fraction, of one example alone -> whose it is
        self._own: dict[Hashable, int] = {}

    def add_shape(self, shape: torch.Size) -> None:
        """Note how long the rows of a tensor of the batch are."""
        number = len(self._whole)
        # one less where a text is shifted against itself
        self._whole |= {
            ("shape", number, axis, less): size - less
            for axis, size in enumerate(shape)
            if axis
            for less in (0, 1)
        }

    def add_count(self, found: Any, own: int | None = None) -> None:
        """Note a number of Python that is made of values of the batch, or of its example ``own`` alone; anything else is none."""
        source: Hashable = None
        if type(found) is int or (type(found) is float and found.is_integer()):
            source = "counted", len(self._whole)
            self._whole[source] = int(found)
        elif type(found) is float and len(repr(found)) > DIGITS:
            source = found
            self.fractions.append(found)
        if source is not None and own is not None:
            self._own[source] = own

    def made(self, numbers: Iterable[Number], own: int | None = None) -> bool:
        """Whether one of these is a fraction that was made of the whole batch, or of the one before. What is made of one example
        alone is its own, also where the batch before had that example too."""
        here = self.fractions if self._examples > 1 else ()
        known = [f for f in (*self._earlier, *here) if own is None or self._own.get(f) != own]
        return any(number.is_near(fraction) for number in numbers for fraction in known)

    def note(
        self, line: int, name: str, number: Number, own: int | None = None, *, averaged: bool = False
    ) -> None:
        """Note where a number that goes by the batch stands in arithmetic, or a multiple of it is averaged over.

        Args:
            line: in which line of the trace.
            name: of the function.
            number: that stands there.
            own: whose row alone it is that the function is given.
            averaged: whether it is how many elements a mean has.
        """
        counts = [
            self._whole[source]
            for source, whose in self._own.items()
            if whose == own and source in self._whole
        ]
        # the longest row has as many tokens of its own as the batch has columns
        its_own = any(number.is_near(n) or (averaged and n > 0 and number.value % n == 0) for n in counts)
        if self._examples == 1 or its_own:
            return
        for source, size in self._whole.items():
            if number.by_row and source not in self.times:
                continue
            if size > 1 and number.is_near(size):
                self.scaled[line, name, source, 1] = size
            elif averaged and size > 1 and number.value % size == 0:
                self.scaled[line, name, source, int(number.value) // size] = size
            elif number.value > 1 and float(number.value).is_integer():
                self.unlike.setdefault((line, name, source), set()).add(number.value)


def goes_by_size(seen: Mapping[int, float]) -> bool:
    """Whether numbers, by the size of the batch that each stood beside, all rise or all fall with it, like ``256 / len(losses)``.

    NaN, for a size that had several, does neither.
    """
    pairs = list(pairwise(seen[size] for size in sorted(seen)))
    return bool(pairs) and (all(a < b for a, b in pairs) or all(a > b for a, b in pairs))
