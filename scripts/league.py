"""Print what the league has to run (dpexp/reproduce/league.yaml), as a list for scripts/run_queue.py.

Usage: python scripts/league.py TASK [TASK ...] > list.txt
       python scripts/run_queue.py list.txt --fork --keep --to league

Twice: the first list tries the learning rates, the second one has the other seeds at the best of them. In the place of a TASK
`methods` stands for what is in no league (dpexp/reproduce/methods.yaml; --to methods).
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from dpexp.reproduce import league, methods, records  # noqa: E402
from dpexp.reproduce.paper import listed  # noqa: E402


def main() -> None:
    """Print the commands of the tasks that are named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", nargs="+", choices=(*listed("league")["tasks"], methods.NAME))
    parser.add_argument("--results", type=Path, default=ROOT / "results")
    given = parser.parse_args()
    for task in given.task:
        if task == methods.NAME:
            print(*methods.commands(records.load(given.results / methods.NAME)), sep="\n")
        else:
            print(*league.commands(task, records.load(given.results / league.NAME)), sep="\n")


if __name__ == "__main__":
    main()
