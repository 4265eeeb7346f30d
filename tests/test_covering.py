"""Tests that take pairs in the place of a full product lose no pair."""

from itertools import combinations, product

from tests.covering import covering


def test_every_two_values_meet_in_few_rows() -> None:
    columns = ("abcdefghijkl", range(5), [(1, 2), (3, 4)], ("x",), range(10))
    rows = covering(*columns)
    for i, j in combinations(range(len(columns)), 2):
        assert {(row[i], row[j]) for row in rows} == set(product(columns[i], columns[j]))
    assert len(rows) < 1.1 * 12 * 10
