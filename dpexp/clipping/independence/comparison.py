"""Comparing what examples got out of a model in two batches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dpexp.clipping.independence.batches import Arrangement, Variant
from dpexp.clipping.independence.end_to_end import Ends
from dpexp.clipping.tapping.forwards import tensors_in

# a dimension, and whether the rows of one example are apart there
Places = set[tuple[int, bool]]

# numbers of one output that are compared; of larger ones every n-th feature
LARGE = 1 << 22
# largest difference, relative to the largest number that an example gets, by bits: in batches of other sizes, which are added up
# in another order, and of the same size, where others change no bit but by what is multiplied together (packed rows: 2e-7).
# Many models compute a part in 32 bits whatever their weights have: routers of experts, scans, normalisations
ROUNDING = {16: (0.05, 0.05), 32: (1e-4, 2e-6), 64: (1e-5, 2e-6)}
# so many times larger than all that differs, a number that is the same to the last bit is none of these: a mask's -1e9, a time
FAR = 1e5


class Comparison:
    """Compares outputs of the same model.

    Args:
        arrangement: of the rows of the first batch.
        bits: of the numbers, see `bits_of`.
        places: of some outputs, where the rows of an example can be, see `places_of`.
    """

    def __init__(self, arrangement: Arrangement, bits: int, places: Mapping[int, Places] | None = None):
        self.arrangement, self.bits, self.places = arrangement, bits, places or {}
        self.tolerance, self.same_size = ROUNDING[bits]
        # by output, the dimension that was found to be the batch, and whether the rows of one example are apart there
        self._rows: dict[int, tuple[int, bool]] = {}

    def of(self, variant: Variant, ends: Sequence[Ends] = ()) -> Callable[..., bool | None]:
        """Return what tells whether two tensors differ for an example of ``variant``; None where they have no rows.

        ``ends``: where the rows of each example lie in tensors that hold those of all end to end.
        """
        rows, here = self.arrangement, len(variant.rows)
        count, count_here = rows.examples * rows.times, here * rows.times
        tolerance = self.same_size if count_here == count else self.tolerance
        pairs = [(rows.row(i, m), rows.row(j, m, here)) for i, j in variant.same for m in range(rows.times)]
        before, after = ([pair[k] for pair in pairs] for k in (0, 1))
        chosen = [rows.row(i, m) for i, _ in variant.rows for m in range(rows.times)]
        cuts = [(cut, Ends(cut.sizes[chosen])) for cut in ends]

        def differs(a: Tensor, b: Tensor, leaf: int | None = None) -> bool | None:
            for cut, now in cuts:
                if a.dim() and b.dim() and (len(a), len(b)) == (cut.total, now.total):
                    apart = self.unequal(a[cut.rows(before)], b[now.rows(after)], tolerance)
                    # by chance as many as examples: either may be meant
                    if cut.total != count or not apart:
                        return apart
            known, allowed = (
                (self._rows.get(leaf), self.places.get(leaf)) if leaf is not None else (None, None)
            )
            verdicts = []
            for axis, times in _batch_axes(a, b, count, count_here, known[0] if known else None):
                for strided in (False, True) if times > 1 else (False,):
                    if allowed is not None and (axis, strided) not in allowed:
                        continue
                    major = [rows_apart(t, axis, n, strided) for t, n in ((a, count), (b, count_here))]
                    verdicts.append(self.unequal(major[0][before], major[1][after], tolerance))
                    # what has one size in every batch, as a parameter that is returned, has no rows of examples
                    if leaf is not None and count != count_here and not verdicts[-1]:
                        self._rows.setdefault(leaf, (axis, strided))
            return None if not verdicts else all(verdicts)

        return differs

    def direction(self, leaf: int, tensor: Tensor, variant: Variant, here: bool) -> Tensor | None:
        """Return random numbers for the rows of an output that belong to the examples of ``variant``, and zero for others.

        None where nobody knows its rows. ``here``: of the output in that batch, with the same numbers as in the batch before.
        """
        if leaf not in self._rows:
            return None
        axis, strided = self._rows[leaf]
        own = self.arrangement
        examples = len(variant.rows) if here else own.examples
        direction = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        rows = rows_apart(direction, axis, examples * own.times, strided)
        places = [own.row(pair[here], m, examples) for pair in variant.same for m in range(own.times)]
        generator = torch.Generator().manual_seed(leaf)
        numbers = torch.randn((len(places), *rows.shape[1:]), generator=generator, device="cpu")
        rows[places] = numbers.to(rows)
        return direction

    def unequal(self, a: Tensor, b: Tensor, tolerance: float | None = None) -> bool:
        """Whether two ``[rows, …]`` differ by more than rounding in any row."""
        if torch.equal(a, b):
            # the same, and no NaN
            return False
        tolerance = self.tolerance if tolerance is None else tolerance
        a, b = (t.reshape(t.shape[0], -1).to(torch.promote_types(t.dtype, torch.float32)) for t in (a, b))
        known = a.isfinite()
        if not torch.equal(known, b.isfinite()):
            return True
        a, b = torch.where(known, a, 0.0), torch.where(known, b, 0.0)
        largest = torch.where(a == b, 0.0, a.abs()).amax(1, keepdim=True)
        size = torch.where((a == b) & (a.abs() > FAR * largest), 0.0, a.abs()).amax(1)
        size = torch.maximum(size, 1e-3 * size.max())
        return bool(((a - b).abs().amax(1) > tolerance * size).any())


def bits_of(tensors: Iterable[Tensor]) -> int:
    """Return 16, 32 or 64: the fewest bits of floating-point tensors, 32 where there are none."""
    found = [torch.finfo(t.dtype).bits for t in tensors if t.is_floating_point()]
    return max(16, min(found, default=32))


def places_of(gradient: Tensor, chosen: Tensor) -> Places:
    """Return where the rows of an example can be in an output, as pairs of a dimension and whether rows of one example are apart.

    Args:
        gradient: of the losses of some examples alone, with respect to the output.
        chosen: ``[rows]`` bool, the rows of these examples.
    """
    count, found = len(chosen), set()
    for axis, size in enumerate(gradient.shape):
        for strided in (False, True) if size > count else (False,):
            if size and size % count == 0:
                rows = rows_apart(gradient, axis, count, strided).reshape(count, -1).ne(0).any(1)
                if bool(rows.any()) and not bool((rows & ~chosen).any()):
                    found.add((axis, strided))
    return found


def rows_of_one(plain: Tensor, weighted: Tensor, times: int = 1) -> int | None:
    """Return how many rows an output has of which each belongs to one example alone, ``times`` to each of these; None where it
    has no such dimension, or most of its rows have no gradient and may be anybody's.

    Args:
        plain: gradient of the losses with respect to the output.
        weighted: of the losses times their numbers, counted from 1.
        times: rows of an example.
    """
    for axis in range(min(2, plain.dim()) if plain.numel() else 0):
        a, b = (g.unsqueeze(-1).movedim(axis, 0).flatten(1).double() for g in (plain, weighted))
        squares = a.square().sum(1)
        rows = squares > 0
        whose = ((a * b).sum(1) / squares)[rows].round()
        apart = (b[rows] - whose[:, None] * a[rows]).abs() > 1e-3 * b[rows].abs().amax(1, keepdim=True)
        if not bool(apart.any()) and len(whose.unique()) * times == len(whose):
            # the one column of a batch in which one example has a gradient is that example's, too
            return len(rows) if 2 * len(whose) > len(rows) else None
    return None


def same_buffer(before: Tensor, now: Tensor | None, rtol: float = 1e-5, atol: float = 1e-7) -> bool:
    """Tell whether a buffer is what it was, to rounding."""
    if now is None or now.shape != before.shape or now.layout != before.layout:
        return False
    pairs = list(zip(held_in(before), held_in(now), strict=True))
    return all(a.shape == b.shape and _same(a, b, rtol, atol) for a, b in pairs)


def held_in(tensor: Tensor) -> list[Tensor]:
    """Return the dense tensors that hold what a tensor is: of a sparse one, where its values stand, and the values last; of one
    that stands for others (quantised weights), these; of a shard, what is here."""
    if tensor.is_meta:
        return []
    if tensor.is_nested:
        return list(tensor.unbind())
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        # a shard has its mesh there, too
        inner = [part for name in names if isinstance(part := getattr(tensor, name), Tensor)]
        return [part for tensor in inner for part in held_in(tensor)]
    if tensor.is_quantized:
        return [tensor.dequantize()]
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor]


def _same(a: Tensor, b: Tensor, rtol: float, atol: float) -> bool:
    if a.is_floating_point() and a.element_size() == 1:
        # torch compares no such numbers of 8 bits
        a, b = a.float(), b.float()
    # most are equal, and NaN is not
    return torch.equal(a, b) or (a.is_floating_point() and torch.allclose(b, a, rtol, atol, equal_nan=True))


def outputs(value: Any, used: Collection[int] = ()) -> dict[int, Tensor]:
    """Return the floating-point tensors of what a module takes or gives, with their numbers among all.

    Args:
        value: what holds them.
        used: numbers of those to take wherever they are; others deep in objects, like a cache, come only alone.
    """
    found = tensors_in(value)
    near = {id(t) for t in tensors_in(value, depth=1) or found}
    taken = {number: t for number, t in enumerate(found) if id(t) in near or number in used}
    real = {n: torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for n, t in taken.items()}
    return {n: t for n, t in real.items() if t.is_floating_point() and t.layout == torch.strided}


def thin(leaf: Tensor) -> Tensor:
    """Return a copy of an output, of a very large one every n-th feature."""
    if leaf.numel() > LARGE and leaf.dim() > 2:
        leaf = leaf[..., :: -(-leaf.numel() // LARGE)]
    return leaf.detach().clone()


def _batch_axes(
    a: Tensor, b: Tensor, count: int, count_here: int, known: int | None
) -> list[tuple[int, int]]:
    """The dimensions of two outputs that may be the batch, and how many rows each row of the batch has there."""
    if a.dim() != b.dim():
        return []
    fits = [
        (axis, a.shape[axis] // count)
        for axis in range(a.dim())
        if a.shape[axis] and a.shape[axis] % count == 0 and b.shape[axis] == a.shape[axis] // count * count_here
        and a.shape[:axis] + a.shape[axis + 1 :] == b.shape[:axis] + b.shape[axis + 1 :]
    ]  # fmt: skip
    if count != count_here:
        return fits
    if known is not None:
        return [(axis, times) for axis, times in fits if axis == known]
    likely = [
        [fit for fit in fits if fit[1] == 1 and fit[0] < 2],
        [fit for fit in fits if fit[1] == 1],
        [fit for fit in fits if fit[0] == 0],
    ]
    return next((tier for tier in likely if tier), [])


def rows_apart(tensor: Tensor, axis: int, count: int, strided: bool) -> Tensor:
    """``[count, …]`` of an output whose rows of one example are adjacent, or ``count`` apart."""
    major = tensor.movedim(axis, 0)
    if strided:
        return major.unflatten(0, (-1, count)).transpose(0, 1)
    return major.unflatten(0, (count, -1))
