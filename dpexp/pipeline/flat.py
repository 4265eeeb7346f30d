"""Flat clipping under a pipeline, in the four ways of He et al., section 4, so that what per-device clipping saves is measured.

An example's norm is spread over the stages, and nobody may scale before all have added their part. What differs is when the
stages talk, and what a stage does with a microbatch until then:

- ``microbatch``: after each microbatch; what the sums need is retained, and the stage is idle until the norms are there;
- ``offload``: after each microbatch; per-example gradients are parked on the host and brought back;
- ``second_backward``: after each microbatch; the gradients are computed again by a second back-propagation;
- ``last``: once, after the last microbatch, for all; then as ``second_backward``.

All four give the same sums. Sums are formed in the order of the microbatches, whenever the norms come.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dpexp.clipping import Clipper, Report
from dpexp.clipping.deferred import Measured
from dpexp.clipping.tapping.roots import Roots
from dpexp.pipeline.traffic import Traffic

WAYS = ("microbatch", "offload", "second_backward", "last")
_HELD = {
    "microbatch": "retained",
    "offload": "parked",
    "second_backward": "again",
    "last": "again",
}
# of float32, relative: the norm that decides a factor bounds what is added, the sum over stages included
_ROUNDING = 2.0**-22


class FlatNorms:
    """Joins the norms of the stages for one logical batch.

    Args:
        way: one of `WAYS`.
        group: the processes of the pipeline, in a group of its own: its traffic runs beside that of the schedule.
        traffic: where bytes are counted.
    """

    def __init__(self, way: str, group: Any, traffic: Traffic):
        self.way, self.group, self.traffic = way, group, traffic
        self._waiting: deque[tuple[int, Measured, Tensor, Any]] = deque()
        self._reports: dict[int, Report] = {}

    def take(
        self, clipper: Clipper, chunk: int, roots: Roots, clip_scale: Tensor | None, loss_scale: float
    ) -> tuple[Tensor | None, ...]:
        """Measure a microbatch, and begin to join its norms. Returns the gradients of its inputs."""
        self._settle(wait=self.way == "microbatch")
        measured = clipper.measure(roots, clip_scale, loss_scale=loss_scale, held=_HELD[self.way])
        self.traffic.add("parked", 2 * measured.parked_bytes)
        norms = measured.sq_norms.double()
        self._waiting.append((chunk, measured, norms, None if self.way == "last" else self._join(norms)))
        return measured.input_gradients

    def finish(self) -> dict[int, Report]:
        """Wait for the norms that are not there yet, and form the sums. Returns a report for each microbatch."""
        if self.way == "last" and self._waiting:
            together = torch.cat([norms for _, _, norms, _ in self._waiting], 1)
            self._join(together).wait()
            parts = together.split([norms.shape[1] for _, _, norms, _ in self._waiting], 1)
            self._waiting = deque(
                (chunk, measured, part, None)
                for (chunk, measured, _, _), part in zip(self._waiting, parts, strict=True)
            )
        self._settle(wait=True)
        return self._reports

    def _join(self, norms: Tensor) -> Any:
        self.traffic.add("norms", norms.nbytes)
        return dist.all_reduce(norms, group=self.group, async_op=True)

    def _settle(self, wait: bool) -> None:
        """Form the sums of the microbatches whose norms are there, in order."""
        while self._waiting:
            chunk, measured, norms, work = self._waiting[0]
            if work is not None:
                if not wait and not work.is_completed():
                    return
                work.wait()
            elif not wait:
                return
            self._waiting.popleft()
            wide = measured.sq_norms.dtype == torch.float64
            self._reports[chunk] = measured.finish(norms if wide else norms * (1 + _ROUNDING))
