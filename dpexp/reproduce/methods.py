"""Each method that is not in the league, in one configuration: ``methods.yaml`` has the list, ``results/methods`` the records.

They show that a method trains, and what it spends. Nothing is ranked: nobody searched for their learning rates.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dpexp.reproduce.documents import Document, Rows, Section, as_rows, number, page
from dpexp.reproduce.fillings import Filling, budget, printed_factor
from dpexp.reproduce.league import settings_of
from dpexp.reproduce.paper import listed
from dpexp.reproduce.records import Record

NAME = "methods"
COLUMNS = (
    "method", "ours", "n", "to be spent", "ε rdp", "ε pld", "released", "steps", "seconds", "command", "record",
)  # fmt: skip


@dataclass(frozen=True)
class Method:
    """One row.

    Attributes:
        name: in the list.
        command: without its seeds.
        seeds: that are to be run.
    """

    name: str
    command: str
    seeds: tuple[int, ...]

    @property
    def words(self) -> set[str]:
        """The program, and all settings that are given to it."""
        return set(shlex.split(self.command))

    def runs(self, records: Sequence[Record]) -> dict[int, Record]:
        """Seed -> its record."""
        return {
            int(record.facts["seed"]): record
            for record in records
            if settings_of(record.summary["command"]) == settings_of(self.command)
        }


def methods() -> list[Method]:
    """All of the list."""
    said = listed(NAME)
    found = []
    for name, own in said["methods"].items():
        own = own if isinstance(own, Mapping) else {"command": f"{said['settings']} {own}"}
        found.append(
            Method(name, shlex.join(shlex.split(own["command"])), tuple(own.get("seeds", said["seeds"])))
        )
    return found


def commands(records: Sequence[Record]) -> list[str]:
    """What is still to run."""
    found = []
    for method in methods():
        if left := [seed for seed in method.seeds if seed not in method.runs(records)]:
            several = " -m" if len(left) > 1 else ""
            found.append(f"{method.command} seed={','.join(map(str, left))}{several}")
    return found


def document(records: Sequence[Record]) -> Document:
    """A row for each method that has a record."""
    rows: Rows = []
    for method in methods():
        if own := [record for _, record in sorted(method.runs(records).items())]:
            rows += as_rows(COLUMNS, [_row(method, own)])
    total = len(methods())
    # of teachers' answers there is no training to run
    left = [command for command in commands(records) if command.startswith("python -m dpexp.train ")]
    words = listed("pages")[NAME]
    done = words["block"].format(settings=listed(NAME)["settings"], complete=len(rows), total=total)
    section = Section("", (done,), COLUMNS, rows, "small", commands=tuple(left))
    return page(NAME, [section], COLUMNS, otherwise=f"small {len(rows)} rows" if rows else "not run")


def _row(method: Method, own: Sequence[Record]) -> tuple[str, ...]:
    metric = listed(NAME)["metric"]
    factor = printed_factor(metric)
    filling = Filling(tuple(own), tuple(factor * (record.metric(metric) or 0.0) for record in own), metric)
    privacy = filling.record.summary["privacy"]
    spread = "" if filling.std is None else f" ± {filling.std:.2f}"
    return (
        method.name, f"{filling.mean:.2f}{spread}", str(len(own)), budget(filling.record),
        *(number(privacy["epsilon"].get(name)) for name in ("rdp", "pld")), ", ".join(privacy["released"]),
        str(privacy["steps"]), f"{filling.seconds:.0f}", method.command.removeprefix("python -m "),
        ", ".join(f"results/methods/{record.name}" for record in own),
    )  # fmt: skip
