"""The tables of the conformance suite: one JSON file with every cell, and a page that people read."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from dpexp import __version__
from dpexp.conform.judge import FAILURES, VERDICTS, Verdict
from dpexp.durable import write_atomic
from dpexp.provenance import code_hash

ENGINE = Path(__file__).parents[1] / "clipping"
PACKAGES = ("torch", "transformers", "timm", "peft", "opacus")
COLUMNS = {
    "dpexp, flat": r"(?!opacus (hooks|fast|ghost)).* flat",
    "dpexp, per layer": r".* layer",
    "Opacus, hooks": "opacus hooks",
    "Opacus, fast gradient": "opacus fast gradient",
    "Opacus, ghost": "opacus ghost",
}
TITLES = {
    "traps": "Models that each hold one trap",
    "classes": "Classes of transformers, timm and peft, tiny and random",
}


@dataclass
class Row:
    """One case.

    Attributes:
        cells: adapter -> ``[verdict, error, sensitivity]``, in units of C.
        said: adapter -> what it said; one adapter for each different message.
    """

    name: str
    family: str
    cells: dict[str, list[Any]] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)

    def add(self, adapter: str, verdict: Verdict) -> None:
        """Add a cell."""
        self.cells[adapter] = [verdict.verdict, _short(verdict.error), _short(verdict.sensitivity)]
        known = {message[:60] for message in self.said.values()}
        if verdict.message and verdict.message[:60] not in known:
            self.said[adapter] = verdict.message[:240]


def read(path: Path) -> dict[str, Row]:
    """Rows of an earlier run of the same versions; none where there is no file, or another one."""
    if not path.exists():
        return {}
    stored = json.loads(path.read_text(encoding="utf-8"))
    if stored["versions"] != versions():
        return {}
    return {row["name"]: Row(**row) for row in stored["rows"]}


def write(path: Path, suite: str, rows: Mapping[str, Row], *, complete: bool) -> None:
    """Write SUITE.json, and SUITE.md if the suite is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(vars(row), ensure_ascii=False) for row in rows.values())
    facts = json.dumps(
        {"suite": suite, "versions": versions(), "command": f"python -m dpexp.conform suite={suite}"}
    )
    write_atomic(path, f'{facts[:-1]}, "rows": [\n{lines}\n]}}\n')
    if complete:
        write_atomic(path.with_suffix(".md"), page(suite, rows))


def page(suite: str, rows: Mapping[str, Row]) -> str:
    """The table in Markdown: totals, the cases by family, and what was said about wrong cells and crashes."""
    used = ", ".join(f"{name} {version}" for name, version in versions().items())
    lines = [
        f"# {TITLES[suite]}", "",
        f"Made by `make conform`; {len(rows)} cases, each in up to {_width(rows)} cells. {used}; CPU, tiny random models, "
        "float64 unless the case is about another precision.", "",
        "*exact*: at most 1e-5 C from the sum of clipped gradients of one example at a time, no example moves the sum by more "
        "than C(1 + 1e-5), no buffer depends on the examples (cases of 16 bits or of cancellation have tolerances of their "
        "own: `dpexp/conform/traps/steps.py`). *refused*: an error of the library's own that names the part. *crash*: "
        "another error. **wrong**: a number that is neither, without a word, and how far one example moves the sum.", "",
        f"Engines asked in every row: {', '.join(_everywhere(rows))}; in some rows others as well, named in the JSON file.", "",
        *totals(rows), "",
    ]  # fmt: skip
    columns = [
        name for name, pattern in COLUMNS.items() if any(_matching(row, pattern) for row in rows.values())
    ]
    for family in dict.fromkeys(row.family for row in rows.values()):
        lines += [
            f"## {family[:1].upper()}{family[1:]}",
            "",
            f"| | {' | '.join(columns)} |",
            "|---" * (len(columns) + 1) + "|",
        ]
        for row in rows.values():
            if row.family == family:
                cells = [_cell(_matching(row, COLUMNS[name])) for name in columns]
                lines.append(f"| {row.name} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def totals(rows: Mapping[str, Row]) -> list[str]:
    """One line for each column."""
    lines = []
    for column, pattern in COLUMNS.items():
        cells = [cell for row in rows.values() for cell in _matching(row, pattern).values()]
        if not cells:
            continue
        counts = Counter(cell[0] for cell in cells)
        shares = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS)
        exact = [cell for cell in cells if cell[0] == "exact"]
        error = max((cell[1] or 0.0 for cell in exact), default=0.0)
        lines.append(f"- {column}: {shares}; the exact ones are within {error:.1e} C")
    return lines


def line(row: Row) -> str:
    """A case in one line, for the terminal."""
    cells = {name: _matching(row, pattern) for name, pattern in COLUMNS.items()}
    other = {k: v for k, v in row.cells.items() if not any(k in found for found in cells.values())}
    shown = [
        f"{name}: {_cell(found)}"
        for name, found in {**cells, **{k: {k: v} for k, v in other.items()}}.items()
        if found
    ]
    return f"{row.name} | {' | '.join(shown)}"


def failed_cells(rows: Mapping[str, Row]) -> int:
    """How many cells of dpexp are wrong, or an error that is no refusal."""
    ours = [COLUMNS["dpexp, flat"], COLUMNS["dpexp, per layer"]]
    return sum(
        cell[0] in FAILURES for row in rows.values() for p in ours for cell in _matching(row, p).values()
    )


def versions() -> dict[str, str]:
    """Of what the verdicts depend on: our version, a hash of the engine's sources, and the packages."""
    own = {"dpexp": __version__, "engine": code_hash(ENGINE)[:12]}
    return own | {name: metadata.version(name) for name in PACKAGES}


def _matching(row: Row, pattern: str) -> dict[str, list[Any]]:
    return {name: cell for name, cell in row.cells.items() if re.fullmatch(pattern, name)}


def _cell(cells: Mapping[str, list[Any]]) -> str:
    """``exact``, or how many engines came to what."""
    counts = Counter(cell[0] for cell in cells.values())
    parts = []
    for verdict in VERDICTS:
        if not counts[verdict]:
            continue
        text = f"**{verdict}**" if verdict == "wrong" else verdict
        if verdict == "wrong":
            moved = max((cell[2] or 0.0 for cell in cells.values() if cell[0] == verdict), default=0.0)
            text += f" ({moved:.2f} C)"
        if len(counts) > 1:
            names = sorted(name.rpartition(" ")[0] for name, cell in cells.items() if cell[0] == verdict)
            text += f" {counts[verdict]}" + (
                f" ({', '.join(names)})" if len(names) <= 3 and verdict != "exact" else ""
            )
        parts.append(text)
    return ", ".join(parts) or "not asked"


def _everywhere(rows: Mapping[str, Row]) -> list[str]:
    """Engines of dpexp that every row has a cell of."""
    cells = [row.cells for row in rows.values()]
    return [
        name.removesuffix(" flat")
        for name in cells[0]
        if name.endswith(" flat") and all(name in c for c in cells)
    ]


def _width(rows: Mapping[str, Row]) -> int:
    return max((len(row.cells) for row in rows.values()), default=0)


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")
