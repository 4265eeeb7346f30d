"""The report page: one HTML file with every table and figure, filters, and the coverage matrix. It fetches nothing."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from dpexp.reproduce import catalogue
from dpexp.reproduce.catalogue import Context
from dpexp.reproduce.documents import Document, Section
from dpexp.reproduce.paper import PAPERS

_HERE = Path(__file__).parent
SHORT = {paper.rstrip("0123456789"): title for paper, title in PAPERS.items()}
SCALES = ("exact", "small", "paper")
_STATUS = ("exact", "paper", "small", "not run", "not built", "supports", "contradicts", "cannot tell")


def write(context: Context) -> Path:
    """Write ``report.html`` beside the tables."""
    documents = [context.document(name) for name in catalogue.builders()]
    path = context.results / "report.html"
    path.write_text(page(documents), encoding="utf-8")
    return path


def page(documents: Sequence[Document]) -> str:
    """The whole page."""
    style, script = ((_HERE / name).read_text(encoding="utf-8") for name in ("site.css", "site.js"))
    groups = [*SHORT.items(), ("", "This repository")]
    menu = "".join(
        f'<li class="paper" data-paper="{short}"><span>{_text(title)}</span><ul>'
        + "".join(
            f'<li><a href="#{d.name}">{_text(_short_title(d))}</a></li>'
            for d in documents
            if d.paper == short
        )
        + "</ul></li>"
        for short, title in groups
    )
    articles = "".join(_article(d) for short, _ in groups for d in documents if d.paper == short)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>dpexp: the papers' tables and figures beside our runs</title>
<style>
{style}</style>
</head>
<body>
<a class="skip" href="#content">Skip to the tables</a>
<header>
<h1>The papers' tables and figures beside our runs</h1>
<p>Four papers on differentially private deep learning. Every number of ours comes from a committed record or from
arithmetic; a cell that was not run shows the command that fills it. Scales are never mixed in a block.</p>
<form id="filters" aria-label="Filters">
<label>Paper <select id="paper"><option value="">all</option>{_options(SHORT.items())}</select></label>
<label>Scale <select id="scale"><option value="">all</option>{_options((s, s) for s in SCALES)}</select></label>
<label>Find <input id="find" type="search" placeholder="word in a title" autocomplete="off"></label>
<output id="count" aria-live="polite"></output>
</form>
</header>
<div class="columns">
<nav aria-label="Tables and figures"><details open><summary>Contents</summary><ul>{menu}</ul></details></nav>
<main id="content" tabindex="-1">
{articles}</main>
</div>
<script>
{script}</script>
</body>
</html>
"""


def _options(pairs: Iterable[tuple[str, str]]) -> str:
    return "".join(f'<option value="{value}">{_text(label)}</option>' for value, label in pairs)


def _short_title(document: Document) -> str:
    """ "Table 2: adaptive per-layer …" of "He et al., Table 2: …"."""
    return document.title.partition(" et al., ")[2] or document.title


def _article(document: Document) -> str:
    scales = " ".join(dict.fromkeys(section.scale for section in document.sections))
    words = "".join(_paragraph(text) for text in document.paragraphs)
    figure = (
        f'<figure aria-label="{_text(document.title)}">{_inline_svg(document)}</figure>'
        if document.svg
        else ""
    )
    sections = "".join(_section(section) for section in document.sections)
    folder = "figures" if catalogue.is_figure(document.name) else "tables"
    stem = f"{folder}/{document.name}"
    files = f'<p class="files">Files: <a href="{stem}.md">Markdown</a>, <a href="{stem}.csv">CSV</a></p>'
    status = f'<span class="status {_class(document.status)}">{_text(document.status)}</span>'
    return (
        f'<article id="{document.name}" data-paper="{document.paper}" data-scale="{scales}">'
        f"<h2>{_text(document.title)} {status}</h2>{words}{figure}{sections}{files}</article>\n"
    )


def _section(section: Section) -> str:
    heading = f"<h3>{_text(section.heading)}</h3>" if section.heading else ""
    words = "".join(_paragraph(text) for text in section.paragraphs)
    table = ""
    if section.columns and section.rows:
        columns = [c for c in section.columns if c != "scale"]  # the heading says it
        head = "".join(f'<th scope="col">{_text(c)}</th>' for c in columns)
        body = "".join(f"<tr>{_row(columns, row)}</tr>" for row in section.rows)
        label = _text(section.heading or "Table")
        table = (
            f'<div class="scroll" role="region" aria-label="{label}" tabindex="0"><table><thead><tr>{head}</tr></thead>'
            f"<tbody>{body}</tbody></table></div>"
        )
        if len(section.rows) > 24:
            table = f"<details><summary>{len(section.rows)} rows</summary>{table}</details>"
    return f'<section data-scale="{section.scale}">{heading}{words}{table}</section>'


def _row(columns: Sequence[str], row: dict[str, str]) -> str:
    """The cells; the last one that says something takes the room of the empty ones after it."""
    filled = [number for number, column in enumerate(columns) if row.get(column)]
    last = filled[-1] if filled else len(columns) - 1
    cells = [_cell(column, row.get(column, "")) for column in columns[: last + 1]]
    if (empty := len(columns) - 1 - last) > 2:
        cells[-1] = cells[-1].replace("<td", f'<td colspan="{empty + 1}"', 1)
    elif empty:
        cells += ["<td></td>"] * empty
    return "".join(cells)


def _cell(column: str, text: str) -> str:
    if column == "record" and text:
        links = ", ".join(_record_link(part) for part in text.split(", "))
        return f"<td>{links}</td>"
    if column == "status":
        return f'<td><span class="status {_class(text)}">{_text(text)}</span></td>'
    empty = ' class="todo"' if text.startswith(("not run", "not built", "no stand-in")) else ""
    return f"<td{empty}>{_inline(text)}</td>"


def _record_link(text: str) -> str:
    path, mark, note = text.partition(" (UNCLEAN")
    name = path.rpartition("/")[2]
    return f'<a href="{_text(path.removeprefix("results/"))}" title="{_text(name)}">record</a>{_text(mark + note)}'


def _class(status: str) -> str:
    return next((word.replace(" ", "-") for word in _STATUS if status.startswith(word)), "other")


def _paragraph(text: str) -> str:
    """A paragraph or a list of inline Markdown."""
    if text.startswith("- "):
        return (
            "<ul>"
            + "".join(f"<li>{_inline(line.removeprefix('- '))}</li>" for line in text.split("\n"))
            + "</ul>"
        )
    return f"<p>{_inline(text)}</p>"


def _inline(text: str) -> str:
    """`code`, **bold** and *emphasis*; everything else as it is."""
    parts = text.split("`")
    shown = []
    for number, part in enumerate(parts):
        if number % 2 and number < len(parts) - 1:
            shown.append(f"<code>{_text(part)}</code>")
        else:
            marked = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", _text(part))
            shown.append(re.sub(r"(?<![*\w])\*([^*\s][^*]*)\*(?![*\w])", r"<em>\1</em>", marked))
    return "".join(shown)


def _inline_svg(document: Document) -> str:
    """The figure without its XML prologue; ids made this document's own, so that two figures on a page don't meet."""
    svg = document.svg[document.svg.index("<svg") :].strip()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{document.name}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{document.name}-\1)", svg)
    svg = re.sub(r'href="#([^"]+)"', rf'href="#{document.name}-\1"', svg)
    return svg.replace("<svg", f'<svg role="img" aria-label="{_text(document.title)}"', 1)


def _text(text: str) -> str:
    return html.escape(text, quote=True)
