"""What weighted losses show: gradients at the outputs of uses, in a plain back-propagation and in weighted ones.

A row that belongs to example i alone has its gradient multiplied by the weight of i, and no other row has. Of each row of a
gradient a few numbers are kept, random projections and the norm.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import torch
from torch import Tensor, nn

from dpexp.clipping.gradients.memory import give_back_freed_memory
from dpexp.clipping.gradients.numerics import wide
from dpexp.clipping.survey import layouts
from dpexp.clipping.tapping.forwards import ForwardPass
from dpexp.clipping.tapping.taps import Visit
from dpexp.clipping.tapping.uses import Use

Signature = tuple[Tensor, Tensor]
# views of rows whose examples no shape tells: along all dimensions but the last, and along the last one
FRONT, LAST = "front", "last"
# projections of each row: one alone sees next to nothing of it once in a thousand rows, and would believe any weight
DIRECTIONS = 4
# how much less the error of the level that a row follows is than that of any other
CLEARLY = 8


class Observed:
    """The gradients that arrive at the outputs of uses, plainly first and then with weights of the examples.

    Args:
        visit: of a graph.
        pending: uses that are looked at, by id, with the layouts that their shapes allow.
        unordered: those of them whose rows may lie in any order: of each row it is asked whose it is.
        doubted: whether something that was proven before is asked again: examples with the same weight may have changed places.
    """

    def __init__(
        self, visit: Visit, pending: dict[int, list[str]], unordered: Set[int], doubted: bool = False
    ):
        self.visit, self.pending, self._unordered = visit, pending, unordered
        many = unordered and not any(use.in_float16 for use in visit.uses)
        self._levels = layouts.MANY_LEVELS if many else layouts.LEVELS
        self._weightings = layouts.all_weights(visit.num_examples, self._levels)
        if not (unordered or doubted):
            del self._weightings[1:]
        # those that tell whose a row is
        self._telling = len(self._weightings)
        if any(use.is_shared for use in visit.uses if id(use) in unordered):
            # the mean of several weights may be that of another example, but the mean of their squares is not its square
            self._weightings.append(torch.stack(self._weightings).square().sum(0))
        each = visit.rows // visit.num_examples
        self._by_row = [weights.repeat_interleave(each) for weights in self._weightings]
        # of each back-propagation, by use and layout or view
        self._seen: list[dict[tuple[int, str], Signature]] = []
        # of each one, of the inputs
        self._entered: list[list[Signature | None]] = []
        self._dtypes: dict[int, torch.dtype] = {}
        # forwards of more rows than losses -> whether they are more with a gradient, too
        self._several: dict[ForwardPass, bool] = {}
        self._alone: set[int] = set()

    def back_propagate(self, params: dict[str, nn.Parameter]) -> set[str]:
        """Go through the graph: once where nothing is pending, else with weights too.

        Returns:
            The parameters that gradients reach by a way that no tap covers.

        Raises:
            UserError: losses were picked among the examples.
        """
        reached: set[str] = set()
        for weights in (None, *self._weightings) if self.pending else (None,):
            self._seen.append({})
            asked = list(params.values()) if weights is None else []
            found = self.visit.back_propagate(
                self._look, retain=True, weights=weights, params=asked, inputs=True
            )
            reached |= {name for name, g in zip(params, found, strict=False) if g is not None}
            del found
            entered = [
                None if g is None else signature(g, layouts.ROWS, self.visit.rows)
                for g in self.visit.input_gradients
            ]
            self._entered.append(entered)
            give_back_freed_memory()
        for owner, more in self._several.items():
            if not more and not self._of_several(owner):
                # a row for each loss, and rows of others: losses were picked, the largest of the batch say
                self.visit.refuse_others(owner)
        if self.pending:
            self._alone = self._find_alone()
        return reached

    def weigh(self) -> bool:
        """Go through the graph with weights alone; what arrives without them is seen later, by `told`.

        Returns:
            Whether no losses were picked among the examples, as far as that shows without a plain back-propagation.
        """
        self._seen.append({})

        def look(owner: ForwardPass, use: Use, saved: tuple[Tensor, ...], gy: Tensor) -> None:
            if id(use) in self.pending:
                self._count(owner, use, gy)
                self._sign(use, gy)

        for weights in self._weightings:
            self._seen.append({})
            self.visit.back_propagate(look, retain=True, weights=weights)
            give_back_freed_memory()
        return all(self._several.values())

    def told(self, use: Use, gy: Tensor, before: str) -> layouts.Layout | None:
        """Return which rows of a use are whose, from what arrives without weights; None where they do not tell.

        Args:
            use: looked at in one way.
            gy: its gradient.
            before: how the rows lay in an earlier batch.
        """
        here, view = id(use), self._sign(use, gy, 0)
        if view != FRONT:
            return None if self.proven(use, view) is False else view
        if before in layouts.IN_ORDER:
            plain, dtype = self._seen[0][here, FRONT], self._dtypes[here]
            of_each = len(plain[0]) // self.visit.num_examples
            each = zip(self._seen[1:], self._weightings, strict=True)
            if all(
                follows(plain, seen[here, FRONT], weights.repeat_interleave(of_each), dtype) is not False
                for seen, weights in each
            ):
                return before
        return self.owned(use)

    def _sign(self, use: Use, gy: Tensor, number: int = -1) -> str:
        (layout,) = self.pending[id(use)]
        self._dtypes[id(use)] = gy.dtype
        rows = in_front(gy) if layout == FRONT else signature(gy, layout, self.visit.rows)
        self._seen[number][id(use), layout] = rows
        return layout

    def _look(self, owner: ForwardPass, use: Use, saved: tuple[Tensor, ...], gy: Tensor) -> None:
        here, seen, rows = id(use), self._seen[-1], self.visit.rows
        if here not in self.pending:
            return
        self._dtypes[here] = gy.dtype
        for layout in self.pending[here]:
            seen[here, layout] = signature(gy, layout, rows)
        self._count(owner, use, gy)
        told = self.pending[here] in ([layouts.ROWS], [layouts.ROWS, layouts.SECOND_BLOCKED]) and not (
            here in self.visit.loose or here in self._unordered
        )
        if gy.dim() and not told:
            seen.update({(here, view): found for view, found in views(gy).items()})

    def _count(self, owner: ForwardPass, use: Use, gy: Tensor) -> None:
        """Notice whether more rows have a gradient than there are losses, in a forward of more rows."""
        if id(use) in self.visit.loose and gy.dim() and len(gy) > self.visit.num_examples:
            more = int(gy.reshape(len(gy), -1).ne(0).any(1).sum()) > self.visit.num_examples
            self._several[owner] = self._several.get(owner, False) or more

    def _of_several(self, owner: ForwardPass) -> bool:
        """Whether the rows with a gradient are the same ones of several that each example has; some views may have no loss."""
        return any(
            self.proven(use, layout) is not False and _alike(self._seen[0][id(use), layout][1] > 0)
            for use in owner.uses
            if id(use) in self._dtypes
            for layout in self.pending[id(use)]
            if layout in layouts.BLOCKS
        )

    def _find_alone(self) -> set[int]:
        """Find the uses that saw one example each, in models that go through the batch in a Python loop.

        That is believed where such uses are there for every weight. A single one may as well be a batch that is mixed, and of
        which one example alone has a loss.
        """
        alone: dict[int, float] = {}
        levels = torch.tensor(self._levels, device="cpu")
        for at, plain in self._seen[0].items():
            # in 16 bits the levels are no further apart than rounding errors
            if at in self._seen[1] and torch.finfo(self._dtypes[at[0]]).bits >= 32:
                found = levels[_fits(plain, self._seen[1][at], 1e-4, self._levels).all(0).cpu()]
                if len(found) == 1:
                    alone[at[0]] = float(found)
        return set(alone) if set(alone.values()) == set(self._weightings[0].tolist()) else set()

    # -- what was seen ------------------------------------------------------------------------------------------------

    def arrived(self, use: Use) -> bool:
        """Whether a gradient came: not where its output was unused, or a backward on the way returned none."""
        return id(use) in self._dtypes

    def silent(self, use: Use) -> bool:
        """Whether all of the gradient is zero."""
        return not any(bool(self._seen[0][id(use), layout][1].any()) for layout in self.pending[id(use)])

    def one_each(self, use: Use) -> bool:
        """Whether it saw one example, as others like it saw the others."""
        return id(use) in self._alone

    def proven(self, use: Use, layout: str) -> bool | None:
        """Whether the rows of each example follow its weights; None where nothing was learnt."""
        plain, dtype = self._seen[0][id(use), layout], self._dtypes[id(use)]
        verdicts = [
            follows(plain, seen[id(use), layout], by_row, dtype)
            for seen, by_row in zip(self._seen[1:], self._by_row, strict=True)
        ]
        return False if False in verdicts else None if None in verdicts else True

    def tells_of_all(self, use: Use, layout: str) -> bool:
        """Whether every example has rows that are large enough to tell; none has them where its loss is masked, say."""
        plain, weighted = (seen[id(use), layout] for seen in self._seen[:2])
        _, scale, finite = _compared(plain, weighted, self._by_row[0])
        telling = _telling(scale, finite, self._dtypes[id(use)])
        return bool(telling.reshape(self.visit.num_examples, -1).any(1).all())

    def refuted(self, use: Use, layout: str) -> bool:
        """Whether a layout that was proven before does not hold any more.

        Stricter about evidence than `proven` is about proof: training goes on if this is False, and in a trained model the
        gradients of confident examples are so small that rounding is all there is to see.
        """
        plain, *weighted = (seen[id(use), layout] for seen in self._seen)
        each = [_compared(plain, *pair) for pair in zip(weighted, self._by_row, strict=True)]
        error, scale, finite = (torch.cat(parts) for parts in zip(*each, strict=True))
        large = scale > 1e-3 * torch.where(finite, scale, 0.0).max()
        tolerance = 0.02 if torch.finfo(self._dtypes[id(use)]).bits >= 32 else 0.2
        return bool((finite & large & (error > tolerance * scale)).any())

    def apart(self, use: Use) -> bool:
        """Whether each row is one example's, whichever that is."""
        here = id(use)
        seen = [
            {v: rows[here, v] for v in (FRONT, LAST) if (here, v) in rows}
            for rows in self._seen[: 1 + self._telling]
        ]
        return apart(seen, self._dtypes[here], self._levels)

    def owned(self, use: Use) -> layouts.Owned | None:
        """Whose each row of a use is: the example with the weights that the row has followed; None where a row does not tell."""
        here = id(use)
        # without all weights, two examples have the same
        told = here in self._unordered and all((here, FRONT) in seen for seen in self._seen)
        if len(self._seen) < 2 or not told:
            return None
        plain, *weighted = [seen[here, FRONT] for seen in self._seen]
        dtype, telling = self._dtypes[here], weighted[: self._telling]
        levels = [_level(plain, rows, dtype, self._levels) for rows in telling]
        # too small to matter, and to tell
        scales = torch.cat([plain[1] + rows[1] for rows in telling], 1)
        finite = scales.isfinite()
        silent = (finite & ~_telling(scales, finite, dtype)).all(1)
        number = torch.zeros_like(levels[0])
        for digit, level in enumerate(levels):
            number += level * len(self._levels) ** digit
        unclear = torch.stack([level < 0 for level in levels]).any(0) | (number >= self.visit.num_examples)
        if bool((unclear & ~silent).any()):
            return None
        # of each number, the example whose weights have it for their digits
        order = layouts.fixed_order(self.visit.num_examples).argsort().to(number.device)
        owners = torch.where(silent, -1, order[number.clamp(0, self.visit.num_examples - 1)])
        for rows, weights in zip(weighted[self._telling :], self._weightings[self._telling :], strict=True):
            if follows(plain, rows, weights.to(owners.device)[owners.clamp(min=0)], dtype) is False:
                return None
        # positions of a row are its own
        owners = owners.reshape(use.output_shape[0], -1)
        first = owners.amax(1)
        if bool(((owners >= 0) & (owners != first[:, None])).any()):
            return None
        return layouts.Owned.of(first, self.visit.num_examples)

    def mixed_input(self) -> Tensor | None:
        """An input whose gradient, for the stage before this one, mixes examples."""
        for leaf, plain, weighted in zip(self.visit.roots.inputs, *self._entered[:2], strict=True):
            if plain is None or weighted is None:
                continue
            if follows(plain, weighted, self._by_row[0], leaf.dtype) is False:
                return leaf
        return None


def _alike(rows: Tensor) -> bool:
    """Tell whether all examples that have any, ``[B, K]``, have the same ones."""
    some = rows[rows.any(1)]
    return bool((some == some[:1]).all())


def signature(gy: Tensor, layout: str, rows: int) -> Signature:
    """Random projections of each example's gradient rows, ``[rows, m * DIRECTIONS]``, and their norms, ``[rows, m]``.

    Random, not a sum: the gradients below a normalisation or a softmax sum to zero.
    """
    flat = layouts.example_major(gy, layout, rows).detach()
    flat = flat.reshape(rows, -1) if flat.dim() < 2 or flat.shape[0] == rows else flat.flatten(1)
    flat = flat.to(wide(flat.dtype))
    generator = torch.Generator().manual_seed(flat.shape[1])
    one = torch.randn(flat.shape[1], generator=generator, dtype=torch.float32, device="cpu").to(flat)
    directions = torch.stack([one.roll(turn) for turn in range(DIRECTIONS)], 1)
    return (flat @ directions).reshape(rows, -1), flat.norm(dim=1).reshape(rows, -1)


def follows(plain: Signature, weighted: Signature, by_row: Tensor, dtype: torch.dtype) -> bool | None:
    """Does each row follow the weight of its own example? None where no row is large enough to tell: nothing was learnt.

    Rows that come near the end of the exponents' range are only rounding errors, and too small to matter.
    """
    error, scale, finite = _compared(plain, weighted, by_row)
    telling = _telling(scale, finite, dtype)
    if not bool(telling.any()):
        return None
    return not bool((telling & (error > _tolerance(dtype) * scale)).any())


def _tolerance(dtype: torch.dtype) -> float:
    """How far a row may be from its weight, relative to its size: half of the digits may be rounding, and what another example
    adds to a row is to be less."""
    info = torch.finfo(dtype)
    return info.eps**0.5 if info.bits >= 32 else 0.1


def _telling(scale: Tensor, finite: Tensor, dtype: torch.dtype) -> Tensor:
    """Which rows are large enough to tell."""
    info = torch.finfo(dtype)
    return finite & (scale > (0.0 if dtype == torch.float16 else info.tiny / info.eps))


def _errors(plain: Tensor, weighted: Tensor, levels: Sequence[float]) -> Tensor:
    """``[rows, levels]``, how far each row, ``[rows, numbers]``, is from being multiplied by each of the levels."""
    factors = torch.tensor(levels, dtype=plain.dtype, device=plain.device)
    return (weighted[..., None] - plain[..., None] * factors).abs().amax(1)


def _fits(plain: Signature, weighted: Signature, tolerance: float, levels: Sequence[float]) -> Tensor:
    """``[rows, levels]``, which of the levels each row follows."""
    return _projected(plain, weighted, levels) <= tolerance * (plain[1] + weighted[1]).reshape(-1, 1)


def _projected(plain: Signature, weighted: Signature, levels: Sequence[float]) -> Tensor:
    """As `_errors`, by the projections."""
    return _errors(plain[0].reshape(-1, DIRECTIONS), weighted[0].reshape(-1, DIRECTIONS), levels)


def _level(plain: Signature, weighted: Signature, dtype: torch.dtype, levels: Sequence[float]) -> Tensor:
    """``[rows]``, which of the levels each row follows; -1 where it is none, or one of several.

    A level is a power of two, by which nothing is rounded: the right one fits much better than those that fit as well because the
    direction of the projection, by chance, saw little of a row.
    """
    scale = plain[1] + weighted[1]
    norms = _errors(plain[1].reshape(-1, 1), weighted[1].reshape(-1, 1), [abs(level) for level in levels])
    errors = torch.maximum(_projected(plain, weighted, levels), norms)
    best, second = errors.topk(2, 1, largest=False)[0].unbind(1)
    told = (best <= _tolerance(dtype) * scale.squeeze(1)) & (CLEARLY * best < second)
    return torch.where(told, errors.argmin(1), -1)


def views(gy: Tensor) -> dict[str, Signature]:
    """The rows that may be one example's each, where no shape tells: all those in front, or those along the last dimension."""
    if not gy.numel():
        return {}
    seen = {FRONT: in_front(gy)}
    if gy.dim() > 1:
        last = gy.movedim(-1, 0).flatten(1)
        seen[LAST] = signature(last, layouts.ROWS, len(last))
    return seen


def in_front(gy: Tensor) -> Signature:
    """The first of the `views`."""
    rows = gy.reshape(-1, 1) if gy.dim() < 2 else gy.flatten(0, -2)
    return signature(rows, layouts.ROWS, len(rows))


def apart(
    seen: Sequence[dict[str, Signature]], dtype: torch.dtype, levels: Sequence[float] = layouts.LEVELS
) -> bool:
    """Whether each row follows the weight of one example, whichever that is, in one of the `views`: of the plain
    back-propagation, and of weighted ones."""

    def follow(plain: Signature, weighted: Signature) -> bool:
        scale = plain[1] + weighted[1]
        fits = _fits(plain, weighted, _tolerance(dtype), levels).any(1, keepdim=True)
        return bool((fits | ~_telling(scale, scale.isfinite(), dtype)).all())

    return not seen[0] or any(all(follow(seen[0][view], rows[view]) for rows in seen[1:]) for view in seen[0])


def _compared(plain: Signature, weighted: Signature, by_row: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """How far rows are from what their weights ask for, how large they are, and whether both are finite."""
    value, norm = plain
    error, scale = (weighted[0] - by_row.to(value)[:, None] * value).abs(), norm + weighted[1]
    error = error.unflatten(1, (norm.shape[1], -1)).amax(2)
    return error, scale, error.isfinite() & scale.isfinite()
