"""``python -m dpexp.conform``: which libraries clip which models exactly, refuse them, or are silently wrong."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from dpexp.config import hydra_entry
from dpexp.conform import render
from dpexp.conform.adapters import LIBRARIES, adapters, quiet
from dpexp.conform.case import Case
from dpexp.conform.classes import FAMILIES as CLASS_FAMILIES
from dpexp.conform.classes import class_case
from dpexp.conform.judge import Adapter, Reference, judge
from dpexp.conform.randomly import random_suite
from dpexp.conform.traps import FAMILIES as TRAP_FAMILIES
from dpexp.conform.traps import trap_case
from dpexp.durable import make_folder
from dpexp.errors import UserError, did_you_mean

SUITES = ("traps", "classes", "random", "all")


@dataclass
class ConformArguments:
    """The settings of ``conf/conform.yaml``."""

    suite: str = "all"
    library: str = "all"
    only: str | None = None
    engines: list[str] | None = None
    models: int = 200
    seed: int = 0
    fresh: bool = True
    out: str | None = "results/conform"


@hydra_entry("conform", ConformArguments)
def main(arguments: ConformArguments) -> None:
    """Ask libraries to clip models that hold a trap, and tabulate who is exact, who refuses, and who is wrong without a word.

    The exit status is 1 where one of dpexp's own engines is wrong or crashes.
    """
    console = Console(highlight=False, soft_wrap=True)
    if failed := conform(arguments, console):
        console.print(f"{failed} answers of dpexp are wrong, or errors that are no refusals", markup=False)
        sys.exit(1)


def conform(arguments: ConformArguments, console: Console) -> int:
    """Run the suites. Returns how many answers of dpexp are wrong, or errors that are no refusals.

    Raises:
        UserError: a suite, library or engine that there is not, or a name that no case contains.
    """
    if arguments.suite not in SUITES:
        raise UserError(f"suite={arguments.suite} is not a choice{did_you_mean(arguments.suite, SUITES)}")
    if arguments.models < 1:
        raise UserError(f"models={arguments.models} must be 1 or more")
    asked = _adapters(arguments)
    out = Path(arguments.out) if arguments.out else None
    if out is not None:
        make_folder(out, "out")
    with quiet():
        if arguments.suite == "random":
            return random_suite(asked, arguments.models, arguments.seed, out, console, fresh=arguments.fresh)
        suites = ("traps", "classes") if arguments.suite == "all" else (arguments.suite,)
        return sum(_suite(suite, asked, arguments, out, console) for suite in suites)


def _suite(
    suite: str, asked: list[Adapter], arguments: ConformArguments, out: Path | None, console: Console
) -> int:
    path = out / f"{suite}.json" if out else None
    rows = {} if arguments.fresh or path is None else render.read(path)
    found = 0
    for family, name in _names(suite, arguments.only):
        found += 1
        row = rows.setdefault(name, render.Row(name, family))
        missing = [adapter for adapter in asked if adapter.name not in row.cells]
        if missing:
            case = trap_case(name) if suite == "traps" else class_case(name)
            _ask(case, row, missing)
            if path is not None:
                render.write(path, suite, rows, complete=False)
        console.print(render.line(row), markup=False)
    if not found:
        raise UserError(f"only={arguments.only}: no case of suite={suite} has this in its name")
    if path is not None:
        render.write(path, suite, rows, complete=arguments.only is None)
    console.print("\n".join(render.totals(rows)), markup=False)
    return render.failed_cells(rows)


def _ask(case: Case, row: render.Row, asked: list[Adapter]) -> None:
    reference = Reference(case)
    for adapter in asked:
        row.add(adapter.name, judge(case, reference, adapter))


def _names(suite: str, only: str | None) -> Iterator[tuple[str, str]]:
    families = TRAP_FAMILIES if suite == "traps" else CLASS_FAMILIES
    for family, members in families.items():
        for name in members:
            if only is None or only.lower() in name.lower():
                yield family, name


def _adapters(arguments: ConformArguments) -> list[Adapter]:
    libraries = LIBRARIES if arguments.library == "all" else (arguments.library,)
    found = [adapter for library in libraries for adapter in adapters(library)]
    if arguments.engines is None:
        return found
    known = {adapter.name.split()[0] for adapter in adapters("dpexp")}
    if unknown := set(arguments.engines) - known:
        raise UserError(
            f"engines={sorted(unknown)[0]} is not an engine of dpexp: take {', '.join(sorted(known))}"
        )
    return [a for a in found if a.name.split()[0] in arguments.engines or a.name.startswith("opacus ")]


if __name__ == "__main__":
    main()
