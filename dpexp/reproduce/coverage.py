"""The coverage matrix: every table, figure, algorithm and system that the four papers name, and how far it is reproduced.

``coverage.csv`` is the list; the status of each row is found out, never written down:

* needs: what must exist, separated by spaces. ``conf:clip/flat`` (a choice; ``conf:experiment/he2023_*``: some choice),
  ``bench:mlp`` (a workload), ``test:clipping/test_layers.py::test_linear`` (a test of this suite, which holds it),
  ``target:table-he-2`` (its own status counts); ``this``: this list; ``missing`` and ``diagram``: nothing to point at.
* runs: settings of the records that show it in use, ``clip=flat,privacy.epsilon=*``; ``a|b``: either; ``bench``: benchmarks.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from dpexp.benchmark.workloads import WORKLOADS
from dpexp.config import conf_dir
from dpexp.reproduce import benchmarks
from dpexp.reproduce.benchmarks import Measurement
from dpexp.reproduce.documents import ARITHMETIC, Document, Section, as_rows, page
from dpexp.reproduce.paper import FOLDER, PAPERS, paper_table, paper_tables
from dpexp.reproduce.records import Record

STATUSES = (*ARITHMETIC, "tested", "paper", "small", "not run", "not built")
_TESTS = Path(__file__).parents[2] / "tests"
COLUMNS = ("paper", "kind", "name", "importance", "printed in", "status", "where", "note")


@cache
def listed() -> tuple[dict[str, str], ...]:
    """The rows of ``coverage.csv``."""
    with (FOLDER / "coverage.csv").open(encoding="utf-8", newline="") as file:
        return tuple(csv.DictReader(file))


def pointers(row: Mapping[str, str], kind: str) -> list[str]:
    """What a row points at, of one kind: "target" -> ["table-he-2"]."""
    parts = (need.partition(":") for need in row["needs"].split())
    return [name for own, colon, name in parts if colon and own == kind]


def targets() -> set[str]:
    """The targets of which the matrix wants the status."""
    return {name for row in listed() for name in pointers(row, "target")}


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

    def has(self, need: str) -> bool:
        """Is there what a row points at?"""
        kind, _, name = need.partition(":")
        return {
            "conf": lambda: any(conf_dir().glob(f"{name}.yaml")),
            "bench": lambda: name in WORKLOADS,
            "target": lambda: name in self.statuses,
            "test": lambda: _is_a_test(*name.split("::")),
        }.get(kind, lambda: need == "this")()

    def status(self, row: Mapping[str, str]) -> dict[str, str]:
        """One of `STATUSES`, and in words where to look."""
        needs = row["needs"].split()
        if not needs or not all(map(self.has, needs)):
            return {"status": "not built", "where": ""}
        own = [self.statuses[name] for name in pointers(row, "target")]
        where = [", ".join(need.partition(":")[2] for need in needs if need != "this")]
        counts = {scale: self._runs(row, scale) for scale in ("paper", "small")}
        where += [f"{scale}: {n} record{'s' if n > 1 else ''}" for scale, n in counts.items() if n]
        scale = next((s for s, n in counts.items() if n or any(f"{s} " in status for status in own)), "")
        if needs == ["this"] or (own and set(own) <= set(ARITHMETIC)):
            status = max(own, default="exact", key=ARITHMETIC.index)
        elif not own and pointers(row, "test"):
            status = "tested"
        elif scale:
            status, where = scale, [*where, *own]
        else:
            status = "not built" if own and set(own) == {"not built"} else "not run"
        return {"status": status, "where": "; ".join(where)}

    def _runs(self, row: Mapping[str, str], scale: str) -> int:
        """Committed records that show it in use; on the paper's scale those of its own tasks alone, and benchmarks on its own
        networks."""
        workloads = set(pointers(row, "bench"))
        if workloads or row["runs"] == "bench":
            of_paper = (target for target in benchmarks.targets().values() if target.paper == row["paper"])
            own = {w for target in of_paper for w, s in target.workloads.items() if s == scale}
            chosen = own & workloads if workloads else own
            return sum(
                any(line["workload"] in chosen for line in one.content["rows"]) for one in self.measured
            )
        asked = dict(part.split("=") for part in filter(None, row["runs"].split(",")))
        where = {name: wanted.split("|") for name, wanted in asked.items() if wanted != "*"} | {
            "scale": scale
        }
        if scale == "paper":
            # the settings of another paper are none of this one's
            where.setdefault("task", _tasks(row["paper"]))
        known = [name for name, wanted in asked.items() if wanted == "*"]
        untrained = "optim.steps" in asked
        return sum(
            record.matches(where)
            and all(record.facts.get(name) is not None for name in known)
            # what was measured before any training shows no training
            and (untrained or record.facts.get("optim.steps") != 0)
            for record in (self.records if asked else ())
        )


@cache
def _tasks(paper: str) -> list[str]:
    """Those of which a paper prints something."""
    cells = (cell for own, table in paper_tables() if own == paper for cell in paper_table(own, table))
    return sorted({cell.settings["task"] for cell in cells if "task" in cell.settings})


@cache
def _is_a_test(file: str, name: str) -> bool:
    """Does this suite have the test? An installed copy comes without its tests; there the list, which they check, is believed."""
    path = _TESTS / file
    if not _TESTS.is_dir():
        return True
    return path.is_file() and f"\ndef {name}(" in path.read_text(encoding="utf-8")


def document(evidence: Evidence) -> Document:
    """The matrix, with a count for each paper."""
    sections, counts = [], []
    for paper, title in PAPERS.items():
        own = (row | {"printed in": row["printed"]} for row in listed() if row["paper"] == paper)
        rows = [row | evidence.status(row) for row in own]
        sections.append(Section(title, (), COLUMNS[1:], rows))
        found = Counter(row["status"] for row in rows)
        counts.append((title, *(found[status] for status in STATUSES), found.total()))
    columns = ("of", *STATUSES, "rows")
    summary = Section("Counts", (), columns, as_rows(columns, counts), in_csv=False)
    return page("coverage", [summary, *sections], COLUMNS)
