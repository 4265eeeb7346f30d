"""Gradient embedding perturbation (Yu et al. 2021a): the part of a gradient in a public subspace, and the rest, clipped apart."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from dpexp.clipping.base import Rows
from dpexp.clipping.gradients import numerics
from dpexp.clipping.groups import Group
from dpexp.clipping.methods.whole import Method, flatten, split
from dpexp.errors import UserError

EMBEDDING = "(embedding)"
# of gradients, in thresholds; both parts of a longer one are clipped, but for a part that is less than a millionth of it
LONGEST = 2.0**20


class Embedding(Method):
    """Gradients of public examples span a subspace V, ``[k, d]`` with orthonormal rows, anew in every step.

        e_i = V·g_i,    r_i = g_i - Vᵀe_i,    released: Σ clip(e_i, C₁) + noise in k dimensions, Σ clip(r_i, C₂) + noise in d

    and the optimiser sees the mean of Vᵀẽ + r̃. Little is left of a gradient outside of the subspace, so C₂ is small, and so is
    the noise in d dimensions. Both are two groups of one step, of the norms ‖e_i‖ and ‖r_i‖, and accounted like any two groups.

    r_i is a difference. Of a long gradient within the subspace nothing is left but rounding, which goes by how many rows the
    product has, so by who else was drawn, and may be longer than C₂. So gradients are shortened to `LONGEST` thresholds before
    they are projected, in 64 bits: rounding is then 1e-10 of a threshold, whoever is there.

    Args:
        basis: k.
        residual: C₂; C₁ is the clipping norm.
    """

    def __init__(self, basis: int, residual: float):
        self.basis, self.residual = basis, residual

    def setup(self, params: dict[str, nn.Parameter], clip_norm: float) -> tuple[list[Group], list[float]]:
        """Two groups; the first one has no parameter of the model."""
        self.params = params
        one = next(iter(params.values()))
        self.embedding = nn.Parameter(torch.zeros(self.basis, dtype=one.dtype, device=one.device))
        self.directions = torch.zeros(0)
        self.limits = clip_norm, self.residual
        groups = [Group("embedding", {EMBEDDING: self.embedding}), Group("residual", params)]
        return groups, [clip_norm, self.residual]

    def extra(self) -> dict[str, nn.Parameter]:
        """The sum of the embeddings lies in its ``grad``."""
        return {EMBEDDING: self.embedding}

    def prepare(self, seed: int, public: Callable[[], Rows]) -> None:
        """V: the first k right singular vectors of the public gradients."""
        anchors = flatten(public()).double()
        if len(anchors) < self.basis or anchors.shape[1] < self.basis:
            raise UserError(
                f"clip.basis={self.basis} directions cannot come from {len(anchors)} public examples and {anchors.shape[1]} "
                "parameters: give fewer, or more clip.public_examples"
            )
        # the Gram matrix is small; singular vectors beyond its numerical rank would be noise of rounding, and still orthonormal
        _, vectors = torch.linalg.eigh(anchors @ anchors.T)
        found = vectors[:, -self.basis :].T @ anchors
        self.directions = torch.linalg.qr(found.T)[0].T

    def clip(self, rows: Rows, keep: Tensor, factors: Callable[[int, Tensor], Tensor]) -> tuple[Tensor, Rows]:
        """Σ ê_i and Σ r̂_i."""
        gradients = flatten(rows).double()
        longest = LONGEST * max(self.limits)
        gradients *= (longest / gradients.norm(dim=1).clamp(min=longest))[:, None]
        directions = self.directions.to(gradients)
        inside = gradients @ directions.T
        outside = gradients - inside @ directions
        parts = (inside, outside)
        squares = torch.stack([*map(numerics.squared_norms, parts)])
        first, second = (factors(k, squares[k]).to(gradients) @ part for k, part in enumerate(parts))
        return squares, {EMBEDDING: first, **split(second, self.params)}

    def finish(self, stds: dict[int, float]) -> None:
        """Vᵀẽ + r̃."""
        assert self.embedding.grad is not None
        inside = split(self.embedding.grad @ self.directions.to(self.embedding), self.params)
        for name, p in self.params.items():
            assert p.grad is not None
            p.grad.add_(inside[name])
