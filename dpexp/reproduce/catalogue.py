"""Every table and figure that can be made, by name: ``table-he-2``, ``figure-li-3``, ``accounting-li``, ``coverage``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from pathlib import Path

from dpexp.errors import UserError, did_you_mean
from dpexp.reproduce import (
    accounting,
    benchmarks,
    communication,
    complexity_tables,
    coverage,
    curves,
    exact,
    figures,
    goals,
    hyperparameters,
    league,
    noise,
    runs,
    tables,
    thresholds,
)
from dpexp.reproduce import records as run_records
from dpexp.reproduce.benchmarks import Measurement
from dpexp.reproduce.documents import Document
from dpexp.reproduce.paper import PAPERS, short, target_name
from dpexp.reproduce.records import Record

GROUPS = ("all", "tables", "figures")
# Names of the paper for pages that have their own.
ALIASES = {
    "complexity-bu": tuple(complexity_tables.PAGES), "table-bu-4": ("complexity-bu-table4",),
    "table-bu-5": ("complexity-bu-table5",), "table-bu-8": ("complexity-bu-table8",), "table-bu-10": ("complexity-bu-table8",),
}  # fmt: skip


@dataclass(frozen=True)
class Context:
    """The committed records below a folder, read once, and the documents that were made of them."""

    results: Path
    built: dict[str, Document] = field(default_factory=dict)

    def document(self, name: str) -> Document:
        """A target's document, built once."""
        if name not in self.built:
            self.built[name] = builders()[name](self)
        return self.built[name]

    @cached_property
    def records(self) -> list[Record]:
        return run_records.load(self.results / "runs")

    @cached_property
    def audits(self) -> list[Record]:
        return run_records.load(self.results / "audits", audits=True)

    @cached_property
    def league(self) -> list[Record]:
        """Apart from `records`: they are shorter runs than any printed cell asks for."""
        return run_records.load(self.results / "league")

    @cached_property
    def benchmarks(self) -> list[Measurement]:
        return benchmarks.load(self.results / "bench")


Builder = Callable[[Context], Document]
# arithmetic alone: their status needs no record
EXACT: dict[str, Callable[[], Document]] = {
    "accounting-li": accounting.document,
    "noise-he": noise.noise_he,
    "table-bu-2": exact.implementations_bu,
    "table-bu-3": exact.modules_bu,
    **complexity_tables.PAGES,
    "communication-he": communication.communication_he,
    "memory-li": exact.memory_li,
    "memory-monir": exact.memory_monir,
    "individual-monir": exact.individual_monir,
    hyperparameters.NAME: hyperparameters.document,
    "figure-he-6": figures.figure_he_6,
    "figure-bu-7": figures.figure_bu_7,
    "figure-li-3": figures.figure_li_3,
    "figure-li-7": figures.figure_li_7,
    "figure-monir-8": figures.figure_monir_8,
    "figure-monir-10": figures.figure_monir_10,
    "figure-monir-13": figures.figure_monir_13,
    "figure-monir-14": figures.figure_monir_14,
}


@cache
def builders() -> dict[str, Builder]:
    """Name -> what makes it, in the order of the report: the papers, then the pages of this repository."""
    found: dict[str, Builder] = {name: partial(_exact, make) for name, make in EXACT.items()}
    found |= {target_name(*key): partial(_table, key) for key in tables.claims()}
    found |= {name: partial(_measured, name) for name in benchmarks.targets()}
    found |= {name: partial(_curves, name) for name in curves.targets()}
    found |= {
        thresholds.NAME: lambda context: thresholds.document(context.records),
        league.NAME: lambda context: league.document(context.league),
        goals.NAME: lambda context: goals.document(context.benchmarks),
        "runs": lambda context: runs.document(context.records),
        "coverage": _coverage,
    }
    return dict(sorted(found.items(), key=lambda item: _order(item[0])))


def resolve(names: list[str]) -> list[str]:
    """What is asked for as names of targets: groups, aliases and parts (``table-he-1`` is 1a and 1b) spelt out.

    Raises:
        UserError: an unknown name, with the close ones.
    """
    known = list(builders())
    found: list[str] = []
    for name in names:
        if name in GROUPS:
            found += [x for x in known if name == "all" or is_figure(x) == (name == "figures")]
        elif name in known:
            found.append(name)
        elif name in ALIASES:
            found += ALIASES[name]
        elif parts := [x for x in known if x[:-1] == name and x[-1].isalpha()]:
            found += parts
        else:
            raise UserError(
                f"no report is called {name}{did_you_mean(name, [*known, *ALIASES, *GROUPS, 'report'])}"
            )
    return list(dict.fromkeys(found))


def is_figure(name: str) -> bool:
    """Does it go to ``results/figures``?"""
    return name.startswith("figure-")


def write(document: Document, results: Path) -> list[Path]:
    """Markdown and CSV of a table; and SVG of a figure."""
    folder = "figures" if is_figure(document.name) else "tables"
    contents = {
        f"{folder}/{document.name}.md": document.as_markdown(),
        f"{folder}/{document.name}.csv": document.as_csv(),
    }
    # of a table too: pictures lie in one place
    picture = f"figures/{document.name}.svg"
    if document.svg:
        contents[picture] = document.svg
    else:
        (results / picture).unlink(missing_ok=True)
    written = []
    for name, content in contents.items():
        path = results / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode())
        written.append(path)
    return written


def _exact(make: Callable[[], Document], context: Context) -> Document:
    return make()


def _table(key: tuple[str, str], context: Context) -> Document:
    return tables.build(*key, context.audits if tables.claims()[key].audits else context.records)


def _measured(name: str, context: Context) -> Document:
    return benchmarks.build(name, context.benchmarks)


def _curves(name: str, context: Context) -> Document:
    return curves.build(name, context.records)


def _coverage(context: Context) -> Document:
    wanted = coverage.targets() & builders().keys()
    statuses = {n: "exact" if n in EXACT else context.document(n).status for n in sorted(wanted)}
    return coverage.document(statuses, [*context.records, *context.league], context.benchmarks)


def _order(name: str) -> tuple[int, str, int, str]:
    papers = [short(paper) for paper in PAPERS]
    paper = next((i for i, p in enumerate(papers) if p in name.split("-")), len(papers))
    kind, _, rest = name.partition("-")
    digits = "".join(c for c in rest if c.isdigit())
    return paper, {"table": "0", "figure": "1"}.get(kind, "2"), int(digits or 0), name
