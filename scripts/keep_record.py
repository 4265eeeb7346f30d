"""Copy the summary of a run that counts into results/runs, without the folders of the machine that it ran on, and with a
thinned curve of what it logged on its way: dev metrics, and quantiles of the norms where they were written. An audit goes to
results/audits: its data hold canaries, and its metrics belong in no table of training runs. The record of a script of
docs/examples goes to results/examples, one of PATE to results/pate, and with `--to league` a run of the league to results/league.

Usage: python scripts/keep_record.py [--to FOLDER] runs/TASK/SIGNATURE/seedK [...]
"""

import argparse
import json
import math
import re
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from dpexp.durable import json_lines, read_json  # noqa: E402

RESULTS = ROOT / "results"
# updates whose ratio of signal to noise is averaged (Li et al. 2022, Figure 3)
EARLY = 30
# an absolute path; its last part stays
FOLDER = re.compile(r"(?<![\w.])/(?:[\w.+-]+/)*([\w.+-]+)")


def without_folders(value: Any) -> Any:
    """The same with every absolute path cut to its last part."""
    if isinstance(value, dict):
        return {key: without_folders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_folders(item) for item in value]
    return FOLDER.sub(r"\1", value) if isinstance(value, str) else value


def curves(log: Path) -> dict[str, Any]:
    """``{"dev": [{"step", "time_s", "dev"}], "norms": {"quantiles", "groups", "points", "not_private"}, "signal_to_noise":
    {"mean", "updates", "not_private"}}`` of a metrics.jsonl.

    Norms and ratios are computed on private data without noise. They are kept because the data of a committed run are public,
    and say so.
    """
    dev: list[dict[str, Any]] = []
    points: list[dict[str, Any]] = []
    shape: dict[str, Any] = {}
    signals: list[float] = []
    time_s = 0.0
    for entry in json_lines(log):
        time_s = entry.get("time_s", time_s)
        if "dev" in entry:
            dev.append({"step": entry["step"], "time_s": time_s, "dev": entry["dev"]})
        if "norm_quantiles" in entry:
            found = entry["norm_quantiles"]
            shape = {"quantiles": found["quantiles"], "groups": found["groups"]}
            rounded = [[float(f"{value:.4g}") for value in values] for values in found["values"]]
            points.append({"step": entry["step"], "values": rounded})
        if "signal_to_noise" in entry and entry["step"] <= EARLY:
            signals.append(entry["signal_to_noise"])
    kept: dict[str, Any] = {"dev": thinned(dev)} if dev else {}
    if points:
        kept["norms"] = shape | {"points": thinned(points), "not_private": True}
    if signals:
        mean = float(f"{statistics.fmean(signals):.4g}")
        kept["signal_to_noise"] = {"mean": mean, "updates": len(signals), "not_private": True}
    return kept


def thinned(points: list[Any], most: int = 24) -> list[Any]:
    """At most so many of the points, evenly, the first and the last among them."""
    if len(points) <= most:
        return points
    step = (len(points) - 1) / (most - 1)
    return [points[math.floor(i * step + 0.5)] for i in range(most)]


def keep(path: Path, folder: str = "") -> Path:
    """Check that a summary can count, and copy it to a folder of results: its own unless one is named."""
    if not (summary := read_json(path)).get("git"):
        sys.exit(f"error: {path}: there is no record, or a damaged one")
    if summary.get("status", "finished") != "finished":
        sys.exit(f"error: {path}: status is {summary['status']}; finish the run first")
    if summary["git"]["commit"] is None or summary["git"]["dirty"]:
        sys.exit(f"error: {path}: the code of this run is in no commit; run it from a clean checkout")
    if "example" in summary:
        return write(RESULTS / "examples" / f"{Path(summary['example']).stem}.json", summary)
    if kept := curves(path.with_name("metrics.jsonl")):
        summary["curves"] = kept
    epsilon = summary["details"]["config"]["privacy"]["epsilon"]
    parts = [summary["task"], summary["model"], summary["clip"], summary["scale"]]
    parts += [
        f"eps{epsilon:g}" if epsilon else "noeps",
        summary["details"]["signature"],
        f"seed{summary['seed']}",
    ]
    pate = summary["details"].get("method") == "pate"
    folder = folder or ("audits" if "audit" in summary else "pate" if pate else "runs")
    return write(RESULTS / folder / ("-".join(parts) + ".json"), summary)


def write(target: Path, summary: dict[str, Any]) -> Path:
    """Write a record without the folders of this machine. Returns where."""
    target.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(without_folders(summary), indent=2, ensure_ascii=False)
    target.write_text(f"{text}\n", encoding="utf-8")
    return target


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("summary", nargs="+", type=Path)
    parser.add_argument("--to", default="", help="the folder of results, where it is not its own")
    given = parser.parse_args()
    for name in given.summary:
        print(keep(name / "summary.json" if name.is_dir() else name, given.to))
