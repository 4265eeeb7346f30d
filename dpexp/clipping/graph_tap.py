"""The tap of a compiled graph: an `autograd.Function` without side effects, which `torch.compile` can trace.

Its backward computes what the eager engine computes in Python from records: per-example norms of the layer's parameters and their
clipped, summed gradients. Both leave as *gradients*: the norms as that of the layer's tap (a row of zeros, made outside of the
graph), the sums as those of stand-ins for the parameters. The parameters themselves stay outside of the tap, so that any
gradient that reaches them by another way is seen.

What may change between steps, or between a forward and its backward (thresholds, clip scales, the loss scale), is read from a
tensor when the backward runs. That takes a custom operation: a compiler may move an ordinary one into the forward, where the
values are old.
"""

from __future__ import annotations

import sys
from types import FrameType, FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dpexp.clipping import layouts
from dpexp.clipping.choice import affordable, by_rule
from dpexp.clipping.contributions import numerics
from dpexp.clipping.contributions.base import Contribution
from dpexp.clipping.contributions.scratch import Scratch
from dpexp.clipping.rules import RULES

if TYPE_CHECKING:
    from dpexp.clipping.fullgraph import GraphSite

# the first entries of a tap's gradient: how many calls were summed in it, and over how many examples
MARKS = 2


@torch.library.custom_op("dpexp::clip_factors", mutates_args=())
def clip_factors(sq_norms: Tensor, settings: Tensor, group: int, num_groups: int, rule: str) -> Tensor:
    """Factors ``[B]`` of one group for gradients that still carry the loss scale; 0 where a norm is not finite.

    Args:
        sq_norms: ``[B]``, of the scaled losses.
        settings: float64: the loss scale, the K thresholds, then a scale of the threshold for each example.
    """
    loss_scale, threshold = settings[0], settings[1 + group]
    limit = (threshold * settings[1 + num_groups :][: sq_norms.shape[0]]).to(sq_norms)
    factors = RULES[rule](sq_norms / loss_scale.to(sq_norms) ** 2, limit) / loss_scale.to(sq_norms)
    # 0/0 where both the norm and the threshold vanish: an example without a budget contributes nothing
    return torch.where(sq_norms.isfinite(), factors, 0.0).nan_to_num(nan=0.0)


@torch.library.custom_op("dpexp::given_factors", mutates_args=())
def given_factors(sq_norms: Tensor, factors: Tensor, group: int) -> Tensor:
    """Row ``group`` of ``factors`` (``[K, N]``), for as many examples as there are norms: the second of two passes."""
    return factors[group, : sq_norms.shape[0]].to(sq_norms).clone()


@clip_factors.register_fake
def _(sq_norms: Tensor, settings: Tensor, group: int, num_groups: int, rule: str) -> Tensor:
    return torch.empty_like(sq_norms)


@given_factors.register_fake
def _(sq_norms: Tensor, factors: Tensor, group: int) -> Tensor:
    return torch.empty_like(sq_norms)


class GraphTap(torch.autograd.Function):
    """Identity on ``y``; ``tensors`` are what the layer's forward received, then the stand-ins for its parameters."""

    @staticmethod
    def forward(
        ctx: Any,
        site: GraphSite,
        module: nn.Module,
        layout: str,
        num_examples: int,
        num_saved: int,
        y: Tensor,
        tap: Tensor,
        settings: Tensor,
        *tensors: Tensor,
    ) -> Tensor:
        ctx.site, ctx.module, ctx.layout = site, module, layout
        ctx.num_examples, ctx.num_saved = num_examples, num_saved
        ctx.save_for_backward(settings, *tensors[:num_saved])
        ctx.mark_dirty(y)  # an in-place identity: later in-place operations on the output stay legal
        return y

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> Any:
        settings, *saved = ctx.saved_tensors
        with torch.autocast(gy.device.type, enabled=False):
            found = contributions(ctx.site, ctx.module, ctx.layout, ctx.num_examples, tuple(saved), gy)
            delivered, sums = norms_and_sums(ctx.site, found, ctx.num_examples, settings)
        return (None, None, None, None, None, gy, delivered, None, *([None] * ctx.num_saved), *sums)


class TableTap(torch.autograd.Function):
    """The tap of an embedding whose table is also the head's weight.

    The norm needs both uses at once. So besides ``y`` the forward gives two carriers of zeros for the head, whose gradients
    bring back what entered the head, and the gradient of what left it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        site: GraphSite,
        module: nn.Module,
        num_examples: int,
        dtype: torch.dtype,
        y: Tensor,
        tap: Tensor,
        settings: Tensor,
        ids: Tensor,
        standin: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.site, ctx.module, ctx.num_examples = site, module, num_examples
        ctx.save_for_backward(settings, ids)
        ctx.mark_dirty(y)
        zero = torch.zeros((), dtype=dtype, device=y.device)
        return y, zero.expand(y.shape), zero.expand(*ids.shape, standin.shape[0])

    @staticmethod
    def backward(ctx: Any, gy: Tensor, head_input: Tensor, head_gradient: Tensor) -> Any:
        settings, ids = ctx.saved_tensors
        site: GraphSite = ctx.site
        head = site.partner
        assert head is not None
        with torch.autocast(gy.device.type, enabled=False):
            table = contributions(site, ctx.module, layouts.ROWS, ctx.num_examples, (ids,), gy)["weight"]
            linear = contributions(
                head, ctx.module, layouts.ROWS, ctx.num_examples, (head_input,), head_gradient
            )["weight"]
            found = {"weight": table.merge(linear)}
            delivered, sums = norms_and_sums(site, found, ctx.num_examples, settings)
        return None, None, None, None, gy, delivered, None, None, *sums


class HeadTap(torch.autograd.Function):
    """The head's tap: hands both of its tensors to the carriers, and says that it was called."""

    @staticmethod
    def forward(
        ctx: Any,
        site: GraphSite,
        num_examples: int,
        y: Tensor,
        tap: Tensor,
        x: Tensor,
        first: Tensor,
        second: Tensor,
    ) -> Tensor:
        ctx.site, ctx.num_examples, ctx.dtype = site, num_examples, first.dtype
        ctx.save_for_backward(x)
        ctx.mark_dirty(y)
        return y

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        norms = torch.zeros(ctx.num_examples, dtype=ctx.site.tap.dtype, device=gy.device)
        return None, None, gy, marked(norms), None, x.to(ctx.dtype), gy.to(ctx.dtype)


def contributions(
    site: GraphSite, module: nn.Module, layout: str, num_examples: int, saved: tuple[Tensor, ...], gy: Tensor
) -> dict[str, Contribution]:
    """Per-example gradients of the layer's parameters by local name."""
    rows = num_examples * site.graph.rows_per_example
    major = tuple(layouts.example_major(s, layout, rows) if i == 0 else s for i, s in enumerate(saved))
    return site.kind.contributions(
        module, major, layouts.example_major(gy, layout, rows), num_examples, set(site.locals)
    )


def marked(sq_norms: Tensor) -> Tensor:
    """The gradient of a tap: `MARKS` numbers, then the squared norms."""
    marks = sq_norms.new_ones(MARKS)
    marks[1] = sq_norms.shape[0]
    return torch.cat([marks, sq_norms])


def norms_and_sums(
    site: GraphSite, found: dict[str, Contribution], num_examples: int, settings: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """The gradient of the tap and the clipped sum of each parameter of the layer.

    Nothing branches on values: NaN and Inf are always masked.
    """
    scratch = site.graph.scratch
    total = torch.zeros(num_examples, dtype=site.tap.dtype, device=settings.device)
    held: dict[str, Tensor | None] = {}
    for local in site.locals:
        sq_norms, held[local] = _norms(found[local], site.graph.norm, scratch)
        total = total + sq_norms.to(total)
    factors = site.factors(total, settings)
    finite = total.isfinite()
    sums = []
    for local in site.locals:
        rows_held = held[local]
        if rows_held is None:
            summed = found[local].mask(finite).weighted_sum(factors)
        else:
            summed = numerics.combine(numerics.zero_examples(rows_held, finite), factors)
        sums.append(summed.to(site.standins[local].dtype))
    return marked(total), sums


def _norms(contribution: Contribution, norm: str, scratch: Scratch) -> tuple[Tensor, Tensor | None]:
    """Squared norms, and per-example gradients where the method has them and all of them fit.

    A loop over chunks of examples would fix the batch size in the compiled code; it is the last resort.
    """
    method = static_choice(contribution, norm, scratch)
    small = contribution.num_examples * contribution.workspace(method) <= scratch.cap_bytes
    if contribution.num_examples == 0 or not contribution.instantiates(method) or not small:
        return contribution.sq_norms(method, scratch=scratch), None
    rows = contribution._gradients(0, contribution.num_examples, method, None).contiguous()
    return numerics.squared_norms(rows), rows


def static_choice(contribution: Contribution, norm: str, scratch: Scratch) -> str:
    """The norm method, from shapes alone: a clock has no place in a graph."""
    if norm in ("ghost", "instantiate", "loop"):
        return contribution.resolve(norm)
    return by_rule(contribution, affordable(contribution, scratch.cap_bytes))


@torch.compiler.assume_constant_result
def tracing_full_graph() -> bool:
    """Runs while `torch.compile` traces: whether it was asked for one graph (``fullgraph=True``).

    Where the compiler may cut, it cuts at the taps of the eager engine, which can do more.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        asked = getattr(frame.f_locals.get("self"), "one_graph", None)
        if asked is not None:
            return bool(asked)
        frame = frame.f_back
    return True


class Detached:
    """A module as its own forward sees it, with the values of some parameters replaced. Nothing is written to the module."""

    def __init__(self, module: nn.Module, cls: type[nn.Module], values: dict[str, Tensor]):
        self._module, self._cls, self._values = module, cls, values

    def __getattr__(self, name: str) -> Any:
        if name in self._values:
            return self._values[name]
        method = getattr(self._cls, name, None)
        if isinstance(method, FunctionType):
            return method.__get__(self)
        return getattr(self._module, name)
