"""Noise of which each step takes back a part of the noise before it, so that less of it adds up in the weights.

A banded matrix factorisation (Choquette-Choo et al. 2023, "(Amplified) Banded Matrix Factorization"): with a lower triangular
matrix C of b bands, what is private is y = C·s + z for the clipped sums s of all steps and independent noise z, and a step
releases its part of C⁻¹·y = s + C⁻¹·z, a function of y. Weights are prefix sums of what is released, and the noise in those is
smaller than that of independent steps. C has the same numbers 1, c_1, …, c_{b-1} in every column, those of a power α of the
prefix sum, cut off after b of them. With α = 1/2 they are the banded square root of Kalinin and Lampert 2024 ("Banded Square Root
Matrix Factorization"). Cut off, a larger α leaves less noise, the more so the longer the run: see `exponent`. They are rounded to
1/256, and the sensitivity is that of the rounded ones.

An example that takes part in step t moves y in the steps t to t + b - 1, by its clipped gradient times 1, c_1, …: (1 + Σ c_i²)^½
times as far as it moves the sum of step t. The noise z is larger by this factor. So that no example moves the same y twice, the
examples are dealt into b parts, and step t draws from part t mod b alone (`sampling.CyclicSampler`).

*On the grid* (`dpexp.privacy.noise`) all of it is done in whole numbers: with ŝ_t, the rounded sum, and n_t of the discrete
Gaussian, a step releases r_t = ŝ_t + m_t, where m_t = n_t - round(Σ_i c_i·m_{t-i}). So n_t = r_t - ŝ_t + round(Σ_i c_i·(r_{t-i} -
ŝ_{t-i})): for given releases, an example of step t moves n_t, …, n_{t+b-1} by whole numbers, its gradient times 1, c_1, … up to a
unit, and no value is possible for one data set and impossible for its neighbour. `Release.noise` counts these units.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.signal import lfilter
from torch import Tensor

from dpexp.errors import UserError
from dpexp.privacy.noise import KeyedGenerator, draw_whole, put_on_grid_, room_for

# bits behind the point: with them, products and sums of whole numbers below 2^45 are exact in float64, on every device
_BITS = 8
# numbers that stay in a CPU's cache
_BLOCK = 1 << 15


@lru_cache
def exponent(bands: int, steps: int) -> float:
    """Find the α with the least noise in the weights: a multiple of 1/32, so that it is the same on every machine."""
    tried = [part / 32 for part in range(16, 32)] if bands > 1 else [0.5]
    return min(tried, key=lambda alpha: float(np.linalg.norm(_added_up(_powers(bands, alpha), steps))))


def _powers(bands: int, alpha: float) -> tuple[float, ...]:
    """The first numbers of (1 - x)^-α, rounded to 1/256."""
    exact = [1.0]
    for lag in range(1, bands):
        exact.append(exact[-1] * (alpha + lag - 1) / lag)
    return tuple(round(value * 2**_BITS) / 2**_BITS for value in exact)


def coefficients(bands: int, steps: int) -> tuple[float, ...]:
    """Compute 1, c_1, …, c_{b-1}: the numbers of each column of C, for a run of so many steps."""
    return _powers(bands, exponent(bands, steps))


def column_norm(bands: int, steps: int) -> float:
    """Compute (Σ c_i²)^½: how much further an example moves y than the sum of its step."""
    return math.hypot(*coefficients(bands, steps))


def inverse(column: Sequence[float], steps: int) -> NDArray[np.float64]:
    """Compute the first column of C⁻¹: what of the noise z_t is in the releases of the steps t, t + 1, …, `[steps]`."""
    impulse = np.zeros(steps)
    impulse[:1] = 1
    found: NDArray[np.float64] = lfilter([1.0], column, impulse)
    return found


@lru_cache(maxsize=2)
def noise_left(bands: int, steps: int) -> NDArray[np.float64]:
    """Compute the standard deviation of the noise in the release of each step, relative to that of its z, `[steps]`."""
    return np.sqrt(np.cumsum(inverse(coefficients(bands, steps), steps) ** 2))


def noise_added_up(bands: int, steps: int) -> NDArray[np.float64]:
    """Compute the standard deviation of the noise in the sum of the first 1, 2, … releases, in thresholds times σ, `[steps]`."""
    return _added_up(coefficients(bands, steps), steps)


def _added_up(column: Sequence[float], steps: int) -> NDArray[np.float64]:
    return math.hypot(*column) * np.sqrt(np.cumsum(np.cumsum(inverse(column, steps)) ** 2))


class CorrelatedNoise:
    """The noise of a run, one step after the other.

    What it must know of earlier steps, with the present one 8·b bytes for each number that is released, is in no checkpoint: it
    is drawn again from the run's key.

    Args:
        bands, steps: b, 2 or more, and T: see `coefficients`.
        generator: number and attempt of a step -> the source of its n_t; the same one for the same step and attempt.
    """

    def __init__(self, bands: int, steps: int, generator: Callable[[int, int], KeyedGenerator]):
        self.coefficients, self._generator = coefficients(bands, steps), generator
        # of each step so far, the attempt whose noise was applied
        self.attempts: list[int] = []
        # m_{t-1}, m_{t-2}, …; memory for others; t
        self._earlier: deque[list[Tensor]] = deque(maxlen=bands - 1)
        self._free: list[list[Tensor]] = []
        self._ahead = 0

    def reserve(self, tensors: Sequence[Tensor]) -> None:
        """Take the memory that all steps need: where there is too little, it shows before a step is charged."""
        while len(self._free) + len(self._earlier) < len(self.coefficients):
            self._free.append(room_for(tensors))

    @torch.no_grad()
    def add_(self, tensors: Sequence[Tensor], stds: Sequence[float], step: int, attempt: int) -> None:
        """Add the noise of a step in place; a step that is added once more has the same noise, if the attempt is the same.

        Args:
            tensors: the same ones, in the same order, in every step.
            stds: of z in each of them, in the unit of the tensor; it may be another one in each step.
            step, attempt: see `generator`.
        """
        if self._ahead != step:
            self._earlier.clear()
            self._free.clear()
            for number in range(step):
                self._draw(tensors, number, self.attempts[number])
        self.attempts[step:] = [attempt]
        put_on_grid_(tensors, stds, self._draw(tensors, step, attempt))

    def _draw(self, tensors: Sequence[Tensor], step: int, attempt: int) -> list[Tensor]:
        """m of the next step."""
        # until it is done: whatever cuts it off, nothing half drawn is used
        self._ahead = -1
        self.reserve(tensors)
        drawn = self._free.pop()
        draw_whole(tensors, self._generator(step, attempt), drawn)
        for fresh, *earlier in zip(drawn, *self._earlier, strict=True):
            size = _BLOCK if fresh.device.type == "cpu" else max(1, fresh.numel())
            for now, *before in zip(*(m.view(-1).split(size) for m in (fresh, *earlier)), strict=True):
                taken_back = torch.zeros_like(now)
                for factor, m in zip(self.coefficients[1:], before, strict=False):
                    taken_back.add_(m, alpha=factor)
                now.sub_(taken_back.round_())
        if len(self._earlier) == self._earlier.maxlen:
            self._free.append(self._earlier.pop())
        self._earlier.appendleft(drawn)
        self._ahead = step + 1
        return drawn

    def state_dict(self) -> dict[str, Any]:
        """Return what a run must know to draw it all again."""
        return {"attempts": list(self.attempts), "coefficients": list(self.coefficients)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there.

        Raises:
            UserError: the run began with other coefficients, so that the noise of its earlier steps is not what would be drawn.
        """
        # a checkpoint that names none is of a version that had those of 1/2 alone
        begun = state.get("coefficients", _powers(len(self.coefficients), 0.5))
        if tuple(begun) != self.coefficients:
            was, now = (f"({', '.join(f'{c:g}' for c in column)})" for column in (begun, self.coefficients))
            raise UserError(
                f"a step of this run takes back the noise of earlier ones by {was}, and this version of dpexp would go on with "
                f"{now}: install the version that the run began with, or begin a new run in another folder"
            )
        self.attempts, self._ahead = list(state["attempts"]), -1
