"""Several pairs of one claim: what they come to, and which of them is shown."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dpexp.reproduce.fillings import Filling
from dpexp.reproduce.pairs import Finding, Pair, Side, at_the_edge, choose
from dpexp.reproduce.records import Record
from dpexp.reproduce.statistics import compare
from tests.reproduce.samples import summary

HIGH, LOW, NEAR = [90.1, 90.4, 90.2], [85.0, 85.6, 85.2], [89.2, 89.9, 89.5]


def _pair(name: str, left: list[float], right: list[float], seeds: int = 3, unfinished: str = "") -> Pair:
    sides = Side(name, seeds, unfinished=unfinished), Side("other", seeds)
    return Pair("", sides, "above 0", compare(left, right, "greater"))


@pytest.mark.parametrize(
    ("pairs", "word", "shown"),
    [
        ([_pair("strong", HIGH, LOW, 9), _pair("weak", HIGH, NEAR)], "supports", "weak"),
        ([_pair("strong", HIGH, LOW, 9), _pair("against", LOW, HIGH)], "contradicts", "against"),
        ([_pair("strong", HIGH, LOW, 9), _pair("undecided", HIGH, HIGH[::-1])], "cannot tell", "undecided"),
        (
            [_pair("unfinished", LOW, HIGH, 9, "at the edge"), _pair("strong", HIGH, LOW)],
            "cannot tell",
            "unfinished",
        ),
    ],
)
def test_the_pair_that_decides_is_shown(pairs: list[Pair], word: str, shown: str):
    verdict = Finding(pairs).verdict("a block")
    assert verdict.word == word
    assert verdict.ours.startswith(f"{shown} − other = ")
    assert verdict.ours.endswith("expected above 0 (1 of 2 pairs)")


def test_a_part_of_a_claim_is_named():
    verdict = Finding([_pair("left", HIGH, LOW)], "1 of 3 comparisons in print").verdict("")
    assert verdict.part == "1 of 3 comparisons in print"
    assert Finding([_pair("left", HIGH, LOW)]).verdict("").part == ""


def test_the_ends_of_a_grid_are_its_edge():
    assert at_the_edge("lr", 2.0, [0.5, 1.0, 2.0]) == "its lr 2 is at the edge of 0.5, 1, 2"
    assert at_the_edge("lr", 1.0, [0.5, 1.0, 2.0]) == at_the_edge("lr", 1.0, [1.0]) == ""


@pytest.mark.parametrize(
    ("metric", "best"), [("accuracy", 90.0), ("perplexity", 80.0), ("perplexity_test", 80.0)]
)
def test_the_best_perplexity_is_the_smallest(metric: str, best: float):
    record = Record("a.json", summary())
    one, other = (Filling((record,), (value,), metric) for value in (80.0, 90.0))
    assert choose([one, other]).filling.mean == choose([other, one]).filling.mean == best


@pytest.mark.parametrize(
    ("printed", "unfinished", "left_out"),
    [(9.0, "", 1), (0.1, "", 0), (None, "", 0), (9.0, "at the edge", 0)],
)
def test_a_printed_difference_that_an_interval_leaves_out_is_counted(
    printed: float | None, unfinished: str, left_out: int
):
    pair = replace(_pair("left", HIGH, HIGH[::-1], unfinished=unfinished), printed=printed)
    other = _pair("another", HIGH, LOW)
    said = Finding([pair, other]).said
    assert (f"{left_out} of the intervals leave out the difference in print" in said) == bool(left_out)
    assert ("(in print +9.00)" in str(pair)) == (printed == 9.0)
