"""Which norm method for which layer: by the papers' rule, or by measurement, once for each shape."""

from __future__ import annotations

import time
from collections.abc import Hashable
from typing import Any

import torch

from dpexp.clipping.gradients.base import PerExampleGradient
from dpexp.clipping.gradients.memory import Scratch, give_back_freed_memory
from dpexp.errors import UserError

MODES = ("measured", "rule", "ghost", "instantiate", "loop")

# flops of the plain gradient below which measuring costs more than a wrong choice
SMALL = 1_000_000
# a method this much slower than the fastest so far is not run again
HOPELESS = 3.0
# how often a method is run at most, the first time cold
RUNS = 5
# seconds after which a method was seen enough: what disturbs a run of some milliseconds can be as long as the run
ENOUGH = 0.05
# a method that computes this much more than the leanest is not even tried
HOPELESS_FLOPS = 6.0
# norms that cost this much less than the sum, as those of a layer that sees one position, decide the matter
FREE = 20
# bytes of one example's gradient that are slow to write and read, whatever the machine
LARGE = 64 << 20


def known_mode(mode: str | None) -> None:
    """Refuse a way to choose norm methods that there is none of that name; None leaves it to the engine."""
    if mode is not None and mode not in MODES:
        raise UserError(f"choice={mode!r} is not known; choose {', '.join(MODES)}")


def _coarse(part: Hashable) -> Hashable:
    """Sizes in half octaves: which method is fastest changes slowly, and Poisson batches come in every size."""
    if not isinstance(part, int) or isinstance(part, bool) or part < 4:
        return part
    octave = 1 << (part.bit_length() - 1)
    return octave if part < 1.5 * octave else octave + octave // 2


def affordable(per_example: PerExampleGradient, cap_bytes: int) -> list[str]:
    """Methods whose memory for one example is within the cap; the leanest one where there is none."""
    need = {method: per_example.workspace(method) for method in per_example.methods()}
    fitting = [method for method, size in need.items() if size <= cap_bytes]
    return fitting or [min(need, key=need.__getitem__)]


def promising(per_example: PerExampleGradient, methods: list[str], fused: bool) -> list[str]:
    """Without those that cannot win: trying a method costs its time and, for a moment, its memory."""
    summing = per_example.cost("instantiate").flops
    flops = {m: per_example.cost(m).flops for m in methods}
    if fused:
        flops = {m: n if per_example.instantiates(m) else n + summing for m, n in flops.items()}
    fewest = min(flops.values())
    lean = [m for m in methods if flops[m] <= HOPELESS_FLOPS * fewest]
    free = [m for m in lean if not per_example.instantiates(m) and FREE * per_example.cost(m).flops < summing]
    if free:
        return free
    gradient = per_example.shape.numel() * per_example.dtype.itemsize
    if gradient > LARGE and any(not per_example.instantiates(m) and flops[m] <= 2 * fewest for m in lean):
        lean = [m for m in lean if not per_example.instantiates(m)]
    return lean


def by_rule(per_example: PerExampleGradient, methods: list[str]) -> str:
    """The ghost norm where its Gram matrices take less space than the gradients (``2T² < pd``), else instantiation.

    For embeddings, the gradients are the rows that an example touched, not the whole table.
    """
    if "ghost" in methods and per_example.cost("ghost").floats < per_example.cost("instantiate").floats:
        return "ghost"
    found = per_example.resolve("instantiate")
    return found if found in methods else next((m for m in methods if m in ("loop", "segments")), methods[0])


def fastest(per_example: PerExampleGradient, methods: list[str], fused: bool) -> str:
    """Time the methods in turns, and take the one with the fastest run."""
    times = {method: [_seconds(per_example, method, fused)] for method in methods}
    for turn in range(1, RUNS):
        best = min(map(min, times.values()))
        for method, seen in times.items():
            if min(seen) <= HOPELESS * best and (turn == 1 or sum(seen) < ENOUGH):
                seen.append(_seconds(per_example, method, fused))
    return min(times, key=lambda method: min(times[method]))


def _seconds(per_example: PerExampleGradient, method: str, fused: bool) -> float:
    asynchronous = per_example.device.type != "cpu"
    if asynchronous:
        torch.accelerator.synchronize()
    start = time.perf_counter()
    if fused:
        per_example.norms_and_sum(method, lambda norms, _: (torch.ones_like(norms), None))
    else:
        per_example.sq_norms(method)
    if asynchronous:
        torch.accelerator.synchronize()
    return time.perf_counter() - start


class Methods:
    """Which norm method is taken for which per-example gradients.

    Args:
        cap_bytes: memory that a method may need for one example. Where none fits, the one that needs least is taken.

    Attributes:
        measured: choices by coarse shapes.
        of_parameter: the method that was last taken for a parameter.
    """

    LARGEST = 1 << 12

    def __init__(self, cap_bytes: int):
        self.cap_bytes = cap_bytes
        self.scratch = Scratch(cap_bytes)
        self.measured: dict[str, str] = {}
        self.of_parameter: dict[str, str] = {}
        # by exact shapes: to look closer costs as much as a small layer
        self._recent: dict[Hashable, str] = {}

    def choose(self, per_example: PerExampleGradient, mode: str, fused: bool = False) -> str:
        """Return the name of a norm method, and let the gradients use the memory of these.

        Args:
            per_example: the gradients.
            mode: "measured" times every method that fits, in a few runs, once for a kind, shapes, dtype
                and device; "rule" is Bu et al., section 3.2; the others force a method where the kind has it.
            fused: judge methods by norms and weighted sum together, as the one-pass engine uses them, not by
                norms alone.
        """
        per_example.within(self.scratch)
        key = (per_example.signature(), per_example.shape, fused)
        method = self._recent.get(key)
        if method is None:
            if len(self._recent) >= self.LARGEST:
                self._recent.clear()
            method = self._recent[key] = self._chosen(per_example, mode, fused)
        return method

    def _chosen(self, per_example: PerExampleGradient, mode: str, fused: bool) -> str:
        if mode in ("ghost", "instantiate", "loop"):
            return per_example.resolve(mode)
        methods = affordable(per_example, self.cap_bytes)
        if len(methods) > 1 and (mode == "rule" or per_example.cost("instantiate").flops < SMALL):
            return by_rule(per_example, methods)
        methods = promising(per_example, methods, fused)
        if len(methods) == 1:
            return methods[0]
        # as text, which can be written to a file
        key = repr((*(_coarse(part) for part in per_example.signature()), fused))
        # what is remembered may be of kernels that are not there any more
        if self.measured.get(key) not in per_example.methods():
            self.measured[key] = fastest(per_example, methods, fused)
            give_back_freed_memory()
        return self.measured[key]

    def state(self) -> dict[str, Any]:
        """Return what was measured, as JSON."""
        return {"choices": dict(self.measured)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over what another process has measured."""
        self.measured |= state.get("choices", {})
        self._recent.clear()
