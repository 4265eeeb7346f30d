"""Pictures: what is left out of matplotlib's SVG, and what is not."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

from dpexp.reproduce.drawing import MOST_MARKERS, draw, heat, lines

HREF = "{http://www.w3.org/1999/xlink}href"


def _drawn(plot: Any, panels: int = 1) -> tuple[str, ElementTree.Element]:
    svg = draw(plot, panels)
    return svg, ElementTree.fromstring(svg)


def test_coordinates_are_short_words_stay_and_what_is_referred_to_is_there():
    def plot(axes: Any) -> None:
        lines(axes[0], [("0.12345", [0.0, 1 / 3, 1.0], [1 / 7, 2 / 3, 1.0])])
        axes[0].set_title("0.12345")

    svg, root = _drawn(plot)
    assert "0.12345" in [text.strip() for text in root.itertext()]
    attributes = [(name, value) for element in root.iter() for name, value in element.attrib.items()]
    assert not [value for _, value in attributes if re.search(r"\d\.\d{3}", value)]
    ids = [value for name, value in attributes if name == "id"]
    referred = {value[1:] for name, value in attributes if name == HREF}
    referred |= set(re.findall(r"url\(#([^)]+)\)", svg))
    assert referred
    assert sorted(referred) == sorted(ids), "every name is unique and used"
    groups = [element for element in root.iter() if element.tag.endswith("}g")]
    assert all(group.attrib and len(group) for group in groups), "no group without a meaning"


def test_many_points_have_no_markers():
    def used(points: int) -> int:
        values = [float(i) for i in range(points)]
        svg, _ = _drawn(lambda axes: lines(axes[0], [("", values, values)]))
        return svg.count("fill: #0072b2")

    assert used(MOST_MARKERS) >= MOST_MARKERS
    assert used(MOST_MARKERS + 1) == 0


def test_a_heat_map_has_numbers_or_a_scale():
    values = {("a", "x"): 0.5, ("a", "y"): 0.25}

    def texts(log: bool) -> list[str]:
        _, root = _drawn(lambda axes: heat(axes[0], ["x", "y"], ["a"], values, "", log=log))
        return [text.strip() for text in root.itertext() if text.strip()]

    assert {"0.5", "0.25"} <= set(texts(log=False))
    assert "0.25" not in texts(log=True)
    assert len(texts(log=True)) > 3, "the ticks of the scale"
