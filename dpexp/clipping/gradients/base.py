"""What a layer knows about the per-example gradients of one parameter, without necessarily having them."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from dpexp.clipping.cost import Cost
from dpexp.clipping.gradients import numerics, rounding
from dpexp.clipping.gradients.memory import HOT, SHARED, Scratch

Bounded = tuple[Tensor, Tensor | None]
"""Factors ``[b]``, zero where a gradient is not finite, and which gradients are finite (None: all)."""

FactorsOf = Callable[[Tensor, slice], Bounded]


class PerExampleGradient(ABC):
    """Per-example gradients of ONE parameter from one or several calls of its module.

    A kind writes `held`, `methods`, `cost`, `workspace`, `signature`, `_gradients` (some examples, instantiated) and
    `_weighted_sum`; it writes `_norms` where it knows norms without gradients, and `_magnitudes` where its weighted sum
    adds up other numbers than the gradients it instantiates. All the rest follows here.
    What it holds is detached from any graph; the caller switches autocast off.

    Attributes:
        shape: of the parameter.
        num_examples: B; may be 0.
        dtype: of norms and sums, float32 or float64.
        device: where it all lives.
    """

    # names of what it holds: tensors whose rows are those of the examples, of one side by side, and other kinds; or lists of them
    held: tuple[str, ...]
    # memory for gradients that are looked at once
    scratch = SHARED
    # methods that hold one example at a time
    looped: frozenset[str] = frozenset({"loop"})
    # methods that give every core whole examples
    spread: frozenset[str] = frozenset({"cores"})
    # methods that find norms without instantiating
    without_gradients: frozenset[str] = frozenset({"ghost"})

    def __init__(self, shape: Sequence[int], num_examples: int, dtype: torch.dtype, device: torch.device):
        self.shape = torch.Size(shape)
        self.num_examples = num_examples
        self.dtype = numerics.wide(dtype)
        self.device = device
        # indices of the examples that are summed alone (see `rounding.rough`); found with the norms
        self.apart: Tensor | None = None

    # What a kind writes.

    @abstractmethod
    def methods(self) -> tuple[str, ...]:
        """Names of the ways to find norms, the default first."""

    @abstractmethod
    def cost(self, method: str) -> Cost:
        """Time and space of the norms of all examples, in the notation of Bu et al., Table 3."""

    @abstractmethod
    def workspace(self, method: str) -> int:
        """Bytes that the method needs for one example, beyond what is held; the rest goes in chunks."""

    @abstractmethod
    def _gradients(self, start: int, stop: int, method: str, out: Tensor | None) -> Tensor:
        """Gradients ``[stop - start, *shape]`` of these examples; may be written into ``out``, of the same shape."""

    @abstractmethod
    def _weighted_sum(self, factors: Tensor, out: Tensor | None) -> Tensor:
        """As `weighted_sum`, with nobody set apart."""

    def _norms(self, method: str) -> tuple[Tensor, Tensor | None]:
        """Squared norms and squared magnitudes (see `rounding`), ``[B]`` each, by a method that does not instantiate.

        No magnitudes where the norms are as exact as those of instantiated gradients.
        """
        raise NotImplementedError(f"{type(self).__name__} has no norm method {method!r}")

    def _magnitudes(self) -> Tensor | None:
        """Squared magnitudes ``[B]`` (see `rounding`) of an instantiating method; None where terms cannot cancel."""
        return None

    def _terms(self) -> int:
        """How many terms an example's gradient is the sum of."""
        return 1

    def _magnitudes_of_rows(self) -> Tensor | None:
        """As `_magnitudes`, to find which instantiated gradients are nothing but rounding; None: they are not looked for."""
        return self._magnitudes()

    def _magnitude(self, example: int) -> Tensor:
        """Squared magnitude of one example, as near to its squared norm as the kind can tell; a number."""
        found = self._magnitudes()
        assert found is not None
        return found[example]

    def magnitudes(self) -> Tensor:
        """Squared magnitudes ``[B]``: what the squared norms would be, at most, if no terms cancelled (see `rounding`)."""
        found = self._magnitudes()
        return self.sq_norms("instantiate") if found is None else found

    @abstractmethod
    def signature(self) -> tuple[Hashable, ...]:
        """Kind, shapes, dtype and device: what a measured choice of the method depends on."""

    # What follows from it.

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        total = 0
        for name in self.held:
            value = getattr(self, name)
            for held in value if type(value) is list else (value,):
                total += 0 if held is None else held.nbytes
        return total

    def select(self, examples: Tensor) -> Self:
        """The same of some examples (their indices)."""
        return self._each(lambda held: held[examples], lambda part: part.select(examples), len(examples))

    def mask(self, keep: Tensor) -> Self:
        """The same with zero gradients for the examples where ``keep`` (``[B]``, bool) is False.

        For examples with NaN or Inf: a factor of zero is not enough, because 0 * NaN is NaN.
        """
        zeroed = partial(numerics.zero_examples, keep=keep)
        return self._each(zeroed, lambda part: part.mask(keep), self.num_examples)

    def _each(
        self, tensor: Callable[[Tensor], Tensor], part: Callable[[Any], Any], num_examples: int
    ) -> Self:
        """A copy with every tensor that is held, ``[B, rows of each, …]``, and every kind that is held changed."""

        def changed(held: Any) -> Any:
            if isinstance(held, PerExampleGradient):
                return part(held)
            rows = len(held) // max(1, self.num_examples)
            return tensor(held.unflatten(0, (self.num_examples, rows))).flatten(0, 1)

        held = {name: getattr(self, name) for name in self.held}
        fields = tree_map_only((Tensor, PerExampleGradient), changed, held)
        return self._replace(**fields, num_examples=num_examples)

    def within(self, scratch: Scratch) -> Self:
        """Take memory for gradients that are looked at once from there. Returns itself."""
        self.scratch = scratch
        for name in self.held:
            part = getattr(self, name)
            if isinstance(part, PerExampleGradient):
                part.within(scratch)
        return self

    def resolve(self, method: str) -> str:
        """The name in `methods` for a method or a general name: "ghost", "instantiate", "loop".

        A general name that the kind does not have stands for the nearest that it has, so that an engine may
        ask for ghost norms of a whole model.

        Raises:
            ValueError: it has no such method.
        """
        methods = self.methods()
        if method in methods:
            return method
        if method == "ghost":
            return methods[0]
        if method in ("instantiate", "loop"):
            return next((m for m in methods if m not in self.without_gradients), methods[0])
        raise ValueError(f"{type(self).__name__} has no norm method {method!r}, only {', '.join(methods)}")

    def instantiates(self, method: str) -> bool:
        """Whether the method has per-example gradients in hand, so that they can be kept or summed at once."""
        return self.resolve(method) not in self.without_gradients

    def sq_norms(self, method: str, doubts: list[Doubt] | None = None) -> Tensor:
        """``||g_i||²`` for every example: an upper bound of the square of the norm of what `weighted_sum` adds of it.

        The bound is above the norm by some units in the last place where the terms of a gradient do not cancel, and by
        the rounding error of their sum where they do (see `rounding`).

        Args:
            method: one of `methods`, or a general name (see `resolve`).
            doubts: gets the norms that would be measured again because much of a gradient cancels.

        Returns:
            ``[B]``, float32, or float64 for float64 inputs; zeros of what has gone to ``doubts``.
        """
        method = self.resolve(method)
        if self.num_examples == 0:
            return self._zeros(0)
        if method in self.without_gradients:
            squares, magnitudes = self._norms(method)
            if magnitudes is not None:
                return self._bounded(squares, magnitudes, doubts)
        else:
            squares = self._row_norms(method)
        magnitudes = self._magnitudes()
        if magnitudes is None:
            return squares
        terms = self._terms()
        bounds = rounding.of_instantiated_norms(squares, magnitudes, terms, rounding.UNCORRELATED * terms)
        if not numerics.static(bounds):
            return rounding.raised(bounds, magnitudes, terms)
        return self.set_apart(bounds, rounding.rough(bounds, magnitudes, terms))

    def set_apart(self, bounds: Tensor, rough: Tensor) -> Tensor:
        """Sum those alone where ``rough`` (``[B]``, bool) is True, and put their own bounds in the place of ``bounds``."""
        alone = {int(i): self._alone(int(i)) for i in rough.nonzero()}
        for i, (_, bound) in alone.items():
            bounds[i] = bound
        self.apart = torch.tensor(list(alone), device=bounds.device) if alone else None
        return bounds

    def _alone(self, example: int) -> tuple[Tensor, Tensor]:
        """One example's gradient, ``[*shape]``, and the bound of its squared norm: the same in whatever company.

        Where its terms cancel, another product rounds them to another gradient: one over several examples, or of another shape.
        """
        row = self._gradients(example, example + 1, self.resolve("instantiate"), None).to(self.dtype)
        square, magnitude = numerics.squared_norms(row), self._magnitude(example).to(self.dtype)
        return row[0], rounding.of_instantiated_norms(square, magnitude, self._terms(), rounding.ORDINARY)[0]

    def _settled_rows(self, rows: Tensor, examples: slice, magnitudes: Tensor | None) -> Tensor:
        """Squared norms ``[b]`` of instantiated gradients that are themselves summed; in the place of rough ones, which are
        rounding that goes by the company, each has its own in ``rows``."""
        squares = numerics.squared_norms(rows)
        if magnitudes is None:
            return squares
        magnitudes, terms = magnitudes[examples], self._terms()
        if not numerics.static(squares):
            return rounding.raised(squares, magnitudes, terms)
        for i in rounding.rough(squares, magnitudes, terms).nonzero().squeeze(1).tolist():
            rows[i], squares[i] = self._alone(examples.start + i)
        return squares

    def weighted_sum(self, factors: Tensor, out: Tensor | None = None) -> Tensor:
        """``sum_i factors[i] * g_i``.

        Args:
            factors: ``[B]``.
            out: a contiguous tensor of the parameter's shape, to which the sum is added in place.

        Returns:
            A tensor of the parameter's shape (``out`` where given). Its dtype is float32 or float64, except
            for 16-bit convolutions, whose libraries return 16 bits; the caller casts.
        """
        if self.apart is None:
            return self._weighted_sum(factors, out)
        total = self._weighted_sum(factors.index_fill(0, self.apart, 0.0), out)
        method = self.resolve("instantiate")
        for i in self.apart.tolist():
            total += self._gradients(i, i + 1, method, None)[0] * factors[i]
        return total

    def finite(self, keep: Tensor | None) -> Self:
        """As `mask`, with the same examples set apart; None keeps all."""
        if keep is None:
            return self
        other = self.mask(keep)
        other.apart = self.apart
        return other

    def norms_and_sum(self, method: str, factors_of: FactorsOf) -> tuple[Tensor, Tensor]:
        """Norms and clipped sum in one go.

        This is what the one-pass engine needs where a group ends with this parameter. Instantiating methods sum
        each chunk of gradients while it is still in the cache.

        Args:
            method: one of `methods`, or a general name.
            factors_of: called with squared norms ``[b]`` of this parameter and the slice of examples that
                they belong to.

        Returns:
            squared norms ``[B]`` and the sum.
        """
        method = self.resolve(method)
        if self.num_examples == 0 or method in self.without_gradients:
            norms = self.sq_norms(method)
            factors, keep = factors_of(norms, slice(0, self.num_examples))
            return norms, self.finite(keep).weighted_sum(factors)
        found, total, magnitudes = [], None, self._magnitudes_of_rows()
        for rows, examples in self._chunks(method):
            norms = self._settled_rows(rows, examples, magnitudes)
            factors, keep = factors_of(norms, examples)
            rows = rows if keep is None else numerics.zero_examples(rows, keep)
            total = numerics.accumulate(rows, factors, total)
            found.append(norms)
        assert total is not None
        return found[0] if len(found) == 1 else torch.cat(found), total

    def instantiate(self, method: str = "instantiate") -> Tensor:
        """All per-example gradients, ``[B, *shape]``, by a method that instantiates."""
        return self.rows_and_norms(method)[0]

    def rows_and_norms(self, method: str) -> tuple[Tensor, Tensor]:
        """All per-example gradients, ``[B, *shape]``, by a method that instantiates, and their squared norms ``[B]``.

        What is summed must be these rows; their norms are bounds, see `_alone`.
        """
        if self.num_examples == 0:
            return self._zeros(0, *self.shape), self._zeros(0)
        method, everybody = self.resolve(method), slice(0, self.num_examples)
        fits = self.scratch.chunk(self.workspace(method), self.device) >= self.num_examples
        if fits and method not in self.looped:
            found = self._gradients(everybody.start, everybody.stop, method, None)
        else:
            found = torch.empty((self.num_examples, *self.shape), dtype=self.dtype, device=self.device)
            for rows, examples in self._chunks(method):
                found[examples] = rows
        return found, self._settled_rows(found, everybody, self._magnitudes_of_rows())

    # Helpers.

    def _row_norms(self, method: str) -> Tensor:
        """Squared norms of instantiated gradients, without any bound."""
        norms = [numerics.squared_norms(rows) for rows, _ in self._chunks(method)]
        return norms[0] if len(norms) == 1 else torch.cat(norms)

    def _in_chunks(
        self, found: Callable[[int, int], tuple[Tensor, Tensor]], bytes_per_example: int
    ) -> tuple[Tensor, Tensor]:
        """Two numbers for each example, ``[B]`` both, from what ``found(start, stop)`` gives for a few of them."""
        step = self.scratch.chunk(bytes_per_example, self.device)
        if step >= self.num_examples:
            return found(0, self.num_examples)
        starts = range(0, self.num_examples, step)
        first, second = zip(*[found(s, min(s + step, self.num_examples)) for s in starts], strict=True)
        return torch.cat(first), torch.cat(second)

    def _bounded(self, squares: Tensor, magnitudes: Tensor, doubts: list[Doubt] | None) -> Tensor:
        """Upper bounds from norms without gradients. Those of gradients that cancel are measured again, one by one.

        Where a device would have to be waited for, the bound alone must do: norms of gradients that cancel are then
        overestimated.
        """
        cancels = rounding.cancels(squares, magnitudes)
        bounds = rounding.of_gram_norms(squares, magnitudes, self._terms(), cancels)
        if not numerics.static(squares):
            return rounding.raised(bounds, magnitudes)
        if not bool(cancels.any()):
            return bounds
        doubt = Doubt(self, bounds, magnitudes, torch.where(cancels, squares, bounds))
        if doubts is None:
            return doubt.settled()
        # what a bound is too large by must not round away what it is added to
        doubts.append(doubt)
        return torch.zeros_like(bounds)

    def _replace(self, **fields: Any) -> Self:
        """A copy with other contents, and nobody set apart."""
        other = copy.copy(self)
        other.__dict__.update(fields, apart=None)
        return other

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def _chunks(self, method: str) -> Iterator[tuple[Tensor, slice]]:
        """Instantiated gradients of a few examples at a time, with the slice of examples they are of.

        A chunk is overwritten by the next one.
        """
        size = 1 if method in self.looped else self.scratch.chunk(self.workspace(method), self.device, HOT)
        if method in self.spread:
            # every core has as many
            size += -size % torch.get_num_threads()
        for start in range(0, self.num_examples, size):
            stop = min(start + size, self.num_examples)
            out = self.scratch.take((stop - start, *self.shape), self.dtype, self.device)
            yield self._gradients(start, stop, method, out), slice(start, stop)


@dataclass(eq=False)
class Doubt:
    """Squared norms without gradients that are far too large where much of a gradient cancels.

    Attributes:
        per_example: the gradients.
        bounds: ``[B]``, of their squared norms.
        magnitudes: ``[B]`` (see `rounding`).
        about: ``[B]``, what they are about; the bounds where nothing cancels.
    """

    per_example: PerExampleGradient
    bounds: Tensor
    magnitudes: Tensor
    about: Tensor

    def settled(self, total: Tensor | None = None) -> Tensor:
        """Return the bounds, measured again where that changes the squared norms ``total`` that they are a part of.

        Args:
            total: ``[B]``, of a whole group, with what these are about; None where the gradients are a group of their own.
        """
        matters = self.bounds - self.about > (0.0 if total is None else rounding.NEGLIGIBLE * total)
        examples = matters.nonzero().squeeze(1)
        if not len(examples):
            return self.bounds
        some, magnitudes = self.per_example.select(examples), self.magnitudes[examples]
        again = some._row_norms(some.resolve("instantiate"))
        bounds = self.bounds.clone()
        bounds[examples] = rounding.of_instantiated_norms(again, magnitudes, some._terms(), rounding.ORDINARY)
        whole = bounds[examples] if total is None else torch.maximum(bounds[examples], total[examples])
        rough = torch.zeros_like(bounds, dtype=torch.bool)
        rough[examples] = rounding.rough(whole, magnitudes)
        return self.per_example.set_apart(bounds, rough)
