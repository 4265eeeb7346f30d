"""How figures are drawn: matplotlib's SVG with fixed ids and no date, so that the same data give the same bytes.

Figures are drawn from rows of text that are already rounded (the CSV beside them), never from what a processor's last bit says.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart by readers with any colour vision.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_STYLE = {
    "svg.hashsalt": "dpexp", "svg.fonttype": "none", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "grid.color": "0.9", "grid.linewidth": 0.6, "legend.frameon": False, "legend.fontsize": 8,
    "figure.facecolor": "white", "axes.axisbelow": True,
}  # fmt: skip


def draw(
    plot: Callable[[Any], None], panels: int = 1, size: tuple[float, float] = (5.0, 3.6)
) -> tuple[str, bytes]:
    """SVG text and PNG bytes.

    Args:
        plot: takes an array of axes, ``[panels]``.
        panels: beside each other.
        size: of each, in inches.
    """
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(size[0] * panels, size[1]), layout="constrained")
        axes = figure.subplots(1, panels, squeeze=False)[0]
        plot(axes)
        text, image = io.StringIO(), io.BytesIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
        figure.savefig(image, format="png", dpi=150, metadata={"Software": None})
    return "".join(line.rstrip() + "\n" for line in text.getvalue().splitlines()), image.getvalue()


def lines(
    axis: Any, series: Sequence[tuple[str, Sequence[float], Sequence[float]]], *, markers: bool = True
) -> None:
    """One line for each (label, x, y), in fixed colours and markers."""
    for number, (label, x, y) in enumerate(series):
        marker = MARKERS[number % len(MARKERS)] if markers else None
        axis.plot(
            x,
            y,
            label=label,
            color=COLOURS[number % len(COLOURS)],
            marker=marker,
            markersize=4,
            linewidth=1.4,
        )
    if len(series) > 1:
        axis.legend()


def heat(
    axis: Any, x: Sequence[str], y: Sequence[str], values: dict[tuple[str, str], float], title: str
) -> None:
    """A heat map with its numbers; cells without a value stay white. ``values[y, x]``."""
    grid = [[values.get((row, column), float("nan")) for column in x] for row in y]
    axis.grid(False)
    shown = [v for line in grid for v in line if v == v]
    if shown:
        axis.imshow(grid, cmap="cividis", aspect="auto", vmin=min(shown), vmax=max(shown))
    else:
        axis.set_xlim(-0.5, len(x) - 0.5)
        axis.set_ylim(len(y) - 0.5, -0.5)
    middle = (min(shown) + max(shown)) / 2 if shown else 0.0
    for i, line in enumerate(grid):
        for j, value in enumerate(line):
            if value == value:
                axis.text(
                    j,
                    i,
                    f"{value:.4g}",
                    ha="center",
                    va="center",
                    fontsize=7,
                    color="white" if value < middle else "black",
                )
    axis.set_xticks(range(len(x)), x)
    axis.set_yticks(range(len(y)), y)
    axis.set_title(title, fontsize=9)
