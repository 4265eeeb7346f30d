"""Cases in which every two values meet: of many columns, few rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any


def covering(*columns: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Rows in which each value of a column meets each of every other one: about as many as the largest two columns have pairs."""
    sizes = [range(len(column)) for column in columns]
    left = {
        ((i, a), (j, b))
        for i, j in combinations(range(len(columns)), 2)
        for a, b in product(sizes[i], sizes[j])
    }
    rows = []
    while left:
        row = dict(min(left))
        for k in sorted(set(range(len(columns))) - row.keys(), key=lambda k: -len(columns[k])):
            met = [sum(tuple(sorted(((k, v), place))) in left for place in row.items()) for v in sizes[k]]
            # of values that meet as many new ones, another one in each row
            row[k] = max(sizes[k], key=lambda v, met=met: (met[v], (v - len(rows)) % len(met)))
        left -= set(combinations(sorted(row.items()), 2))
        rows.append(tuple(column[row[k]] for k, column in enumerate(columns)))
    return rows
