"""The measurement: rounds over the methods of a workload, one working while the others wait; the largest batch by search."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from dpexp.benchmark.disturbance import Stolen
from dpexp.benchmark.methods import NONPRIVATE
from dpexp.benchmark.processes import Failed, Worker

# steps, as in Li et al., Appendix G
WARM_UP = 3
# a turn ends after this many times the wanted seconds
_SLOWEST = 20.0


@dataclass
class Protocol:
    """How to measure; `conf/bench.yaml` says what each is."""

    size: str = "full"
    batch: int | None = None
    rounds: int = 5
    steps: int = 3
    seconds: float = 1.0
    threads: int = 2
    device: str = "cpu"
    precision: str = "fp32"
    compile: bool = False
    noise: float = 1.0
    check: str = "tiny"
    memory_gib: float | None = None
    resolution: float = 0.01
    patience: float = 1800.0


@dataclass
class Row:
    """One method on one workload. Numbers are None where there is nothing to say; `reason` says why."""

    workload: str
    method: str
    # ok | failed
    status: str = "ok"
    reason: str = ""
    batch_size: int | None = None
    trainable: int | None = None
    steps: int = 0
    fastest_s: float | None = None
    median_s: float | None = None
    # at the fastest step
    examples_per_s: float | None = None
    # fastest / fastest of non-private
    time_ratio: float | None = None
    median_ratio: float | None = None
    # after the model is built, before the method is set up
    baseline_mib: float | None = None
    # above the baseline, from set-up to the last step
    peak_mib: float | None = None
    # the same without the first steps, in which methods are tried and graphs compiled
    steady_mib: float | None = None
    # the most that the tensors of a steady step have at once: what is resident has the holes of the C library's heap, too
    tensors_mib: float | None = None
    # peak / peak of non-private
    memory_ratio: float | None = None
    steady_ratio: float | None = None
    tensors_ratio: float | None = None
    # baseline + peak / the same of non-private: what a GPU must hold
    total_ratio: float | None = None
    # of the clipped sum, against the naive loop
    error: float | None = None
    max_batch: int | None = None
    max_batch_examples_per_s: float | None = None
    max_batch_ratio: float | None = None
    max_batch_throughput_ratio: float | None = None
    max_batch_reason: str = ""
    choices: dict[str, int] = field(default_factory=dict)

    def fail(self, reason: str) -> None:
        self.status, self.reason = "failed", reason


Say = Callable[[str], None]


def measure(workload: str, methods: list[str], protocol: Protocol, max_batch: bool, say: Say) -> Measured:
    """All methods on one workload. A method that fails is a row with the reason.

    Args:
        methods: non-private first.
        max_batch: also search for the largest physical batch.
        say: told what is going on.
    """
    rows = {method: Row(workload, method) for method in methods}
    workers: dict[str, Worker] = {}
    seconds: dict[str, list[list[float]]] = {method: [] for method in methods}
    hardware: dict[str, Any] = {}
    stolen = Stolen()
    try:
        steps = protocol.steps
        for method, row in rows.items():
            say(f"{workload}: {method}: building, first steps")
            workers[method] = Worker(protocol.threads, protocol.patience)
            with _noting(row, workers):
                facts = workers[method].ask("start", **_job(workload, method, protocol))
                row.batch_size, row.trainable = facts["batch_size"], facts["trainable"]
                row.baseline_mib, hardware = facts["baseline_mib"], facts["hardware"]
                warm = workers[method].ask("warm_up", steps=WARM_UP)
                row.peak_mib, row.choices = warm["peak_mib"] - row.baseline_mib, warm["choices"]
                if method == NONPRIVATE:
                    steps = max(steps, math.ceil(protocol.seconds / warm["seconds"]))
        for number in range(protocol.rounds):
            for method in _rotated(list(workers), number):
                say(f"{workload}: round {number + 1} of {protocol.rounds}: {method}")
                row = rows[method]
                with _noting(row, workers):
                    turn = workers[method].ask("turn", steps=steps, limit=_SLOWEST * protocol.seconds)
                    seconds[method].append(turn["seconds"])
                    used = turn["peak_mib"] - (row.baseline_mib or 0.0)
                    row.steady_mib = max(used, row.steady_mib or 0.0)
                    row.peak_mib = max(used, row.peak_mib or 0.0)
        for method, worker in list(workers.items()):
            with _noting(rows[method], workers):
                rows[method].tensors_mib = worker.ask("tensors")["tensors_mib"]
        if protocol.check != "none":
            for method, worker in list(workers.items()):
                say(f"{workload}: {method}: comparing with the naive loop")
                with _noting(rows[method], workers):
                    rows[method].error = worker.ask("check", size=protocol.check)["error"]
    finally:
        for worker in workers.values():
            worker.close()
    share = stolen.share()
    for method, row in rows.items():
        _summarise(row, seconds[method])
    if max_batch:
        for row in rows.values():
            if row.status == "ok":
                _search(row, protocol, say)
    _relate(list(rows.values()))
    return Measured(list(rows.values()), seconds, hardware, share)


@dataclass
class Measured:
    """The rows of one workload, every timed step (method -> round -> seconds), the machine, and how much its host took away."""

    rows: list[Row]
    seconds: dict[str, list[list[float]]]
    hardware: dict[str, Any]
    stolen: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def largest(fits: Callable[[int], bool], start: int, resolution: float) -> int:
    """The largest batch that fits, by doubling and then bisection (Li et al., Appendix G); 0 if one example does not fit.

    Args:
        fits: monotone: once false, false for every larger batch.
        start: where to begin doubling.
        resolution: stop when the bounds are this close, as a share of the lower one; 0 is exact.
    """
    low, high = 0, start
    while fits(high):
        low, high = high, 2 * high
    while high - low > max(1, resolution * low):
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def _search(row: Row, protocol: Protocol, say: Say) -> None:
    """Fill in the largest physical batch. Processes that ran out of memory are replaced, since what they left is unknown."""
    current: Worker | None = None

    def worker() -> Worker:
        nonlocal current
        if current is None:
            current = Worker(protocol.threads, protocol.patience)
            job = _job(row.workload, row.method, protocol)
            job["cap_mib"] = None if protocol.memory_gib is None else protocol.memory_gib * 2**10
            current.ask("start", **job | {"batch": 1})
        return current

    def drop() -> None:
        nonlocal current
        if current is not None:
            current.close()
        current = None

    def fits(batch: int) -> bool:
        say(f"{row.workload}: {row.method}: does a batch of {batch} fit?")
        try:
            worker().ask("fit", batch=batch, steps=1)
        except Failed as failed:
            drop()
            if not failed.memory:
                raise
            return False
        return True

    try:
        found = largest(fits, row.batch_size or 1, protocol.resolution)
        while found and row.max_batch is None:
            # a fresh process: the number is of this batch alone, its first step in which methods are tried included
            drop()
            try:
                taken = worker().ask("fit", batch=found, steps=protocol.steps)
            except Failed as failed:
                if not failed.memory:
                    raise
                found -= max(1, int(protocol.resolution * found))
            else:
                row.max_batch, row.max_batch_examples_per_s = found, found / taken["seconds"]
        row.max_batch = found
    except Failed as failed:
        row.max_batch_reason = str(failed)
    finally:
        drop()


def _job(workload: str, method: str, protocol: Protocol) -> dict[str, Any]:
    keys = ("size", "batch", "threads", "device", "precision", "compile", "noise")
    values = asdict(protocol)
    return {"workload": workload, "method": method, "cap_mib": None, **{key: values[key] for key in keys}}


@contextmanager
def _noting(row: Row, workers: dict[str, Worker]) -> Iterator[None]:
    """Turn the failure of a worker into a failed row, and end it."""
    try:
        yield
    except Failed as failed:
        row.fail(str(failed))
        workers.pop(row.method).close()


def _rotated(methods: list[str], by: int) -> list[str]:
    """Another method begins in each round, so that none always follows the same one."""
    by %= max(1, len(methods))
    return methods[by:] + methods[:by]


def _summarise(row: Row, rounds: list[list[float]]) -> None:
    every = [second for turn in rounds for second in turn]
    if row.status == "ok" and every:
        row.steps = len(every)
        row.fastest_s, row.median_s = min(every), statistics.median(every)
        row.examples_per_s = (row.batch_size or 0) / row.fastest_s


def _relate(rows: list[Row]) -> None:
    """Fill in what is relative to non-private, which stands first."""
    plain = rows[0]
    for row in rows:
        for ratio, number in (
            ("time_ratio", "fastest_s"),
            ("median_ratio", "median_s"),
            ("memory_ratio", "peak_mib"),
            ("steady_ratio", "steady_mib"),
            ("tensors_ratio", "tensors_mib"),
            ("max_batch_ratio", "max_batch"),
            ("max_batch_throughput_ratio", "max_batch_examples_per_s"),
        ):
            mine, theirs = getattr(row, number), getattr(plain, number)
            if row.status == plain.status == "ok" and mine is not None and theirs:
                setattr(row, ratio, mine / theirs)
        if row.memory_ratio is not None:
            row.total_ratio = _total(row) / _total(plain)


def _total(row: Row) -> float:
    return (row.baseline_mib or 0.0) + (row.peak_mib or 0.0)
