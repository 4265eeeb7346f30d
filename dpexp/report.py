"""``python -m dpexp.report NAME``: a table beside the paper's own numbers, from the committed records.

Names: ``accounting-li`` (the ε columns of Li et al.), ``complexity-bu`` (Tables 4, 5, 8 and Figure 7 of Bu et al.), ``runs``
(the committed training records), or ``all``.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from dpexp.checks import did_you_mean
from dpexp.reproduce import accounting, complexity_tables, runs


def main(arguments: list[str] | None = None) -> int:
    """Render what is asked for. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m dpexp.report", description=__doc__)
    parser.add_argument("name", nargs="+", help="accounting-li, complexity-bu, runs, or all")
    parser.add_argument("--results", type=Path, default=Path("results"), help="default: %(default)s")
    given = parser.parse_args(arguments)
    tables = given.results / "tables"
    tables.mkdir(parents=True, exist_ok=True)
    reports: dict[str, Callable[[], None]] = {
        "accounting-li": lambda: accounting.main(tables),
        "complexity-bu": lambda: complexity_tables.main(tables),
        "runs": lambda: runs.main(tables, given.results / "runs"),
    }
    names = list(reports) if "all" in given.name else given.name
    for name in names:
        if name not in reports:
            print(f"error: no report is called {name}{did_you_mean(name, list(reports))}", file=sys.stderr)
            return 2
    for name in names:
        try:
            reports[name]()
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        print(f"{name}: written to {tables}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
