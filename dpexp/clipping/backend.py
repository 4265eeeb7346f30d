"""All engines but Opacus's, behind one attached model: what follows its parameters, what is known of it, and its norm methods."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from dpexp.clipping.backward import Factors, Sums, clipped_sums
from dpexp.clipping.coverage import CoverageRow
from dpexp.clipping.deferred import DeferredStep
from dpexp.clipping.engines import Engine
from dpexp.clipping.groups import Group, trainable_parameters
from dpexp.clipping.remembered import Methods
from dpexp.clipping.roots import Roots
from dpexp.clipping.sharding import shards_of
from dpexp.clipping.sites import find_sites, install, uninstall
from dpexp.clipping.survey import Survey
from dpexp.clipping.taps import Recorder, Visit


class TapBackend:
    """All engines but ``opacus``: parameters are followed to the operations that use them."""

    def __init__(
        self,
        model: nn.Module,
        groups: list[Group],
        engine: Engine,
        rows_per_example: int,
        choice: str | None,
        memory_cap_mib: int,
    ):
        self.shards = shards_of(model)
        self.groups, self.rows_per_example = groups, rows_per_example
        self.engine = engine if choice is None else replace(engine, norm=choice)
        self.survey = Survey()
        self.methods = Methods(memory_cap_mib * 2**20)
        self.recorder = Recorder(trainable_parameters(model), self.survey.roles, self.shards)
        self.sites = find_sites(model, self.recorder)
        for module, site in self.sites:
            install(module, site)

    def uninstall(self) -> None:
        """Give the modules their classes back."""
        for module, _ in self.sites:
            uninstall(module)

    def clipped_sums(
        self, roots: Roots, factors: Factors, grad_scale: float
    ) -> tuple[Tensor, Sums, tuple[Tensor | None, ...]]:
        """Compute squared norms ``[K, B]``, the clipped sums, and the gradients of the roots' inputs."""
        visit = Visit(self.recorder, roots, self.rows_per_example)
        sq, sums = clipped_sums(visit, self.survey, self.methods, self.groups, self.engine, factors)
        return sq, sums, visit.input_gradients

    def curious(self, roots: Roots) -> bool:
        """Tell whether this backward pass goes through the graph more often than the engine needs."""
        visit = Visit(self.recorder, roots, self.rows_per_example)
        return self.engine.name == "loop" or (bool(roots.num_examples) and self.survey.curious(visit))

    def measured(self, roots: Roots, factors: Factors, held: str) -> DeferredStep:
        """Compute squared norms ``[K, B]``, and hold what the sums need."""
        visit = Visit(self.recorder, roots, self.rows_per_example)
        return DeferredStep(visit, self.survey, self.methods, self.groups, self.engine, factors, held)

    def state(self) -> dict[str, Any]:
        """Return what is known, as JSON."""
        return self.survey.state() | self.methods.state() | {"batch": self.recorder.batch}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over what another process has found."""
        self.survey.load_state(state)
        self.methods.load_state(state)
        self.recorder.batch = state.get("batch", self.recorder.batch)

    def coverage(self) -> list[CoverageRow]:
        """Return a row for each trainable parameter."""
        return [
            CoverageRow(
                name,
                group.name,
                ", ".join(self.survey.operations.get(name, ())),
                self.methods.of_parameter.get(name, ""),
            )
            for group in self.groups
            for name in group.params
        ]
