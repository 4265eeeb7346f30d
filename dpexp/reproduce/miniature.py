"""A search of a paper over a grid of settings that no printed cell has: in miniature, or where print has only a picture.

Nothing of it stands beside a printed number. What carries over is the shape of the grid, and that is what is tested.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dpexp.reproduce.documents import Rows, Section
from dpexp.reproduce.fillings import ORIGIN, Filling, columns, measured, most_seeds
from dpexp.reproduce.pairs import Choice, Finding, Pair, at_the_edge, compared
from dpexp.reproduce.records import Record

COLUMNS = ("row", "column", "ours", "n", "dev error", "scale", *ORIGIN)


def build(asked: Mapping[str, Any], records: Sequence[Record]) -> Section:
    """The block of a grid, with what its seeds say.

    Args:
        asked: the entry "miniature" of a claim: task, where (settings of its records), row and column (name and setting of each
            axis), metric, words, command; scale, "small" if it is left out; heading; part, of the claim, that is compared; best,
            the side of the columns that the paper finds best: "largest" if it is left out, or "smallest".
        records: committed ones.

    The claims tested, both at level 0.05: at its best row the largest column beats the smallest at its own, and in the largest
    column the largest row beats the smallest; where the smallest column is to be best, that it beats the largest. The best row is
    chosen by the same seeds that are then compared: the page says so. While it is at the edge of those tried, the search of its
    side is not finished.
    """
    scale = asked.get("scale", "small")
    heading = asked.get("heading", f"scale=small, in miniature on {asked['task']}")
    words, command = asked["words"], asked["command"]
    where = {"task": asked["task"], "scale": scale, **asked["where"]}
    (row_name, down), (column_name, across) = asked["row"], asked["column"]
    own = measured((record for record in records if record.matches(where)), asked["metric"])
    grid = most_seeds(own, lambda f: (float(f.record.facts[down]), float(f.record.facts[across])))
    if len(grid) < 2:
        return Section(heading, (words, f"Not run: `{command}`"), scale=scale, commands=(command,))
    rows: Rows = [
        {"row": f"{row_name} = {row:g}", "column": f"{column_name} = {column:g}", "scale": scale}
        | columns(filling, 2)
        for (row, column), filling in sorted(grid.items(), key=lambda item: (-item[0][0], item[0][1]))
    ]
    found = Finding([*_pairs(asked, grid)], asked.get("part", ""))
    of = f"/{asked['of']} cells" if asked.get("of") else " cells in miniature"
    return Section(
        heading, (words, *found.paragraphs), COLUMNS, rows, scale,
        done=f"{scale} {len(rows)}{of} on {asked['task']}", verdicts=(found.verdict(heading),),
    )  # fmt: skip


def _pairs(asked: Mapping[str, Any], grid: Mapping[tuple[float, float], Filling]) -> Iterator[Pair]:
    (row_name, _), (column_name, _) = asked["row"], asked["column"]
    smallest = asked.get("best") == "smallest"
    across = sorted({column for _, column in grid}, reverse=smallest)
    rows = {column: sorted(row for row, c in grid if c == column) for column in across}

    def named(row: float, column: float) -> str:
        return f"{row_name} = {row:g}, {column_name} = {column:g}"

    def at_its_best(column: float) -> tuple[str, Choice]:
        tried = rows[column]
        row = max(tried, key=lambda row: grid[row, column].merit)
        return named(row, column), Choice(grid[row, column], len(tried), at_the_edge(row_name, row, tried))

    best = across[-1]
    if len(across) > 1:
        yield compared(f"each at its best {row_name}", at_its_best(best), at_its_best(across[0]), "greater")
    if len(rows[best]) > 1 and not smallest:
        left, right = ((named(row, best), Choice(grid[row, best])) for row in (rows[best][-1], rows[best][0]))
        yield compared(f"at the largest {column_name}", left, right, "greater")
