"""One backward pass of the tapped engines: norms as the gradients arrive, sums as the groups complete.

A group is *complete* when every use of its parameters in the forward pass has delivered. It is flushed at once: factors,
weighted sums, and its activations and output gradients are released. Per-layer groups therefore clip inside back-propagation
(He et al., section 3.1), flat clipping flushes once at the end (book-keeping, Bu et al., Algorithm 1), blocks in between. With a
second pass (ghost clipping, Li et al., section 4) nothing is kept: a second back-propagation computes the weighted sums.

Gradients are never written to ``p.grad`` here: a refusal, at any point, leaves every gradient as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from dpexp.clipping.choice import Methods
from dpexp.clipping.distributed import LateSum, Sums
from dpexp.clipping.engines import Engine
from dpexp.clipping.gradients import Dense, Joined, Lookup, Tied, instantiated, merge, numerics
from dpexp.clipping.gradients.base import Bounded, Doubt, PerExampleGradient
from dpexp.clipping.groups import Group
from dpexp.clipping.loop import LOOPED, loop_over_examples
from dpexp.clipping.survey.graph import Survey
from dpexp.clipping.survey.layouts import NOBODY, per_example
from dpexp.clipping.survey.ownership import LATE
from dpexp.clipping.tapping.forwards import ForwardPass
from dpexp.clipping.tapping.taps import Visit
from dpexp.clipping.tapping.uses import Use
from dpexp.errors import LateError, UserError
from dpexp.torch_versions import gradient_dtype

DRAWS = (
    "the back-propagation of this model draws random numbers (activation checkpointing with preserve_rng_state=False, the "
    "generators of Python or numpy in a checkpointed part, a hook), so a second one would sum other gradients than those whose "
    "norms were taken: draw outside of what is computed again, or use engine='auto', which sums what it has measured"
)

# (group index, squared norms [b], slice of the examples that they belong to)
Factors = Callable[..., Tensor]


@dataclass(frozen=True)
class Setup:
    """What the backward passes of one clipper share.

    Attributes:
        groups: K of them.
        engine: when sums are formed, and how.
        survey: what is known of the model.
        methods: how norms are found.
    """

    groups: list[Group]
    engine: Engine
    survey: Survey
    methods: Methods


@contextmanager
def examined(visit: Visit, setup: Setup) -> Iterator[None]:
    """Complete what is known of the model first, and take note of the pass afterwards.

    Inside, it is as in `numerics.in_full`.
    """
    with numerics.in_full(visit.roots.device):
        names = [name for group in setup.groups for name in group.params]
        try:
            if setup.engine.name == "loop":
                setup.survey.looped.update(names)
            setup.survey.look(visit, {name: visit.recorder.leaf(name) for name in names})
            yield
        finally:
            setup.survey.finish(visit)


class Step:
    """The visits that form norms and sums.

    Args:
        visit: the graph behind the roots.
        setup: of the clipper.
        factors: group index, squared norms ``[b]`` and the slice of their examples -> factors ``[b]`` for gradients that still
            carry the loss scale.
        deferred: factors come later, from elsewhere (`deferred.py`): `measure` forms no sum, and whatever the sums need is held
            until `finish`.
    """

    def __init__(self, visit: Visit, setup: Setup, factors: Factors, deferred: bool = False):
        self.visit, self.factors, self.deferred = visit, factors, deferred
        self.survey, self.methods, self.engine = setup.survey, setup.methods, setup.engine
        self.groups = groups = setup.groups
        self.layout, self.looped = self.survey.ownership.layout, set(self.survey.looped)
        self.num_examples = visit.num_examples
        self.group_of = {name: k for k, group in enumerate(groups) for name in group.params}
        self.params = {name: p for group in groups for name, p in group.params.items()}
        dtype, device = numerics.wide(visit.roots.dtype), visit.roots.device
        self.all_norms = torch.zeros(len(groups), self.num_examples, dtype=dtype, device=device)
        # an example whose loss is NaN or Inf adds nothing, whatever its gradient
        self.all_norms.masked_fill_(~visit.roots.finite(), torch.nan)
        # views
        self.sq_norms = list(self.all_norms)
        self.sums: Sums = {}
        self.factor: dict[int, Bounded] = {}
        self.kept: dict[int, dict[str, PerExampleGradient]] = {}
        # by group, what is measured in one go when the group is complete
        self.small: dict[int, dict[str, Dense]] = {}
        # norms of a group that may have to be measured again, once the whole group's are known
        self.doubts: dict[int, list[Doubt]] = {}
        # examples that are summed alone, of each parameter, for a second pass
        self.apart: dict[str, Tensor] = {}
        self.pending: dict[str, list[PerExampleGradient]] = {}
        # whether measuring drew random numbers; asked where something is summed by another back-propagation
        self.drew = False
        self.expected = dict.fromkeys(self.params, 0)
        for use in visit.uses:
            for name in use.names if self.layout[id(use)] != NOBODY else ():
                self.expected[name] += 1
        self.remaining = [sum(self.expected[n] for n in g.params if n not in self.looped) for g in groups]
        at_once = len(visit.passes) == 1 and not (self.engine.second_pass or deferred)
        self.early = [at_once and self.looped.isdisjoint(group.params) for group in groups]

    def measure(self) -> Tensor:
        """Find the squared norms, ``[K, B]``; unless `deferred`, groups that are complete are summed on the way."""
        outside = [name for name in self.params if name not in self.looped]
        if (shards := self.visit.recorder.shards) is not None and not self.deferred:
            # what is complete may leave while the back-propagation goes on
            shards.sums = self.sums
        before = self._chance()
        native = self.visit.back_propagate(
            self._record,
            retain=bool(self.looped) or self.engine.second_pass,
            params=[self.visit.recorder.leaf(name) for name in outside],
            inputs=True,
        )
        late = [name for name, g in zip(outside, native, strict=True) if g is not None]
        if late:
            self.survey.looped.update(late)
            self.survey.unsettle()
            raise LateError(f"{sorted(late)[0]} {LATE}")
        if not self.visit.arrived and not self.looped:
            raise UserError(
                "losses do not depend on any trainable parameter of the attached model: compute them from the attached "
                "model, after attach()"
            )
        if self.looped:
            self.methods.of_parameter |= dict.fromkeys(self.looped, LOOPED)
            self._loop()
        self.drew = before != self._chance()
        if self.deferred:
            for k in range(len(self.groups)):
                self._complete(k)
        return self.all_norms

    def _chance(self) -> tuple[Any, ...] | None:
        again = self.engine.second_pass or self.deferred
        return numerics.states_of_chance(self.visit.roots.device) if again else None

    def finish(self, sq_norms: Tensor | None = None) -> tuple[Tensor, Sums]:
        """Sum what is not summed yet. Returns squared norms ``[K, B]``, of the scaled losses, and the clipped sums by parameter.

        Args:
            sq_norms: ``[K, B]``, what decides the factors of a deferred step, in place of its own norms.

        Raises:
            UserError: what is to be back-propagated again draws random numbers.
        """
        if self.drew and (self.engine.second_pass or self.looped):
            raise UserError(DRAWS)
        if sq_norms is not None:
            self.all_norms = sq_norms.to(self.all_norms)
            self.sq_norms = list(self.all_norms)
        if self.deferred and self.looped:
            self._loop(measuring=False)
        for k in range(len(self.groups)):
            if k not in self.factor:
                self._flush(k)
        if self.engine.second_pass:
            self.visit.back_propagate(self._sum, retain=False)
            for name in list(self.pending):
                self._add_weighted(name)
        return self.all_norms, self.sums

    # -- norms, and sums of complete groups ---------------------------------------------------------------------------

    def _per_example(self, use: Use, saved: tuple[Tensor, ...], gy: Tensor) -> dict[str, PerExampleGradient]:
        names = {name for name in use.names if name not in self.looped}
        if not names or self.layout[id(use)] == NOBODY:
            return {}
        self.survey.waiting.tell(use, gy)
        layout, visit = self.layout[id(use)], self.visit
        return per_example(use, saved, gy, layout, visit.rows, visit.num_examples, names)

    def _record(self, owner: ForwardPass, use: Use, saved: tuple[Tensor, ...], gy: Tensor) -> None:
        found = self._per_example(use, saved, gy)
        # the largest last: see `_finish`
        if len(found) > 1:
            found = dict(sorted(found.items(), key=lambda item: item[1].shape.numel()))
        for name in found:
            k = self.group_of[name]
            self.remaining[k] -= 1
            held = self.pending.setdefault(name, [])
            held.append(found[name])
            if len(held) < self.expected[name]:
                continue
            if self.remaining[k] == 0 and self.early[k]:
                self._finish(k, name)
            else:
                self._measure(name)

    def _chosen(self, name: str, merged: PerExampleGradient, fused: bool) -> str:
        """The norm method; ``fused``: gradients that it has in hand are there for the sum, too."""
        method = self.methods.choose(merged, self.engine.norm, fused)
        self.methods.of_parameter[name] = method
        return method

    def _measure(self, name: str) -> None:
        """All uses of a parameter have arrived: add its squared norms to its group's, or leave it for `_measure_small`."""
        k = self.group_of[name]
        merged = reduce(merge, self.pending.pop(name))
        if isinstance(merged, Dense) and merged.joins:
            self.small.setdefault(k, {})[name] = merged
            return
        size = self.num_examples * merged.shape.numel() * merged.dtype.itemsize
        light = self.engine.keep and (self.engine.always_keep or size <= merged.nbytes)
        method = self._chosen(name, merged, fused=light)
        if light and merged.instantiates(method):
            merged = instantiated(merged, method)
        # a second pass keeps nothing that could be measured later
        doubts = None if self.engine.second_pass else self.doubts.setdefault(k, [])
        self.sq_norms[k].add_(merged.sq_norms(method, doubts))
        if merged.apart is not None:
            self.apart[name] = merged.apart
        if not self.engine.second_pass:
            self.kept.setdefault(k, {})[name] = merged

    def _measure_small(self, k: int) -> None:
        """Add the squared norms of the small gradients of group k that have arrived."""
        small = self.small.pop(k)
        name, one = next(iter(small.items()))
        rows = one if len(small) == 1 else Joined(small)
        self.methods.of_parameter.update(dict.fromkeys(small, "instantiate"))
        self.sq_norms[k].add_(numerics.squared_norms(rows.grad))
        if not self.engine.second_pass:
            self.kept.setdefault(k, {})[name] = rows

    def _complete(self, k: int, last: str = "") -> None:
        """Measure what has arrived of group k, but for ``last``; again what cancels so much that it matters in its norms."""
        for name in [n for n in self.groups[k].params if n in self.pending and n != last]:
            self._measure(name)
        if k in self.small:
            self._measure_small(k)
        doubts = self.doubts.pop(k, None)
        if not doubts:
            return
        total = self.sq_norms[k] + sum(doubt.about for doubt in doubts)
        for doubt in doubts:
            self.sq_norms[k].add_(doubt.settled(total))

    def _finish(self, k: int, name: str) -> None:
        """The last parameter of a group has arrived: its norms, the group's factors and its own sum in one go.

        Its per-example gradients, where they are instantiated, are clipped and added while they are still in the cache.
        """
        merged = reduce(merge, self.pending[name])
        self.pending[name] = [merged]
        if isinstance(merged, Lookup | Tied) or (isinstance(merged, Dense) and merged.joins):
            self._measure(name)
            self._flush(k)
            return
        self._complete(k, last=name)
        del self.pending[name]
        method = self._chosen(name, merged, fused=True)
        measured = self.sq_norms[k]
        found: list[Bounded] = []

        def factors_of(sq_norms: Tensor, examples: slice) -> Bounded:
            # a view
            total = measured[examples].add_(sq_norms)
            found.append(self._bounded_factors(k, total, examples, wait=numerics.static(total)))
            return found[-1]

        _, total = merged.norms_and_sum(method, factors_of)
        self._add(name, total)
        self._flush(k, _joined(found))

    def _flush(self, k: int, bounded: Bounded | None = None) -> None:
        """Factors, then the weighted sums of one group; what the group held is released."""
        self._complete(k)
        factors, keep = bounded or self._bounded_factors(k, self.sq_norms[k])
        self.factor[k] = factors, keep
        held = self.kept.pop(k, {})
        # What frees most memory goes first, and nothing is held once its sum is formed.
        for name in sorted(held, key=lambda n: self.params[n].nbytes - held[n].nbytes):
            gradient = held.pop(name)
            gradient = gradient.finite(keep)
            if isinstance(gradient, Joined):
                for each, total in gradient.weighted_sums(factors):
                    self._add(each, total)
            elif isinstance(gradient, Lookup | Tied):
                self.sums[name] = LateSum(gradient, factors)
            else:
                self._add(name, gradient.weighted_sum(factors))

    def _bounded_factors(
        self, k: int, sq_norms: Tensor, examples: slice = slice(None), wait: bool = True
    ) -> Bounded:
        """Factors of group k, and which examples are finite (None if all are): NaN and Inf contribute nothing.

        ``wait``: whether to ask if all are finite, which a GPU must be waited for.
        """
        if wait and numerics.all_finite(sq_norms):
            return self.factors(k, sq_norms, examples), None
        finite = sq_norms.isfinite()
        factors = self.factors(k, torch.where(finite, sq_norms, 0.0), examples)
        return torch.where(finite, factors, 0.0), finite

    def _sum(self, owner: ForwardPass, use: Use, saved: tuple[Tensor, ...], gy: Tensor) -> None:
        """Second pass: the factors are known. All uses of a parameter are summed at once, because they may cancel."""
        for name, gradient in self._per_example(use, saved, gy).items():
            held = self.pending.setdefault(name, [])
            held.append(gradient)
            if len(held) == self.expected[name]:
                self._add_weighted(name)

    def _add_weighted(self, name: str) -> None:
        factors, keep = self.factor[self.group_of[name]]
        gradient = reduce(merge, self.pending.pop(name))
        gradient.apart = self.apart.get(name)
        self._add(name, gradient.finite(keep).weighted_sum(factors))

    def _add(self, name: str, value: Tensor) -> None:
        # all uses of a parameter are summed at once
        assert name not in self.sums
        self.sums[name] = value.to(gradient_dtype(self.params[name]))

    # -- the loop over examples ---------------------------------------------------------------------------------------

    def _loop(self, measuring: bool = True) -> None:
        """Norms and sums of the parameters that no formula covers; of a deferred step first the norms, then the sums.

        A group's factor for an example is known as soon as its own back-propagation is done, because the taps delivered the
        rest of the group's norms before.
        """
        looped = {name: self.visit.recorder.leaf(name) for name in self.params if name in self.looped}
        later = measuring and self.deferred
        if measuring:
            for k in sorted({self.group_of[name] for name in looped}):
                self._complete(k)
        sums = {
            name: torch.zeros(p.shape, dtype=numerics.wide(p.dtype), device=p.device)
            for name, p in self.params.items()
            if name in looped and not later
        }
        for i, gradients in loop_over_examples(self.visit, looped, retain=self.engine.second_pass or later):
            for name, g in gradients.items() if measuring else ():
                norms = self.sq_norms[self.group_of[name]]
                norms[i] += numerics.squared_norms(g.unsqueeze(0)).squeeze(0).to(norms.dtype)
            if later:
                continue
            one = slice(i, i + 1)
            groups = {self.group_of[name] for name in gradients}
            bounded = {k: self._bounded_factors(k, self.sq_norms[k][one], one) for k in groups}
            for name, g in gradients.items():
                factor, keep = bounded[self.group_of[name]]
                if keep is None or keep[0]:
                    # a number of no dimension does not widen a product
                    sums[name] += factor[0].to(sums[name]) * g.to(sums[name])
        for name, total in sums.items():
            self._add(name, total)


def _joined(chunks: list[Bounded]) -> Bounded:
    """The factors of chunks of examples as one."""
    if len(chunks) == 1:
        return chunks[0]
    factors = torch.cat([factors for factors, _ in chunks])
    if all(keep is None for _, keep in chunks):
        return factors, None
    return factors, torch.cat([torch.ones_like(f, dtype=torch.bool) if k is None else k for f, k in chunks])
