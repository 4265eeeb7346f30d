"""The page of sharp edges: every test that it names exists, and no edge is without one."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "sharp_edges.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith(("| pitfall", "| edge"))
]


@pytest.mark.parametrize("named", sorted(set(re.findall(r"`(tests/[^`]+)`", PAGE))))
def test_every_test_that_is_named_exists(named):
    path, name = named.split("::")
    functions = [
        node.name
        for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body
        if hasattr(node, "name")
    ]
    assert name in functions


def test_every_edge_has_a_severity_and_a_test_or_is_yours():
    assert len(ROWS) > 30
    for edge, severity, what, *held in ROWS:
        assert severity in {"critical", "theoretical", "negligible", "yours"}, edge
        assert what
        assert severity == "yours" or "::test_" in held[0], edge


def test_the_twelve_pitfalls_are_twelve():
    pitfalls = PAGE.split("## The twelve pitfalls")[1].split("\n## ")[0]
    assert sum(line.startswith("| ") for line in pitfalls.splitlines()) == 12 + 1


def test_what_is_yours_comes_first():
    first = PAGE.split("## Yours")[1].split("\n## ")[0]
    assert (
        sum("| yours |" in line for line in first.splitlines()) == sum(row[1] == "yours" for row in ROWS) > 0
    )
