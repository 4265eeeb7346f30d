"""How figures are drawn: matplotlib's SVG with fixed ids and no date, so that the same data give the same bytes.

Figures are drawn from rows of text that are already rounded (the CSV beside them), never from what a processor's last bit says.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart by readers with any colour vision.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
# rows or columns of a heat map that still show them
MOST_NUMBERS = 16
# along one of its sides
MOST_LABELS = 24
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


def style(number: int) -> dict[str, Any]:
    """Colour, marker and, when the colours are used up, dashes of a line by its number."""
    dashes = ("-", "--", ":")[number // len(COLOURS) % 3]
    return {
        "color": COLOURS[number % len(COLOURS)],
        "marker": MARKERS[number % len(MARKERS)],
        "linestyle": dashes,
    }


def lines(
    axis: Any, series: Sequence[tuple[str, Sequence[float], Sequence[float]]], *, markers: bool = True
) -> None:
    """One line for each (label, x, y), in fixed colours and markers."""
    for number, (label, x, y) in enumerate(series):
        looks = style(number) | ({} if markers else {"marker": None})
        axis.plot(x, y, label=label, markersize=4, linewidth=1.4, **looks)
    if len(series) > 1:
        axis.legend()


def heat(
    axis: Any, x: Sequence[str], y: Sequence[str], values: dict[tuple[str, str], float], title: str, *, log: bool = False
) -> None:  # fmt: skip
    """A heat map, with its numbers where they fit; cells without a value stay white.

    Args:
        axis: of matplotlib.
        x, y: labels.
        values: ``[y, x]``.
        title: above it.
        log: colours by the logarithm, where all values are positive.
    """
    grid = [[values.get((row, column), float("nan")) for column in x] for row in y]
    axis.grid(False)
    shown = [v for line in grid for v in line if v == v]
    scale = LogNorm if log and shown and min(shown) > 0 else Normalize
    norm = scale(min(shown), max(shown)) if shown else Normalize()
    if shown:
        axis.imshow(grid, cmap="cividis", aspect="auto", norm=norm)
    else:
        axis.set_xlim(-0.5, len(x) - 0.5)
        axis.set_ylim(len(y) - 0.5, -0.5)
    form, size = (".3g", 5) if log else (".4g", 7)
    for i, line in enumerate(grid if len(y) <= MOST_NUMBERS and len(x) <= MOST_NUMBERS else []):
        for j, value in enumerate(line):
            if value == value:
                ink = "white" if float(norm(value)) < 0.5 else "black"
                axis.text(j, i, format(value, form), ha="center", va="center", fontsize=size, color=ink)
    for labels, put in ((x, axis.set_xticks), (y, axis.set_yticks)):
        some = range(0, len(labels), -(-len(labels) // MOST_LABELS) or 1)
        put(some, [labels[i] for i in some])
    # characters that fit below a panel
    if len(x) * max(map(len, x), default=0) > 44:
        axis.tick_params(axis="x", labelrotation=30)
    axis.set_title(title, fontsize=9)
