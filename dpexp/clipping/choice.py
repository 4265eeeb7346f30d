"""Which norm method for which layer: by the papers' rule, or by measurement."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import Any, Literal

import torch

from dpexp.clipping.contributions.base import Contribution
from dpexp.clipping.contributions.scratch import Scratch

Mode = Literal["measured", "rule", "ghost", "instantiate", "loop"]
MODES: tuple[Mode, ...] = ("measured", "rule", "ghost", "instantiate", "loop")

SMALL = 1_000_000  # flops of the plain gradient below which measuring costs more than a wrong choice
HOPELESS = 3.0  # a first, cold run this much slower than the best so far is not run again
HOPELESS_FLOPS = 6.0  # a method that computes this much more than the leanest is not even tried
FREE = 20  # norms that cost this much less than the sum, as those of a layer that sees one position, decide the matter
LARGE = 64 << 20  # bytes of one example's gradient that are slow to write and read, whatever the machine


def choose(
    contribution: Contribution,
    mode: str,
    cap_bytes: int,
    cache: dict[Any, str],
    fused: bool = False,
    scratch: Scratch | None = None,
) -> str:
    """The name of a norm method of ``contribution``.

    Args:
        mode: "measured" times every method that fits, the second of two runs, once for a kind, shapes, dtype
            and device; "rule" is Bu et al., section 3.2; the others force a method where the kind has it.
        cap_bytes: memory that a method may need for one example. Where none fits, the one that needs least is
            taken.
        cache: remembers measurements; one per attached model.
        fused: judge methods by norms and weighted sum together, as the one-pass engine uses them, not by
            norms alone.
        scratch: the buffer that the engine will use, so that the measurement is of what will happen.

    Raises:
        ValueError: unknown mode.
    """
    if mode not in MODES:
        raise ValueError(f"choice={mode!r} is not known; choose {', '.join(MODES)}")
    if mode in ("ghost", "instantiate", "loop"):
        return contribution.resolve(mode)
    methods = affordable(contribution, cap_bytes)
    if len(methods) > 1 and (mode == "rule" or small(contribution)):
        return by_rule(contribution, methods)
    methods = promising(contribution, methods, fused)
    if len(methods) == 1:
        return methods[0]
    key = (*(_coarse(part) for part in contribution.signature()), fused)
    if key not in cache:
        if torch.compiler.is_compiling():  # a clock has no place in a graph
            return by_rule(contribution, methods)
        cache[key] = fastest(contribution, methods, fused, scratch)
    return cache[key]


def _coarse(part: Hashable) -> Hashable:
    """Sizes in half octaves: which method is fastest changes slowly, and Poisson batches come in every size."""
    if not isinstance(part, int) or isinstance(part, bool) or part < 4:
        return part
    octave = 1 << (part.bit_length() - 1)
    return octave if part < 1.5 * octave else octave + octave // 2


def affordable(contribution: Contribution, cap_bytes: int) -> list[str]:
    """Methods whose memory for one example is within the cap; the leanest one where there is none."""
    need = {method: contribution.workspace(method) for method in contribution.methods()}
    fitting = [method for method, size in need.items() if size <= cap_bytes]
    return fitting or [min(need, key=lambda method: need[method])]


def promising(contribution: Contribution, methods: list[str], fused: bool) -> list[str]:
    """Without those that cannot win: trying a method costs its time and, for a moment, its memory."""
    summing = contribution.cost("instantiate").flops
    flops = {
        m: contribution.cost(m).flops + (summing if fused and not contribution.instantiates(m) else 0)
        for m in methods
    }
    fewest = min(flops.values())
    lean = [m for m in methods if flops[m] <= HOPELESS_FLOPS * fewest]
    free = [
        m for m in lean if not contribution.instantiates(m) and FREE * contribution.cost(m).flops < summing
    ]
    if free:
        return free
    gradient = contribution.shape.numel() * contribution.dtype.itemsize
    if gradient > LARGE and any(not contribution.instantiates(m) and flops[m] <= 2 * fewest for m in lean):
        lean = [m for m in lean if not contribution.instantiates(m)]
    return lean


def by_rule(contribution: Contribution, methods: list[str]) -> str:
    """The ghost norm where its Gram matrices take less space than the gradients (``2T² < pd``), else
    instantiation.

    For embeddings, the gradients are the rows that an example touched, not the whole table.
    """
    instantiated = contribution.resolve("instantiate")
    if instantiated not in methods:
        instantiated = next((m for m in methods if m in ("loop", "segments")), methods[0])
    ghost_floats = contribution.cost("ghost").floats
    prefers_ghost = "ghost" in methods and ghost_floats < contribution.cost("instantiate").floats
    return "ghost" if prefers_ghost else instantiated


def small(contribution: Contribution) -> bool:
    """Whether any method will do."""
    return contribution.cost("instantiate").flops < SMALL


def fastest(
    contribution: Contribution, methods: list[str], fused: bool, scratch: Scratch | None = None
) -> str:
    """Time the methods, warm."""
    times: dict[str, float] = {}
    for method in methods:
        task = _task(contribution, method, fused, scratch)
        cold = _seconds(task, contribution.device)
        hopeless = times and cold > HOPELESS * min(times.values())
        times[method] = cold if hopeless else _seconds(task, contribution.device)
    return min(times, key=lambda method: times[method])


def _task(
    contribution: Contribution, method: str, fused: bool, scratch: Scratch | None
) -> Callable[[], object]:
    if fused:
        return lambda: contribution.norms_and_sum(method, lambda norms, _: torch.ones_like(norms), scratch)
    return lambda: contribution.sq_norms(method, scratch=scratch)


def _seconds(task: Callable[[], object], device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize()
    start = time.perf_counter()
    task()
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - start
