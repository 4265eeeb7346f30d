"""``python -m dpexp.report NAME``: a table or figure of a paper beside our own numbers, from the committed records.

Names: ``table-he-2``, ``figure-li-3``, ``accounting-li``, ``coverage``, …; ``tables``, ``figures``, ``all``; ``report`` is the
page with everything; ``list`` shows all names. ``run FOLDER [FOLDER ...]`` shows runs of your own and compares them; its
options: ``run --help``.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dpexp
from dpexp.config.usage import print_out, print_what_can_be, shipped
from dpexp.durable import disk_error
from dpexp.errors import INTERRUPTED, UserError
from dpexp.own_runs import page
from dpexp.reproduce import catalogue, site
from dpexp.reproduce.catalogue import Context
from dpexp.reproduce.documents import ARITHMETIC, Document

RESULTS = Path("results")
_KEEP = Path(__file__).resolve().parent.parent / "scripts" / "keep_record.py"


def main(arguments: list[str] | None = None) -> int:
    """Render what is asked for. Returns the exit status."""
    print_what_can_be()
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] == ["run"]:
        return _guarded(page.main, words[1:])
    parser = argparse.ArgumentParser(prog="python -m dpexp.report", description=__doc__)
    parser.add_argument("name", nargs="*", help="table-he-2, figure-li-3, tables, figures, all, report, list")
    parser.add_argument("--results", type=Path, default=RESULTS, help="default: %(default)s")
    parser.add_argument("--run", action="store_true", help="first run what has no record, at --scale")
    parser.add_argument(
        "--scale", default="small", choices=("small", "paper"), help="of --run; default: %(default)s"
    )
    return _guarded(_render, parser.parse_args(words))


def _guarded(act: Callable[[Any], int], given: Any) -> int:
    """The exit status of a function that may not like what it is given."""
    try:
        return act(given)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        told = error if isinstance(error, ValueError) else disk_error(error)
        if told is None:
            raise
        print(f"error: {told}", file=sys.stderr)
        return 2


def _render(given: argparse.Namespace) -> int:
    if not given.name:
        raise UserError(
            "not given: what to show. `dpexp report run FOLDER` is a page about a run of yours; `dpexp report table-he-2` a "
            "paper's table beside ours, and `dpexp report list` names all of them"
        )
    if "list" in given.name:
        print_out("\n".join([*catalogue.builders(), *catalogue.ALIASES, *catalogue.GROUPS, "report"]))
        return 0
    wants_page = "report" in given.name
    if given.results == RESULTS and not RESULTS.exists() and not _KEEP.exists():
        shutil.copytree(shipped("results"), RESULTS)
        print(f"{RESULTS}: made here, with the records that travel with dpexp {dpexp.__version__}")
    names = catalogue.resolve([name for name in given.name if name != "report"])
    context = Context(given.results)
    if given.run:
        for name in names:
            _fill(context.document(name), given.scale)
        # with the new records
        context = Context(given.results)
    for name in names:
        written = catalogue.write(context.document(name), given.results)
        print(f"{name}: written to {written[0].with_suffix('')}.*")
    if wants_page:
        print(f"report: written to {site.write(context)}")
    return 0


def _fill(document: Document, scale: str) -> None:
    """Run the commands that a document misses and keep their records; a run that fails is named, and the rest go on."""
    if not _KEEP.exists():
        raise UserError("--run keeps records of committed code alone: run it from a checkout of dpexp")
    folder = Path(os.environ.get("DPEXP_RUNS", "runs"))
    commands = document.commands(scale)
    if not commands:
        left = f"no training is left to run at scale={scale}; what else it takes stands on its page"
        why = "it is arithmetic" if document.status in ARITHMETIC else left
        print(f"{document.name}: nothing is run: {why}")
    for command in commands:
        print(f"{document.name}: {command}", flush=True)
        before = {path: path.stat().st_mtime_ns for path in _summaries(folder)}
        words = shlex.split(command)
        done = subprocess.run([sys.executable, *words[1:], f"runtime.runs_dir={folder}"], check=False)
        if done.returncode:
            print(
                f"{document.name}: failed with exit status {done.returncode}; its cells stay empty",
                file=sys.stderr,
            )
        for path in _summaries(folder):
            if before.get(path) != path.stat().st_mtime_ns:
                subprocess.run([sys.executable, str(_KEEP), str(path)], check=False)


def _summaries(folder: Path) -> list[Path]:
    """Of runs and of audits."""
    return sorted([*folder.glob("*/*/*/summary.json"), *folder.glob("audit/*/*/*/summary.json")])


if __name__ == "__main__":
    sys.exit(main())
