"""Each method that is not in the league, in one configuration: ``methods.yaml`` has the list, ``results/methods`` the records.

They show that a method trains, and what it spends. Nothing is ranked: nobody searched for their learning rates.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from dpexp.reproduce.documents import Document, Section, as_rows, number, page
from dpexp.reproduce.fillings import Filling, budget
from dpexp.reproduce.league import by_command
from dpexp.reproduce.paper import listed
from dpexp.reproduce.records import Record

NAME = "methods"


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

    def runs(self, records: Sequence[Record]) -> dict[int, Record]:
        """Seed -> its record, sorted."""
        own = by_command(records, self.command)
        return dict(sorted((int(record.facts["seed"]), record) for record in own))

    def left(self, records: Sequence[Record]) -> str:
        """The command of the seeds without a record; "" where all have one."""
        seeds = [str(seed) for seed in self.seeds if seed not in self.runs(records)]
        return f"{self.command} seed={','.join(seeds)}{' -m' if len(seeds) > 1 else ''}" if seeds else ""


def methods() -> list[Method]:
    """All of the list."""
    said = listed(NAME)
    found = []
    for name, own in said["methods"].items():
        own = {"seeds": said["seeds"]} | (own if isinstance(own, dict) else {"command": own})
        words = shlex.split(own["command"])
        words = words if words[0] == "python" else [*shlex.split(said["settings"]), *words]
        found.append(Method(name, shlex.join(words), tuple(own["seeds"])))
    return found


def commands(records: Sequence[Record]) -> list[str]:
    """What is still to run."""
    return [command for method in methods() if (command := method.left(records))]


def document(records: Sequence[Record]) -> Document:
    """A row for each method that has a record."""
    said = listed(NAME)
    found = {method: Filling.of(method.runs(records).values(), said["metric"]) for method in methods()}
    rows = as_rows(_row(method, filling) for method, filling in found.items() if filling)
    # of teachers' answers there is no training to run
    left = tuple(command for command in commands(records) if command.startswith("python -m dpexp.train "))
    words = listed("pages")[NAME]["block"]
    done = words.format(settings=said["settings"], complete=len(rows), total=len(found))
    section = Section("", (done,), rows=rows, scale="small", commands=left)
    return page(NAME, [section], otherwise=f"small {len(rows)} rows" if rows else "not run")


def _row(method: Method, filling: Filling) -> dict[str, object]:
    privacy = filling.record.summary["privacy"]
    return {
        "method": method.name, "ours": filling.said(), "n": len(filling.records), "to be spent": budget(filling.record),
        **{f"ε {name}": number(privacy["epsilon"].get(name)) for name in ("rdp", "pld")},
        "released": ", ".join(privacy["released"]), "steps": privacy["steps"], "seconds": f"{filling.seconds:.0f}",
        "command": method.command.removeprefix("python -m "), "record": filling.paths,
    }  # fmt: skip
