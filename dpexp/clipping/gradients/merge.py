"""Per-example gradients out of others: the sum of two uses of one parameter, and what is instantiated to be kept.

One weight, used as an embedding and as the language-model head, is `Tied`: exact norms without a V x d tensor.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from dpexp.clipping.cost import Cost
from dpexp.clipping.gradients import numerics
from dpexp.clipping.gradients.base import PerExampleGradient
from dpexp.clipping.gradients.dense import Dense
from dpexp.clipping.gradients.grams import ROWS
from dpexp.clipping.gradients.grouped import Grouped
from dpexp.clipping.gradients.lookup import Lookup
from dpexp.clipping.gradients.outer import Outer


def merge(first: PerExampleGradient, second: PerExampleGradient) -> PerExampleGradient:
    """Return one object whose per-example gradients are the sums of both.

    Matrix products and lookups, in any mixture, merge without being instantiated, as do uses of stacked matrices. Everything
    else is instantiated and added: ``B`` times the parameter's size.

    Raises:
        ValueError: they are not of the same parameter and the same examples.
    """
    if first.shape != second.shape or first.num_examples != second.num_examples:
        raise ValueError(
            f"per-example gradients {first.num_examples} x {tuple(first.shape)} and {second.num_examples} x "
            f"{tuple(second.shape)} do not belong to the same parameter and batch"
        )
    if isinstance(first, Grouped) and isinstance(second, Grouped):
        return first.joined(second)
    parts = (*_parts(first), *_parts(second))
    outers = [part for part in parts if isinstance(part, Outer)]
    lookups = [part for part in parts if isinstance(part, Lookup)]
    if len(outers) + len(lookups) < len(parts) or len({part.padding_idx for part in lookups}) > 1:
        lengths = first.magnitudes().sqrt() + second.magnitudes().sqrt()
        return Dense(first.instantiate() + second.instantiate(), lengths.square())
    joined: list[Any] = [reduce(lambda a, b: a.joined(b), own) for own in (outers, lookups) if own]
    return Tied(*joined) if len(joined) > 1 else joined[0]


def _parts(per_example: PerExampleGradient) -> tuple[PerExampleGradient, ...]:
    return (per_example.outer, per_example.lookup) if isinstance(per_example, Tied) else (per_example,)


def instantiated(per_example: PerExampleGradient, method: str) -> Dense:
    """Return the gradients themselves, without the activations that they were made of."""
    if isinstance(per_example, Dense):
        return per_example
    rows, squares = per_example.rows_and_norms(method)
    return Dense(rows, squares=squares)


class Tied(PerExampleGradient):
    """The sum of a matrix product's and a lookup's gradients of the same ``[V, d]`` parameter.

    The squared norm is that of the head plus that of the embedding plus twice their inner product, which is
    ``sum_t sum_s (ge_t . h_s) gh_s[v_t]`` over lookups t and head positions s: column v_t of the head's
    output gradient is picked out by index.
    """

    held = ("outer", "lookup")

    def __init__(self, outer: Outer, lookup: Lookup):
        dtype = torch.promote_types(outer.dtype, lookup.dtype)
        super().__init__(lookup.shape, lookup.num_examples, dtype, lookup.device)
        self.outer, self.lookup = outer, lookup

    def methods(self) -> tuple[str, ...]:
        return ("ghost", "instantiate", "loop")

    def cost(self, method: str) -> Cost:
        if method != "ghost":
            return self.outer.cost(method) + Cost(self.lookup.g.numel(), 0)
        B, heads, _, d = self.outer._sizes()
        lookups = self.lookup.g.shape[1]
        cross = Cost(2 * B * heads * lookups * d, 2 * B * heads * lookups)
        return self.outer.cost("ghost") + self.lookup.cost("segments") + cross

    def workspace(self, method: str) -> int:
        if method != "ghost":
            return self.outer.workspace(method)
        return max(self.outer.workspace("ghost"), self._cross_bytes())

    def signature(self) -> tuple[Hashable, ...]:
        return ("tied", *self.outer.signature(), *self.lookup.signature())

    def _cross_bytes(self) -> int:
        return 2 * self.dtype.itemsize * min(self.outer._sizes()[1], ROWS) * self.lookup.g.shape[1]

    def _terms(self) -> int:
        return self.outer._terms() + self.lookup._terms()

    def _magnitudes(self) -> Tensor:
        return (self.outer.magnitudes().sqrt() + self.lookup.magnitudes().sqrt()).square().to(self.dtype)

    def _norms(self, method: str) -> tuple[Tensor, Tensor]:
        norms, magnitudes = self.outer._norms("ghost")
        looked_up, lengths = self.lookup._norms("segments")
        magnitudes = (norms if magnitudes is None else magnitudes) + lengths
        norms = (norms + looked_up).to(self.dtype)
        magnitudes = magnitudes.to(self.dtype)
        cross, lengths = self._in_chunks(self._cross, self._cross_bytes())
        return (norms + 2 * cross).clamp_(min=0), magnitudes + 2 * lengths

    def _cross(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Inner products of the two gradients, for some examples, and their magnitudes."""
        h, gh = (x[start:stop] for x in self.outer.parts)
        ids, ge = self.lookup.ids[start:stop], self.lookup.g[start:stop]
        skipped = self.lookup.skipped(ids)
        cross, lengths = h.new_zeros(2, len(h), dtype=self.dtype)
        # some head positions at a time; nothing is rounded that is summed as it is
        for some, logits in zip(h.split(ROWS, 1), gh.split(ROWS, 1), strict=True):
            products = numerics.product(some.to(self.dtype), ge.mT.to(self.dtype))
            picked = logits.gather(2, ids.long().unsqueeze(1).expand(-1, logits.shape[1], -1))
            if skipped is not None:
                picked = picked.masked_fill(skipped.unsqueeze(1), 0)
            products.mul_(picked)
            cross += products.sum((1, 2))
            lengths += products.abs_().sum((1, 2))
        return cross, lengths

    def _gradients(self, start: int, stop: int, method: str, out: Tensor | None) -> Tensor:
        rows = self.outer._gradients(start, stop, method, out).to(self.dtype)
        return self.lookup.add_gradients(rows, start)

    def _weighted_sum(self, factors: Tensor, out: Tensor | None) -> Tensor:
        total = self.outer.weighted_sum(factors, out)
        return self.lookup.weighted_sum(factors, total)
