"""What a table or figure of the report is made of, and how it is written: Markdown, CSV; `dpexp.reproduce.site` has HTML.

A document is built once and written by these functions alone, so that all three say the same.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from dpexp.reproduce.paper import PAPERS, short
from dpexp.reproduce.statistics import CANNOT_TELL, CONTRADICTS, SUPPORTS

Rows = list[dict[str, str]]
WORDS = (SUPPORTS, CONTRADICTS, CANNOT_TELL)
CLAIM = "**Claim.** "
REGENERATE = "Regenerate: `python -m dpexp.report {name}`."
_PAPERS = frozenset(map(short, PAPERS))


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
        columns: of the table, in order; empty for text alone, or for rows that the CSV alone has.
        rows: column -> text.
        scale: "exact" for arithmetic, else that of the runs.
        in_csv: whether its rows are part of the CSV; not those of a summary.
    """

    heading: str
    paragraphs: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    rows: Rows = field(default_factory=list)
    scale: str = "exact"
    in_csv: bool = True


@dataclass(frozen=True)
class Document:
    """A page about one table or figure.

    Attributes:
        name: of the target, and of the files: "table-he-2".
        title: one line.
        paragraphs: the claim, the verdict, notes.
        sections: in order.
        columns: of the CSV; empty: those of all sections.
        svg: of a figure.
        status: for the coverage matrix, as text: "exact", "small 2/8", "not run".
        verdicts: one for each block that was run; none where nothing was, or where it is arithmetic.
        foot: the last paragraph, "{name}" in it standing for the name.
    """

    name: str
    title: str
    paragraphs: tuple[str, ...] = ()
    sections: tuple[Section, ...] = ()
    columns: tuple[str, ...] = ()
    svg: str = ""
    status: str = "exact"
    verdicts: tuple[Verdict, ...] = ()
    foot: str = REGENERATE

    @property
    def paper(self) -> str:
        """ "he", "bu", "li", "monir", or "" where it belongs to none."""
        return next((part for part in self.name.split("-") if part in _PAPERS), "")

    @property
    def words(self) -> tuple[str, ...]:
        """The paragraphs and the foot."""
        return (*self.paragraphs, self.foot.format(name=self.name)) if self.foot else self.paragraphs

    @property
    def claim(self) -> str:
        """What the paper says, "" for a page that is not about a claim."""
        return next((text.removeprefix(CLAIM) for text in self.paragraphs if text.startswith(CLAIM)), "")

    @property
    def rows(self) -> Rows:
        """Of the sections that the CSV has, one after the other."""
        return [row for section in self.sections if section.in_csv for row in section.rows]

    def as_markdown(self) -> str:
        """The page."""
        parts = [f"# {self.title}", *self.words]
        for section in self.sections:
            parts += [f"## {section.heading}"] if section.heading else []
            parts += section.paragraphs
            parts += [_table(section.columns, section.rows)] if section.columns else []
        return "\n\n".join(parts) + "\n"

    def as_csv(self) -> str:
        """All rows with unix line ends, a row's missing cells empty."""
        columns = self.columns or dict.fromkeys(key for section in self.sections for key in section.columns)
        text = io.StringIO()
        writer = csv.DictWriter(text, list(columns), lineterminator="\n", restval="", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(self.rows)
        return text.getvalue()


def claimed(claim: str, verdicts: Sequence[Verdict], otherwise: str) -> tuple[str, str]:
    """The first two paragraphs: what the paper says, and what our runs say about it, or why they say nothing."""
    return (
        f"{CLAIM}{claim}",
        f"**Our runs.** {'; '.join(map(str, verdicts)) or f'{CANNOT_TELL}: {otherwise}'}.",
    )


def not_run(needs: str) -> str:
    """Why there is no verdict, with what a run takes."""
    return f"not run; it takes {needs}" if needs else "not run"


def as_rows(columns: Sequence[str], lines: Iterable[Sequence[object]]) -> Rows:
    """Each line's values, as text, under the names of the columns."""
    return [dict(zip(columns, map(str, line), strict=True)) for line in lines]


def counted(count: int, what: str) -> str:
    """ "1 run", "2 runs"."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def number(value: float | None, form: str = ".2f") -> str:
    """As text; "" where there is none."""
    return "" if value is None else format(value, form)


def _table(columns: Sequence[str], rows: Rows) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    lines += ["| " + " | ".join(_cell(row.get(column, "")) for column in columns) + " |" for row in rows]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
