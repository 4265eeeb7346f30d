"""How figures are drawn: matplotlib's SVG with fixed ids and no date, so that the same data give the same bytes.

Figures are drawn from rows of text that are already rounded (the CSV beside them), never from what a processor's last bit says.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path
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
# of a line that still has markers
MOST_MARKERS = 16
_STYLE = {
    "svg.hashsalt": "dpexp", "svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans"], "font.size": 9,
    "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "grid.color": "0.9", "grid.linewidth": 0.6, "legend.frameon": False, "legend.fontsize": 8,
    "figure.facecolor": "white", "axes.axisbelow": True,
}  # fmt: skip
_NO_METADATA = dict.fromkeys(("Date", "Creator", "Format", "Type"))
_LONG_NUMBER = re.compile(r"-?\d+\.\d{3,}")


def draw(
    plot: Callable[[Any], None],
    panels: int = 1,
    size: tuple[float, float] = (5.0, 3.6),
    png: Path | None = None,
) -> str:
    """Return the picture as SVG text.

    Args:
        plot: takes an array of axes, ``[panels]``.
        panels: beside each other.
        size: of each, in inches.
        png: where the same picture is written in pixels, for slides and documents that take no SVG.
    """
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(size[0] * panels, size[1]), layout="constrained")
        axes = figure.subplots(1, panels, squeeze=False)[0]
        plot(axes)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata=_NO_METADATA)
        if png is not None:
            figure.savefig(png, dpi=160)
    return _slim(text.getvalue())


def _slim(svg: str) -> str:
    """The same picture in half the bytes: two decimals of a point, short names, and none of what nothing refers to."""
    svg = re.sub(r' transform="rotate\(-0 [^"]*"', "", re.sub(r'<g id="[^"]*"', "<g", svg))
    svg = re.sub(r"<[^>]*>", lambda tag: _LONG_NUMBER.sub(_rounded, tag[0]), svg)
    short = {name: f"i{number}" for number, name in enumerate(re.findall(r'\bid="([^"]+)"', svg))}
    svg = re.sub(r'(?<=\bid=")[^"]+|(?<=#)\w+', lambda name: short.get(name[0], name[0]), svg)
    kept: list[str] = []
    # of each open group: does it say anything?
    groups: list[bool] = []
    for line in map(str.strip, svg.splitlines()):
        opens = line.startswith("<g") and not line.endswith("/>")
        if opens:
            groups.append(line != "<g>")
        says = groups.pop() if line == "</g>" else groups[-1] if opens else line != "<g/>"
        if says:
            kept.append(line)
    return "\n".join(kept) + "\n"


def _rounded(number: re.Match[str]) -> str:
    return f"{round(float(number[0]), 2) + 0.0:g}"


def style(number: int) -> dict[str, Any]:
    """Colour, marker and, when the colours are used up, dashes of a line by its number."""
    again, place = divmod(number, len(COLOURS))
    return {"color": COLOURS[place], "marker": MARKERS[place], "linestyle": ("-", "--", ":")[again % 3]}


def lines(axis: Any, series: Sequence[tuple[str, Sequence[float], Sequence[float]]]) -> None:
    """One line for each (label, x, y), in fixed colours, with markers where the points are few."""
    for number, (label, x, y) in enumerate(series):
        looks = style(number) | ({} if len(x) <= MOST_MARKERS else {"marker": None})
        axis.plot(x, y, label=label, markersize=4, linewidth=1.4, **looks)
    if len(series) > 1:
        axis.legend()


def heat(
    axis: Any, x: Sequence[str], y: Sequence[str], values: dict[tuple[str, str], float], title: str, *, log: bool = False
) -> None:  # fmt: skip
    """A heat map, with its numbers where they fit or else a scale beside it; cells without a value stay white.

    Args:
        axis: of matplotlib.
        x, y: labels.
        values: ``[y, x]``.
        title: above it.
        log: colours by the logarithm, where all values are positive; without numbers.
    """
    grid = [[values.get((row, column), float("nan")) for column in x] for row in y]
    axis.grid(False)
    shown = [v for line in grid for v in line if v == v]
    norm = (LogNorm if log and min(shown) > 0 else Normalize)(min(shown), max(shown))
    numbers = not log and len(y) <= MOST_NUMBERS and len(x) <= MOST_NUMBERS
    image = axis.imshow(grid, cmap="cividis", aspect="auto", norm=norm)
    if not numbers:
        axis.figure.colorbar(image, ax=axis)
    for i, line in enumerate(grid if numbers else []):
        for j, value in enumerate(line):
            if value == value:
                ink = "white" if float(norm(value)) < 0.5 else "black"
                axis.text(j, i, format(value, ".4g"), ha="center", va="center", fontsize=7, color=ink)
    for labels, put in ((x, axis.set_xticks), (y, axis.set_yticks)):
        some = range(0, len(labels), -(-len(labels) // MOST_LABELS) or 1)
        put(some, [labels[i] for i in some])
    # characters that fit below a panel
    if len(x) * max(map(len, x), default=0) > 44:
        axis.tick_params(axis="x", labelrotation=30)
    axis.set_title(title, fontsize=9)
