"""Two configurations, their seeds, and what they say about a claim; in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dpexp.reproduce.documents import Verdict
from dpexp.reproduce.fillings import Filling, described
from dpexp.reproduce.statistics import CANNOT_TELL, LEVEL, Comparison, compare, judge, overall

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
        better: why the search is not finished, in words: a configuration with fewer seeds and a higher mean, or an optimum at
            the edge of what was tried; "" where it is.
    """

    filling: Filling
    tried: int = 1
    better: str = ""


Side = tuple[str, Choice]


def choose(fillings: Sequence[Filling]) -> Choice:
    """The choice among configurations of one side.

    Raises:
        ValueError: there is none.
    """
    chosen = max(fillings, key=lambda f: (len(f.values), f.mean))
    trials = [int(record.summary["privacy"].get("trials") or 1) for record in chosen.records]
    rivals = [f for f in fillings if len(f.values) < len(chosen.values) and f.mean > chosen.mean]
    better = _edge(chosen, fillings)
    if rivals:
        rival = max(rivals, key=lambda f: f.mean)
        better = f"{described(rival.records[0])}, has {rival.mean:.2f} with n = {len(rival.values)}"
    return Choice(chosen, max(len(fillings), *trials), better)


def _edge(chosen: Filling, fillings: Sequence[Filling]) -> str:
    """Is the learning rate that was chosen the largest or the smallest of several? Then the best one may lie beyond."""
    own, *others = (f.records[0].facts.get("optim.lr") for f in (chosen, *fillings))
    grid = sorted({float(rate) for rate in others if rate is not None})
    if own is None or len(grid) < 2 or float(own) not in (grid[0], grid[-1]):
        return ""
    return f"its lr {own:g} is at the edge of {', '.join(f'{rate:g}' for rate in grid)}"


@dataclass(frozen=True)
class Pair:
    """One instance of a claim: two cells, two configurations, and what their seeds say.

    Attributes:
        what: both have in common.
        names: of the left side and the right one.
        expect: in words, with the margin.
        result: left minus right.
        sizes: seeds on each side.
        tried: configurations that each side is the best of.
        better: of each side, why its search is not finished, in words.
        test: of the seeds, in words.
    """

    what: str
    names: tuple[str, str]
    expect: str
    result: Comparison
    sizes: tuple[int, int]
    tried: tuple[int, int] = (1, 1)
    better: tuple[str, str] = ("", "")
    test: str = "Welch's t"

    @property
    def judged(self) -> Comparison:
        """The result without what the unfinished search of a side forbids to conclude.

        Where a configuration with too few seeds did better than the one compared, or the best learning rate is at the edge of
        those tried, the side may be better than it looks: then the seeds can't say that it is worse. Where they can say
        neither, nothing was tested.
        """
        left, right = map(bool, self.better)
        if (left and right) or (self.expect.startswith("close") and (left or right)):
            return replace(self.result, p_for=None, p_against=None, verdict=CANNOT_TELL)
        p_for = 1.0 if right else self.result.p_for
        p_against = 1.0 if left else self.result.p_against
        if self.result.p_for is None or p_for is None or p_against is None:
            return self.result
        return replace(self.result, p_for=p_for, p_against=p_against, verdict=judge(p_for, p_against))

    def __str__(self) -> str:
        """Difference, interval, p-values and verdict."""
        result = self.result
        sides = [
            f"{name} (n = {size}{f', best of {tried}' if tried > 1 else ''})"
            for name, size, tried in zip(self.names, self.sizes, self.tried, strict=True)
        ]
        unfinished = "".join(
            f"; the search of {name} is not finished: {better}"
            for name, better in zip(self.names, self.better, strict=True)
            if better
        )
        interval = f", 95% [{result.low:+.2f}, {result.high:+.2f}]" if math.isfinite(result.low) else ""
        p = "" if result.p_for is None else f", p for {result.p_for:.3f}, against {result.p_against:.3f}"
        return (
            f"{self.what}: {' minus '.join(sides)} = {result.difference:+.2f}{interval};"
            f" expected {self.expect}{p}{unfinished}: {self.judged.verdict}"
        )


def compared(what: str, left: Side, right: Side, expect: str, margin: float = 0.0) -> Pair:
    """The pair of two named choices."""
    (name, one), (other, two) = left, right
    result = compare(one.filling.values, two.filling.values, expect, margin)
    return Pair(
        what, (name, other), f"{expect} (margin {margin:g})" if margin else expect, result,
        (len(one.filling.values), len(two.filling.values)), (one.tried, two.tried), (one.better, two.better),
    )  # fmt: skip


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
            return f"{CANNOT_TELL}: no pair of records that differ in this alone"
        tested = [pair for pair in pairs if pair.judged.p_for is not None]
        if not tested:
            why = "fewer than two seeds on a side, or searches that are not finished"
            return f"{CANNOT_TELL}: {why}, of each of {len(pairs)} pairs"
        word = overall([pair.judged for pair in pairs])
        test = " and ".join(dict.fromkeys(pair.test for pair in tested))
        picked = ", sides picked on these seeds" if any(max(pair.tried) > 1 for pair in tested) else ""
        named = f" for a part of the claim, {self.part}" if self.part and word != CANNOT_TELL else ""
        found = f"{len(tested)} of {len(pairs)} pairs tested, {test} over seeds, level {LEVEL:g}{picked}"
        if self.unstated and word != CANNOT_TELL:
            chosen = f"the paper does not state {self.unstated}; at what was chosen here"
            return f"{CANNOT_TELL}: {chosen}: {word}{named} ({found})"
        return f"{word}{named} ({found})"

    @property
    def paragraphs(self) -> tuple[str, ...]:
        """The verdict in bold, and a list with a line for each pair."""
        selected = [SELECTED] if any(max(pair.tried) > 1 for pair in self.pairs) else []
        lines = "\n".join(f"- {pair}" for pair in self.pairs)
        return f"**{self.said}**", *selected, *([lines] if lines else [])

    def verdict(self, where: str) -> Verdict:
        """Of a block; its numbers are those of the tested pair with the most seeds."""
        measured = [p for p in self.pairs if p.result.p_for is not None and math.isfinite(p.result.low)]
        tested = [pair for pair in measured if pair.judged.p_for is not None] or measured
        if not tested:
            return Verdict(where, self.said)
        pair = max(tested, key=lambda pair: min(pair.sizes))
        result, more = pair.result, f" (and {len(tested) - 1} more)" if len(tested) > 1 else ""
        interval = f"[{result.low:+.2f}, {result.high:+.2f}]"
        ours = f"{' − '.join(pair.names)} = {result.difference:+.2f} {interval}, n = {min(pair.sizes)}{more}"
        return Verdict(where, self.said, ours)
