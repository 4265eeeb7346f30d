"""``python -m dpexp.bench``: speed and memory of clipping methods relative to training without privacy, in one interleaved run.

Every method is a process of its own, so that its peak memory is its own; they take turns, and one computes at a time.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from dpexp import native
from dpexp.benchmark.measure import Protocol, measure
from dpexp.benchmark.methods import ENGINE, LEAN, chosen_methods
from dpexp.benchmark.noise import NOISE, measure_noise, noise_table
from dpexp.benchmark.ranks import RANKS, measure_ranks
from dpexp.benchmark.ranks_page import ranks_table, write_ranks
from dpexp.benchmark.render import overview, workload_table, write
from dpexp.benchmark.workloads import SIZES, workload_named
from dpexp.config import hydra_entry
from dpexp.durable import make_folder, write_json
from dpexp.errors import INTERRUPTED, UserError, did_you_mean
from dpexp.provenance import code_hash, command_line, git_state, hardware, versions

_DEVICES = ("cpu", "cuda")
_PRECISIONS = ("fp32", "bf16")
_CHECKS = ("tiny", "same", "none")


@dataclass
class BenchArguments(Protocol):
    """The settings of ``conf/bench.yaml``, where each is explained."""

    workloads: list[str] = field(default_factory=list)
    methods: list[str] = field(default_factory=list)
    native: bool = True
    max_batch: bool = False
    out: str = "runs/bench/latest"


def bench(arguments: BenchArguments, console: Console) -> dict[str, Any]:
    """Measure, print and write. Returns the record; what was measured before an interruption is kept.

    Raises:
        UserError: settings that make no measurement.
    """
    methods = _check(arguments)
    if not arguments.native:
        # the workers inherit it
        os.environ["DPEXP_NATIVE"] = "0"
    elif arguments.device == "cpu" and native.kernels() is None:
        console.print("there are no native kernels, so pure torch is measured")
    out, started = Path(arguments.out), time.monotonic()
    make_folder(out.parent, "out")
    record: dict[str, Any] = {
        "kind": "bench",
        "name": out.name,
        "settings": asdict(arguments) | {"methods": methods},
        "rows": [],
        "seconds": {},
        "stolen": {},
        "hardware": {},
        "versions": versions(),
        "git": git_state(),
        "code": code_hash(),
        "engine": ENGINE,
        "command": command_line(),
        "status": "running",
    }
    try:
        if NOISE in arguments.workloads:
            record["noise"] = measure_noise(arguments.rounds)
            record["hardware"] = hardware(torch.device("cpu"))
            console.print(noise_table(record["noise"]))
        for name in arguments.workloads:
            plain, _, processes = name.partition("@")
            if plain in RANKS:
                size = RANKS[plain] if arguments.size == "full" else arguments.size
                record.setdefault("ranks", []).extend(
                    measure_ranks(
                        size, arguments.rounds, arguments.steps, int(processes or 2), arguments.noise
                    )
                )
                record["hardware"] = hardware(torch.device("cpu"))
                console.print(ranks_table(record["ranks"]))
                write_ranks(record["ranks"], out)
        for workload in (name for name in arguments.workloads if not is_special(name)):
            with console.status("", spinner="dots") as status:
                measured = measure(workload, methods, arguments, arguments.max_batch, status.update).to_dict()
            record["rows"] += measured["rows"]
            record["seconds"][workload] = measured["seconds"]
            record["stolen"][workload] = measured["stolen"]
            record["hardware"] = measured["hardware"] or record["hardware"]
            record["wall_s"] = round(time.monotonic() - started, 1)
            console.print(workload_table(measured["rows"], arguments.precision))
            if (measured["stolen"] or 0.0) > 0.01:
                console.print(
                    f"the host of this machine took {measured['stolen']:.0%} of the processors' time meanwhile: ratios of "
                    "fastest steps tell more than medians, and small differences tell nothing"
                )
            # a long measurement loses one workload at most
            write(record, out)
        record["status"] = "finished"
    except KeyboardInterrupt:
        record["status"] = "interrupted"
        console.print("interrupted: what follows is what was measured until then")
    if ("noise" in record or "ranks" in record) and not record["rows"]:
        record["wall_s"] = round(time.monotonic() - started, 1)
        write_json(out.with_name(f"{out.name}.json"), record)
        console.print(f"written: {out}.json", markup=False)
    if record["rows"]:
        written = write(record, out)
        console.print(overview(record))
        console.print(f"written: {', '.join(map(str, written))}", markup=False)
    return record


def is_special(name: str) -> bool:
    """Whether a name stands in the place of a workload for something that has a measurement of its own."""
    plain, _, number = name.partition("@")
    return name == NOISE or (plain in RANKS and (not number or (number.isdecimal() and int(number) > 1)))


def _check(arguments: BenchArguments) -> list[str]:
    if not arguments.workloads:
        raise UserError("workloads=[] names nothing to measure")
    for name in arguments.workloads:
        if not is_special(name):
            workload_named(name)
    for key, value, choices in (
        ("size", arguments.size, SIZES),
        ("device", arguments.device, _DEVICES),
        ("precision", arguments.precision, _PRECISIONS),
        ("check", arguments.check, _CHECKS),
    ):
        if value not in choices:
            raise UserError(f"{key}={value} is not a choice{did_you_mean(value, choices)}")
    for key in ("rounds", "steps", "seconds", "threads", "patience", "batch", "memory_gib"):
        value = getattr(arguments, key)
        if value is not None and not value > 0:
            raise UserError(f"{key}={value} must be larger than 0")
    if arguments.noise < 0 or not 0 <= arguments.resolution < 1:
        raise UserError("noise must be 0 or larger, and resolution in [0, 1)")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise UserError("device=cuda: no GPU is available here; use device=cpu")
    if arguments.max_batch and arguments.device == "cpu" and arguments.memory_gib is None:
        raise UserError(
            "max_batch=true on a CPU needs memory_gib=…, the resident memory that one process may take"
        )
    methods = chosen_methods(arguments.methods)
    lean = [method for method in methods if method.endswith(LEAN)]
    if lean and arguments.compile:
        raise UserError(
            f"methods=[{lean[0]}] with compile=true: the lean losses hook into the network, which a compiled one does not see; "
            "leave one of them out"
        )
    return methods


@hydra_entry("bench", BenchArguments)
def main(arguments: BenchArguments) -> None:
    """Speed and memory of clipping methods relative to training without privacy."""
    console = Console(highlight=False)
    if not console.is_terminal:
        # a log file has no width of its own
        console = Console(highlight=False, width=180)
    if bench(arguments, console)["status"] == "interrupted":
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
