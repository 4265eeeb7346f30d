"""Clipping that needs whole per-example gradients: the methods that change them before or while they are clipped.

`attach` finds norms without gradients where it can. Here every per-example gradient of a physical batch is held (B times the
size of the model), by the same formulas and the same proofs, and handed to a `Method`:

- `coordinates.Coordinates`: each coordinate is centred and scaled before the norm is taken (AdaClip and its relatives)
- `embedding.Embedding`: gradients are split into a part in a public subspace and the rest, each clipped by itself

What is released is a sum of vectors of bounded length, as ever: `VectorClipper` is a `Clipper` to the rest of the program.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from dpexp.clipping.attach import Clipper
from dpexp.clipping.backend import TapBackend
from dpexp.clipping.backward import Step, examined
from dpexp.clipping.base import SCALES, Rows
from dpexp.clipping.compiling import uncompiled
from dpexp.clipping.distributed import Sums
from dpexp.clipping.gradients import merge, numerics
from dpexp.clipping.groups import Group
from dpexp.clipping.loop import loop_over_examples
from dpexp.clipping.rules import RULES
from dpexp.clipping.tapping.roots import Roots
from dpexp.errors import UserError


class Method(ABC):
    """How per-example gradients become a sum with bounded contributions. A subclass writes `clip`, and what else it needs.

    Attributes:
        KEPT: names of what the next step depends on; all of it public or released.
    """

    KEPT: tuple[str, ...] = ()

    def setup(self, params: dict[str, nn.Parameter], clip_norm: float) -> tuple[list[Group], list[float]]:
        """Take the parameters, and return K groups with their thresholds."""
        self.params = params
        return [Group("flat", params)], [clip_norm]

    def extra(self) -> dict[str, nn.Parameter]:
        """Parameters that exist for the sake of their ``grad`` alone: sums that are released besides."""
        return {}

    def prepare(self, seed: int, public: Callable[[], Rows]) -> None:
        """Called before each step. ``seed`` is secret and new; ``public()`` gives gradients of public examples."""

    @abstractmethod
    def clip(self, rows: Rows, keep: Tensor, factors: Callable[[int, Tensor], Tensor]) -> tuple[Tensor, Rows]:
        """Norms and sums.

        Args:
            rows: see `Rows`.
            keep: ``[B]``, whether an example is finite; it contributes nothing else.
            factors: group index, squared norms ``[B]`` -> factors ``[B]``, at most threshold / norm.

        Returns:
            squared norms ``[K, B]``, and the sums by name, those of `extra` included.
        """

    def finish(self, stds: dict[int, float]) -> None:
        """Make of the noisy means in ``p.grad`` what an optimiser expects there. ``stds``: of their noise, by ``id(p)``."""

    def state_dict(self) -> dict[str, Any]:
        """What the next step depends on."""
        return {key: value for key, value in vars(self).items() if key in self.KEPT}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""
        for key, value in state.items():
            if isinstance(value, dict):
                value = {name: tensor.to(self.params[name].device) for name, tensor in value.items()}
            setattr(self, key, value)


class VectorClipper(Clipper):
    """A `Clipper` whose sums a `Method` forms from whole per-example gradients.

    Args:
        model: as for `attach`.
        method: a fresh one.
        clip_norm: C.
        rule: how a norm becomes a factor.
        rows_per_example, fixed_length: as for `attach`.
    """

    def __init__(
        self, model: nn.Module, method: Method, clip_norm: float = 1.0, rule: str = "abadi", **named: Any
    ):
        super().__init__(model, "flat", clip_norm, rule, "opacus_improved", memory_cap_mib=1 << 20, **named)
        self.method = method
        self.groups, thresholds = method.setup(self.params, clip_norm)
        self._thresholds = self._thresholds.new_tensor(thresholds)

    @property
    def extra(self) -> list[nn.Parameter]:
        """See `Method.extra`."""
        return list(self.method.extra().values())

    def prepare(self, seed: int, public: Callable[[], Rows]) -> None:
        """See `Method.prepare`."""
        self.method.prepare(seed, public)

    def finish(self, stds: dict[int, float]) -> None:
        """See `Method.finish`."""
        self.method.finish(stds)

    @property
    def _summed(self) -> dict[str, nn.Parameter]:
        return self.params | self.method.extra()

    @uncompiled
    def rows(self, losses: Tensor) -> Rows:
        """Return the per-example gradients behind losses."""
        roots = Roots.of_losses(losses)
        self._independence.begin(roots, self.params.values())
        rows, _ = self._rows(roots, 1.0)
        self._independence.check(len(losses))
        return rows

    def _rows(self, roots: Roots, loss_scale: float) -> tuple[Rows, Tensor]:
        """The per-example gradients behind roots, and ``[B]`` which examples are finite."""
        backend, count = self._backend, roots.num_examples
        assert isinstance(backend, TapBackend)
        visit = backend.visit(roots)
        with examined(visit, backend.setup):
            step = RowsStep(visit, backend.setup, _no_factors, deferred=True)
            step.measure()
        keep = torch.ones(count, dtype=torch.bool, device=roots.device)
        rows: Rows = {}
        for name, p in self.params.items():
            if name in step.rows:
                rows[name] = step.rows.pop(name)
                if loss_scale != 1.0:
                    rows[name] = rows[name] / loss_scale
                keep &= representable(rows[name])
            else:
                dtype = numerics.wide(roots.dtype)
                rows[name] = torch.zeros(count, *p.shape, dtype=dtype, device=roots.device)
        if not bool(keep.all()):
            rows = {name: numerics.zero_examples(value, keep) for name, value in rows.items()}
        return rows, keep

    def _clipped(
        self, roots: Roots, thresholds: Tensor, scale: Tensor | None, loss_scale: float
    ) -> tuple[Tensor, Sums, tuple[Tensor | None, ...]]:
        if scale is not None:
            raise UserError(SCALES)
        rows, keep = self._rows(roots, loss_scale)
        rule, values = RULES[self.rule], thresholds.tolist()

        def factors(k: int, sq_norms: Tensor) -> Tensor:
            return torch.where(keep, rule(sq_norms, values[k]), 0.0)

        with numerics.in_full(roots.device), numerics.all_full_precision():
            squares, sums = self.method.clip(rows, keep, factors)
        norms = torch.where(keep, squares.clamp(min=0).sqrt(), torch.nan)
        params = self._summed
        return norms, {name: value.to(params[name].dtype) for name, value in sums.items()}, ()


class RowsStep(Step):
    """Holds every per-example gradient, and forms no sum."""

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        self.rows: Rows = {}

    def _measure(self, name: str) -> None:
        merged = reduce(merge, self.pending.pop(name))
        self._chosen(name, merged, fused=True)
        self.rows[name] = merged.instantiate()

    def _loop(self, measuring: bool = True) -> None:
        looped = {name: p for name, p in self.params.items() if name in self.looped}
        for name, p in looped.items():
            self.rows[name] = self.all_norms.new_zeros(self.num_examples, *p.shape)
        finite = self.visit.roots.finite()
        for i, gradients in loop_over_examples(self.visit, looped, retain=False):
            for name, gradient in gradients.items():
                self.rows[name][i] = gradient if finite[i] else torch.nan


def _no_factors(k: int, sq_norms: Tensor, examples: slice) -> Tensor:
    raise RuntimeError("no sum is formed here")


def representable(x: Tensor) -> Tensor:
    """Say of each example of ``[B, ...]`` whether it is finite, ``[B]``: a gradient may overflow where it is scaled or projected.

    Infinity times a factor of 0 is NaN in the whole sum, and no noise hides that.
    """
    return x.reshape(len(x), math.prod(x.shape[1:])).isfinite().all(1)


def flatten(rows: Rows) -> Tensor:
    """``[B, d]``: all parameters side by side, in the order of the names."""
    return torch.cat([value.reshape(len(value), math.prod(value.shape[1:])) for value in rows.values()], 1)


def split(vector: Tensor, params: dict[str, nn.Parameter]) -> Rows:
    """A vector ``[d]`` as one tensor for each parameter; the inverse of `flatten` for a single row."""
    pieces = vector.split([p.numel() for p in params.values()])
    return {name: piece.view(p.shape) for piece, (name, p) in zip(pieces, params.items(), strict=True)}
