"""What a table or figure of the report is made of, and how it is written: Markdown, CSV; `dpexp.reproduce.site` has HTML.

A document is built once and written by these functions alone, so that all three say the same.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

Rows = list[dict[str, str]]
WORDS = ("exact", "supports", "contradicts", "cannot tell")
CLAIM, OURS = "**Claim.** ", "**Our runs.** "


@dataclass(frozen=True)
class Verdict:
    """What the runs of one block say about a claim.

    Attributes:
        where: the block; "" where there is one alone.
        said: begins with a word of `WORDS`.
        ours: the numbers that it rests on, in short.
    """

    where: str
    said: str
    ours: str = ""

    @property
    def word(self) -> str:
        """One of `WORDS`."""
        return next(word for word in WORDS if self.said.startswith(word))

    def __str__(self) -> str:
        return f"{self.where}: {self.said}" if self.where else self.said


@dataclass(frozen=True)
class Section:
    """One block of a document: never of more than one scale.

    Attributes:
        heading: "" for a block without one.
        paragraphs: text above the table; inline Markdown (`code`, **bold**).
        columns: of the table, in order; empty for text alone.
        rows: column -> text.
        scale: "exact" for arithmetic, else that of the runs.
    """

    heading: str
    paragraphs: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    rows: Rows = field(default_factory=list)
    scale: str = "exact"


@dataclass(frozen=True)
class Document:
    """A page about one table or figure.

    Attributes:
        name: of the target, and of the files: "table-he-2".
        title: one line.
        paper: "he", "bu", "li", "monir", or "" where it belongs to none.
        paragraphs: the claim, the verdict, notes.
        sections: in order.
        columns: of the CSV: every section's rows in one file.
        markdown: written as it is, where a page has its own form.
        rule: what stands below a column's name in the Markdown tables.
        svg, png: of a figure.
        status: for the coverage matrix, as text: "exact", "small 2/8", "not run".
        verdicts: one for each block that was run; none where nothing was, or where it is arithmetic.
    """

    name: str
    title: str
    paper: str
    paragraphs: tuple[str, ...] = ()
    sections: tuple[Section, ...] = ()
    columns: tuple[str, ...] = ()
    markdown: str = ""
    rule: str = " --- |"
    svg: str = ""
    png: bytes = b""
    status: str = "exact"
    verdicts: tuple[Verdict, ...] = ()

    @property
    def claim(self) -> str:
        """What the paper says, "" for a page that is not about a claim."""
        return next((text.removeprefix(CLAIM) for text in self.paragraphs if text.startswith(CLAIM)), "")

    @property
    def rows(self) -> Rows:
        """Of every section, one after the other."""
        return [row for section in self.sections for row in section.rows]

    def as_markdown(self) -> str:
        """The page."""
        if self.markdown:
            return self.markdown
        parts = [f"# {self.title}", *self.paragraphs]
        for section in self.sections:
            parts += [f"## {section.heading}"] if section.heading else []
            parts += section.paragraphs
            parts += [table(section.columns, section.rows, self.rule)] if section.columns else []
        return "\n\n".join(parts) + "\n"

    def as_csv(self) -> str:
        """All rows, a row's missing cells empty."""
        columns = self.columns or tuple(
            dict.fromkeys(key for section in self.sections for key in section.columns)
        )
        return as_csv(columns, self.rows)


def table(columns: Sequence[str], rows: Rows, rule: str = " --- |") -> str:
    """A Markdown table, without a line end; ``rule`` as in `Document`."""
    lines = ["| " + " | ".join(columns) + " |", "|" + rule * len(columns)]
    lines += ["| " + " | ".join(_cell(row.get(column, "")) for column in columns) + " |" for row in rows]
    return "\n".join(lines)


def as_csv(columns: Iterable[str], rows: Rows) -> str:
    """Rows as CSV with unix line ends."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(columns), lineterminator="\n", restval="", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
