"""The report page: one HTML file. First every claim with its verdict, all runs in one table, and accuracy against ε; then every
table and figure, filters, and the coverage matrix. It fetches nothing."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from dpexp.reproduce import catalogue, overview
from dpexp.reproduce.catalogue import Context
from dpexp.reproduce.documents import Document, Rows, Section
from dpexp.reproduce.paper import PAPERS
from dpexp.reproduce.records import Record
from dpexp.reproduce.statistics import CANNOT_TELL

_HERE = Path(__file__).parent
SHORT = {paper.rstrip("0123456789"): title for paper, title in PAPERS.items()}
SCALES = ("exact", "small", "paper")
_STATUS = (
    "exact",
    "tested",
    "paper",
    "small",
    "not run",
    "not built",
    "supports",
    "contradicts",
    "cannot tell",
)
# folded, until a reader asks
_PROVENANCE = (
    "ε",
    "δ",
    "accountant",
    "sampling",
    "hardware",
    "record",
    "precision",
)
_MOST_ROWS = 160  # of what a figure is drawn from
_SAID_ONCE = ("Ours: mean ± standard deviation", "Regenerate:")  # at the top of the page, for all


def write(context: Context) -> Path:
    """Write ``report.html`` beside the tables."""
    documents = [context.document(name) for name in catalogue.builders()]
    path = context.results / "report.html"
    path.write_text(page(documents, context.records), encoding="utf-8")
    return path


def page(documents: Sequence[Document], records: Sequence[Record] = ()) -> str:
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
    ordered = [d for short, _ in groups for d in documents if d.paper == short]
    articles = _first(ordered, records) + "".join(map(_article, ordered))
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
arithmetic; a cell that was not run has the command that fills it. Scales are never mixed in a block.</p>
<details><summary>How to read the tables</summary><p>Ours: mean ± standard deviation over n seeds; <em>dev error</em>: the
standard error that a dev set of this size has by itself, which no test here knows of. The difference is ours minus paper; at
scale=small it compares another model and another length of training. Hyper-parameter search is not paid for in ε; the record says
how many configurations were tried. A verdict needs two seeds or more on each side, at level 0.05 with Holm's correction; an
optimum at the edge of its grid reads “cannot tell”. Every page is made by <code>python -m dpexp.report NAME</code>.</p></details>
<form id="filters" aria-label="Filters">
<label>Paper <select id="paper"><option value="">all</option>{_options(SHORT.items())}</select></label>
<label>Scale <select id="scale"><option value="">all</option>{_options((s, s) for s in SCALES)}</select></label>
<label>Find <input id="find" type="search" placeholder="word in a title" autocomplete="off"></label>
<label><input id="provenance" type="checkbox"> ε, δ, hardware, records</label>
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


def _first(documents: Sequence[Document], records: Sequence[Record]) -> str:
    """Verdicts, accuracy against ε, and the table of all runs."""
    claims = overview.verdicts(documents)
    parts = []
    if claims:
        counts = ", ".join(
            f"{sum(row['verdict'] == word for row in claims)} {word}"
            for word in dict.fromkeys(row["verdict"] for row in claims)
        )
        links = [row | {"where": f"#{row['where']}"} for row in claims]
        decided = [row for row in links if row["verdict"] != CANNOT_TELL]
        others = [row for row in links if row["verdict"] == CANNOT_TELL]
        folded = (
            f"<details><summary>{len(others)} claims that our runs cannot tell about, and why</summary>"
            f"{_table('Other claims', overview.VERDICTS, others)}</details>"
        )
        parts.append(
            f"<h2>{len(claims)} claims: {_text(counts)}</h2>"
            f"{_table('Claims', overview.VERDICTS, decided)}{folded if others else ''}"
        )
    if records:
        svg = overview.accuracy_against_epsilon(records)
        if svg:
            parts.append(
                "<h2>Accuracy against ε</h2><p>Filled: our configurations, bars over seeds. Open circles: the papers' numbers,"
                " with larger models and longer training.</p>"
                f"<figure>{_svg(svg, 'accuracy', 'Accuracy against epsilon for each task')}</figure>"
            )
        found = overview.leaders(records)
        table = _table("All runs", overview.LEADERS, found, sortable=True)
        parts.append(
            f"<h2>All {len(found)} configurations</h2><p>Best first for each task and ε; a click on a column sorts.</p>"
            f"<details><summary>{len(found)} rows</summary>{table}</details>"
        )
    return "".join(f'<div class="first">{part}</div>\n' for part in parts)


def _options(pairs: Iterable[tuple[str, str]]) -> str:
    return "".join(f'<option value="{value}">{_text(label)}</option>' for value, label in pairs)


def _short_title(document: Document) -> str:
    """ "Table 2: adaptive per-layer …" of "He et al., Table 2: …"."""
    return document.title.partition(" et al., ")[2] or document.title


def _article(document: Document) -> str:
    scales = " ".join(dict.fromkeys(section.scale for section in document.sections))
    words = "".join(_paragraph(text) for text in document.paragraphs if not text.startswith(_SAID_ONCE))
    figure = f"<figure>{_svg(document.svg, document.name, document.title)}</figure>" if document.svg else ""
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
    label = section.heading or "Table"
    columns = [c for c in section.columns if c != "scale"]  # the heading says it
    table = ""
    if columns and section.rows and {"row", "column", "paper", "ours"} <= set(columns):
        filled = [row for row in section.rows if row.get("n")]
        table = _as_printed(label, section.rows)
        if filled:
            table += f"<details><summary>{len(filled)} configurations</summary>{_table(label, columns, filled)}</details>"
        table += _to_run(section.rows)
    elif len(section.rows) > _MOST_ROWS:
        table = f"<p>{len(section.rows)} rows: in the CSV file below.</p>"
    elif columns and section.rows:
        table = _table(label, columns, section.rows)
        if len(section.rows) > 24:
            table = f"<details><summary>{len(section.rows)} rows</summary>{table}</details>"
    return f'<section data-scale="{section.scale}">{heading}{words}{table}</section>'


def _as_printed(label: str, rows: Rows) -> str:
    """The layout of the paper, with ours below each printed number: of several configurations, the one with the most seeds."""
    columns = list(dict.fromkeys(row["column"] for row in rows))
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        place = row["row"], row["column"]
        if place not in cells or int(row.get("n") or 0) > int(cells[place].get("n") or 0):
            cells[place] = row
    lines: Rows = []
    for name in dict.fromkeys(row["row"] for row in rows):
        line = {"": name}
        for column in columns:
            if found := cells.get((name, column)):
                ours = f"**{found['ours']}**" if found.get("n") else ""
                line[column] = f"{found['paper']}\n{ours}" if ours else found["paper"]
        lines.append(line)
    table = _table(label, ("", *columns), lines)
    return (
        f"<details><summary>{len(lines)} rows as printed</summary>{table}</details>"
        if len(lines) > 24
        else table
    )


def _to_run(rows: Rows) -> str:
    """One line for all cells without a run: how many, why, and the commands, folded."""
    left = [row["ours"] for row in rows if not row.get("n")]
    if not left:
        return ""
    commands = list(dict.fromkeys(text for text in left if text.startswith("not run")))
    reasons = list(dict.fromkeys(text for text in left if not text.startswith("not run")))
    listed = "".join(f"<li>{_inline(text.removeprefix('not run: '))}</li>" for text in (*commands, *reasons))
    return (
        f'<details class="todo"><summary>{len(left)} cells without a run: {len(commands)} commands'
        f"{f', {len(reasons)} reasons' if reasons else ''}</summary><ul>{listed}</ul></details>"
    )


def _table(label: str, columns: Sequence[str], rows: Rows, *, sortable: bool = False) -> str:
    shown = [column for column in columns if any(row.get(column) for row in rows)]
    mark = ' aria-sort="none"' if sortable else ""
    head = "".join(
        f'<th scope="col"{_hidden(c)}{mark}>{f"<button>{_text(c)}</button>" if sortable else _text(c)}</th>'
        for c in shown
    )
    body = "".join(f"<tr>{_row(shown, row)}</tr>" for row in rows)
    return (
        f'<div class="scroll" role="region" aria-label="{_text(label)}" tabindex="0"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _hidden(column: str) -> str:
    return ' class="p"' if column in _PROVENANCE else ""


def _row(columns: Sequence[str], row: dict[str, str]) -> str:
    return "".join(_cell(column, row.get(column, "")) for column in columns)


def _cell(column: str, text: str) -> str:
    if column == "record" and text:
        links = ", ".join(_record_link(part) for part in text.split(", "))
        return f'<td class="p">{links}</td>'
    if column in ("status", "verdict"):
        return f'<td><span class="status {_class(text)}">{_text(text)}</span></td>'
    if column == "where" and text.startswith("#"):
        return f'<td><a href="{_text(text)}">{_text(text[1:])}</a></td>'
    kind = (
        "todo"
        if text.startswith(("not run", "not built", "no stand-in"))
        else "p"
        if column in _PROVENANCE
        else ""
    )
    kind = kind or ("long" if len(text) > 36 else "")
    shown = "<br>".join(_inline(line) for line in text.split("\n"))
    return f'<td class="{kind}">{shown}</td>' if kind else f"<td>{shown}</td>"


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


def _svg(text: str, name: str, title: str) -> str:
    """A figure without its XML prologue; ids made its own, so that two figures on a page don't meet."""
    svg = text[text.index("<svg") :].strip()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", svg)
    svg = re.sub(r'href="#([^"]+)"', rf'href="#{name}-\1"', svg)
    return svg.replace("<svg", f'<svg role="img" aria-label="{_text(title)}"', 1)


def _text(text: str) -> str:
    return html.escape(text, quote=True)
