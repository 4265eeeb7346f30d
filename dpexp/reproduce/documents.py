"""What a table or figure of the report is made of, and how it is written: Markdown, CSV; `dpexp.reproduce.site` has HTML.

A document is built once and written by these functions alone, so that all three say the same.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from dpexp.privacy.shown import upwards
from dpexp.reproduce.paper import listed, paper_of
from dpexp.reproduce.statistics import CANNOT_TELL, CONTRADICTS, SUPPORTS

Rows = list[dict[str, str]]
WORDS = (SUPPORTS, CONTRADICTS, CANNOT_TELL)
# statuses that need no run; of the second the paper prints no result, or not the settings
ARITHMETIC = ("exact", "computed")
PART = " for a part of the claim, "
REGENERATE = "Regenerate: `python -m dpexp.report {name}`."
Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)


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

    @property
    def part(self) -> str:
        """Which part of the claim it is about, in words; "" for all of it."""
        return self.said.partition(PART)[2].partition(" (")[0].partition(": ")[0]

    def __str__(self) -> str:
        return f"{self.where}: {self.said}" if self.where else self.said


@dataclass(frozen=True)
class Section:
    """One block of a document: never of more than one scale.

    Attributes:
        heading: "" for a block without one.
        paragraphs: text above the table; inline Markdown (`code`, **bold**).
        columns: of the table, in order, where they are not those of its first row.
        rows: column -> text.
        scale: "exact" for arithmetic, else that of the runs.
        in_csv: whether its rows are part of the CSV; not those of a summary.
        done: what of it has records, in short: "small 2/8"; "" for nothing.
        verdicts: what its records say about the claim.
        commands: that make the records which it still lacks.
    """

    heading: str = ""
    paragraphs: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    rows: Rows = field(default_factory=list)
    scale: str = "exact"
    in_csv: bool = True
    done: str = ""
    verdicts: tuple[Verdict, ...] = ()
    commands: tuple[str, ...] = ()

    @property
    def shown(self) -> tuple[str, ...]:
        """The columns of its table."""
        return self.columns or tuple(self.rows[0] if self.rows else ())


@dataclass(frozen=True)
class Document:
    """A page about one table or figure.

    Attributes:
        name: of the target, and of the files: "table-he-2".
        title: one line.
        notes: paragraphs above the blocks.
        sections: in order.
        columns: of the CSV; empty: those of its rows.
        svg: of a figure.
        otherwise: the status where no block has records: one of `ARITHMETIC` (it needs none), "not run", "not built".
        foot: the last paragraphs, of the files alone; "{name}" in it stands for the name.
        claim: what the paper says, "" for a page that is not about one claim.
        untold: why there is no verdict on it, where there is none.
    """

    name: str
    title: str
    notes: tuple[str, ...] = ()
    sections: tuple[Section, ...] = ()
    columns: tuple[str, ...] = ()
    svg: str = ""
    otherwise: str = "exact"
    foot: str = REGENERATE
    claim: str = ""
    untold: str = ""

    @property
    def paper(self) -> str:
        """ "he", "bu", "li", "monir", or "" where it belongs to none."""
        return paper_of(self.name)

    @property
    def status(self) -> str:
        """What has records: "exact", "small 2/8", "not run"."""
        return ", ".join(section.done for section in self.sections if section.done) or self.otherwise

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """Of all blocks."""
        return tuple(verdict for section in self.sections for verdict in section.verdicts)

    def commands(self, scale: str) -> tuple[str, ...]:
        """That make the records which its blocks of a scale lack."""
        own = (section for section in self.sections if section.scale == scale)
        return tuple(command for section in own for command in section.commands)

    @property
    def paragraphs(self) -> tuple[str, ...]:
        """What the paper says, what ours say about it or why they say nothing, and the notes."""
        if not self.claim:
            return self.notes
        ours = "Ours" if self.status in ARITHMETIC else "Our runs"
        said = "; ".join(map(str, self.verdicts)) or f"{CANNOT_TELL}: {self.untold}"
        return f"**Claim.** {self.claim}", f"**{ours}.** {said}.", *self.notes

    @property
    def rows(self) -> Rows:
        """Of the sections that the CSV has, one after the other."""
        return [row for section in self.sections if section.in_csv for row in section.rows]

    def as_markdown(self) -> str:
        """The page."""
        parts = [f"# {self.title}", *self.paragraphs, *filter(None, [self.foot.format(name=self.name)])]
        for section in self.sections:
            parts += [f"## {section.heading}"] if section.heading else []
            parts += section.paragraphs
            parts += [_table(section.shown, section.rows)] if section.shown else []
        return "\n\n".join(parts) + "\n"

    def as_csv(self) -> str:
        """All rows with unix line ends, a row's missing cells empty."""
        columns = self.columns or dict.fromkeys(key for row in self.rows for key in row)
        text = io.StringIO()
        writer = csv.DictWriter(text, list(columns), lineterminator="\n", restval="", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(self.rows)
        return text.getvalue()


def page(
    name: str, sections: Iterable[Section], columns: tuple[str, ...] = (), *, otherwise: str = "exact", svg: str = "",
    untold: str = "", words: Mapping[str, Any] | None = None, **values: Any,
) -> Document:  # fmt: skip
    """Put a page together.

    Args:
        name, sections, columns, otherwise, svg, untold: of the `Document`.
        words: title, claim, notes, foot and otherwise; those that ``pages.yaml`` has for the name, if they are left out.
        values: what ``{name}`` in its title and notes stands for.
    """
    words = listed("pages")[name] if words is None else words
    title, *notes = (text.format(**values) for text in (words["title"], *words.get("notes", ())))
    return Document(
        name, title, tuple(notes), tuple(sections), columns, svg, words.get("otherwise", otherwise),
        words.get("foot", REGENERATE), words.get("claim", ""), untold,
    )  # fmt: skip


def not_run(needs: str) -> str:
    """Why there is no verdict, with what a run takes."""
    return f"not run; it takes {needs}" if needs else "not run"


def as_rows(lines: Iterable[Mapping[str, object]]) -> Rows:
    """The values of each line as text, "" where there is none."""
    return [{column: "" if value is None else str(value) for column, value in line.items()} for line in lines]


def agreement(rows: Iterable[Mapping[str, str]]) -> dict[str, Any]:
    """For the words of a page beside print: how many of its rows agree, and how many could be compared."""
    said = [row["agrees"] for row in rows if row["agrees"] in ("yes", "no")]
    return {"agree": said.count("yes"), "compared": len(said)}


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """The items of each key; keys and items in order."""
    found: dict[Key, list[Item]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def counted(count: int, what: str) -> str:
    """ "1 run", "2 runs"."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def number(value: float | None, form: str = ".2f") -> str:
    """As text; "" where there is none."""
    return "" if value is None else format(value, form)


def bound(value: float | None, form: str = ".2f") -> str:
    """An ε as text, rounded upwards; "" where there is none."""
    return "" if value is None else upwards(value, form)


def _table(columns: Sequence[str], rows: Rows) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    for row in rows:
        cells = (row.get(column, "").replace("|", "\\|").replace("\n", " ") for column in columns)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
