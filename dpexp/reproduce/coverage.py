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

from dpexp.benchmark.workloads import WORKLOADS
from dpexp.config import conf_dir
from dpexp.reproduce import benchmarks
from dpexp.reproduce.benchmarks import Measurement
from dpexp.reproduce.documents import Document, Section, as_rows
from dpexp.reproduce.paper import FOLDER, PAPERS
from dpexp.reproduce.records import Record

STATUSES = ("exact", "tested", "paper", "small", "not run", "not built")
_TESTS = Path(__file__).parents[2] / "tests"
COLUMNS = ("paper", "kind", "name", "importance", "printed in", "status", "where", "note")


@cache
def listed() -> tuple[dict[str, str], ...]:
    """The rows of ``coverage.csv``."""
    with (FOLDER / "coverage.csv").open(encoding="utf-8", newline="") as file:
        return tuple(csv.DictReader(file))


def targets() -> set[str]:
    """The targets of which the matrix wants the status."""
    needs = (need for row in listed() for need in row["needs"].split())
    return {need.removeprefix("target:") for need in needs if need.startswith("target:")}


def document(
    statuses: Mapping[str, str], records: Sequence[Record], measured: Sequence[Measurement]
) -> Document:
    """The matrix, with a count for each paper.

    Args:
        statuses: of the `targets` that there are, in words: "exact", "small 2/8", "not run".
        records: of training runs.
        measured: benchmarks.
    """
    sections, counts = [], []
    for paper, title in PAPERS.items():
        own = (row | {"printed in": row["printed"]} for row in listed() if row["paper"] == paper)
        rows = [row | _status(row, statuses, records, measured) for row in own]
        sections.append(Section(title, (), COLUMNS[1:], rows))
        found = Counter(row["status"] for row in rows)
        counts.append((title, *(found[status] for status in STATUSES), found.total()))
    columns = ("of", *STATUSES, "rows")
    sections.insert(0, Section("Counts", (), columns, as_rows(columns, counts), in_csv=False))
    words = (
        "Every table, figure, algorithm and system that the four papers name. **exact**: arithmetic, computed again to the"
        " printed digit; **tested**: built, and the test that is named holds it against a formula, a naive twin or another"
        " implementation; **paper**, **small**: committed records at this scale (how many cells, in the column *where*);"
        " **not run**: built, without a committed record; **not built**: not in this repository (or a diagram, or samples).",
        "core: run or reported by that paper; quoted: its numbers are taken from elsewhere; described: explained or cited.",
        "The status is found out from the configuration files, the tests and the records.",
    )
    return Document("coverage", "Coverage of the four papers", words, tuple(sections), COLUMNS)


def _status(
    row: dict[str, str],
    statuses: Mapping[str, str],
    records: Sequence[Record],
    measured: Sequence[Measurement],
) -> dict[str, str]:
    """One of `STATUSES`, and in words where to look."""
    needs = row["needs"].split()
    pointers = [need for need in needs if need != "this"]
    if not needs or not all(_exists(need, statuses) for need in pointers):
        return {"status": "not built", "where": ""}
    own = [statuses[need.removeprefix("target:")] for need in pointers if need.startswith("target:")]
    where = [", ".join(need.partition(":")[2] for need in pointers)]
    counts = {scale: _runs(row, pointers, scale, records, measured) for scale in ("paper", "small")}
    where += [f"{scale}: {n} record{'s' if n > 1 else ''}" for scale, n in counts.items() if n]
    scale = next((s for s, n in counts.items() if n or any(f"{s} " in status for status in own)), "")
    if needs == ["this"] or (own and set(own) == {"exact"}):
        status = "exact"
    elif not own and any(need.startswith("test:") for need in needs):
        status = "tested"
    elif scale:
        status, where = scale, [*where, *own]
    else:
        status = "not built" if own and set(own) == {"not built"} else "not run"
    return {"status": status, "where": "; ".join(where)}


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
    row: Mapping[str, str], pointers: Sequence[str], scale: str, records: Sequence[Record],
    measured: Sequence[Measurement],
) -> int:  # fmt: skip
    """Committed records that show it in use; benchmarks count on the networks of that paper alone."""
    selector = row["runs"]
    workloads = {need.removeprefix("bench:") for need in pointers if need.startswith("bench:")}
    if workloads or selector == "bench":
        targets = [target for target in benchmarks.targets().values() if target.paper == row["paper"]]
        own = {w for target in targets for w, s in target.workloads.items() if s == scale}
        chosen = own & workloads if workloads else own
        return sum(any(line["workload"] in chosen for line in one.content["rows"]) for one in measured)
    asked = [part.partition("=") for part in filter(None, selector.split(","))]
    where = {name: wanted.split("|") for name, _, wanted in asked if wanted != "*"}
    known = [name for name, _, wanted in asked if wanted == "*"]
    return sum(
        record.matches(where | {"scale": scale}) and all(record.facts.get(name) is not None for name in known)
        for record in (records if asked else ())
    )
