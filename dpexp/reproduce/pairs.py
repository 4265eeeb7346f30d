"""Two cells, their seeds, and what they say about a claim; in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dpexp.reproduce.statistics import CANNOT_TELL, Comparison, overall


@dataclass(frozen=True)
class Pair:
    """One instance of a claim: two cells, two configurations, and what their seeds say.

    Attributes:
        what: both have in common.
        left, right: their rows.
        expect: in words, with the margin.
        result: left minus right.
        sizes: seeds on each side.
    """

    what: str
    left: str
    right: str
    expect: str
    result: Comparison
    sizes: tuple[int, int]


def verdict(pairs: Sequence[Pair]) -> str:
    """Supports, contradicts or cannot tell, and from how many pairs."""
    if not pairs:
        return f"{CANNOT_TELL}: no pair of records that differ in this alone"
    tested = [pair for pair in pairs if pair.result.p_for is not None]
    word = overall([pair.result for pair in pairs])
    if not tested:
        return f"{CANNOT_TELL}: fewer than two seeds on a side of each of {len(pairs)} pairs"
    return f"{word} ({len(tested)} of {len(pairs)} pairs tested, Welch's t over seeds, level 0.05)"


def paragraphs(pairs: Sequence[Pair]) -> tuple[str, ...]:
    """The verdict in bold, and a list with a line for each pair."""
    lines = "\n".join(f"- {line(pair)}" for pair in pairs)
    return f"**{verdict(pairs)}**", *([lines] if pairs else [])


def line(pair: Pair) -> str:
    """Difference, interval, p-values and verdict of one pair."""
    result, (left, right) = pair.result, pair.sizes
    interval = f", 95% [{result.low:+.2f}, {result.high:+.2f}]" if math.isfinite(result.low) else ""
    p = f", p for {result.p_for:.3f}, against {result.p_against:.3f}" if result.p_for is not None else ""
    return (
        f"{pair.what}: {pair.left} (n = {left}) minus {pair.right} (n = {right}) = {result.difference:+.2f}{interval};"
        f" expected {pair.expect}{p}: {result.verdict}"
    )
