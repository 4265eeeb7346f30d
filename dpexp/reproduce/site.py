"""The report page: one HTML file. First every claim with its verdict, all runs in one table, and accuracy against ε; then every
table and figure, filters, and the coverage matrix. It fetches nothing."""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from string import Template

from dpexp.reproduce import catalogue, overview
from dpexp.reproduce.catalogue import Context
from dpexp.reproduce.coverage import STATUSES
from dpexp.reproduce.documents import WORDS, Document, Rows, Section
from dpexp.reproduce.paper import PAPERS, short
from dpexp.reproduce.records import Record
from dpexp.reproduce.statistics import CANNOT_TELL

SHORT = {short(paper): title for paper, title in PAPERS.items()}
SCALES = ("exact", "small", "paper")
# shown when a reader asks
_PROVENANCE = ("ε", "δ", "accountant", "sampling", "hardware", "record", "precision")
# of what a figure is drawn from
_MOST_ROWS = 160
# a table with more rows is folded
_FOLDED = 24
# at the top of the page, for all
_SAID_ONCE = ("Ours: mean ± standard deviation", "Regenerate:")


def write(context: Context) -> Path:
    """Write ``report.html`` beside the tables."""
    documents = [context.document(name) for name in catalogue.builders()]
    path = context.results / "report.html"
    path.write_text(page(documents, context.records), encoding="utf-8")
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
        links = "".join(f'<li><a href="#{d.name}">{_text(_short_title(d))}</a></li>' for d in own)
        menu += f'<li class="paper" data-paper="{paper}"><span>{_text(title)}</span><ul>{links}</ul></li>'
        ordered += own
    return Template(frame).substitute(
        style=style, script=script, menu=menu, papers=_options(SHORT.items()), scales=_options((s, s) for s in SCALES),
        articles=_first(ordered, records) + "".join(map(_article, ordered)),
    )  # fmt: skip


def _first(documents: Sequence[Document], records: Sequence[Record]) -> str:
    """Verdicts, accuracy against ε, and the table of all runs."""
    parts = []
    if claims := overview.verdicts(documents):
        counts = ", ".join(f"{n} {word}" for word, n in Counter(row["verdict"] for row in claims).items())
        links = [row | {"where": f"#{row['where']}"} for row in claims]
        decided = [row for row in links if row["verdict"] != CANNOT_TELL]
        others = [row for row in links if row["verdict"] == CANNOT_TELL]
        told = _table("Claims", overview.VERDICTS, decided)
        untold = _table("Other claims", overview.VERDICTS, others)
        why = f"{len(others)} claims that our runs cannot tell about, and why"
        parts.append(
            f"<h2>{len(claims)} claims: {_text(counts)}</h2>{told}{_fold(why, untold) if others else ''}"
        )
    if svg := overview.accuracy_against_epsilon(records):
        picture = _svg(svg, "accuracy", "Accuracy against epsilon for each task")
        parts.append(
            "<h2>Accuracy against ε</h2><p>Filled: our configurations, bars over seeds. Open circles: the papers' numbers,"
            f" with larger models and longer training.</p><figure>{picture}</figure>"
        )
    if records:
        found = overview.leaders(records)
        table = _table("All runs", overview.LEADERS, found, sortable=True)
        parts.append(
            f"<h2>All {len(found)} configurations</h2><p>Best first for each task and ε; a click on a column sorts.</p>"
            f"{_fold(f'{len(found)} rows', table)}"
        )
    return "".join(f'<div class="first">{part}</div>\n' for part in parts)


def _options(pairs: Iterable[tuple[str, str]]) -> str:
    return "".join(f'<option value="{value}">{_text(label)}</option>' for value, label in pairs)


def _fold(summary: str, content: str, kind: str = "") -> str:
    return f"<details{kind}><summary>{summary}</summary>{content}</details>"


def _short_title(document: Document) -> str:
    """ "Table 2: adaptive per-layer …" of "He et al., Table 2: …"."""
    return document.title.partition(" et al., ")[2] or document.title


def _article(document: Document) -> str:
    scales = " ".join(dict.fromkeys(section.scale for section in document.sections))
    words = "".join(_paragraph(text) for text in document.words if not text.startswith(_SAID_ONCE))
    figure = f"<figure>{_svg(document.svg, document.name, document.title)}</figure>" if document.svg else ""
    sections = "".join(map(_section, document.sections))
    stem = f"{'figures' if catalogue.is_figure(document.name) else 'tables'}/{document.name}"
    files = f'<p class="files">Files: <a href="{stem}.md">Markdown</a>, <a href="{stem}.csv">CSV</a></p>'
    status = f'<span class="status {_class(document.status)}">{_text(document.status)}</span>'
    return (
        f'<article id="{document.name}" data-paper="{document.paper}" data-scale="{scales}">'
        f"<h2>{_text(document.title)} {status}</h2>{words}{figure}{sections}{files}</article>\n"
    )


def _section(section: Section) -> str:
    heading = f"<h3>{_text(section.heading)}</h3>" if section.heading else ""
    words = "".join(map(_paragraph, section.paragraphs))
    label, rows = section.heading or "Table", section.rows
    # the heading says it
    columns = [c for c in section.columns if c != "scale"]
    table = ""
    if columns and rows and {"row", "column", "paper", "ours"} <= set(columns):
        table = _as_printed(label, rows)
        if filled := [row for row in rows if row.get("n")]:
            table += _fold(f"{len(filled)} configurations", _table(label, columns, filled))
        table += _to_run(rows)
    elif len(rows) > _MOST_ROWS:
        table = f"<p>{len(rows)} rows: in the CSV file below.</p>"
    elif columns and rows:
        table = _table(label, columns, rows)
        table = _fold(f"{len(rows)} rows", table) if len(rows) > _FOLDED else table
    return f'<section data-scale="{section.scale}">{heading}{words}{table}</section>'


def _as_printed(label: str, rows: Rows) -> str:
    """The layout of the paper, with ours below each printed number: of several configurations, the one with the most seeds."""
    best: dict[str, dict[str, dict[str, str]]] = {}
    for row in rows:
        known = best.setdefault(row["row"], {}).setdefault(row["column"], row)
        if int(row.get("n") or 0) > int(known.get("n") or 0):
            best[row["row"]][row["column"]] = row
    lines = [
        {"": name} | {c: r["paper"] + (f"\n**{r['ours']}**" if r.get("n") else "") for c, r in own.items()}
        for name, own in best.items()
    ]
    table = _table(label, ("", *dict.fromkeys(row["column"] for row in rows)), lines)
    return _fold(f"{len(lines)} rows as printed", table) if len(lines) > _FOLDED else table


def _to_run(rows: Rows) -> str:
    """One line for all cells without a run: how many, why, and the commands, folded."""
    left = [row["ours"] for row in rows if not row.get("n")]
    if not left:
        return ""
    texts = dict.fromkeys(left)
    commands = [text.removeprefix("not run: ") for text in texts if text.startswith("not run")]
    reasons = [text for text in texts if not text.startswith("not run")]
    listed = "".join(f"<li>{_inline(text)}</li>" for text in (*commands, *reasons))
    why = f", {len(reasons)} reasons" if reasons else ""
    return _fold(
        f"{len(left)} cells without a run: {len(commands)} commands{why}",
        f"<ul>{listed}</ul>",
        ' class="todo"',
    )


def _table(label: str, columns: Sequence[str], rows: Rows, *, sortable: bool = False) -> str:
    shown = [column for column in columns if any(row.get(column) for row in rows)]
    mark = ' aria-sort="none"' if sortable else ""
    head = ""
    for column in shown:
        hidden = ' class="p"' if column in _PROVENANCE else ""
        name = f"<button>{_text(column)}</button>" if sortable else _text(column)
        head += f'<th scope="col"{hidden}{mark}>{name}</th>'
    body = "".join(
        f"<tr>{''.join(_cell(column, row.get(column, '')) for column in shown)}</tr>" for row in rows
    )
    return (
        f'<div class="scroll" role="region" aria-label="{_text(label)}" tabindex="0"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _cell(column: str, text: str) -> str:
    if column == "record" and text:
        return f'<td class="p">{", ".join(map(_record_link, text.split(", ")))}</td>'
    if column in ("status", "verdict"):
        return f'<td><span class="status {_class(text)}">{_text(text)}</span></td>'
    if column == "where" and text.startswith("#"):
        return f'<td><a href="{_text(text)}">{_text(text[1:])}</a></td>'
    todo = text.startswith(("not run", "not built", "no stand-in"))
    kind = "todo" if todo else "p" if column in _PROVENANCE else "long" if len(text) > 36 else ""
    shown = "<br>".join(_inline(line) for line in text.split("\n"))
    return f'<td class="{kind}">{shown}</td>' if kind else f"<td>{shown}</td>"


def _record_link(text: str) -> str:
    path, mark, note = text.partition(" (UNCLEAN")
    name = path.rpartition("/")[2]
    return f'<a href="{_text(path.removeprefix("results/"))}" title="{_text(name)}">record</a>{_text(mark + note)}'


def _class(status: str) -> str:
    words = (*STATUSES, *WORDS)
    return next((word.replace(" ", "-") for word in words if status.startswith(word)), "other")


def _paragraph(text: str) -> str:
    """A paragraph or a list of inline Markdown."""
    if not text.startswith("- "):
        return f"<p>{_inline(text)}</p>"
    lines = (_inline(line.removeprefix("- ")) for line in text.split("\n"))
    return f"<ul>{''.join(f'<li>{line}</li>' for line in lines)}</ul>"


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
