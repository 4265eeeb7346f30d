"""One backward pass of the tapped engines: norms as the gradients arrive, sums as the groups complete.

A group is *complete* when every use of its parameters in the forward pass has delivered. It is flushed at once: factors,
weighted sums, and its activations and output gradients are released. Per-layer groups therefore clip inside back-propagation
(He et al., section 3.1), flat clipping flushes once at the end (book-keeping, Bu et al., Algorithm 1), blocks in between. With a
second pass (ghost clipping, Li et al., section 4) nothing is kept: a second back-propagation computes the weighted sums.

Gradients are never written to ``p.grad`` here: a refusal, at any point, leaves every gradient as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import reduce
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dpexp.clipping import layouts
from dpexp.clipping.choice import choose
from dpexp.clipping.contributions import Lookup, Tied, numerics
from dpexp.clipping.contributions.base import Contribution
from dpexp.clipping.contributions.pages import give_back_freed_memory
from dpexp.clipping.donation import used_again
from dpexp.clipping.engines import Engine
from dpexp.clipping.groups import Group
from dpexp.clipping.memory import LateSum, Memory
from dpexp.clipping.proof import LATE, Proof
from dpexp.clipping.swap import REENTRANT
from dpexp.clipping.taps import Call, ForwardPass, Recorder
from dpexp.errors import UserError

if TYPE_CHECKING:
    from dpexp.clipping.fullgraph import GraphTaps

Bounded = tuple[Tensor, Tensor | None]  # factors, and which examples are finite (None if all are)
Factors = Callable[..., Tensor]  # (group index, squared norms [b], slice of the examples that they belong to)


class BackwardPass:
    """Computes the clipped sums of one ``clipper.backward``.

    Args:
        losses: ``[B]`` with a graph.
        factors: group index, squared norms ``[b]`` and the slice of their examples -> factors ``[b]`` for gradients that still
            carry the loss scale.
        memory: what is remembered between backward passes: proven layouts, parameters known to need the loop, choices.
    """

    def __init__(
        self,
        recorder: Recorder,
        groups: list[Group],
        engine: Engine,
        memory: Memory,
        losses: Tensor,
        rows_per_example: int,
        factors: Factors,
        grad_scale: float,
        graph: GraphTaps | None = None,
    ):
        self.recorder, self.groups, self.engine, self.memory = recorder, groups, engine, memory
        self.losses, self.factors, self.grad_scale = losses, factors, grad_scale
        self.graph, self.compiled = graph, False  # compiled: whether taps of a compiled graph delivered
        self.looped: set[str] = set()
        self.num_examples = losses.shape[0]
        self.rows = self.num_examples * rows_per_example
        self.group_of = {name: k for k, group in enumerate(groups) for name in group.params}
        self.params = {name: p for group in groups for name, p in group.params.items()}
        self.passes = recorder.passes(self.rows)
        self.arrived: set[ForwardPass] = set()
        self.batch_moved = False  # whether the batch is another input than was assumed in the forward
        self._handle: Callable[[ForwardPass, Call, tuple[Tensor, ...], Tensor], None] = self._record

    # -- what the taps call -------------------------------------------------------------------------------------------

    def arrive(self, owner: ForwardPass, call: Call, saved: tuple[Tensor, ...], gy: Tensor) -> None:
        """An output gradient has reached a tap."""
        if owner not in self.passes:
            raise UserError(
                f"losses have {self.num_examples} examples, but the model's forward saw inputs of shape "
                f"{[list(shape) for shape in owner.shapes]}…: pass the losses of exactly the examples that entered the model"
            )
        if call.source.names:
            self.arrived.add(owner)
        self._handle(owner, call, saved, gy)

    # -- the whole ----------------------------------------------------------------------------------------------------

    def run(self) -> tuple[Tensor, dict[str, Tensor | LateSum]]:
        """Returns squared norms ``[K, B]`` (of the scaled losses) and the clipped sums by parameter name.

        Autograd and autocast are off: nothing here is differentiated, and 16 bits belong to the model's forward alone.
        """
        with torch.no_grad(), torch.autocast(self.losses.device.type, enabled=False):
            return self._run()

    def _run(self) -> tuple[Tensor, dict[str, Tensor | LateSum]]:
        self.recorder.running = self
        try:
            self.proof = Proof(self.memory)
            self.proof.run(self)
            if self.graph is not None:
                self.graph.prove(self)
            for _ in range(3):  # restarts when something turns out to need the loop
                self.looped = self._names_for_the_loop()
                if self._first_backward():
                    break
            else:
                raise UserError(
                    "the model's use of its parameters changed during one backward pass: use engine='loop'"
                )
            if not self.arrived and not self.looped and not self.compiled:
                raise UserError(
                    "losses do not depend on any trainable parameter of the attached model: compute them from the attached "
                    "model, after attach()"
                )
            self.memory.methods |= dict.fromkeys(self.looped, "one back-propagation per example")
            if self.looped:
                self._loop_over_examples()
            for k in range(len(self.groups)):
                if k not in self.flushed:
                    self._flush(k)
            if self.engine.second_pass:
                self._handle = self._sum
                if self.graph is not None and self.compiled:
                    self.graph.second_pass(self)
                else:
                    self._back_propagate(retain=False)
            return self.all_norms, self.grads
        finally:
            self.recorder.running = None
            del (
                self._handle
            )  # a bound method of ours: the cycle would keep the sums alive until a garbage collection
            for owner in self.arrived:
                owner.consumed = True
                self.batch_moved |= self.recorder.learn_batch(owner, self.rows)

    def _back_propagate(
        self, retain: bool, weights: Tensor | None = None, params: Sequence[Tensor] | None = None
    ) -> list[Tensor | None]:
        """One visit of every tap. Returns the gradients that reached ``params`` by ways that no tap covers."""
        ones = torch.ones_like(self.losses) if weights is None else weights.to(self.losses)
        inputs = [self.recorder.anchor, *(params or [])]
        try:
            with used_again(self.losses) if retain else nullcontext():
                grads = torch.autograd.grad(
                    self.losses, inputs, ones * self.grad_scale, retain_graph=retain, allow_unused=True
                )
        except RuntimeError as error:
            if "Checkpointing is not compatible" in str(error):
                raise UserError(REENTRANT) from error
            raise
        return list(grads[1:])

    def _names_for_the_loop(self) -> set[str]:
        looped = set(self.memory.looped)
        for owner in self.passes:
            for call in owner.calls:
                if self.proof.layout[id(call)] == layouts.LOOP:
                    looped.update(call.source.names)
                    if call.input_shape is None and self.memory.layouts.get(call.key) == layouts.LOOP:
                        # with another batch this operation may not look like one on the batch, and get no tap
                        self.memory.looped.update(call.source.names)
        return looped

    # -- norms, and sums of complete groups ---------------------------------------------------------------------------

    def _first_backward(self) -> bool:
        """Norms of everything the taps cover. False if parameters turned up that need the loop."""
        accumulate = torch.promote_types(self.losses.dtype, torch.float32)
        self.all_norms = torch.zeros(
            len(self.groups), self.num_examples, dtype=accumulate, device=self.losses.device
        )
        self.sq_norms = list(self.all_norms)  # views
        self.grads: dict[str, Tensor | LateSum] = {}
        self.flushed: set[int] = set()
        self.kept: dict[int, dict[str, Contribution]] = {}
        self.factor: dict[int, Bounded] = {}
        self.pending: dict[str, list[Contribution]] = {}
        self.expected = dict.fromkeys(self.params, 0)
        for owner in self.passes:
            for call in owner.calls:
                for name in call.source.names:
                    self.expected[name] += 1
        self.remaining = [
            sum(self.expected[name] for name in group.params if name not in self.looped)
            for group in self.groups
        ]
        self.early = [
            len(self.passes) == 1 and not self.engine.second_pass and not (set(group.params) & self.looped)
            for group in self.groups
        ]
        self._handle = self._record
        outside = [name for name in self.params if name not in self.looped]
        retain = bool(self.looped) or self.engine.second_pass or not self.proof.ways_known
        try:
            leaves = [] if self.graph is None else self.graph.leaves()
            grads = self._back_propagate(retain, params=[*(self.params[name] for name in outside), *leaves])
        except _NeedsLoop as needs:
            self.memory.layouts[needs.key] = layouts.LOOP
            self.memory.looped.update(needs.names)
            if not retain:
                raise UserError(f"{needs.names[0]} {LATE}") from needs
            return False
        surprises = {name for name, g in zip(outside, grads, strict=False) if g is not None}
        if self.graph is not None and leaves:
            self.compiled = self.graph.collect(self, grads[len(outside) :], surprises)
        if surprises:
            self.memory.looped |= surprises
            self.memory.surprises |= surprises
            if not retain:
                raise UserError(f"{sorted(surprises)[0]} {LATE}")
            return False
        if self.passes:
            self.memory.ways_known = True
            self.memory.settled |= self.num_examples > 1 and not self.proof.undecided
        return True

    def _record(self, owner: ForwardPass, call: Call, saved: tuple[Tensor, ...], gy: Tensor) -> None:
        names = {name for name in call.source.names if name not in self.looped}
        found = self._contributions(call, saved, gy, names)
        if len(found) > 1:  # the largest last: see `_finish`
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

    def _contributions(
        self, call: Call, saved: tuple[Tensor, ...], gy: Tensor, names: set[str]
    ) -> dict[str, Contribution]:
        if not names:
            return {}
        layout = self.proof.layout[id(call)]
        if layout == layouts.UNSEEN:
            raise _NeedsLoop(call.key, call.source.names)
        major = tuple(
            layouts.example_major(s, layout, self.rows)
            if (call.batched[i] if call.batched else i == 0)
            else s
            for i, s in enumerate(saved)
        )
        gy = layouts.example_major(gy, layout, self.rows)
        try:
            return call.source.contributions(call, major, gy, self.num_examples, names)
        except (RuntimeError, ValueError) as error:
            if call.input_shape is not None or isinstance(error, torch.OutOfMemoryError):
                raise
            raise _NeedsLoop(call.key, call.source.names) from error

    def _merged(self, name: str, fused: bool) -> tuple[Contribution, str]:
        """All uses of a parameter as one contribution, and the method for its norms."""
        merged = reduce(lambda a, b: a.merge(b), self.pending.pop(name))
        memory = self.memory
        key = (merged.signature(), merged.shape, fused)
        method = memory.recent.get(key)
        if method is None:
            known = len(memory.choices)
            method = choose(merged, self.engine.norm, memory.cap_bytes, memory.choices, fused, memory.scratch)
            if len(memory.choices) > known:
                give_back_freed_memory()
            memory.recent.put(key, method)
        memory.methods[name] = method
        return merged, method

    def _measure(self, name: str) -> None:
        """All uses of a parameter have arrived: add its squared norms to its group's."""
        k = self.group_of[name]
        merged, method = self._merged(name, fused=False)
        size = self.num_examples * merged.shape.numel() * merged.dtype.itemsize
        keep = (
            self.engine.keep
            and merged.instantiates(method)
            and (self.engine.always_keep or size <= merged.nbytes)
        )
        self.sq_norms[k].add_(merged.sq_norms(method, keep, self.memory.scratch))
        if not self.engine.second_pass:
            self.kept.setdefault(k, {})[name] = merged.kept() if keep else merged

    def _finish(self, k: int, name: str) -> None:
        """The last parameter of a group has arrived: its norms, the group's factors and its own sum in one go.

        Its per-example gradients, where they are instantiated, are clipped and added while they are still in the cache.
        """
        for other in [n for n in self.groups[k].params if n in self.pending and n != name]:
            self._measure(other)
        merged, method = self._merged(name, fused=True)
        if isinstance(merged, Lookup | Tied):
            self.pending[name] = [merged]
            self._measure(name)
            self._flush(k)
            return
        measured = self.sq_norms[k]
        found: list[Bounded] = []

        def factors_of(sq_norms: Tensor, examples: slice) -> Tensor:
            total = measured[examples] + sq_norms
            found.append(self._bounded_factors(k, total, examples, wait=numerics.static(total)))
            return found[-1][0]

        norms, total = merged.norms_and_sum(method, factors_of, self.memory.scratch)
        measured.add_(norms)
        self._add(name, total)
        self._flush(k, _joined(found))

    def _flush(self, k: int, bounded: Bounded | None = None) -> None:
        """Factors, then the weighted sums of one group; what the group held is released."""
        for name in [n for n in self.groups[k].params if n in self.pending]:
            self._measure(name)
        self.flushed.add(k)
        factors, keep = bounded or self._bounded_factors(k, self.sq_norms[k])
        self.factor[k] = factors, keep
        held = self.kept.pop(k, {})
        # What frees most memory goes first, and nothing is held once its sum is formed.
        for name in sorted(held, key=lambda n: self.params[n].nbytes - held[n].nbytes):
            contribution = held.pop(name)
            if keep is not None:
                contribution = contribution.mask(keep)
            if isinstance(contribution, Lookup | Tied) and name not in self.grads:
                self.grads[name] = LateSum(contribution, factors)
            else:
                self._add(name, contribution.weighted_sum(factors))

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

    def _sum(self, owner: ForwardPass, call: Call, saved: tuple[Tensor, ...], gy: Tensor) -> None:
        """Second pass: the factors are known, so each call adds its weighted sum and keeps nothing."""
        names = {name for name in call.source.names if name not in self.looped}
        for name, contribution in self._contributions(call, saved, gy, names).items():
            factors, keep = self.factor[self.group_of[name]]
            self._add(name, (contribution if keep is None else contribution.mask(keep)).weighted_sum(factors))

    def _add(self, name: str, value: Tensor) -> None:
        held = self.grads.get(name)
        if isinstance(held, LateSum):
            held = held.tensor(self.params[name].dtype)
        value = value.to(self.params[name].dtype)
        self.grads[name] = value if held is None else held.add_(value)

    # -- the per-example loop -----------------------------------------------------------------------------------------

    def _loop_over_examples(self) -> None:
        """Exact gradients of the parameters in ``looped``, one example at a time (B back-propagations).

        A group's factor for example i is known as soon as example i's own loop is done, because the taps delivered the
        rest of the group's norms before.
        """
        names = [name for name in self.params if name in self.looped]
        params = [self.params[name] for name in names]
        groups = sorted({self.group_of[name] for name in names})
        for group in groups:  # parameters that share the group but not the loop
            for name in [n for n in self.groups[group].params if n in self.pending]:
                self._measure(name)
        sums = {name: torch.zeros_like(p) for name, p in zip(names, params, strict=True)}
        for i in range(self.num_examples):
            collected: dict[str, Tensor] = {}

            def collect(
                owner: ForwardPass, call: Call, saved: tuple[Tensor, ...], gy: Tensor, into: dict = collected
            ) -> None:
                wanted = set(call.source.names) & self.looped
                if wanted:
                    finite = tuple(_finite(s) for s in saved)
                    for name, g in call.source.plain_gradients(call, finite, _finite(gy), wanted).items():
                        into[name] = into[name] + g if name in into else g

            self._handle = collect
            one = torch.zeros_like(self.losses)
            one[i] = 1.0
            last = i == self.num_examples - 1 and not self.engine.second_pass
            native = self._back_propagate(retain=not last, weights=one, params=params)
            for name, g in zip(names, native, strict=True):
                if g is not None:
                    self._refuse_poison(name, g)
                    collected[name] = collected[name] + g if name in collected else g
            for name, g in collected.items():
                k = self.group_of[name]
                self.sq_norms[k][i] += g.to(self.sq_norms[k].dtype).pow(2).sum()
                if not bool(self.losses[i].isfinite()):
                    self.sq_norms[k][i] = torch.nan
            for k in {self.group_of[name] for name in collected}:
                factor, keep = self._bounded_factors(k, self.sq_norms[k])
                if keep is None or keep[i]:
                    for name in [n for n in collected if self.group_of[n] == k]:
                        sums[name] += factor[i].to(sums[name].dtype) * collected[name]
        for name, total in sums.items():
            self._add(name, total)

    @staticmethod
    def _refuse_poison(name: str, gradient: Tensor) -> None:
        """Ordinary autograd multiplies one example's NaN by another's zero: the sum would lose everybody."""
        if not bool(gradient.isfinite().all()):
            raise UserError(
                f"{name}: a gradient of this batch is NaN or Inf, and this parameter is used outside of the layers that can "
                "bound one example's share of it. Find the example (torch.isfinite on the inputs and losses) and drop it"
            )


def _joined(chunks: list[Bounded]) -> Bounded | None:
    """The factors of chunks of examples as one; None of no chunk."""
    if len(chunks) <= 1:
        return chunks[0] if chunks else None
    factors = torch.cat([factors for factors, _ in chunks])
    if all(keep is None for _, keep in chunks):
        return factors, None
    return factors, torch.cat([torch.ones_like(f, dtype=torch.bool) if k is None else k for f, k in chunks])


def _finite(tensor: Tensor) -> Tensor:
    """NaN and Inf replaced by zero. In the loop all but one example should contribute zero, and 0 * NaN is not."""
    if not tensor.is_floating_point() or bool(tensor.isfinite().all()):
        return tensor
    return tensor.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


class _NeedsLoop(Exception):
    def __init__(self, key: object, names: tuple[str, ...]):
        super().__init__(key)
        self.key, self.names = key, names
