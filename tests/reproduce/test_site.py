"""The page: its structure always, and a picture of it where a Chromium is found."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from dpexp.reproduce import exact, figures, site
from dpexp.reproduce.documents import Document, Section
from dpexp.reproduce.records import load
from dpexp.reproduce.tables import build
from tests.reproduce.samples import summary, write

VOID = {"meta", "link", "br", "input", "img", "hr"}
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "headless_shell")


class Structure(HTMLParser):
    """Open and close tags in balance; ids, links and attributes by tag."""

    def __init__(self, page: str):
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self._seen(tag, attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._seen(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, tag
        assert self.open.pop() == tag

    def _seen(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.found.append((tag, attributes))
        if "id" in attributes:
            self.ids.append(attributes["id"] or "")

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> list[Document]:
    records = load(write(tmp_path_factory.mktemp("results") / "runs", summary(), summary(seed=1)))
    hostile = Document(
        "hostile", "A <b>title</b> & more", ("<script>alert(1)</script> `a < b`",), (Section("x"),)
    )
    return [
        exact.table_bu_3(),
        figures.figure_monir_8(),
        figures.individual_budgets("sampling", "13"),
        build("he2023", "1b", records),
        hostile,
    ]


@pytest.fixture(scope="module")
def page(documents: list[Document]) -> str:
    return site.page(documents)


def test_tags_are_balanced_and_ids_unique(page: str):
    structure = Structure(page)
    assert structure.open == []
    assert len(structure.ids) == len(set(structure.ids))


def test_every_document_is_an_article_in_the_contents(page: str, documents: list[Document]):
    structure = Structure(page)
    assert {a["id"] for a in structure.all("article")} == {d.name for d in documents}
    targets = [a["href"] for a in structure.all("a") if (a.get("href") or "").startswith("#")]
    assert {f"#{d.name}" for d in documents} <= set(targets)
    assert {target[1:] for target in targets if target} <= set(structure.ids)


def test_nothing_is_fetched(page: str):
    structure = Structure(page)
    for tag, attributes in structure.found:
        assert tag not in ("link", "iframe", "img", "object", "embed")
        assert "src" not in attributes, (tag, attributes)
        href = attributes.get("href") or attributes.get("xlink:href") or ""
        assert not href.startswith(("http:", "https:", "//")), href
    assert "@import" not in page
    assert not re.search(r"url\((?!#)", page)
    assert not re.search(r"\b(fetch|XMLHttpRequest|WebSocket|importScripts)\b", page)


def test_text_of_a_document_is_text(page: str):
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt; <code>a &lt; b</code>" in page


def test_a_reader_with_a_keyboard_or_a_phone_is_served(page: str):
    structure = Structure(page)
    assert structure.all("html")[0]["lang"] == "en"
    assert any(meta.get("name") == "viewport" for meta in structure.all("meta"))
    assert "prefers-color-scheme: dark" in page
    assert all(svg.get("aria-label") for svg in structure.all("svg"))
    regions = [div for div in structure.all("div") if div.get("class") == "scroll"]
    assert regions
    assert all(div.get("tabindex") == "0" and div.get("aria-label") for div in regions)
    labelled = page.count("<label>")
    assert labelled == len(structure.all("select")) + len(structure.all("input"))
    assert structure.all("a")[0]["href"] == "#content"


def test_filters_know_paper_and_scale_of_every_block(page: str):
    structure = Structure(page)
    scales = {s["data-scale"] for s in structure.all("section")}
    assert scales <= set(site.SCALES)
    assert {"small", "paper", "exact"} <= scales
    assert {a["data-paper"] for a in structure.all("article")} == {"he", "bu", "monir", ""}


def test_records_are_links(page: str):
    assert '<a href="runs/record0.json">record0</a> +1' in page


def test_cells_of_several_models_name_them():
    def shown(other: str) -> str:
        rows = [
            {"row": row, "column": "ε = 3", "paper": "90.0", "ours": "88.5", "n": "3", "configuration": f"{model}, E = 10, lr 1"}
            for row, model in (("flat", "mpnet, linear head"), ("per-layer", other))
        ]  # fmt: skip
        return site._as_printed("Table", rows)

    assert "<br>mpnet, linear head<" in shown("mpnet, dense head")
    assert "mpnet" not in shown("mpnet, linear head")


def test_the_same_documents_give_the_same_page(page: str, documents: list[Document]):
    assert site.page(documents) == page


@pytest.mark.parametrize(("width", "height"), [(1280, 900), (390, 844)], ids=["desk", "phone"])
def test_a_browser_shows_it(width: int, height: int, page: str, tmp_path: Path):
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        pytest.skip(f"no headless browser: none of {', '.join(BROWSERS)} is on this machine")
    file, picture = tmp_path / "report.html", tmp_path / "page.png"
    probe = "<script>document.title = document.documentElement.scrollWidth > innerWidth ? 'WIDE' : 'FITS';</script>"
    file.write_text(page.replace("</body>", f"{probe}</body>"), encoding="utf-8")
    common = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
              f"--user-data-dir={tmp_path / 'profile'}",
              f"--window-size={width},{height}"]  # fmt: skip
    subprocess.run(
        [*common, f"--screenshot={picture}", file.as_uri()], check=True, capture_output=True, timeout=600
    )
    shown = subprocess.run(
        [*common, "--dump-dom", file.as_uri()], check=True, capture_output=True, text=True, timeout=600
    )
    assert "5 of 5 shown" in shown.stdout  # the script ran
    assert "<title>FITS</title>" in shown.stdout  # nothing sticks out at the side
    from PIL import Image

    with Image.open(picture) as image:
        assert image.size == (width, height)
        colours = image.convert("RGB").getcolors(maxcolors=1 << 20)
        assert colours is None or len(colours) > 50  # text and tables, not a blank page
