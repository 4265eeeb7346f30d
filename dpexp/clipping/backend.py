"""What stands behind one attached model: the tapped engines, or Opacus's (`opacus_engine`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from dpexp.clipping.backward import Factors, Setup, Step, examined
from dpexp.clipping.choice import Methods
from dpexp.clipping.distributed import Sums
from dpexp.clipping.engines import Engine
from dpexp.clipping.groups import Group, trainable_parameters
from dpexp.clipping.reports import CoverageRow
from dpexp.clipping.sharding import Shards, shards_of
from dpexp.clipping.survey.graph import Survey
from dpexp.clipping.tapping.forwards import Entered, ForwardPass, inside_reentrant_checkpoint
from dpexp.clipping.tapping.messages import REENTRANT
from dpexp.clipping.tapping.roots import Roots
from dpexp.clipping.tapping.sites import find_sites, install, uninstall
from dpexp.clipping.tapping.taps import Recorder, Visit
from dpexp.errors import UserError


class Backend(ABC):
    """Computes norms and clipped sums. A subclass writes what is abstract, and what else it needs."""

    shards: Shards | None = None
    groups: list[Group]

    @abstractmethod
    def enter(self, given: Entered, looking: bool) -> None:
        """The model's forward begins; ``looking``: it is none of the user's, but repeats one to compare what examples get."""

    @abstractmethod
    def leave(self, output: Any, looking: bool) -> None:
        """The model's forward has ended; ``looking`` as in `enter`."""

    @abstractmethod
    def clipped_sums(self, roots: Roots, factors: Factors) -> tuple[Tensor, Sums, tuple[Tensor | None, ...]]:
        """Compute squared norms ``[K, B]``, the clipped sums, and the gradients of the roots' inputs."""

    def silence(self) -> AbstractContextManager[None]:
        """Nothing of what runs inside is the user's, or recorded."""
        return nullcontext()

    def forget(self) -> None:
        """The batch is empty: no backward pass comes."""

    def new_batch(self) -> None:
        """Another batch begins: no losses of it come from the forwards so far."""

    def may_begin_again(self) -> None:
        """Whoever steps begins a step again on a `LateError`."""

    @abstractmethod
    def uninstall(self) -> None:
        """Give the model back as it was."""

    def coverage(self) -> list[CoverageRow]:
        """Return a row for each trainable parameter."""
        return [CoverageRow(name, g.name, *self.how(name)) for g in self.groups for name in g.params]

    @abstractmethod
    def how(self, name: str) -> tuple[str, str]:
        """Return the operations that use a parameter, and its norm method; empty as long as they are not known."""

    def curious(self, roots: Roots) -> bool:
        """Tell whether this backward pass goes through the graph more often than the engine needs."""
        return False

    def last_forward(self) -> ForwardPass | None:
        """Return the forward with gradients that ended last, where it is known."""
        return None

    def state(self) -> dict[str, Any]:
        """Return what is known, as JSON."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over what another process has found."""


class TapBackend(Backend):
    """All engines but ``opacus``: parameters are followed to the operations that use them."""

    def __init__(
        self, model: nn.Module, groups: list[Group], engine: Engine, rows_per_example: int, cap_bytes: int
    ):
        self.shards, self.groups = shards_of(model), groups
        self.survey, self.methods = Survey(), Methods(cap_bytes)
        self.setup = Setup(groups, engine, self.survey, self.methods)
        self.rows_per_example = rows_per_example
        self.recorder = Recorder(trainable_parameters(model), self.survey.roles, self.shards)
        self.sites = find_sites(model, self.recorder)
        for module, site in self.sites:
            install(module, site)

    def enter(self, given: Entered, looking: bool) -> None:
        if looking:
            return
        # what nobody back-propagates is forgotten with its graph
        self.recorder.loose = None
        if torch.is_grad_enabled():
            known = self.survey.knows(given.rows // self.rows_per_example)
            self.recorder.open(given, watch=not known)
        elif inside_reentrant_checkpoint():
            raise UserError(REENTRANT)

    def leave(self, output: Any, looking: bool) -> None:
        if torch.is_grad_enabled() and not looking:
            self.recorder.close(output)

    @contextmanager
    def silence(self) -> Iterator[None]:
        before, self.recorder.quiet = self.recorder.quiet, True
        try:
            yield
        finally:
            self.recorder.quiet = before

    def uninstall(self) -> None:
        for module, _ in self.sites:
            uninstall(module)
        # a forward that was interrupted is still watched
        self.recorder.close()
        if self.shards is not None:
            self.shards.release()

    def clipped_sums(self, roots: Roots, factors: Factors) -> tuple[Tensor, Sums, tuple[Tensor | None, ...]]:
        visit = self.visit(roots)
        with examined(visit, self.setup):
            step = Step(visit, self.setup, factors)
            step.measure()
            return *step.finish(), visit.input_gradients

    def new_batch(self) -> None:
        self.recorder.new_batch()

    def may_begin_again(self) -> None:
        self.survey.waiting.allowed = True

    def visit(self, roots: Roots) -> Visit:
        """Return what goes through the graph behind the roots."""
        return Visit(self.recorder, roots, self.rows_per_example)

    def curious(self, roots: Roots) -> bool:
        return bool(roots.num_examples) and self.survey.curious(self.visit(roots))

    def last_forward(self) -> ForwardPass | None:
        return self.recorder.last()

    def state(self) -> dict[str, Any]:
        return self.survey.state() | self.methods.state() | {"batch": self.recorder.batch}

    def load_state(self, state: dict[str, Any]) -> None:
        self.survey.load_state(state)
        self.methods.load_state(state)
        self.recorder.batch = state.get("batch", self.recorder.batch)

    def how(self, name: str) -> tuple[str, str]:
        return ", ".join(self.survey.operations.get(name, ())), self.methods.of_parameter.get(name, "")
