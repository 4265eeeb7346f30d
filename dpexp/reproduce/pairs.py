"""Two configurations, their seeds, and what they say about a claim; in words."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from dpexp.reproduce.documents import PART, Verdict, grouped
from dpexp.reproduce.fillings import Filling, described
from dpexp.reproduce.statistics import CANNOT_TELL, CONTRADICTS, LEVEL, Comparison, compare, overall

# of each method its own, as in the papers
TUNED = ("optim.lr", "optim.lr_schedule", "optim.warmup_ratio")
SELECTED = (
    "Where a side is the best of several configurations, it was picked by the dev metric, seeds that are compared here among"
    " them: this is selection on the test data. Its mean is optimistic, the more so the more were tried; the p-values don't"
    " know of it."
)


@dataclass(frozen=True)
class Choice:
    """The configuration that speaks for a side.

    Attributes:
        filling: of the most seeds, then of the highest mean.
        tried: configurations that it is the best of: those with records, or as many as its records say.
        unfinished: why the search is not finished, in words: a configuration with fewer seeds and a higher mean, or an optimum
            at the edge of what was tried; "" where it is.
    """

    filling: Filling
    tried: int = 1
    unfinished: str = ""


Named = tuple[str, Choice]


def choose(fillings: Sequence[Filling]) -> Choice:
    """The choice among configurations of one side.

    Raises:
        ValueError: there is none.
    """
    chosen = max(fillings, key=lambda f: (len(f.values), f.merit))
    trials = [int(record.summary["privacy"].get("trials") or 1) for record in chosen.records]
    rates = [float(rate) for f in fillings if (rate := f.record.facts.get("optim.lr")) is not None]
    unfinished = at_the_edge("lr", chosen.record.facts.get("optim.lr"), rates)
    rivals = [f for f in fillings if len(f.values) < len(chosen.values) and f.merit > chosen.merit]
    if rivals:
        rival = max(rivals, key=lambda f: f.merit)
        unfinished = f"{described(rival.record)}, has {rival.mean:.2f} with n = {len(rival.values)}"
    return Choice(chosen, max(len(fillings), *trials), unfinished)


def best_of_each(
    fillings: Iterable[Filling], names: Collection[str], prefixes: tuple[str, ...] = ()
) -> dict[str, Choice]:
    """Context -> the configuration that speaks for it. A context is all that may change a result but what is tuned for each
    method, and what is compared: settings of these names, or whose names begin so."""
    found = grouped(fillings, lambda filling: filling.record.without({*TUNED, *names}, prefixes))
    return {context: choose(own) for context, own in found.items()}


def agreeing(
    left: Iterable[Filling], right: Iterable[Filling], names: Collection[str], prefixes: tuple[str, ...] = ()
) -> Iterator[tuple[Choice, Choice]]:
    """The configurations that speak for two sides in each context that both have; see `best_of_each`."""
    ones, others = (best_of_each(side, names, prefixes) for side in (left, right))
    return ((one, others[context]) for context, one in ones.items() if context in others)


def at_the_edge(name: str, chosen: float | None, tried: Iterable[float]) -> str:
    """Say that a value is the largest or the smallest of several, so that the best one may lie beyond; "" where it is not."""
    grid = sorted(set(tried))
    if chosen is None or len(grid) < 2 or chosen not in (grid[0], grid[-1]):
        return ""
    return f"its {name} {chosen:g} is at the edge of {', '.join(f'{value:g}' for value in grid)}"


class Side(NamedTuple):
    """Of a pair: its name, how many seeds it has, and of its search what `Choice` has."""

    name: str
    seeds: int
    tried: int = 1
    unfinished: str = ""

    def __str__(self) -> str:
        picked = f", best of {self.tried}" if self.tried > 1 else ""
        return f"{self.name} (n = {self.seeds}{picked})"


@dataclass(frozen=True)
class Pair:
    """One instance of a claim: two sides, and what their seeds say.

    Attributes:
        what: both have in common.
        sides: left and right.
        expect: of left minus right, in words: "above -1".
        result: left minus right.
        test: of the seeds, in words.
        printed: left minus right in the paper; None where it has no such numbers.
    """

    what: str
    sides: tuple[Side, Side]
    expect: str
    result: Comparison
    test: str = "Welch's t"
    printed: float | None = None

    @property
    def excluded(self) -> bool:
        """Is what the paper has outside of the interval? A search that is not finished can't say so."""
        if self.printed is None or any(side.unfinished for side in self.sides):
            return False
        return not self.result.low <= self.printed <= self.result.high

    @property
    def seeds(self) -> int:
        """Of the side that has fewer."""
        return min(side.seeds for side in self.sides)

    @property
    def picked(self) -> bool:
        """Is a side the best of several?"""
        return any(side.tried > 1 for side in self.sides)

    @property
    def judged(self) -> Comparison:
        """The result without what the unfinished search of a side forbids to conclude.

        Where a configuration with too few seeds did better than the one compared, or the best learning rate is at the edge of
        those tried, the side may be better than it looks: then the seeds can't say that it is worse. Where they can say
        neither, nothing was tested.
        """
        left, right = (bool(side.unfinished) for side in self.sides)
        if (left and right) or (self.expect.startswith("within") and (left or right)):
            return replace(self.result, p_for=math.nan, p_against=math.nan)
        if not self.result.tested:
            return self.result
        p_for, p_against = 1.0 if right else self.result.p_for, 1.0 if left else self.result.p_against
        return replace(self.result, p_for=p_for, p_against=p_against)

    def __str__(self) -> str:
        """Difference, interval, p-values and verdict."""
        result = self.result
        interval = f", 95% {result.interval}" if math.isfinite(result.low) else ""
        p = f", p = {result.p_for:.3f} for it, {result.p_against:.3f} against it" if result.tested else ""
        printed = "" if self.printed is None else f" (in print {self.printed:+.2f})"
        searched = [side for side in self.sides if side.unfinished]
        unfinished = "".join(f"; the search of {s.name} is not finished: {s.unfinished}" for s in searched)
        return (
            f"{self.what}: {' minus '.join(map(str, self.sides))} = {result.difference:+.2f}{interval}{printed};"
            f" expected {self.expect}{p}{unfinished}: {self.judged.verdict}"
        )


def compared(
    what: str, left: Named, right: Named, expect: str, margin: float = 0.0, printed: float | None = None
) -> Pair:
    """The pair of two named choices; ``printed``: what the paper has."""
    result = compare(left[1].filling.values, right[1].filling.values, expect, margin)
    one, two = (Side(name, len(c.filling.values), c.tried, c.unfinished) for name, c in (left, right))
    words = f"within ±{margin:g}" if expect == "close" else f"above {0 - margin:g}"
    return Pair(what, (one, two), words, result, printed=printed)


@dataclass(frozen=True)
class Finding:
    """What pairs say about a claim.

    Attributes:
        pairs: its instances.
        part: which part of the claim they are instances of, in words; "" where they are all of it.
        unstated: settings that the paper does not give: then the seeds speak for the settings chosen here alone.
    """

    pairs: Sequence[Pair]
    part: str = ""
    unstated: str = ""

    @property
    def said(self) -> str:
        """Supports, contradicts or cannot tell, and from how many pairs."""
        pairs = self.pairs
        if not pairs:
            return f"{CANNOT_TELL}: no two of our runs differ in this alone"
        tested = [pair for pair in pairs if pair.judged.tested]
        if not tested:
            if any(math.isnan(pair.result.difference) for pair in pairs):
                return f"{CANNOT_TELL}: a run ended without a number"
            return f"{CANNOT_TELL}: fewer than two seeds on a side, or a search that is not finished, in every pair"
        word = overall([pair.judged for pair in pairs])
        test = " and ".join(dict.fromkeys(pair.test for pair in tested))
        picked = ", sides picked on these seeds" if any(pair.picked for pair in tested) else ""
        named = f"{PART}{self.part}" if self.part and word != CANNOT_TELL else ""
        excluded = sum(pair.excluded for pair in tested)
        far = f"; {excluded} of the intervals leave out the difference in print" if excluded else ""
        found = f"{len(tested)} of {len(pairs)} pairs tested, {test} over seeds, level {LEVEL:g}{picked}{far}"
        if self.unstated and word != CANNOT_TELL:
            chosen = f"the paper does not state {self.unstated}; at what was chosen here"
            return f"{CANNOT_TELL}: {chosen}: {word}{named} ({found})"
        return f"{word}{named} ({found})"

    @property
    def paragraphs(self) -> tuple[str, ...]:
        """The verdict in bold, and a list with a line for each pair."""
        selected = [SELECTED] if any(pair.picked for pair in self.pairs) else []
        lines = "\n".join(f"- {pair}" for pair in self.pairs)
        return f"**{self.said}**", *selected, *([lines] if lines else [])

    def verdict(self, where: str) -> Verdict:
        """Of a block; its numbers are those of the pair that decides: the clearest against the claim, or the weakest for it."""
        measured = [pair for pair in self.pairs if pair.result.tested and math.isfinite(pair.result.low)]
        # without a judged pair, the first: p-values that are no numbers are larger than none
        tested = [pair for pair in measured if pair.judged.tested] or measured
        if not tested:
            return Verdict(where, self.said)
        if self.said.startswith(CONTRADICTS):
            pair = min(tested, key=lambda pair: pair.judged.p_against)
        else:
            pair = max(tested, key=lambda pair: pair.judged.p_for)
        result, more = pair.result, f" (1 of {len(tested)} pairs)" if len(tested) > 1 else ""
        names = " − ".join(side.name for side in pair.sides)
        ours = f"{names} = {result.difference:+.2f} {result.interval}, n = {pair.seeds}"
        return Verdict(where, self.said, f"{ours}, expected {pair.expect}{more}")
