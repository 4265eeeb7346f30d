"""The documents: every page can be found, and what a page names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
METHODS = sorted(path for path in (DOCS / "methods").glob("*.md") if path.name != "index.md")
PARTS = ("Equation", "Source", "Switch it on", "What it costs", "When", "Code")


def _named(value: object) -> list[str]:
    """The files in the nested lists of a navigation."""
    if isinstance(value, str):
        return [value]
    items = value.values() if isinstance(value, dict) else value
    return [name for item in items for name in _named(item)]  # type: ignore[union-attr]


def test_every_page_is_in_the_navigation() -> None:
    # the file names functions of Python, which a plain loader does not know
    text = re.sub(r"!!python/\S+", "", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    named = _named(yaml.safe_load(text)["nav"])
    assert sorted(named) == sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


@pytest.mark.parametrize("page", METHODS, ids=lambda path: path.stem)
def test_a_method_has_all_its_parts_and_a_row_in_the_index(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert tuple(re.findall(r"^\*\*(.+?)\.\*\*", text, re.M)) == PARTS
    assert f"]({page.name})" in (DOCS / "methods" / "index.md").read_text(encoding="utf-8")
    code = text.split("**Code.**")[1]
    named = re.findall(r"`(dpexp/\S+?\.(?:py|yaml))`", code)
    assert named, "the last part names the files"
    for name in named:
        assert (ROOT / name).is_file(), name


@pytest.mark.parametrize(
    "page", sorted([*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "results" / "README.md"]), ids=str
)
def test_links_lead_somewhere(page: Path) -> None:
    if not page.exists():
        pytest.skip("not written yet")
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target or target.startswith(("#", "mailto:")):
            continue
        assert (page.parent / target.partition("#")[0]).exists(), target
