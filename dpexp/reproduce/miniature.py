"""A search of a paper over a grid of settings that no printed cell has: in miniature, or where print has only a picture.

Nothing of it stands beside a printed number. What carries over is the shape of the grid, and that is what is tested.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dpexp.reproduce import cells
from dpexp.reproduce.cells import Filling
from dpexp.reproduce.documents import Rows, Section
from dpexp.reproduce.pairs import Choice, Pair, compared, paragraphs
from dpexp.reproduce.records import Record
from dpexp.reproduce.statistics import compare, mean_std

COLUMNS = (
    "row", "column", "ours", "n", "dev error", "scale", "configuration", "ε", "δ", "accountant", "sampling", "hardware", "record",
)  # fmt: skip


def build(asked: Mapping[str, Any], records: Sequence[Record]) -> tuple[Section, list[Pair]]:
    """The block of a grid, and what its seeds say.

    Args:
        asked: the entry "miniature" of a claim: task, where (settings of its records), row and column (name and setting of each
            axis), metric, words, command; scale, "small" if it is left out; heading; best, the side of the columns that the paper
            finds best: "largest" if it is left out, or "smallest".
        records: committed ones.

    The claims tested, both at level 0.05: at its best row the largest column beats the smallest at its own, and in the largest
    column the largest row beats the smallest; where the smallest column is to be best, that it beats the largest. The best row is
    chosen by the same seeds that are then compared: the page says so.
    """
    scale = asked.get("scale", "small")
    heading = asked.get("heading", f"scale=small, in miniature on {asked['task']}")
    words = (asked["words"],)
    where = {"task": asked["task"], "scale": scale, **asked["where"]}
    grid = _grid(asked, [record for record in records if record.matches(where)])
    if len(grid) < 2:
        return Section(heading, (*words, f"Not run: `{asked['command']}`"), scale=scale), []
    (row_name, _), (column_name, _) = asked["row"], asked["column"]
    rows: Rows = [
        {"row": f"{row_name} = {row:g}", "column": f"{column_name} = {column:g}", "scale": scale}
        | cells.columns(filling, 2)
        for (row, column), filling in sorted(grid.items(), key=lambda item: (-item[0][0], item[0][1]))
    ]
    found = list(_pairs(asked, grid))
    return Section(heading, (*words, *paragraphs(found)), COLUMNS, rows, scale), found


def _grid(asked: Mapping[str, Any], records: Sequence[Record]) -> dict[tuple[float, float], Filling]:
    """(row, column) -> the configuration there, of the most seeds."""
    found: dict[tuple[float, float], Filling] = {}
    for filling in cells.measured(records, asked["metric"]):
        row, column = (float(filling.records[0].facts[asked[side][1]]) for side in ("row", "column"))
        place = row, column
        if place not in found or len(filling.values) > len(found[place].values):
            found[place] = filling
    return found


def _pairs(asked: Mapping[str, Any], grid: Mapping[tuple[float, float], Filling]) -> list[Pair]:
    (row_name, _), (column_name, _) = asked["row"], asked["column"]
    columns = sorted({column for _, column in grid})
    found: list[Pair] = []

    def best(column: float) -> float:
        return max(
            (row for row, c in grid if c == column), key=lambda row: mean_std(grid[row, column].values)[0]
        )

    def pair(what: str, left: tuple[float, float], right: tuple[float, float], of_rows: bool) -> None:
        names = [f"{row_name} = {row:g}, {column_name} = {column:g}" for row, column in (left, right)]
        tried = [sum(c == column for _, c in grid) if of_rows else 1 for _, column in (left, right)]
        alone = [f"no other {row_name} was tried" if of_rows and count == 1 else "" for count in tried]
        sides = Choice(grid[left], tried[0], alone[0]), Choice(grid[right], tried[1], alone[1])
        result = compare(grid[left].values, grid[right].values, "greater")
        found.append(compared(what, (names[0], names[1]), sides, "greater", 0.0, result))

    if asked.get("best") == "smallest":
        columns.reverse()
    if len(columns) > 1:
        first, last = columns[0], columns[-1]
        pair(f"each at its best {row_name}", (best(last), last), (best(first), first), True)
    rows = sorted({row for row, column in grid if column == columns[-1]})
    if len(rows) > 1 and asked.get("best") != "smallest":
        pair(f"at the largest {column_name}", (rows[-1], columns[-1]), (rows[0], columns[-1]), False)
    return found
