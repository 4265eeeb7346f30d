"""Norms now, sums later: what flat clipping needs where an example's norm is spread over the stages of a pipeline.

He et al., section 4, name what a device can do until the norms of the others are there: retain what the sums need, offload
per-example gradients to the host, or compute them again by a second back-propagation. Each is a `Step` that forms no sum: what
the engine keeps is retained (book-keeping), parked, or, in an engine of two passes, the graph alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dpexp.clipping.backward import Factors, Setup, Step, examined
from dpexp.clipping.distributed import Sums
from dpexp.clipping.gradients import Dense, Lookup, PerExampleGradient, Tied, numerics
from dpexp.clipping.reports import Report
from dpexp.clipping.tapping.taps import Visit
from dpexp.errors import UserError

_HOST = torch.device("cpu")
# what of an engine goes by where that is held which the sums need
_HELD: dict[str, dict[str, Any]] = {
    "retained": {},
    "parked": {"second_pass": False, "keep": True, "always_keep": True},
    "again": {"second_pass": True, "keep": False, "always_keep": False},
}


class Measured:
    """A batch whose own norms are known, and which is summed in `finish`.

    Args:
        visit, setup, factors: see `backward.Step`.
        held: ``retained``, ``parked`` or ``again``. Parked gradients of a lookup (an embedding) stay what they are,
            activations: instantiated, each example's would be as large as the table.
        loss_scale: of the losses; no norm that is given or taken here has it.
        deliver: takes squared norms of the scaled losses and the clipped sums.

    Attributes:
        parked_bytes: of per-example gradients that went to the host, and come back once.
        sq_norms: ``[K, B]``, of the gradients of this model's parameters.
        input_gradients: of the roots' inputs.
    """

    def __init__(
        self,
        visit: Visit,
        setup: Setup,
        factors: Factors,
        held: str,
        loss_scale: float,
        deliver: Callable[[Tensor, Sums], Report],
    ):
        if held not in _HELD:
            raise UserError(f"held={held!r} is not known: {', '.join(_HELD)}")
        setup = replace(setup, engine=replace(setup.engine, **_HELD[held]))
        self._device, self._square, self._deliver = visit.roots.device, loss_scale**2, deliver
        self.parked_bytes = 0
        with examined(visit, setup):
            self._step = Step(visit, setup, factors, deferred=True)
            self.sq_norms = self._step.measure() / self._square
            self._home = {name: p.device for group in setup.groups for name, p in group.params.items()}
            if held == "parked":
                self._move(self._parked)
        self.input_gradients = visit.input_gradients

    def finish(self, sq_norms: Tensor) -> Report:
        """Add the sums to ``p.grad``, under the factors of these squared norms ``[K, B]``."""
        with numerics.in_full(self._device):
            self._move(self._back)
            found = self._step.finish(sq_norms * self._square)
        return self._deliver(*found)

    def _move(self, to: Callable[[str, PerExampleGradient], PerExampleGradient]) -> None:
        for held in self._step.kept.values():
            for name in held:
                held[name] = to(name, held[name])

    def _parked(self, name: str, gradient: PerExampleGradient) -> PerExampleGradient:
        if isinstance(gradient, Lookup | Tied):
            return gradient
        rows = gradient if isinstance(gradient, Dense) else Dense(gradient.instantiate())
        self.parked_bytes += rows.nbytes
        return rows.to(_HOST)

    def _back(self, name: str, gradient: PerExampleGradient) -> PerExampleGradient:
        if isinstance(gradient, Dense) and gradient.device != self._home[name]:
            return gradient.to(self._home[name])
        return gradient
