"""The process that one method lives in: takes commands on its input, one JSON line each, and answers on its output.

Between commands it waits in a read, which needs no core; its gradients are freed, so that many of these processes fit side
by side. Started by `dpexp.benchmark.processes`.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import re
import resource
import sys
import threading
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

from dpexp.durable import memory_error
from dpexp.errors import UserError, first_line

# exit status of a process that stopped itself at its memory cap
OVER_THE_CAP = 77

_STATUS = Path("/proc/self/status")


class Memory:
    """Resident memory of this process, or allocated memory of its GPU; in MiB."""

    def __init__(self, device: Any):
        import torch

        self.cuda = torch.cuda if device.type == "cuda" else None

    def reset(self) -> None:
        """Begin a new high-water mark (where the system lets a process do that: Linux, CUDA)."""
        if self.cuda:
            self.cuda.reset_peak_memory_stats()
        else:
            # the mark then includes the building of the model
            with contextlib.suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")

    def now(self) -> float:
        return self.cuda.memory_allocated() / 2**20 if self.cuda else resident_mib("VmRSS")

    def peak(self) -> float:
        return self.cuda.max_memory_allocated() / 2**20 if self.cuda else resident_mib("VmHWM")


def resident_mib(field: str) -> float:
    """VmRSS or VmHWM of this process; the high-water mark of `getrusage` where there is no /proc."""
    try:
        found = re.search(rf"^{field}:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    except OSError:
        found = None
    if found:
        return int(found[1]) / 2**10
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


class Bench:
    """One method on one workload: what the commands act on."""

    def __init__(self, job: dict[str, Any]):
        import torch

        from dpexp.benchmark.methods import LEAN, LEARNING_RATE, Settings, make_method
        from dpexp.benchmark.workloads import workload_named
        from dpexp.models.precision import autocast
        from dpexp.provenance import hardware

        # loaded before the baseline is taken: its accountants weigh more than a small network
        self._hardware = hardware
        self.torch, self.job, self.lean = torch, job, job["method"].endswith(LEAN)
        torch.set_num_threads(job["threads"])
        # fp32 means fp32
        torch.backends.cudnn.allow_tf32 = False
        self.device = torch.device(job["device"])
        self.memory = Memory(self.device)
        if job["cap_mib"] is not None:
            self._cap(job["cap_mib"])
        self.autocast: Callable[[], Any] = lambda: autocast(job["precision"], self.device)
        self.workload = workload_named(job["workload"])
        self.noise, self.rate = job["noise"], LEARNING_RATE
        self._rehearse()
        self.parts = self.workload.parts(job["size"])
        self.batch_size = job["batch"] or self.workload.default_batch(job["size"])
        self.batch = self._batch(self.batch_size)
        model = self._model()
        self.num_parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
        self.settings = Settings(model, self.batch_size, 1.0, self.noise, self.rate)
        gc.collect()
        _give_back_memory()
        self.baseline = self.memory.now()
        self.memory.reset()
        self.method = make_method(job["method"], self.settings)
        self.method.network = self._compiled(self.method.network)

    def _rehearse(self) -> None:
        """One step on the tiny workload: what libraries load when first used is in the baseline, for every method alike."""
        from dpexp.benchmark.methods import Settings, make_method

        self.parts = self.workload.parts("tiny")
        size = self.workload.default_batch("tiny")
        batch = self._batch(size)
        method = make_method(self.job["method"], Settings(self._model(), size, 1.0, self.noise, self.rate))
        method.network = self._compiled(method.network)
        method.step(lambda network: self._losses(network, batch))

    def facts(self) -> dict[str, Any]:
        return {
            "batch_size": self.batch_size,
            "trainable": self.num_parameters,
            "baseline_mib": self.baseline,
            "hardware": self._hardware(self.device),
        }

    def warm_up(self, steps: int) -> dict[str, Any]:
        """Untimed steps: compilation, measuring of choices, first touches. Returns what the last one took."""
        for _ in range(steps):
            last = self._seconds(1)
        warm = self.memory.peak()
        self.memory.reset()
        return {"seconds": last, "peak_mib": warm, "choices": self._choices()}

    def turn(self, steps: int, limit: float) -> dict[str, Any]:
        """Seconds per step: one untimed step, then up to `steps`, no longer than `limit` seconds but one at least.

        On a GPU the steps are timed as one stretch, since waiting for each would time the waiting.
        """
        last = self._seconds(1)
        steps = max(1, min(steps, int(limit / max(last, 1e-9))))
        if self.device.type == "cuda":
            seconds = [self._seconds(steps) / steps]
        else:
            seconds = [self._seconds(1) for _ in range(steps)]
        peak = self.memory.peak()
        self._rest()
        return {"seconds": seconds, "peak_mib": peak}

    def tensors(self) -> dict[str, Any]:
        """The most MiB that the tensors of a step have at once, above those that are there before it. The smaller of two: one
        of them may prove again what was proven (`dpexp.clipping.survey.layouts.due`)."""
        return {"tensors_mib": min(self._tensors() for _ in range(2))}

    def _tensors(self) -> float:
        self._rest()
        if self.device.type == "cuda":
            self.memory.reset()
            before = self.memory.now()
            self._seconds(1)
            return self.memory.peak() - before
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            self._seconds(1)
        events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
        sizes = (event.nbytes() for event in events if event.name() == "[memory]")
        return max(accumulate(sizes), default=0) / 2**20

    def check(self, size: str) -> dict[str, Any]:
        """See `exactness`; at size "same" on the workload as it is measured, otherwise on its tiny version."""
        from dpexp.benchmark.exactness import max_relative_error

        self._rest()
        if size == "same":
            batch = self.batch
        else:
            self.parts = self.workload.parts("tiny")
            batch = self._batch(self.workload.default_batch("tiny"))
        error = max_relative_error(
            self.job["method"], self.parts, batch, self._model(), self._compiled, self._losses
        )
        return {"error": error}

    def fit(self, batch: int, steps: int) -> dict[str, Any]:
        """Does this physical batch fit in memory? Answers with seconds per step; if it does not, with an error or death."""
        self.batch, self.batch_size = self._batch(batch), batch
        self._seconds(1)
        return {"seconds": self._seconds(steps) / steps, "peak_mib": self.memory.peak()}

    def _model(self) -> Any:
        with self.torch.random.fork_rng(devices=[]):
            self.torch.manual_seed(0)
            return self.parts.model().to(self.device).train()

    def _batch(self, size: int) -> Any:
        generator = self.torch.Generator().manual_seed(1)
        return {key: rows.to(self.device) for key, rows in self.parts.batch(size, generator).items()}

    def _compiled(self, network: Any) -> Any:
        return self.torch.compile(network) if self.job["compile"] else network

    def _losses(self, network: Any, batch: Any) -> Any:
        losses = self.parts.lean if self.lean else self.parts.losses
        if losses is None:
            raise UserError("the loss of this workload has no lean form")
        with self.autocast():
            return losses(network, batch).float()

    def _seconds(self, steps: int) -> float:
        self._wait()
        start = time.perf_counter()
        for _ in range(steps):
            self.method.step(lambda network: self._losses(network, self.batch))
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        if self.device.type == "cuda":
            self.torch.cuda.synchronize()

    def _rest(self) -> None:
        """Free what the next step makes anew, so that idle processes are small."""
        for parameter in self.settings.parameters:
            parameter.grad = None
            for left in ("grad_sample", "summed_grad"):
                if hasattr(parameter, left):
                    setattr(parameter, left, None)
        gc.collect()
        _give_back_memory()
        if self.device.type == "cuda":
            self.torch.cuda.empty_cache()

    def _choices(self) -> dict[str, int]:
        """How many parameters have their norms computed in which way, for our engines."""
        clipper = getattr(self.method, "clipper", None)
        methods = list(clipper.choices.values()) if clipper is not None else []
        return {name or "none": methods.count(name) for name in sorted(set(methods))}

    def _cap(self, cap_mib: float) -> None:
        if self.device.type == "cuda":
            total = self.torch.cuda.get_device_properties(self.device).total_memory / 2**20
            self.torch.cuda.set_per_process_memory_fraction(min(1.0, cap_mib / total))
            return

        def watch() -> None:
            while resident_mib("VmRSS") <= cap_mib:
                time.sleep(0.005)
            os._exit(OVER_THE_CAP)

        threading.Thread(target=watch, daemon=True).start()


def _give_back_memory() -> None:
    """glibc keeps freed memory; hand it back to the system."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def serve() -> None:
    """Answer commands until the input ends. What libraries print goes to the error output."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    bench: Bench | None = None
    for line in sys.stdin:
        command = json.loads(line)
        kind = command.pop("do")
        try:
            if bench is None:
                bench = Bench(command)
                answer = bench.facts()
            else:
                answer = getattr(bench, kind)(**command)
        except Exception as error:
            # a library may raise anything; the row says what
            reason = first_line(error)
            if type(error).__name__ != "UserError":
                reason = f"{type(error).__name__}: {reason}"
            answer = {"failed": "out of memory" if memory_error(error) else reason[:400]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve()
