"""Clipping by norms that are estimated from random projections (Bu et al. 2021, "Fast and Memory Efficient DP-SGD via JL
Projections"): one forward, and back-propagations without any per-example gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from dpexp.clipping.backward import DRAWS
from dpexp.clipping.base import Rows
from dpexp.clipping.distributed import Sums
from dpexp.clipping.gradients.numerics import all_full_precision, states_of_chance, wide
from dpexp.clipping.methods.watched import WatchedClipper
from dpexp.clipping.rules import RULES
from dpexp.clipping.survey import layouts
from dpexp.clipping.survey.observed import apart, views
from dpexp.clipping.survey.ownership import MIXED
from dpexp.clipping.tapping.roots import Roots
from dpexp.errors import UserError

# inner products that are taken twice, by what their directions are multiplied then, and how much of a norm their difference is
TWICE, OTHERWISE, ROUGH = 4, 4 / 3, 100.0
# how far gradients may be from growing in proportion with weights, and inner products from adding up to that of the sum: rounding
PROPORTION = 1e-3
# by what one of two weights of an example is multiplied to be the other; they, and their sum, are powers of two times it
FACTORS = (1.0, -0.5, -2.0)
OPAQUE = (
    "clip=jl takes the norms of gradients by differentiating twice, and an operation of this model gives a gradient that "
    "cannot be (a fused kernel, a backward of one's own or a hook that detaches it): its norm would be left out, and its sum not "
    "be clipped. Use clip=flat, or the plain operation"
)


class ProjectedClipper(WatchedClipper):
    """Clips by M_i² = (1/r)·Σ_j ⟨g_i, v_j⟩² in the place of ‖g_i‖².

    The inner products of all examples with one v_j come from one back-propagation through the back-propagation: with weights
    u_i on the losses, Σ_i u_i g_i is linear in u, and d/du_i of its inner product with v_j is ⟨g_i, v_j⟩.

    A norm may be under-estimated, so an example may move the sum by more than C: `sensitivity` is C, the unit in which
    `dpexp.privacy.projected` knows how far. That rests on the v_j being normal, independent of the data, new in each step and
    the same for all examples of it.

    Where the terms of a gradient cancel, its inner products and what it adds to the sum are rounding, and not the same. So some
    products are taken a second time, with directions that round otherwise; a hundred times their difference counts as norm.

    A backward that autograd cannot look into (a fused kernel) would leave its gradients out of the inner products, and not out of
    the sum: all examples' products with v_j must add up to that of the sum, and are held against it in each pass.

    Args:
        model: its trainable parameters are clipped together.
        projections: r.
        clip_norm, rule, rows_per_example, fixed_length: as for `dpexp.clipping.attach`.
    """

    def __init__(
        self, model: nn.Module, projections: int, clip_norm: float = 1.0, rule: str = "abadi", **named: Any
    ):
        super().__init__(model, "flat", clip_norm, rule, **named)
        self.projections = projections
        self._seed: int | None = None

    def prepare(self, seed: int, public: Callable[[], Rows] | None = None) -> None:
        """Begin a step: its projections follow from ``seed``, which is secret and new."""
        self._seed = seed

    def check_losses(self, losses: Tensor) -> None:
        """Refuse losses of no step."""
        super().check_losses(losses)
        if self._seed is None:
            raise UserError("clip=jl draws its projections for each step: call prepare(seed) first")

    def clipped(self, losses: Tensor, loss_scale: float) -> tuple[Tensor, Sums]:
        """Return estimates of the norms ``[1, B]``, and the sums clipped by them.

        Raises:
            UserError: the model cannot be differentiated twice; or the gradient of an example is NaN or infinite.
        """
        params, roots = tuple(self.params.values()), Roots.of_losses(losses)
        if roots.in_16_bits:
            raise UserError(
                "clip=jl lets autograd add the examples up, which this forward makes it do in 16 bits: one example could "
                "round the sum of all by more than C. Compute in float32 (no autocast; runtime.precision=fp32), or use "
                "clip=flat"
            )
        looked = self._independence.due
        self._independence.begin(roots, params)
        with torch.autocast(losses.device.type, enabled=False), all_full_precision():
            if looked:
                self._prove(losses, params, self._independence.returned(roots))
            before = states_of_chance(losses.device)
            squares = self._squared_norms(losses * loss_scale) / loss_scale**2
            if states_of_chance(losses.device) != before:
                raise UserError(DRAWS)
            factors = (self._factors(squares) * loss_scale).to(losses)
            found = torch.autograd.grad(losses, params, factors, allow_unused=True)
        self._independence.check(len(losses))
        if not all(bool(g.isfinite().all()) for g in found if g is not None):
            raise UserError(
                "the gradient of an example is NaN or infinite, and clip=jl knows no gradient of a single example that it could "
                "leave out: find the example (torch.isfinite on the inputs and losses), or use clip=flat"
            )
        pairs = zip(self.params, found, strict=True)
        return squares.sqrt()[None], {name: g / loss_scale for name, g in pairs if g is not None}

    def _prove(self, losses: Tensor, params: tuple[nn.Parameter, ...], edges: Sequence[GradientEdge]) -> None:
        """Prove that a weight on an example's loss moves its own rows of what the model returned, and gradients in proportion.

        Raises:
            UserError: losses go by other examples, or a hook changes gradients by what is in the batch.
        """
        asked: Any = [*edges, *params]
        once, uneven = torch.ones_like(losses), layouts.weights(len(losses)).to(losses)
        # what cancels is rounding alone, which powers of two do not change
        other = uneven * torch.tensor(FACTORS).to(losses)[torch.arange(len(losses)) % len(FACTORS)]
        found = [
            torch.autograd.grad(losses, asked, weights, retain_graph=True, allow_unused=True)
            for weights in (once, uneven, other, uneven + other)
        ]
        for plain, weighted in zip(found[0][: len(edges)], found[1], strict=False):
            if plain is not None and not apart([views(plain), views(weighted)], plain.dtype):
                raise UserError(f"what the model returns: {MIXED}")
        one, two, both = (
            torch.cat([g.flatten() for g in each[len(edges) :] if g is not None] or [once.new_zeros(1)])
            for each in found[1:]
        )
        if float((one + two - both).norm()) > PROPORTION * float(one.norm() + two.norm()):
            raise UserError(
                "the gradients do not grow in proportion with the weights of the losses: a hook or a backward in this model "
                "clamps or normalises them, by what the whole batch holds. Leave it out"
            )

    @torch.no_grad()
    def _factors(self, squares: Tensor) -> Tensor:
        factors = RULES[self.rule](squares, float(self.thresholds))
        # of an M near overflow: a factor of few bits may be rounded up by as much as it is
        return torch.where(factors < torch.finfo(torch.float32).tiny, 0.0, factors)

    def _squared_norms(self, losses: Tensor) -> Tensor:
        """M_i², ``[B]``, float64."""
        weights, params = torch.ones_like(losses, requires_grad=True), tuple(self.params.values())
        try:
            found = torch.autograd.grad(losses, params, weights, create_graph=True, allow_unused=True)
            used = [(p, g) for p, g in zip(params, found, strict=True) if g is not None]
            pairs = [(p, g) for p, g in used if g.requires_grad]
            if any(bool(g.any()) for _, g in used if not g.requires_grad):
                raise UserError(OPAQUE)
            total = torch.zeros(len(losses), dtype=torch.float64, device=losses.device)
            if not pairs:
                return total
            rounded, twice = torch.zeros_like(total), min(TWICE, self.projections)
            missing, size = total.new_zeros(()), total.new_zeros(())

            def products(directions: dict[int, Tensor], factor: float) -> tuple[Tensor, Tensor]:
                parts = torch.stack([(factor * directions[id(p)] * g).sum() for p, g in pairs])
                (each,) = torch.autograd.grad(parts.sum(), weights, retain_graph=True)
                return each.detach().double() / factor, parts.detach().double() / factor

            for number, directions in enumerate(self._directions()):
                each, parts = products(directions, 1.0)
                total += each.square()
                if number < twice:
                    missing = torch.maximum(missing, (each.sum() - parts.sum()).abs())
                    size = torch.maximum(size, each.abs().sum() + parts.abs().sum())
                    rounded += (each - products(directions, OTHERWISE)[0]).square()
            if bool(missing > PROPORTION * size + ROUGH * rounded.sqrt().sum()):
                raise UserError(OPAQUE)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise UserError(
                f"clip=jl differentiates twice, which an operation of this model does not allow ({error}): use clip=flat, or "
                "model.config._attn_implementation=eager where it is the attention"
            ) from error
        return total / self.projections + ROUGH**2 * rounded / twice

    def _directions(self) -> Iterator[dict[int, Tensor]]:
        """v_1, …, v_r, each by ``id(p)``; the same for all physical batches of a step."""
        params = self.params.values()
        assert self._seed is not None
        normal = _normals(self._seed, next(iter(params)).device)
        for _ in range(self.projections):
            yield {id(p): normal(p.shape).to(wide(p.dtype)) for p in params}


def _normals(seed: int, device: torch.device) -> Callable[[torch.Size], Tensor]:
    """Standard normal numbers of a shape, float32, from all 63 bits of a seed.

    torch's generator on the CPU would keep 32 of them, and a gradient that is orthogonal to the projections of many of the 2^32
    seeds exists: where one of these is drawn its norm is taken for nothing, which no privacy loss of normal projections covers.
    """
    if device.type == "cuda":
        generator = torch.Generator(device).manual_seed(seed)
        return lambda shape: torch.randn(shape, generator=generator, device=device)
    drawn = np.random.Generator(np.random.Philox(key=[seed, 0]))
    return lambda shape: torch.from_numpy(drawn.standard_normal(tuple(shape), dtype=np.float32)).to(device)
