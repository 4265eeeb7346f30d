"""Copy the summary of a run that counts into results/runs, without the folders of the machine that it ran on.

Usage: python scripts/keep_record.py runs/TASK/SIGNATURE/seedK/summary.json [...]
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent.parent / "results" / "runs"
FOLDER = re.compile(r"(?<![\w.])/(?:[\w.+-]+/)*([\w.+-]+)")  # an absolute path; its last part stays


def without_folders(value: Any) -> Any:
    """The same with every absolute path cut to its last part."""
    if isinstance(value, dict):
        return {key: without_folders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_folders(item) for item in value]
    return FOLDER.sub(r"\1", value) if isinstance(value, str) else value


def keep(path: Path) -> Path:
    """Check that a summary can count, and copy it."""
    summary = json.loads(path.read_text(encoding="utf-8"))
    if summary["status"] != "finished":
        sys.exit(f"error: {path}: status is {summary['status']}; finish the run first")
    if summary["git"]["commit"] is None or summary["git"]["dirty"]:
        sys.exit(f"error: {path}: the code of this run is in no commit; run it from a clean checkout")
    epsilon = summary["details"]["config"]["privacy"]["epsilon"]
    parts = [summary["task"], summary["model"], summary["clip"], summary["scale"]]
    parts += [
        f"eps{epsilon:g}" if epsilon else "noeps",
        summary["details"]["signature"],
        f"seed{summary['seed']}",
    ]
    RESULTS.mkdir(parents=True, exist_ok=True)
    target = RESULTS / ("-".join(parts) + ".json")
    target.write_text(
        json.dumps(without_folders(summary), indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    return target


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    for name in sys.argv[1:]:
        print(keep(Path(name)))
