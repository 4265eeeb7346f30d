"""What a release costs one core: noise (the default, the exact form, plain normals beside them) and the checksum of its sums."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from dpexp import native
from dpexp.privacy.fingerprint import checksum
from dpexp.privacy.noise import KeyedGenerator, SecureGenerator, add_gaussian_

# in the place of a workload
NOISE = "noise"
_ELEMENTS = 1 << 22
_EXACT_ELEMENTS = 1 << 19


def measure_noise(rounds: int) -> list[dict[str, Any]]:
    """Time every kind in turns, on one thread. The processor's time counts, which other programs disturb least.

    Returns:
        One row for each kind: elements of a float32 tensor, nanoseconds for each (fastest and median turn), and the machine's
        load average at the end.
    """
    kinds: dict[str, tuple[int, Callable[[Tensor], object]]] = {
        "torch.normal_, not for privacy": (_ELEMENTS, lambda tensor: tensor.normal_()),
        "default": (_ELEMENTS, lambda tensor: add_gaussian_(tensor, 1.0, KeyedGenerator(bytes(32)))),
        "exact (privacy.secure)": (
            _EXACT_ELEMENTS,
            lambda tensor: add_gaussian_(tensor, 1.0, SecureGenerator(bytes(32))),
        ),
        "checksum before it": (_ELEMENTS, lambda tensor: checksum([tensor], bytes(32))),
    }
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    spent: dict[str, list[float]] = {kind: [] for kind in kinds}
    try:
        for turn in range(rounds + 1):
            for kind, (elements, draw) in kinds.items():
                tensor = torch.zeros(elements)
                start = time.process_time()
                draw(tensor)
                # The first turn builds tables and loads code.
                if turn:
                    spent[kind].append((time.process_time() - start) / elements * 1e9)
    finally:
        torch.set_num_threads(threads)
    return [
        {
            "kind": kind,
            "kernels": native.backend(),
            "elements": kinds[kind][0],
            "fastest_ns": min(values),
            "median_ns": statistics.median(values),
            "load_average": os.getloadavg()[0],
        }
        for kind, values in spent.items()
    ]


def noise_table(rows: list[dict[str, Any]]) -> Table:
    """The rows of `measure_noise` for the terminal."""
    table = Table(
        "noise", "fastest ns", "median ns", "million/s per core", title=f"kernels: {rows[0]['kernels']}"
    )
    for row in rows:
        speed = 1e3 / row["fastest_ns"]
        table.add_row(row["kind"], f"{row['fastest_ns']:.2f}", f"{row['median_ns']:.2f}", f"{speed:.4g}")
    return table
