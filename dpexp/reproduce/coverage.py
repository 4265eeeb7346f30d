"""The coverage matrix: every table, figure, algorithm and system that the four papers name, and how far it is reproduced.

``coverage.csv`` is the list; the status of each row is found out, never written down:

* needs: what must exist, separated by spaces. ``conf:clip/flat`` (a choice), ``glob:experiment/he2023_*`` (some choice),
  ``code:package.module[:word]`` (a module, and a word in it), ``bench:mlp`` (a workload), ``target:table-he-2`` (its own
  status counts); ``exact``: it is held by tests against a naive twin or a formula, so that being built is being exact;
  ``this``: this list; ``missing`` and ``diagram``: nothing to point at.
* runs: settings of the records that show it in use, ``clip=flat,privacy.epsilon=*``; ``a|b``: either; ``bench``: benchmarks.
"""

from __future__ import annotations

import csv
import importlib.util
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from dpexp.benchmark.workloads import WORKLOADS
from dpexp.config import conf_dir
from dpexp.reproduce import benchmarks, catalogue
from dpexp.reproduce.documents import Document, Rows, Section
from dpexp.reproduce.paper import PAPERS
from dpexp.reproduce.records import Record

STATUSES = ("exact", "paper", "small", "not run", "not built")
COLUMNS = ("paper", "kind", "name", "importance", "printed in", "status", "where", "note")


@cache
def listed() -> tuple[dict[str, str], ...]:
    """The rows of ``coverage.csv``."""
    with (Path(__file__).parent / "coverage.csv").open(encoding="utf-8", newline="") as file:
        return tuple(csv.DictReader(file))


def document(context: catalogue.Context) -> Document:
    """The matrix, with a count for each paper."""
    statuses = _target_statuses(context)
    rows: Rows = []
    for row in listed():
        status, where = _status(row, context, statuses)
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
        "Every table, figure, algorithm and system that the four papers name. **exact**: computed, or held by tests against a"
        " formula or a naive twin; **paper**, **small**: committed records at this scale (how many cells, in the column *where*);"
        " **not run**: built, without a committed record; **not built**: not in this repository (or a diagram, or samples).",
        "core: run or reported by that paper; quoted: its numbers are taken from elsewhere; described: explained or cited.",
        "The status is found out from the configuration files, the modules and the records."
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


def _target_statuses(context: catalogue.Context) -> dict[str, str]:
    """Target -> its status in words; targets that are arithmetic need not be computed for it."""
    wanted = {
        part.removeprefix("target:")
        for row in listed()
        for part in row["needs"].split()
        if part.startswith("target:")
    }
    known = catalogue.builders()
    return {
        name: "exact" if name in catalogue.EXACT else context.document(name).status
        for name in sorted(wanted & known.keys())
    }


def _status(row: dict[str, str], context: catalogue.Context, targets: dict[str, str]) -> tuple[str, str]:
    """One of `STATUSES`, and in words where to look."""
    needs = row["needs"].split()
    exact = "exact" in needs or needs == ["this"]
    pointers = [need for need in needs if need not in ("exact", "this")]
    missing = [need for need in pointers if not _exists(need, targets)]
    if missing or not needs:
        return "not built", ""
    own = [targets[need.removeprefix("target:")] for need in pointers if need.startswith("target:")]
    where = ", ".join(need.partition(":")[2] for need in pointers)
    found = {scale: count for scale in ("paper", "small") if (count := _runs(row, pointers, scale, context))}
    for scale, count in found.items():
        where += f"; {scale}: {count} record{'s' if count > 1 else ''}"
    if exact or "exact" in own:
        return "exact", where
    for scale in ("paper", "small"):
        if scale in found or any(f"{scale} " in status for status in own):
            return scale, f"{where}{'; ' + '; '.join(own) if own else ''}"
    return ("not built" if own and all(s == "not built" for s in own) else "not run"), where


def _exists(need: str, targets: dict[str, str]) -> bool:
    kind, _, name = need.partition(":")
    if kind == "conf":
        return (conf_dir() / f"{name}.yaml").is_file()
    if kind == "glob":
        return any(conf_dir().glob(f"{name}.yaml"))
    if kind == "bench":
        return name in WORKLOADS
    if kind == "target":
        return name in targets
    if kind == "code":
        return _module_has(*name.partition(":")[::2])
    return False


@cache
def _module_has(module: str, word: str) -> bool:
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return False
    if spec is None:
        return False
    if not word:
        return True
    return spec.origin is not None and word in Path(spec.origin).read_text(encoding="utf-8")


def _runs(row: dict[str, str], pointers: Sequence[str], scale: str, context: catalogue.Context) -> int:
    """Committed records that show it in use; benchmarks count on the networks of that paper alone."""
    selector = row["runs"]
    workloads = {need.removeprefix("bench:") for need in pointers if need.startswith("bench:")}
    if workloads or selector == "bench":
        targets = [target for target in benchmarks.TARGETS.values() if target.paper == row["paper"]]
        own = {w for target in targets for w, s in target.workloads.items() if s == scale}
        chosen = own & workloads if workloads else own
        return sum(
            any(line["workload"] in chosen for line in record["rows"]) for _, record, _ in context.benchmarks
        )
    if not selector:
        return 0
    return sum(record.summary["scale"] == scale and _shows(record, selector) for record in context.records)


def _shows(record: Record, selector: str) -> bool:
    for part in selector.split(","):
        name, _, wanted = part.partition("=")
        if wanted == "*":
            if record.facts.get(name) is None:
                return False
        elif not record.matches({name: wanted.split("|")}):
            return False
    return True
