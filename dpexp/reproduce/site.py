"""The report page: one HTML file. First every claim with its verdict, all runs in one table, and accuracy against ε; then every
table and figure, filters, and the coverage matrix. It fetches nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html import escape
from operator import itemgetter
from pathlib import Path
from string import Template

from dpexp.reproduce import catalogue, overview
from dpexp.reproduce.catalogue import Context
from dpexp.reproduce.coverage import STATUSES
from dpexp.reproduce.documents import WORDS, Document, Rows, Section, counted, grouped
from dpexp.reproduce.fillings import ORIGIN
from dpexp.reproduce.pairs import SELECTED
from dpexp.reproduce.paper import SHORT, listed
from dpexp.reproduce.records import Record
from dpexp.reproduce.statistics import CANNOT_TELL

SCALES = ("exact", "small", "paper")
# shown when a reader asks
_PROVENANCE = (*ORIGIN[1:], "precision")
# of what a figure is drawn from
_MOST_ROWS = 160
# a table with more rows is folded, and a list of more comparisons
_FOLDED, _LISTED = 24, 2
# columns of a table with a line for each printed cell
_BESIDE = {"row", "column", "paper", "ours"}
_DECIDED = {"supports": "supported", "contradicts": "contradicted", overview.MIXED: "mixed"}


def write(context: Context) -> Path:
    """Write ``report.html`` beside the tables."""
    documents = [context.document(name) for name in catalogue.builders()]
    path = context.results / "report.html"
    path.write_text(page(documents, context.read("runs")), encoding="utf-8")
    return path


def page(documents: Sequence[Document], records: Sequence[Record] = ()) -> str:
    """The whole page."""
    frame, style, script = (
        (Path(__file__).parent / f"site.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js")
    )
    menu = ""
    ordered: list[Document] = []
    for paper, title in (*SHORT.items(), ("", "This repository")):
        own = [document for document in documents if document.paper == paper]
        # "Table 2: adaptive per-layer …" of "He et al., Table 2: …"
        names = {d.name: d.title.partition(" et al., ")[2] or d.title for d in own}
        links = "".join(f'<li><a href="#{name}">{escape(said)}</a></li>' for name, said in names.items())
        menu += f'<li class="paper" data-paper="{paper}"><span>{escape(title)}</span><ul>{links}</ul></li>'
        ordered += own
    papers, scales = (
        "".join(f'<option value="{value}">{escape(label)}</option>' for value, label in options.items())
        for options in (SHORT, {scale: scale for scale in SCALES})
    )
    parts = "".join(f'<div class="first">{part}</div>\n' for part in _first(ordered, records))
    articles = "".join(map(_article, ordered))
    return Template(frame).substitute(
        style=style, script=script, menu=menu, papers=papers, scales=scales, first=parts, articles=articles
    )


def _first(documents: Sequence[Document], records: Sequence[Record]) -> Iterator[str]:
    """Verdicts, accuracy against ε, and the table of all runs."""
    words = listed("pages")["report"]
    if claims := overview.verdicts(documents):
        told = [row for row in claims if row["verdict"] != CANNOT_TELL]
        untold = [row for row in claims if row["verdict"] == CANNOT_TELL]
        said = []
        for verdict, own in grouped(told, itemgetter("verdict")).items():
            recomputed = sum(row["evidence"].startswith(overview.RECOMPUTED) for row in own)
            more = f" ({recomputed} of them by arithmetic)" if recomputed else ""
            said.append(f"{len(own)} {_DECIDED[verdict]}{more}")
        why = f"{len(untold)} claims that our runs cannot tell about, and why"
        yield (
            f"<h2>{len(claims)} claims: {escape(', '.join(said))}, {len(untold)} open</h2><p>{_inline(words['verdicts'])}</p>"
            + _fold("What the columns say", f"<p>{_inline(words['columns'])}</p>")
            + (_table("Claims", overview.VERDICTS, told, cards=True) if told else "")
            + (_fold(why, _table("Other claims", overview.VERDICTS, untold, cards=True)) if untold else "")
        )
    if svg := overview.accuracy_against_epsilon(records):
        picture = _svg(svg, "accuracy", "Accuracy against epsilon for each task")
        yield f"<h2>Accuracy against ε</h2><p>{_inline(words['picture'])}</p><figure>{picture}</figure>"
    if records:
        found = overview.leaders(records)
        table = _fold(f"{len(found)} rows", _table("All runs", tuple(found[0]), found, sortable=True))
        yield f"<h2>All {len(found)} configurations</h2><p>{_inline(words['runs'])}</p>{table}"


def _fold(summary: str, content: str, kind: str = "") -> str:
    return f"<details{kind}><summary>{summary}</summary>{content}</details>"


def _article(document: Document) -> str:
    scales = " ".join(dict.fromkeys(section.scale for section in document.sections))
    words = "".join(map(_paragraph, document.paragraphs))
    figure = f"<figure>{_svg(document.svg, document.name, document.title)}</figure>" if document.svg else ""
    printed = next((own for own in document.sections if set(own.shown) >= _BESIDE and own.rows), None)
    sections = "".join(_section(section, section is printed) for section in document.sections)
    stem = f"{'figures' if catalogue.is_figure(document.name) else 'tables'}/{document.name}"
    files = f'<p class="files">Files: <a href="{stem}.md">Markdown</a>, <a href="{stem}.csv">CSV</a></p>'
    status = f'<span class="status {_class(document.status)}">{escape(document.status)}</span>'
    return (
        f'<article id="{document.name}" data-paper="{document.paper}" data-scale="{scales}">'
        f"<h2>{escape(document.title)} {status}</h2>{words}{figure}{sections}{files}</article>\n"
    )


def _section(section: Section, printed: bool) -> str:
    """A block; the layout of the paper where it has runs, and in the first block (``printed``) without any too."""
    heading = f"<h3>{escape(section.heading)}</h3>" if section.heading else ""
    # at the top of the page, for all
    words = "".join(_paragraph(text) for text in section.paragraphs if text != SELECTED)
    label, rows = section.heading or "Table", section.rows
    # the heading says it
    columns = [c for c in section.shown if c != "scale"]
    table = ""
    if rows and set(columns) >= _BESIDE:
        filled = [row for row in rows if row.get("n")]
        table = _as_printed(label, rows) if filled or printed else ""
        if filled:
            table += _fold(counted(len(filled), "configuration"), _table(label, columns, filled))
        table += _to_run(rows)
    elif len(rows) > _MOST_ROWS:
        table = f"<p>{len(rows)} rows: in the CSV file below.</p>"
    elif columns and rows:
        table = _table(label, columns, rows)
        table = _fold(f"{len(rows)} rows", table) if len(rows) > _FOLDED else table
    return f'<section data-scale="{section.scale}">{heading}{words}{table}</section>'


def _as_printed(label: str, rows: Rows) -> str:
    """The layout of the paper, with ours below each printed number: of several configurations the first, which is the best. Where
    they are not of one model, each names its own: neighbours are then no comparison."""
    best: dict[str, dict[str, dict[str, str]]] = {}
    for row in rows:
        best.setdefault(row["row"], {}).setdefault(row["column"], row)
    models = {_model(row) for own in best.values() for row in own.values() if row.get("n")}

    def ours(row: dict[str, str]) -> str:
        if not row.get("n"):
            return row["paper"]
        return "\n".join([row["paper"], f"**{row['ours']}**", *([_model(row)] if len(models) > 1 else [])])

    lines = [{"": name} | {c: ours(row) for c, row in own.items()} for name, own in best.items()]
    table = _table(label, ("", *dict.fromkeys(row["column"] for row in rows)), lines)
    return _fold(f"{len(lines)} rows as printed", table) if len(lines) > _FOLDED else table


def _model(row: dict[str, str]) -> str:
    """Of a configuration in words what comes before its length."""
    return re.split(r", (?:E = |\d+ steps)", row.get("configuration", ""))[0]


def _to_run(rows: Rows) -> str:
    """One line for all cells without a run: how many, why, and the commands, folded."""
    left = [row["ours"] for row in rows if not row.get("n")]
    if not left:
        return ""
    texts = dict.fromkeys(left)
    commands = [text.removeprefix("not run: ") for text in texts if text.startswith("not run")]
    reasons = [text for text in texts if not text.startswith("not run")]
    items = "".join(f"<li>{_inline(text)}</li>" for text in (*commands, *reasons))
    why = [counted(len(own), what) for own, what in ((commands, "command"), (reasons, "reason")) if own]
    summary = f"{counted(len(left), 'cell')} without a run: {', '.join(why)}"
    return _fold(summary, f"<ul>{items}</ul>", ' class="todo"')


def _table(
    label: str, columns: Sequence[str], rows: Rows, sortable: bool = False, cards: bool = False
) -> str:
    """A table that scrolls sideways; ``cards``: whose rows are cards on a telephone."""
    shown = [column for column in columns if any(row.get(column) for row in rows)]
    mark = ' aria-sort="none"' if sortable else ""
    head = ""
    for column in shown:
        hidden = ' class="p"' if column in _PROVENANCE else ""
        name = f"<button>{escape(column)}</button>" if sortable else escape(column)
        head += f'<th scope="col"{hidden}{mark}>{name}</th>'
    cells = (map(_cell, shown, (row.get(column, "") for column in shown)) for row in rows)
    body = "".join(f"<tr>{''.join(own)}</tr>" for own in cells)
    kind = "scroll cards" if cards else "scroll"
    return (
        f'<div class="{kind}" role="region" aria-label="{escape(label)}" tabindex="0"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _cell(column: str, text: str) -> str:
    if column == "record" and text:
        first, *others = text.split(", ")
        # the names of the other seeds differ in the seed alone
        more = f" +{len(others)}" if others else ""
        return f'<td class="p">{_record_link(first)}{more}</td>'
    if column in ("status", "verdict"):
        return f'<td><span class="status {_class(text)}">{escape(text)}</span></td>'
    if column == "where" and text in catalogue.builders():
        return f'<td><a href="#{escape(text)}">{escape(text)}</a></td>'
    todo = text.startswith(("not run", "not built", "no stand-in"))
    kind = "todo" if todo else "p" if column in _PROVENANCE else "long" if len(text) > 48 else ""
    shown = "<br>".join(_inline(line) for line in text.split("\n"))
    return f'<td class="{kind}">{shown}</td>' if kind else f"<td>{shown}</td>"


def _record_link(text: str) -> str:
    stem = Path(text).stem
    shown = re.search(r"seed\d+$", stem)
    return f'<a href="{escape(text.removeprefix("results/"))}">{escape(shown[0] if shown else stem)}</a>'


def _class(status: str) -> str:
    words = (overview.MIXED, *STATUSES, *WORDS)
    return next((word.replace(" ", "-") for word in words if status.startswith(word)), "other")


def _paragraph(text: str) -> str:
    """A paragraph or a list of inline Markdown."""
    if not text.startswith("- "):
        return f"<p>{_inline(text)}</p>"
    lines = [_inline(line.removeprefix("- ")) for line in text.split("\n")]
    shown = f"<ul>{''.join(f'<li>{line}</li>' for line in lines)}</ul>"
    return shown if len(lines) <= _LISTED else _fold(f"{len(lines)} comparisons", shown)


def _inline(text: str) -> str:
    """`code`, **bold** and *emphasis*; everything else as it is."""
    parts = text.split("`")
    shown = []
    for number, part in enumerate(parts):
        if number % 2 and number < len(parts) - 1:
            shown.append(f"<code>{escape(part)}</code>")
        else:
            marked = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", escape(part))
            shown.append(re.sub(r"(?<![*\w])\*([^*\s][^*]*)\*(?![*\w])", r"<em>\1</em>", marked))
    return "".join(shown)


def _svg(text: str, name: str, title: str) -> str:
    """A figure without its XML prologue; ids made its own, so that two figures on a page don't meet."""
    svg = text[text.index("<svg") :].strip()
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", svg)
    svg = re.sub(r'href="#([^"]+)"', rf'href="#{name}-\1"', svg)
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(title)}"', 1)
