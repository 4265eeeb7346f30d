"""Every table and figure that can be made, by name: ``table-he-2``, ``figure-li-3``, ``accounting-li``, ``coverage``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from dpexp.errors import UserError, did_you_mean
from dpexp.reproduce import (
    accounting,
    benchmarks,
    coverage,
    curves,
    exact,
    figures,
    hyperparameters,
    league,
    methods,
    overview,
    tables,
    thresholds,
)
from dpexp.reproduce import complexity_tables as complexity
from dpexp.reproduce import records as run_records
from dpexp.reproduce.documents import Document
from dpexp.reproduce.paper import SHORT, listed, paper_of, target_name, targets

GROUPS = ("all", "tables", "figures")


@dataclass(frozen=True)
class Context:
    """The committed records below a folder, read once, and the documents that were made of them."""

    results: Path
    built: dict[str, Document] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)

    def document(self, name: str) -> Document:
        """A target's document, built once."""
        if name not in self.built:
            make, needs = builders()[name]
            self.built[name] = make(self.read(needs)) if needs else make()
        return self.built[name]

    def read(self, what: str) -> Any:
        """The records of a folder, or "evidence", all that the matrix is made from. Those of the league and of other methods are
        apart from the runs: they are shorter than any printed cell asks for."""
        if what not in self.kept:
            folder = self.results / what
            if what == "evidence":
                self.kept[what] = self._evidence()
            elif what == "bench":
                self.kept[what] = benchmarks.load(folder)
            else:
                self.kept[what] = run_records.load(folder, audits=what == "audits")
        return self.kept[what]

    def _evidence(self) -> coverage.Evidence:
        words = listed("pages")
        # arithmetic takes long; its status is known without it
        statuses = {
            name: words[name].get("otherwise", "exact") if name in EXACT else self.document(name).status
            for name in sorted(coverage.targets() & builders().keys())
        }
        return coverage.Evidence(statuses, [*self.read("runs"), *self.read("league")], self.read("bench"))


# a function, and what it takes of a context; "" for nothing
Builder = tuple[Callable[..., Document], str]
# arithmetic alone: their status needs no record; a function has the name of its page
EXACT: dict[str, Callable[[], Document]] = {
    make.__name__.replace("_", "-"): make
    for make in (
        accounting.accounting_li, accounting.noise_he, exact.communication_he, hyperparameters.hyperparameters,
        complexity.complexity_bu_table4, complexity.complexity_bu_table5, complexity.complexity_bu_table8,
        exact.table_bu_2, exact.table_bu_3, exact.memory_li, exact.individual_monir,
        figures.figure_he_6, figures.figure_bu_7, figures.figure_li_3, figures.figure_li_7, figures.figure_monir_8,
        figures.figure_monir_10,
    )
} | {
    "figure-monir-13": partial(figures.individual_budgets, "sampling", "13"),
    "figure-monir-14": partial(figures.individual_budgets, "scaling", "14"),
}  # fmt: skip
# Names of the paper for pages that have their own.
ALIASES = {
    "complexity-bu": tuple(name for name in EXACT if name.startswith("complexity-bu-")),
    "table-bu-4": ("complexity-bu-table4",), "table-bu-5": ("complexity-bu-table5",),
    "table-bu-8": ("complexity-bu-table8",), "table-bu-10": ("complexity-bu-table8",),
}  # fmt: skip


@cache
def builders() -> dict[str, Builder]:
    """Name -> what makes it, in the order of the report: the papers, then the pages of this repository."""
    found: dict[str, Builder] = {
        **{name: (make, "") for name, make in EXACT.items()},
        **{
            target_name(*key): (partial(tables.build, *key), "audits" if claim.audits else "runs")
            for key, claim in tables.claims().items()
        },
        **{name: (partial(benchmarks.build, name), "bench") for name in targets("bench")},
        **{name: (partial(curves.build, name), "runs") for name in targets("curves")},
        thresholds.NAME: (thresholds.document, "runs"),
        league.NAME: (league.document, "league"),
        methods.NAME: (methods.document, "methods"),
        "memory-monir": (exact.memory_monir, "bench"),
        benchmarks.EFFICIENCY: (benchmarks.efficiency, "bench"),
        "runs": (overview.runs, "runs"),
        "coverage": (coverage.document, "evidence"),
    }
    return dict(sorted(found.items(), key=lambda item: _order(item[0])))


def _order(name: str) -> tuple[int, str, int, str]:
    kind, _, rest = name.partition("-")
    digits = "".join(c for c in rest if c.isdigit())
    place = [*SHORT, ""].index(paper_of(name))
    return place, {"table": "0", "figure": "1"}.get(kind, "2"), int(digits or 0), name


def resolve(names: list[str]) -> list[str]:
    """What is asked for as names of targets: groups, aliases and parts (``table-he-1`` is 1a and 1b) spelt out.

    Raises:
        UserError: an unknown name, with the close ones.
    """
    known = list(builders())
    meant = {
        "all": known,
        "tables": [name for name in known if not is_figure(name)],
        "figures": [name for name in known if is_figure(name)],
        **ALIASES,
        **{name: (name,) for name in known},
    }
    found: list[str] = []
    for name in names:
        parts = meant.get(name) or [x for x in known if x[:-1] == name and x[-1].isalpha()]
        if not parts:
            raise UserError(f"no report is called {name}{did_you_mean(name, [*meant, 'report', 'run'])}")
        found += parts
    return list(dict.fromkeys(found))


def is_figure(name: str) -> bool:
    """Does it go to ``results/figures``?"""
    return name.startswith("figure-")


def write(document: Document, results: Path) -> list[Path]:
    """Markdown and CSV of a table; and SVG of a figure."""
    folder = "figures" if is_figure(document.name) else "tables"
    # of a table too: pictures lie in one place
    picture = results / f"figures/{document.name}.svg"
    picture.unlink(missing_ok=True)
    contents = {
        results / f"{folder}/{document.name}.md": document.as_markdown(),
        results / f"{folder}/{document.name}.csv": document.as_csv(),
        picture: document.svg,
    }
    written = [path for path, content in contents.items() if content]
    for path in written:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(contents[path].encode())
    return written
