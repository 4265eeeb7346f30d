"""Print the lowest version that pyproject.toml allows of everything that dpexp needs, for pip.

Usage: python -m pip install $(python scripts/lowest.py)
"""

import re
import tomllib
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def lowest() -> list[str]:
    """``name==version`` for each dependency."""
    found = []
    for requirement in tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["dependencies"]:
        name, version = re.match(r"([\w.-]+)>=([\d.]+)", requirement).groups()
        found.append(f"{name}=={version}")
    return found


if __name__ == "__main__":
    print(*lowest())
