"""Print what the league has to run (dpexp/reproduce/league.yaml), as a list for scripts/run_queue.py.

Usage: python scripts/league.py TASK [TASK ...] > list.txt
       python scripts/run_queue.py list.txt --fork --keep --to league

Twice: the first list tries the learning rates, the second one has the other seeds at the best of them.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from dpexp.reproduce import league, records  # noqa: E402
from dpexp.reproduce.paper import listed  # noqa: E402


def main() -> None:
    """Print the commands of the tasks that are named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", nargs="+", choices=tuple(listed("league")["tasks"]))
    parser.add_argument("--results", type=Path, default=ROOT / "results" / "league")
    given = parser.parse_args()
    kept = records.load(given.results)
    for task in given.task:
        print(*league.commands(task, kept), sep="\n")


if __name__ == "__main__":
    main()
