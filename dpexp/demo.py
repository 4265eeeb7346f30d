"""``python -m dpexp.demo``: the main job in miniature, and the same few steps through Opacus beside ours.

Each run is a process of its own, as a person would start it, so that its peak memory is its own too.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dpexp.config import compose, run_folder
from dpexp.privacy.shown import upwards
from dpexp.statement import ACCOUNTANTS

JOB = ("task=sst2", "clip=adaptive_perlayer", "scale=demo")
STEPS, PHYSICAL = 8, 64
COMPARED = ("optim.epochs=null", f"optim.steps={STEPS}", f"runtime.physical_batch_size={PHYSICAL}")
ENGINES = ("auto", "opacus")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demonstration. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m dpexp.demo", description=__doc__)
    parser.add_argument(
        "--runs-dir", default="runs/demo", help="where the runs' folders go (default: %(default)s)"
    )
    runs_dir = f"runtime.runs_dir={parser.parse_args(arguments).runs_dir}"
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        "This demonstration trains a tiny BERT with random weights on SYNTHETIC sentences that are embedded in the "
        "package.\nIt shows that everything works; its accuracy says nothing about a real task.\n"
    )
    trained = launch([*JOB, runs_dir])
    console.print(
        f"\nThe first {STEPS} steps again, through our engine and through Opacus, which keeps a gradient of each example: "
        f"{PHYSICAL} examples at once, a minute or two ..."
    )
    compared = {
        engine: launch([*JOB, *COMPARED, f"engine={engine}", runs_dir], quiet=True) for engine in ENGINES
    }
    console.print()
    console.print(result_table(trained))
    console.print(comparison_table(compared))
    console.print("The data is synthetic and embedded. The records:")
    for summary in (trained, *compared.values()):
        console.print(f"  {summary['folder'] / 'summary.json'}", markup=False)
    return 0


def launch(overrides: Sequence[str], quiet: bool = False) -> dict[str, Any]:
    """`python -m dpexp.train` with these settings, in a process of its own. Returns its summary and its `folder`.

    A failed run ends this process too, with the run's own output and exit status.
    """
    command = [sys.executable, "-m", "dpexp.train", *overrides]
    output = subprocess.PIPE if quiet else None
    done = subprocess.run(command, stdout=output, stderr=output, text=True, check=False)
    if done.returncode:
        sys.stderr.write((done.stdout or "") + (done.stderr or ""))
        sys.exit(done.returncode)
    folder: Path = run_folder(compose(overrides))
    return json.loads((folder / "summary.json").read_text(encoding="utf-8")) | {"folder": folder}


def result_table(summary: dict[str, Any]) -> Table:
    """Accuracy, and ε under every accountant."""
    privacy = summary["privacy"]
    table = Table(title="adaptive per-layer clipping on synthetic data", show_header=False)
    for name, value in summary["metrics"].items():
        table.add_row(name, f"{value:.4f}")
    for name in ACCOUNTANTS:
        note = {privacy["accountant"]: "decides", "gdp": "approximation"}.get(name, "")
        table.add_row(f"ε {name}", upwards(privacy["epsilon"][name]), note)
    table.add_row("δ", upwards(privacy["delta"], ".3g"))
    return table


def comparison_table(summaries: dict[str, dict[str, Any]]) -> Table:
    """Speed and peak memory, engine by engine."""
    table = Table(
        "engine",
        "examples/s",
        "seconds per step",
        "peak memory MiB",
        title=f"the same {STEPS} steps, {PHYSICAL} examples at once",
        caption="one after the other, so whatever else the machine did shows here; dpexp bench measures them in turns",
    )
    for engine, summary in summaries.items():
        numbers = summary["performance"]
        table.add_row(
            "ours" if engine == "auto" else engine,
            f"{numbers['examples_per_s']:.0f}",
            f"{numbers['step_s']:.3f}",
            f"{numbers['peak_memory_mib']:.0f}",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
