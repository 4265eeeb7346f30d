"""What a collate function does to examples, seen by asking it again: what it pads with, whether it keeps their order, and whether
it keeps them apart. Mixup and CutMix stand there, and what they mix no gradient shows.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from dpexp.clipping import Clipper
from dpexp.clipping.independence.chance import NotingDraws
from dpexp.errors import UserError
from dpexp.training import generators
from dpexp.training.watching.collated import Part, Parts, by_name

# examples that are collated, and how often: chance may decide whether anything is mixed
EXAMPLES, TIMES = 8, 4
# factors of their numbers: one that keeps all bounds, and one that wakes what sleeps until a large row comes
SMALLER, LARGER = 0.5, 1e3

OTHERWISE = (
    "collate_fn makes something else of the same examples and the same random numbers: it keeps something of earlier batches, or "
    "has a generator of its own, whose numbers go by the place in the batch and are no secret. Keep nothing, and draw from "
    "torch, numpy or random (seed=None): they are seeded from the run's key for every batch"
)

_APART = "Make each row of its own example alone, with public numbers"
MIXES = (
    "collate_fn mixes examples: what it makes of one changes when others of its batch do (mixup, CutMix, a mean over the batch, "
    "negatives or weights from the batch), or one stands there twice. An example would then move more than its own clipped "
    f"gradient. {_APART}"
)
READ_TOGETHER = (
    "the data set (its __getitems__, or a transform of several rows) or collate_fn mixes examples: what is made of one changes "
    "when others are read with it. An example would then move more than its own clipped gradient. " + _APART
)

SHARED = "what collate_fn, or a transform of several rows, draws once for the batch"

Collate = Callable[[list[Any]], Any]
Read = Callable[[list[int]], list[Any]]


class Collation:
    """Collates physical batches, and looks at a collate function until a batch of several examples has gone through it.

    Args:
        clipper: is told what texts are padded with.
        ordered: whether it matters which row stands where.
        shared: is told, under "collate_fn", what the examples of a batch share of chance, in words, if they do.
    """

    def __init__(self, clipper: Clipper, ordered: bool, shared: dict[str, str]):
        self.clipper, self.ordered, self.shared = clipper, ordered, shared
        self._known: Collate | None = None

    def knows(self, collate_fn: Collate) -> bool:
        """Whether it was looked at."""
        return collate_fn == self._known

    def forget(self) -> None:
        """Look at the next collate function, also where it is the one that was looked at: a switch may have been turned."""
        self._known = None

    def of(
        self, collate_fn: Collate, examples: list[Any], units: int, alone: bool, read: Read | None = None
    ) -> Any:
        """Return the batch.

        Args:
            collate_fn: a list of examples -> a batch.
            examples: adjacent ones are of one unit.
            units: how many units there are.
            alone: whether there never are several.
            read: gives examples by their places in ``examples``, where the data set makes several of them at once.

        Raises:
            UserError: it mixes examples; it puts them in another order, where that matters; or it does not pad, and has to.
        """
        if self.knows(collate_fn):
            return _batch_of(collate_fn, examples)
        self.shared.pop("collate_fn", None)
        refuse_mixing(collate_fn, examples, len(examples) // units)
        refuse_company(collate_fn, examples, len(examples) // units, read, self.shared)
        batch = _batch_of(collate_fn, examples)
        if (token := padding_token(collate_fn, examples, batch)) is not None:
            self.clipper.pads_with(token)
        if self.ordered:
            refuse_other_order(collate_fn, examples, batch)
        if len(examples) > 1 and (units > 1 or alone):
            self._known = collate_fn
        return batch


def _batch_of(collate_fn: Collate, examples: list[Any]) -> Any:
    """The batch; what a collate function of a library cannot stack gets a sentence, one of the loop's own its own words."""
    try:
        return collate_fn(examples)
    except (RuntimeError, ValueError) as error:
        if not str(getattr(collate_fn, "__module__", "")).startswith(("torch.", "transformers.")):
            raise
        name = getattr(collate_fn, "__name__", type(collate_fn).__name__)
        raise UserError(
            f"{name} cannot put {len(examples)} examples into one batch, mostly because their lengths differ ({error}): give a "
            "collate function that pads, as collate_fn= of engine.batches() or data_collator= of a Trainer, such as "
            "transformers.DataCollatorWithPadding(tokenizer) or, with a label for each token, DataCollatorForTokenClassification"
        ) from error


def refuse_mixing(collate_fn: Collate, examples: Sequence[Any], rows_per_unit: int = 1) -> bool:
    """Collate a few examples twice, by the same random numbers: as they are, and with other pictures and numbers in half of them.

    Lengths, texts and labels stay what they are, so that nothing is padded or sorted in another way.

    Args:
        collate_fn: a list of examples -> a batch.
        examples: of one batch; copies of a few are used.
        rows_per_unit: adjacent examples that may be mixed, because they are one user's.

    Returns:
        Whether anything could be compared.

    Raises:
        UserError: a row of the batch depends on several examples, or on what was collated before.
    """
    units = min(len(examples) // rows_per_unit, max(2, EXAMPLES // rows_per_unit))
    few = list(examples[: units * rows_per_unit])
    unit = [i // rows_per_unit for i in range(len(few))]
    compared = False
    with generators.kept():
        try:
            here, again = (_seeded(collate_fn, few, 0) for _ in range(2))
        except Exception:
            return False
        whole, again = (Parts(len(few)).of(batch) for batch in (here, again))
        if len(whole) != len(again) or not all(map(Part.equals, whole, again)):
            raise UserError(OTHERWISE)
        without = _leaving_one_out(lambda kept: _seeded(collate_fn, [few[i] for i in kept], 0), unit)
        parts = Parts(len(few), without, rows_per_unit)
        # neighbours, mirror images and halves are all apart; and each example alone, which may stand there twice
        halves = [[u.bit_count() % 2 == side for u in unit] for side in range(2)]
        splits = [halves] * TIMES + [[[u != alone for u in unit]] for alone in range(units)] + [halves]
        for seed, sides in enumerate(splits if units > 1 else []):
            change = partial(_changed, factor=SMALLER if seed + 1 < len(splits) else LARGER)
            try:
                changed = [
                    [r if k else tree_map(change, r) for r, k in zip(few, kept, strict=True)]
                    for kept in sides
                ]
                here, *there = [parts.of(_seeded(collate_fn, rows, seed)) for rows in (few, *changed)]
                # a row is one example's in all tensors: others, like negatives from the batch, are lost with other examples
                pairs = zip(there, sides, strict=True)
                mixed = any(parts.lose(here, other, kept.count(False)) for other, kept in pairs)
                mixed |= len(there) > 1 and any(map(Part.shared, here, *there))
            except Exception:
                # a collate function that does not take these, or changes what it takes
                return compared
            if mixed:
                raise UserError(MIXES)
            compared = compared or any(not all(map(Part.equals, here, other)) for other in there)
            if not compared:
                # texts and labels alone
                return False
    return compared


def refuse_company(
    collate_fn: Collate,
    examples: Sequence[Any],
    rows_per_unit: int = 1,
    read: Read | None = None,
    shared: dict[str, str] | None = None,
) -> None:
    """Collate a few examples twice, by the same random numbers: as they are, and with others of the batch instead of some.

    So texts, tokens and labels are other ones too, and a data set is asked again that makes several examples at once.
    Where nothing is drawn, they are also collated one more at a time: what is made of the first ones has to stay, up to padding.

    Args:
        collate_fn, examples, rows_per_unit: see `refuse_mixing`.
        read: see `Collation.of`.
        shared: see `Collation`.

    Raises:
        UserError: a row of the batch depends on several examples.
    """
    units = min(len(examples) // rows_per_unit, max(2, EXAMPLES // rows_per_unit))
    if units < 2:
        # nor is it asked for nothing: one that remembers would remember this
        return
    kinds = [_sizes(examples[u * rows_per_unit : (u + 1) * rows_per_unit]) for u in range(units)]

    def make(chosen: list[int]) -> Any:
        places = [u * rows_per_unit + row for u in chosen for row in range(rows_per_unit)]
        rows = copies([examples[place] for place in places]) if read is None else read(places)
        return collate_fn(rows)

    with generators.kept():
        try:
            # an honest one that sorts by length gives other random numbers to what has got another place
            draws = _drawn(make, list(range(units)), 0)[1] != _drawn(lambda _: None, [], 0)[1]
            here = list(range(units))
            without = _leaving_one_out(lambda kept: _seeded(make, kept, 0), here)
            parts = Parts(units * rows_per_unit, without, rows_per_unit)
            kept = [[_drawn(make, here, seed) for _ in range(2)] for seed in range(2 if draws else 1)]
            if draws and shared is not None and _draws_for_all(make, here):
                drawn, anew = (parts.of(batch) for (batch, _), _ in kept)
                if not all(map(Part.equals, drawn, anew)):
                    shared["collate_fn"] = SHARED
            for seed, alone in itertools.product(range(len(kept)), here):
                if (other := _stand_in(alone, kinds, draws)) is None:
                    continue
                (first, left), (again, left_again) = kept[seed]
                others, left_there = _drawn(make, [other if u == alone else u for u in here], seed)
                before, now = parts.of(first), parts.of(others)
                if (
                    left != left_again
                    or left != left_there
                    or not all(map(Part.equals, before, parts.of(again)))
                ):
                    # they draw by what they are, or from a generator of their own: nothing can be compared
                    continue
                if parts.lose(before, now, rows_per_unit):
                    break
            else:
                steady = not draws and all(map(Part.equals, *(parts.of(batch) for batch, _ in kept[0])))
                # short ones first, and long ones first
                short = sorted(here, key=lambda u: sum(1 if n is None else n for n in tree_leaves(kinds[u])))
                more = [
                    [make(some[:k]) for k in range(1, units + 1)] for some in (short, short[::-1]) if steady
                ]
                if all(_lasts(batches, rows_per_unit) for batches in more):
                    return
        except Exception:
            # what does not take these
            return
    raise UserError(MIXES if read is None else READ_TOGETHER)


def _lasts(batches: Sequence[Any], rows_per_unit: int) -> bool:
    """Whether what is made of some units stays, up to padding, where others follow; ``batches``: of one unit, of two, …"""
    parts = [
        Parts(number * rows_per_unit, [fewer], rows_per_unit).of(batch)
        for number, (fewer, batch) in enumerate(itertools.pairwise(batches), 2)
    ]
    return all(
        one.is_in(other, number * rows_per_unit, len(batches) * rows_per_unit)
        for number, some in enumerate(parts[:-1], 2)
        for one, other in zip(some, parts[-1], strict=True)
    )


def _stand_in(alone: int, kinds: Sequence[Any], draws: bool) -> int | None:
    """Which unit of the batch takes the place of another: the next one of its sizes, or, where nothing is drawn, the next."""
    others = [(alone + i) % len(kinds) for i in range(1, len(kinds))]
    alike = [u for u in others if kinds[u] == kinds[alone]]
    return alike[0] if alike else None if draws else others[0]


def _sizes(rows: Any) -> Any:
    """The structure of examples, and how long their parts are."""
    if isinstance(rows, Mapping):
        return {name: _sizes(value) for name, value in rows.items()}
    if isinstance(rows, list | tuple):
        return [_sizes(value) for value in rows]
    return tuple(rows.shape) if hasattr(rows, "shape") else len(rows) if isinstance(rows, str) else None


def _drawn(make: Collate, chosen: list[int], seed: int) -> tuple[Any, Any]:
    """A batch, and where the random generators are then."""
    return _seeded(make, chosen, seed), generators.states()


def _draws_for_all(make: Collate, chosen: list[int]) -> bool:
    """Whether as much is drawn for these as for one of them alone."""

    def drawn(chosen: list[int], seed: int) -> Any:
        with NotingDraws() as noting:
            _seeded(make, chosen, seed)
        return noting.draws, random.random(), np.random.random_sample()

    return all(drawn(chosen, seed) == drawn(chosen[:1], seed) for seed in range(2))


def _leaving_one_out(make: Collate, unit: Sequence[int]) -> list[Any]:
    """The batches without one unit, for each of them; without those that cannot be made."""
    found = []
    for gone in sorted(set(unit)) if len(set(unit)) > 1 else []:
        try:
            found.append(make([i for i, u in enumerate(unit) if u != gone]))
        except Exception:
            continue
    return found


def padding_token(collate_fn: Collate, examples: Sequence[Any], batch: Any) -> int | float | None:
    """Find with what examples are made equally long, by collating some of them alone.

    Random generators are left as they were found. A batch that holds no sequences asks for nothing.

    Args:
        collate_fn: a list of examples -> a batch, of which tensors of whole numbers ``[b, T]`` are looked at, then numbers
            with a fraction ``[b, T, …]``, ``[b, features, T]`` or ``[b, channels, height, width]``.
        examples: of one batch; copies of a few are used.
        batch: what they were collated to.

    Returns:
        The id of a token, which is not negative; a float of other sequences; None where nothing is padded, or not with one
        such number.
    """
    tried: list[Any] | None = None
    for are_ids in (True, False):
        if not (together := _rows(batch, len(examples), are_ids)):
            continue
        if tried is None:
            tried = [collated(collate_fn, [example]) for example in examples[:EXAMPLES]]
        if any(other is None for other in tried):
            return None
        alone = [_rows(other, 1, are_ids) for other in tried]
        for place, rows in enumerate(together):
            for row, single in zip(rows, alone, strict=False):
                if len(single) != len(together) or (own := single[place].shape[1]) >= len(row):
                    continue
                before = torch.equal(row[len(row) - own :], single[place][0])
                added = (row[: len(row) - own] if before else row[own:]).unique()
                if len(added) == 1 and (rows.is_floating_point() or added.item() >= 0):
                    return added.item()
    return None


def example_axes(collate_fn: Collate, examples: Sequence[Any], units: int, batch: Any) -> WeakIdKeyDictionary:
    """Find in which dimension of each tensor of a batch its examples stand, by collating them without the first and without the
    last one.

    Args:
        collate_fn, examples, units, batch: see `Collation.of`.

    Returns:
        tensor -> dimension, of those that leave no doubt.
    """
    found, rows = WeakIdKeyDictionary(), len(examples) // units
    if units == 1:
        return found
    without = [collated(collate_fn, some) for some in (examples[rows:], examples[:-rows])]
    if all(other is not None for other in without):
        for part in Parts(len(examples), without, rows).of(batch):
            if len(part.axes) == 1:
                found[part.tensor] = part.axes[0]
    return found


def refuse_other_order(collate_fn: Collate, examples: Sequence[Any], batch: Any) -> None:
    """Refuse a collate function that puts examples in an order of its own: whose rows are whose would be lost.

    Args:
        collate_fn, examples, batch: see `padding_token`.

    Raises:
        UserError: the same examples from last to first do not come out from last to first.
    """
    turned = collated(collate_fn, examples[::-1])
    for here, there in zip(leaves_of(batch), [] if turned is None else leaves_of(turned), strict=False):
        if here.dim() and len(here) == len(examples) and here.shape == there.shape:
            rows, others = _bytes(here), _bytes(there)
            if others != rows[::-1] and sorted(others) == sorted(rows):
                raise UserError(
                    "collate_fn puts its examples in an order of its own (by length, say), and with users= it says whose "
                    "rows are whose: leave it as it is, or give length= to engine.batches()"
                )


def _seeded(collate_fn: Collate, examples: list[Any], seed: int) -> Any:
    generators.seed_public(seed)
    return collate_fn(copies(examples))


def copies(examples: Any) -> Any:
    """Copy what a collate function might change, whatever it consists of."""
    with _Rows():
        return copy.deepcopy(examples)


class _Rows(TorchFunctionMode):
    """Copies the rows of a large tensor by themselves, where torch would copy all of it for each of them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.__deepcopy__ or (row := args[0]).layout != torch.strided or row.requires_grad:
            return func(*args, **kwargs or {})
        return row.clone() if row.untyped_storage().nbytes() > row.nbytes else func(*args)


def _changed(leaf: Any, factor: float) -> Any:
    """Another picture within the same bounds, or other numbers, ``factor`` times as large; anything else as it is."""
    if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.dtype == torch.uint8):
        factor = factor if leaf.is_floating_point() else SMALLER
        return (leaf.flatten().flip(0).reshape(leaf.shape) * factor).to(leaf.dtype)
    if isinstance(leaf, np.ndarray | np.floating) and leaf.dtype.kind in "fu":
        factor = factor if leaf.dtype.kind == "f" else SMALLER
        return (np.flip(np.asarray(leaf)) * factor).astype(leaf.dtype)
    if isinstance(leaf, float):
        return leaf * factor
    if hasattr(leaf, "rotate") and hasattr(leaf, "point"):
        # of Pillow
        return leaf.rotate(180).point(lambda value: value // 2)
    return leaf


def collated(collate_fn: Collate, examples: Sequence[Any]) -> Any:
    """Collate copies; None where that fails, as of a single example."""
    try:
        with generators.kept():
            return collate_fn([copies(example) for example in examples])
    except Exception:
        return None


def _bytes(rows: Tensor) -> list[bytes]:
    return [row.numpy().tobytes() for row in rows.detach().cpu().reshape(len(rows), -1).view(torch.uint8)]


def leaves_of(batch: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(by_name(batch)) if isinstance(leaf, Tensor)]


def _rows(batch: Any, count: int, are_ids: bool) -> list[Tensor]:
    """The tensors with a row for each example: of whole numbers with two dimensions, or of numbers with a fraction; series and
    images stand there with their times, heights and widths in front, too."""
    # of nested tensors nothing is padded
    leaves = [t for t in leaves_of(batch) if not t.is_nested and t.dim() > 1 and len(t) == count]
    if are_ids:
        return [t for t in leaves if t.dim() == 2 and t.dtype == torch.int64]
    numbers = [t for t in leaves if t.is_floating_point()]
    return numbers + [t.movedim(axis, 1) for t in numbers if t.dim() in (3, 4) for axis in range(2, t.dim())]
