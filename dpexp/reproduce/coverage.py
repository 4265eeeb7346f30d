"""The coverage matrix: every table, figure, algorithm and system that the four papers name, and how far it is reproduced.

``coverage.csv`` is the list; the status of each row is found out, never written down:

* needs: what must exist, separated by spaces. ``conf:clip/flat`` (a choice), ``glob:experiment/he2023_*`` (some choice),
  ``bench:mlp`` (a workload), ``test:clipping/test_layers.py::test_linear`` (a test of this suite, which holds it),
  ``target:table-he-2`` (its own status counts); ``this``: this list; ``missing`` and ``diagram``: nothing to point at.
* runs: settings of the records that show it in use, ``clip=flat,privacy.epsilon=*``; ``a|b``: either; ``bench``: benchmarks.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from dpexp.benchmark.workloads import WORKLOADS
from dpexp.config import conf_dir
from dpexp.reproduce import benchmarks
from dpexp.reproduce.documents import Document, Rows, Section
from dpexp.reproduce.paper import PAPERS
from dpexp.reproduce.records import Record

STATUSES = ("exact", "tested", "paper", "small", "not run", "not built")
Measurement = tuple[str, dict[str, Any], str]
_TESTS = Path(__file__).parents[2] / "tests"
COLUMNS = ("paper", "kind", "name", "importance", "printed in", "status", "where", "note")


@cache
def listed() -> tuple[dict[str, str], ...]:
    """The rows of ``coverage.csv``."""
    with (Path(__file__).parent / "coverage.csv").open(encoding="utf-8", newline="") as file:
        return tuple(csv.DictReader(file))


def targets() -> set[str]:
    """The targets of which the matrix wants the status."""
    needs = (need for row in listed() for need in row["needs"].split())
    return {need.removeprefix("target:") for need in needs if need.startswith("target:")}


def document(
    statuses: dict[str, str], records: Sequence[Record], measured: Sequence[Measurement]
) -> Document:
    """The matrix, with a count for each paper.

    Args:
        statuses: of the `targets` that there are, in words: "exact", "small 2/8", "not run".
        records: of training runs.
        measured: benchmarks, as `dpexp.reproduce.benchmarks.load` gives them.
    """
    rows: Rows = []
    for row in listed():
        status, where = _status(row, statuses, records, measured)
        rows.append({
            "paper": row["paper"], "kind": row["kind"], "name": row["name"], "importance": row["importance"],
            "printed in": row["printed"], "status": status, "where": where, "note": row["note"],
        })  # fmt: skip
    counts: Rows = []
    for paper, title in PAPERS.items():
        own = Counter(row["status"] for row in rows if row["paper"] == paper)
        counts.append({"of": title} | {s: str(own[s]) for s in STATUSES} | {"rows": str(own.total())})
    sections = [Section("Counts", (), ("of", *STATUSES, "rows"), counts)]
    for paper, title in PAPERS.items():
        sections.append(Section(title, (), COLUMNS[1:], [row for row in rows if row["paper"] == paper]))
    words = (
        "Every table, figure, algorithm and system that the four papers name. **exact**: arithmetic, computed again to the"
        " printed digit; **tested**: built, and the test that is named holds it against a formula, a naive twin or another"
        " implementation; **paper**, **small**: committed records at this scale (how many cells, in the column *where*);"
        " **not run**: built, without a committed record; **not built**: not in this repository (or a diagram, or samples).",
        "core: run or reported by that paper; quoted: its numbers are taken from elsewhere; described: explained or cited.",
        "The status is found out from the configuration files, the tests and the records."
        " Regenerate: `python -m dpexp.report coverage`.",
    )
    return _Coverage(
        "coverage", "Coverage of the four papers", "", words, tuple(sections), COLUMNS, matrix=tuple(rows)
    )


class _Coverage(Document):
    """Its CSV leaves the counts out."""

    def __init__(self, *arguments: object, matrix: Sequence[dict[str, str]]):
        super().__init__(*arguments)  # type: ignore[arg-type]
        object.__setattr__(self, "matrix", list(matrix))

    @property
    def rows(self) -> Rows:
        found: Rows = self.__dict__["matrix"]
        return found


def _status(
    row: dict[str, str], statuses: dict[str, str], records: Sequence[Record], measured: Sequence[Measurement]
) -> tuple[str, str]:
    """One of `STATUSES`, and in words where to look."""
    needs = row["needs"].split()
    pointers = [need for need in needs if need != "this"]
    tested = any(need.startswith("test:") for need in needs)
    missing = [need for need in pointers if not _exists(need, statuses)]
    if missing or not needs:
        return "not built", ""
    own = [statuses[need.removeprefix("target:")] for need in pointers if need.startswith("target:")]
    where = ", ".join(need.partition(":")[2] for need in pointers)
    found = {
        scale: count
        for scale in ("paper", "small")
        if (count := _runs(row, pointers, scale, records, measured))
    }
    for scale, count in found.items():
        where += f"; {scale}: {count} record{'s' if count > 1 else ''}"
    if needs == ["this"] or (own and set(own) == {"exact"}):
        return "exact", where
    if tested and not own:
        return "tested", where
    for scale in ("paper", "small"):
        if scale in found or any(f"{scale} " in status for status in own):
            return scale, f"{where}{'; ' + '; '.join(own) if own else ''}"
    return ("not built" if own and all(s == "not built" for s in own) else "not run"), where


def _exists(need: str, statuses: Mapping[str, str]) -> bool:
    kind, _, name = need.partition(":")
    if kind == "conf":
        return (conf_dir() / f"{name}.yaml").is_file()
    if kind == "glob":
        return any(conf_dir().glob(f"{name}.yaml"))
    if kind == "bench":
        return name in WORKLOADS
    if kind == "target":
        return name in statuses
    if kind == "test":
        return _is_a_test(*name.split("::"))
    return False


@cache
def _is_a_test(file: str, name: str) -> bool:
    """Does this suite have the test? An installed copy comes without its tests; there the list, which they check, is believed."""
    path = _TESTS / file
    if not _TESTS.is_dir():
        return True
    return path.is_file() and f"\ndef {name}(" in path.read_text(encoding="utf-8")


def _runs(
    row: dict[str, str],
    pointers: Sequence[str],
    scale: str,
    records: Sequence[Record],
    measured: Sequence[Measurement],
) -> int:
    """Committed records that show it in use; benchmarks count on the networks of that paper alone."""
    selector = row["runs"]
    workloads = {need.removeprefix("bench:") for need in pointers if need.startswith("bench:")}
    if workloads or selector == "bench":
        targets = [target for target in benchmarks.TARGETS.values() if target.paper == row["paper"]]
        own = {w for target in targets for w, s in target.workloads.items() if s == scale}
        chosen = own & workloads if workloads else own
        return sum(any(line["workload"] in chosen for line in record["rows"]) for _, record, _ in measured)
    if not selector:
        return 0
    return sum(record.summary["scale"] == scale and _shows(record, selector) for record in records)


def _shows(record: Record, selector: str) -> bool:
    for part in selector.split(","):
        name, _, wanted = part.partition("=")
        if wanted == "*":
            if record.facts.get(name) is None:
                return False
        elif not record.matches({name: wanted.split("|")}):
            return False
    return True
