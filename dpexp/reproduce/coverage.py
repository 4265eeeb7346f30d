"""The coverage matrix: every table, figure, algorithm and system that the four papers name, and how far it is reproduced.

``coverage.csv`` is the list; the status of each row is found out, never written down:

* what must exist, in a column for each kind, separated by spaces. target: ``table-he-2`` (its own status counts); choice:
  ``clip/flat``, of conf/ (``experiment/he2023_*``: some choice); workload: ``mlp``, of the benchmarks; test:
  ``clipping/test_layers.py::test_linear``, of this suite, which holds it.
* otherwise: why there is none of them: ``missing``, ``diagram``, ``this list``.
* runs: settings of the records that show it in use, ``clip=flat,privacy.epsilon=*``; ``a|b``: either; ``bench``: benchmarks.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from dpexp.benchmark.workloads import WORKLOADS
from dpexp.config import conf_dir
from dpexp.reproduce.benchmarks import Measurement
from dpexp.reproduce.documents import ARITHMETIC, Document, Section, as_rows, grouped, page
from dpexp.reproduce.paper import FOLDER, PAPERS, paper_table, paper_tables
from dpexp.reproduce.paper import targets as paper_targets
from dpexp.reproduce.records import Record

KINDS = ("target", "choice", "workload", "test")
STATUSES = (*ARITHMETIC, "tested", "paper", "small", "not run", "not built")
COLUMNS = ("paper", "kind", "name", "importance", "printed in", "status", "where", "note")


@cache
def listed() -> tuple[dict[str, str], ...]:
    """The rows of ``coverage.csv``."""
    with (FOLDER / "coverage.csv").open(encoding="utf-8", newline="") as file:
        return tuple(csv.DictReader(file))


def targets() -> set[str]:
    """The targets of which the matrix wants the status."""
    return {name for row in listed() for name in row["target"].split()}


@dataclass(frozen=True)
class Evidence:
    """What statuses are found out from.

    Attributes:
        statuses: of the `targets` that there are, in words: "exact", "computed", "small 2/8", "not run".
        records: of training runs.
        measured: benchmarks.
    """

    statuses: Mapping[str, str]
    records: Sequence[Record] = ()
    measured: Sequence[Measurement] = ()

    def has(self, kind: str, name: str) -> bool:
        """Is there what a row names?"""
        return {
            "target": name in self.statuses,
            "choice": any(conf_dir().glob(f"{name}.yaml")),
            "workload": name in WORKLOADS,
            # the list is believed: a test of this suite looks for them
            "test": True,
        }[kind]

    def status(self, row: Mapping[str, str]) -> dict[str, str]:
        """One of `STATUSES`, and in words where to look."""
        if row["otherwise"] == "this list":
            return {"status": ARITHMETIC[0], "where": ""}
        named = [(kind, name) for kind in KINDS for name in row[kind].split()]
        if not named or not all(self.has(*one) for one in named):
            return {"status": "not built", "where": ""}
        own = [self.statuses[name] for kind, name in named if kind == "target"]
        where = [", ".join(name for _, name in named)]
        counts = {scale: self._runs(row, scale) for scale in ("paper", "small")}
        where += [f"{scale}: {n} record{'s' if n > 1 else ''}" for scale, n in counts.items() if n]
        scale = next((s for s, n in counts.items() if n or any(f"{s} " in status for status in own)), "")
        if own and set(own) <= set(ARITHMETIC):
            status = max(own, key=ARITHMETIC.index)
        elif not own and row["test"]:
            status = "tested"
        elif scale:
            status, where = scale, [*where, *own]
        else:
            status = "not built" if own and set(own) == {"not built"} else "not run"
        return {"status": status, "where": "; ".join(where)}

    def _runs(self, row: Mapping[str, str], scale: str) -> int:
        """Committed records that show it in use; on the paper's scale those of its own tasks alone, and benchmarks on its own
        networks."""
        workloads = set(row["workload"].split())
        if workloads or row["runs"] == "bench":
            of_paper = (target for target in paper_targets("bench").values() if target.key[0] == row["paper"])
            own = {w for target in of_paper for w, s in target.workloads.items() if s == scale}
            chosen = own & workloads if workloads else own
            shown = ({line["workload"] for line in one.content["rows"]} for one in self.measured)
            return sum(not chosen.isdisjoint(workloads) for workloads in shown)
        asked = dict(part.split("=") for part in filter(None, row["runs"].split(",")))
        where: dict[str, Any] = {name: wanted.split("|") for name, wanted in asked.items()}
        if scale == "paper":
            # the settings of another paper are none of this one's
            where.setdefault("task", _tasks(row["paper"]))
        # what was measured before any training shows no training
        untrained = "optim.steps" in asked
        counted = (r for r in self._of_scale[scale] if untrained or r.facts.get("optim.steps") != 0)
        return sum(record.matches(where) for record in counted) if asked else 0

    @cached_property
    def _of_scale(self) -> dict[str, list[Record]]:
        return {"paper": [], "small": []} | grouped(self.records, lambda record: str(record.facts["scale"]))


@cache
def _tasks(paper: str) -> list[str]:
    """Those of which a paper prints something."""
    cells = (cell for own, table in paper_tables() if own == paper for cell in paper_table(own, table))
    return sorted({cell.settings["task"] for cell in cells if "task" in cell.settings})


def document(evidence: Evidence) -> Document:
    """The matrix, with a count for each paper."""
    sections, counts = [], []
    for paper, title in PAPERS.items():
        own = (row | {"printed in": row["printed"]} for row in listed() if row["paper"] == paper)
        rows = [row | evidence.status(row) for row in own]
        sections.append(Section(title, (), COLUMNS[1:], rows))
        found = Counter(row["status"] for row in rows)
        counts.append(
            {"of": title} | {status: found[status] for status in STATUSES} | {"rows": found.total()}
        )
    return page("coverage", [Section("Counts", rows=as_rows(counts), in_csv=False), *sections], COLUMNS)
