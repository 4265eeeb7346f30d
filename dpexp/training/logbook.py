"""What a run says about itself while it goes on: lines of metrics, the progress bar, times and memory."""

import math
import statistics
import time
from typing import Any

import torch

from dpexp import provenance, record
from dpexp.schemas import RunConfig
from dpexp.training.sums import Sums

# those that Figure 4 of He et al. marks
NORM_QUANTILES = [0.25, 0.5, 0.75, 0.85]
# in which the ratio of signal to noise is logged, marked not private: Li et al., Figure 3 average it over so many
FIRST_STEPS = 30


class Logbook:
    """Write what a step released, what it did not, marked not private, and how long it took.

    Args:
        run: the configuration.
        metrics: where lines go.
        device: where the run computes.
        expected_batch: B.
        groups: names of the clipping groups whose norms this process sees; empty: of none.

    Attributes:
        step_times: seconds of each step of this session.
        timings: what an earlier session measured.
    """

    def __init__(
        self,
        run: RunConfig,
        metrics: record.Metrics,
        device: torch.device,
        *,
        expected_batch: float,
        groups: list[str],
    ):
        self.run, self.metrics, self.device = run, metrics, device
        self.expected_batch, self.groups = expected_batch, groups
        self.step_times: list[float] = []
        self.timings: dict[str, Any] = {}
        self.wall_before, self.started = 0.0, time.perf_counter()

    @property
    def wall_s(self) -> float:
        """Seconds spent on the run so far, earlier sessions included as far as they reached a checkpoint."""
        return self.wall_before + time.perf_counter() - self.started

    def wants_norms(self, step: int, last: int) -> bool:
        """Whether the norms of every example are looked at in this step: the first, the last, and those with an evaluation."""
        every = self.run.runtime.eval_every
        if not every or not self.groups or self.metrics.strict:
            return False
        return step in (1, last) or step % every == 0

    def wants_signal(self, step: int) -> bool:
        """Whether the ratio of signal to noise is looked at in this step."""
        return step <= FIRST_STEPS and not self.metrics.strict

    def took(self, begun: float) -> None:
        """A step ends that began at this value of `time.perf_counter`."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.step_times.append(time.perf_counter() - begun)

    def write(self, step: int, last: int, sums: Sums, released: dict[str, Any], loss: float | None) -> None:
        """Write the lines of a step, where they are due.

        Args:
            step: steps taken, this one included.
            last: the number of the last step, of which there is always a line.
            sums: of the step; private.
            released: what the step made public.
            loss: the mean loss of the step; private; None where nothing private is written.
        """
        every = self.run.runtime.log_every
        if every and (step % every == 0 or step == last):
            self.metrics.write(step, released | {"time_s": round(self.wall_s, 3)})
            if not self.metrics.strict:
                self._write_private(step, sums, loss)
        if sums.every and sums.drawn:
            self._write_norms(step, sums.every)

    def performance(self) -> dict[str, Any]:
        """Return `examples_per_s`, `step_s`, `peak_memory_mib` and `device`.

        `step_s` is the median step of this session, without its first one (an engine may still be measuring then), and
        `examples_per_s` the *expected* batch over it: the drawn sizes are private. A session without a step passes on
        what an earlier one measured.
        """
        times = self.step_times[1:] or self.step_times
        if not times:
            return self.timings or {"device": provenance.device_name(self.device)}
        step_s = statistics.median(times)
        return {
            "examples_per_s": self.expected_batch / step_s,
            "step_s": step_s,
            "peak_memory_mib": provenance.peak_memory_mib(self.device),
            "device": provenance.device_name(self.device),
        }

    def _write_private(self, step: int, sums: Sums, loss: float | None) -> None:
        private: dict[str, Any] = {"loss": loss, "drawn": sums.drawn}
        if len(sums.norms):
            drawn = max(1, sums.drawn)
            private |= {
                "mean_norms": (sums.norms / drawn).tolist(),
                "clipped_share": (sums.clipped / drawn).tolist(),
            }
        if sums.signal_to_noise is not None and math.isfinite(sums.signal_to_noise):
            private["signal_to_noise"] = sums.signal_to_noise
        self.metrics.write(step, private, released=False)

    def _write_norms(self, step: int, norms_of_pieces: list[torch.Tensor]) -> None:
        """Quantiles of the norms of each group (He et al., Figures 2, 4), without noise: marked not private."""
        # [K, b]
        norms = torch.cat(norms_of_pieces, 1)
        values = torch.nanquantile(norms, torch.tensor(NORM_QUANTILES), dim=1).T
        quantiles = {"quantiles": NORM_QUANTILES, "groups": self.groups, "values": values.tolist()}
        self.metrics.write(step, {"norm_quantiles": quantiles}, released=False)
