"""``make gpu``: what only a GPU can tell, in one command of at most nine minutes; ``results/gpu/record.json`` is the record.

Parts run one after the other, each a process of its own with a limit; a part that fails, is cut off or lacks something is named
with its reason, and the others go on. What a benchmark had measured before its limit is kept. ``--rehearse`` runs the same parts
with tiny sizes on the CPU: that this command works is tested where there is no GPU.

A machine without a package registry takes the missing packages along: ``make gpu-wheels`` downloads them into
``.wheels``, and ``make gpu`` reads that folder. torch is the one that is there.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpexp.config.usage import shipped
from dpexp.durable import read_json, write_json

# of all parts; starting and writing take the rest of nine minutes
LIMIT_S = 525.0
# characters of a part's output that are kept
TAIL = 2000
WORKLOADS = ("mlp", "wrn", "vit", "roberta", "gpt2", "gpt2_tied", "gpt2_lora")
METHODS = ("auto/layer", "auto/flat", "opacus:flat", "opacus:ghost")
# what a GPU image with torch and transformers usually lacks
WHEELS = (
    "absl-py", "antlr4-python3-runtime", "attrs", "dm-tree", "dp-accounting", "hydra-core", "iniconfig", "omegaconf", "opacus",
    "opt-einsum", "packaging", "peft", "pluggy", "prv-accountant", "psutil", "pytest", "rich", "markdown-it-py", "mdurl",
    "pygments", "hypothesis", "sortedcontainers", "wrapt", "mpmath", "accelerate",
)  # fmt: skip


@dataclass(frozen=True)
class Part:
    """One of the things to do.

    Attributes:
        name: in the record.
        command: what follows ``python -m``.
        seconds: after which it is stopped; what is left of the whole is another limit.
        record: the file that the command leaves, without its ending; None where its output says all.
        needs: modules without which it is skipped.
        data: a file below ``DPEXP_DATA`` without which it is skipped.
    """

    name: str
    command: tuple[str, ...]
    seconds: float
    record: str | None = None
    needs: tuple[str, ...] = ()
    data: str | None = None

    def missing(self, data: str | None) -> str | None:
        """Why it is skipped, or None."""
        if lacking := [name for name in self.needs if importlib.util.find_spec(name) is None]:
            return f"not installed: {', '.join(lacking)}"
        if self.data and not (data and list(Path(data).glob(f"{self.data}*"))):
            return f"DPEXP_DATA has no {self.data}"
        return None


def parts(work: Path, rehearse: bool) -> list[Part]:
    """What is done, in the order of what matters most.

    Args:
        work: a folder for what the commands write.
        rehearse: tiny, on the CPU.
    """
    tests, device, size, rounds = shipped("tests"), "cuda", "full", 5
    workloads: Sequence[str] = WORKLOADS
    methods: Sequence[str] = METHODS
    precisions: Sequence[str] = ("bf16", "fp32")
    if rehearse:
        device, size, rounds = "cpu", "tiny", 1
        workloads, methods, precisions = ("mlp",), ("auto/flat",), ("fp32",)
    chosen = ",".join(methods)

    def bench(name: str, *settings: str) -> tuple[str, ...]:
        return (
            "dpexp.bench", f"device={device}", f"size={size}", f"rounds={rounds}", "seconds=0.2", "check=none", "patience=45",
            f"out={work / name}", *settings,
        )  # fmt: skip

    speed = [
        Part(
            f"speed_{precision}",
            bench(
                f"speed_{precision}",
                f"workloads=[{','.join(workloads)}]",
                f"methods=[{chosen}]",
                f"precision={precision}",
            ),
            120.0,
            f"speed_{precision}",
            ("hydra", "opacus"),
        )
        for precision in precisions
    ]
    cell = (
        "dpexp.train", "task=cifar10_jpeg", "scale=paper", "privacy=eps3", "optim.epochs=null", "optim.steps=20",
        f"runtime.device={device}", f"runtime.runs_dir={work / 'runs'}",
    )  # fmt: skip
    quick = () if not rehearse else ("--collect-only",)
    kept = [
        Part("noise", ("dpexp.benchmark.gpu", "--noise", device), 30.0),
        Part(
            "tests",
            ("pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *quick, str(tests / "clipping" / "test_kernels.py"),
             str(tests / "clipping" / "test_gradients.py"), str(tests / "privacy" / "test_noise.py"),
             str(tests / "privacy" / "test_staircase_gpu.py")),
            60.0,
            None,
            ("pytest", "hypothesis"),
        ),
        *speed,
    ]  # fmt: skip
    if rehearse:
        return kept
    return [
        *kept,
        Part(
            "largest_batch",
            bench("largest_batch", "workloads=[gpt2]", "methods=[auto/layer,auto/flat,opacus:ghost]", "max_batch=true",
                  "memory_gib=16", "resolution=0.1", "precision=bf16"),
            75.0,
            "largest_batch",
            ("hydra", "opacus"),
        ),
        *(
            Part(f"he_table2_{clip}", (*cell, f"clip={clip}"), 50.0, None, ("hydra", "PIL"),
                 "cifar10/cifar10_jpeg_train.tar")
            for clip in ("flat", "adaptive_perlayer")
        ),
    ]  # fmt: skip


def run(part: Part, seconds: float, work: Path) -> dict[str, Any]:
    """Run a part within a time. Returns its row of the record."""
    if (why := part.missing(os.environ.get("DPEXP_DATA"))) is not None:
        return {"part": part.name, "status": "skipped", "why": why}
    command, began = [sys.executable, "-m", *part.command], time.monotonic()
    limit = min(part.seconds, seconds)
    if limit < 5:
        return {"part": part.name, "status": "skipped", "why": "no time was left"}
    log = work / f"{part.name}.log"
    with open(log, "w") as file:
        child = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code, status = child.wait(limit), "ok"
        except subprocess.TimeoutExpired:
            status = "cut off at its limit"
            code = _stop(child)
    row: dict[str, Any] = {
        "part": part.name,
        "status": status if status != "ok" or code == 0 else f"failed with exit status {code}",
        "command": " ".join(["python -m", *part.command]).replace(f"{work}/", ""),
        "seconds": round(time.monotonic() - began, 1),
        "output": log.read_text(errors="replace")[-TAIL:].replace(f"{work}/", ""),
    }
    if part.record and (found := read_json(work / f"{part.record}.json")):
        row["record"] = found
    return row


def _stop(child: subprocess.Popen[bytes]) -> int:
    """Interrupt a command, which then writes what it has; end it with its children where it does not."""
    for number, patience in ((signal.SIGINT, 6.0), (signal.SIGKILL, None)):
        os.killpg(child.pid, number)
        try:
            return child.wait(patience)
        except subprocess.TimeoutExpired:
            continue
    return -1


def noise(device: str) -> None:
    """Print one line: noise of the device against that of the CPU, and how fast it is drawn."""
    import torch

    from dpexp.privacy.noise import KeyedGenerator, add_gaussian_

    elements = 1 << (24 if device == "cuda" else 16)
    drawn = {}
    for place in ("cpu", device):
        tensor = torch.zeros(1 << 16, device=place)
        add_gaussian_(tensor, 1.0, KeyedGenerator(bytes(32)))
        drawn[place] = tensor.cpu()
    times = []
    for _ in range(4):
        tensor = torch.zeros(elements, device=device)
        start = time.perf_counter()
        add_gaussian_(tensor, 1.0, KeyedGenerator(bytes(32)))
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    print(
        json.dumps(
            {
                "device": device,
                "equal_to_the_cpu": bool(torch.equal(drawn["cpu"], drawn[device])),
                "elements": elements,
                "median_ns_per_element": sorted(times[1:])[1] / elements * 1e9,
            }
        )
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all parts and write the record. Returns 1 where a part failed or was cut off."""
    parser = argparse.ArgumentParser(prog="python -m dpexp.benchmark.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/gpu"), help="default: %(default)s")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--seconds", type=float, default=LIMIT_S, help="for all parts; default: %(default)s")
    parser.add_argument("--noise", metavar="DEVICE", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.noise:
        noise(given.noise)
        return 0
    import torch

    from dpexp.provenance import code_hash, git_state, hardware, versions

    if not given.rehearse and not torch.cuda.is_available():
        print(
            "error: there is no GPU here; --rehearse tries the command with tiny sizes on the CPU",
            file=sys.stderr,
        )
        return 2
    began, work = time.monotonic(), given.out / "work"
    work.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {
        "kind": "gpu", "rehearsal": given.rehearse, "parts": [], "versions": versions(), "git": git_state(), "code": code_hash(),
        "hardware": hardware(torch.device("cpu" if given.rehearse else "cuda")),
    }  # fmt: skip
    for part in parts(work, given.rehearse):
        row = run(part, given.seconds - (time.monotonic() - began), work)
        record["parts"].append(row)
        print(f"{part.name}: {row['status']}{': ' + row['why'] if 'why' in row else ''}", flush=True)
        record["wall_s"] = round(time.monotonic() - began, 1)
        # after each: a lease may end at any time
        write_json(given.out / "record.json", record)
    print(f"written to {given.out / 'record.json'} after {record['wall_s']} s")
    return int(any(row["status"].startswith(("failed", "cut")) for row in record["parts"]))


if __name__ == "__main__":
    sys.exit(main())
