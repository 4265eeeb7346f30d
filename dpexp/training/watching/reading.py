"""Which rows a data set reads to make one example, seen by asking it again: mixup may stand in ``__getitem__``, too."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Collection, Hashable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset, TensorDataset

from dpexp.errors import UserError
from dpexp.training import generators
from dpexp.training.watching.collated import by_name

# examples that are made, and how often: chance may decide whether anything is mixed
EXAMPLES, TIMES = 8, 2
# parts of an attribute that are looked at: the columns of a table, and no table of words
FEW = 64
# bytes of a running mean, of which each copy of a data set has its own
SMALL = 1 << 16
# the numbers of later examples, and rows that are kept for them, stay what they are
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)
_SIZED = (list, tuple, Tensor, np.ndarray)
_KEPT = (*_GENERATORS, MutableMapping, list)
READS_OTHERS = (
    "the data set makes one example of several rows: another row of its {name} changes it (mixup, CutMix or mosaic in "
    "__getitem__, a partner, a negative, a neighbour in time). What somebody gave would then be in the gradients of other "
    "examples too, and move more than one clipped gradient. Make each example of its own row alone, and take what stands beside "
    "it from public rows; let one example be all that belongs together, with no row in two of them; or say whose each row is "
    "(users=, unit=user)"
)
REMEMBERS = (
    "the data set makes something else of the same row, and the same random numbers, once it has read others: it keeps something "
    "of them (the row before, a running mean, the first row of a class, a counter). What somebody gave would then be in the "
    "gradients of other examples too, and move more than one clipped gradient. Make each example of its own row alone, by its "
    "number and random numbers of torch, numpy or random"
)
REPEATS = (
    "the data set gives one row under several numbers (rows[i % n], i // copies, a row that chance chooses, balanced classes), "
    "and privacy would protect each of these by itself. Give every row once, under its own number, with a weight in "
    "its loss where it is to count more; or say whose each is (users=)"
)


COLLATES_OTHERS = (
    "collate_fn reads other rows of the data set than those of its batch (a partner of mixup, negatives, a whole column): what "
    "somebody gave would then be in the gradients of other examples too, and move more than one clipped gradient. Make each row "
    "of its own example alone, and take what stands beside it from public rows"
)


@contextmanager
def reading_alone(dataset: Any, numbers: Collection[int]) -> Iterator[None]:
    """Let nothing but the examples with these numbers be read; of a list, whose class cannot be changed, nothing is seen.

    Raises:
        UserError: others were.
    """
    kind, asked = type(dataset), list[Any]()
    method, own = getattr(kind, "__getitem__", None), vars(kind).get("__getitem__")

    def noting(self: Any, item: Any) -> Any:
        if self is dataset:
            asked.append(item)
        return method(self, item)  # type: ignore[misc]

    try:
        kind.__getitem__ = noting
    except TypeError:
        kind = object
    try:
        yield
    finally:
        if own is not None and kind is not object:
            kind.__getitem__ = own
        elif kind is not object:
            del kind.__getitem__
    if not all(numbers_of(item, len(dataset)) <= set(numbers) for item in asked):
        raise UserError(COLLATES_OTHERS)


def numbers_of(item: Any, size: int) -> set[Any]:
    """Return which examples a data set of this size is asked for; None of a column, or whatever else it gives."""
    try:
        found = range(size)[item]
    except (TypeError, IndexError):
        try:
            return {int(i) for i in item}
        except (TypeError, ValueError):
            return {None}
    return set(found) if isinstance(found, range) else {found}


def refuse_other_rows(dataset: Any, users: Sequence[Hashable] | None = None) -> None:
    """Make a few examples, and make them again with others in the place of the rows that are not theirs.

    Looked at is what has at least as many items as the data set, and is an attribute of it or a part of one: lists, tensors,
    arrays, frames, data sets. The row of an example is the one at its own number, or at the number that an order (an attribute
    of whole numbers, all different) has for it. What is not read there for each example holds no rows (a table of words),
    nor do whole numbers. Of files that are named by number nothing is seen.

    Args:
        dataset: has a length, and examples at 0 … length - 1.
        users: who gave each example: rows of one user may be in an example.

    Raises:
        UserError: what stands in another row changes an example, or that another one was read before.
    """
    with generators.kept():
        try:
            why = _mixed(dataset, users)
        except Exception:
            # what does not let itself be copied or compared
            return
    if why is not None:
        raise UserError(why)


def _mixed(dataset: Any, users: Sequence[Hashable | None] | None = None) -> str | None:
    """Say of which attribute an example takes several rows, and is changed by one of others, or that it goes by earlier ones.

    ``users`` has None for what is an example of this data set, and not of the one that it is a part of."""
    # a copy of what closes its files when it goes would close them
    known = type(dataset) is TensorDataset or hasattr(dataset, "with_format") or hasattr(dataset, "__del__")
    if known or not hasattr(dataset, "__dict__"):
        return None
    size = len(dataset)
    orders = [range(size), *filter(None, (_order(value, size) for value in vars(dataset).values()))]
    for inner, numbers in _within(dataset, orders):
        owners = None if users is None else [None if n is None else users[n] for n in numbers]
        if (why := _mixed(inner, owners)) is not None:
            return why
    taken = [number for number in range(size) if users is None or users[number] is not None]
    if len(taken) < EXAMPLES:
        return None
    items = [taken[i * (len(taken) - 1) // (EXAMPLES - 1)] for i in range(EXAMPLES)]
    made = {(item, seed): _made(dataset, item, seed) for item in items for seed in range(TIMES)}
    if users is None and _repeats(dataset, items, made):
        return REPEATS
    for name in made[items[0], 0][1]:
        read = {key: places[name] for key, (_, places) in made.items() if places[name]}
        order = next(
            (order for order in orders if all(order[i] in places for (i, _), places in read.items())), ()
        )
        owner = {place: number for number, place in enumerate(order)}
        for (item, seed), places in read.items():
            others = {
                place
                for place in places & owner.keys()
                if owner[place] != item and (users is None or users[owner[place]] not in (None, users[item]))
            }
            # a longer table may end in rows that are nobody's own
            if not others or not any(
                place in _made(dataset, owner[place], seed)[1][name] for place in list(others)[:TIMES]
            ):
                continue
            for other in {order[item] for item in items} - places:
                now, there = (_made(dataset, item, seed, name, dict.fromkeys(o, other)) for o in ((), others))
                # not of what is another one whenever it is asked for
                if made[item, seed][0] == now[0] != there[0]:
                    return READS_OTHERS.format(name=name)
    return REMEMBERS if _remembers(dataset, items, users) else None


def _repeats(dataset: Any, items: Sequence[int], made: dict[tuple[int, int], Any]) -> bool:
    """Whether two numbers have the same row: one that chance alone has chosen, or all of them as rows come round again."""
    for one, other in itertools.combinations(items, 2):
        (here, places), chance = made[one, 0], made[one, 1][0]
        same = all(made[one, seed] == made[other, seed] for seed in range(TIMES))
        if same and any(places.values()) and here != chance:
            return True
    size, first = len(dataset), [made[item, 0][0] for item in items]
    if all(here == first[0] for here in first):
        return False
    counts = {
        len(value)
        for value in vars(dataset).values()
        if isinstance(value, _SIZED) and getattr(value, "ndim", None) != 0
    }
    for count in counts:
        if EXAMPLES <= count < size and size % count == 0:
            copies = size // count
            rounds = [(item + count) % size for item in items]
            beside = [item // copies * copies + (item + 1) % copies for item in items]
            if any([_made(dataset, item, 0)[0] for item in twins] == first for twins in (rounds, beside)):
                return True
    return False


def _remembers(dataset: Any, items: Sequence[int], users: Sequence[Hashable | None] | None) -> bool:
    """Whether the last of some examples is another one where those of others were read before it."""
    item = items[-1]
    others = [other for other in items[:-1] if users is None or users[other] != users[item]]
    once = _read(_copied(dataset), item, 0)
    later = _copied(dataset)
    for other in others:
        _read(later, other, 0)
    # numbers of a generator of its own are others by then
    own = {name: value for name, value in vars(dataset).items() if isinstance(value, _GENERATORS)}
    vars(later).update(copy.deepcopy(own))
    after = _read(later, item, 0)
    return after != once == _read(_copied(dataset), item, 0)


def _order(value: Any, size: int) -> list[int] | None:
    """Whole numbers, a different one for each example: of rows that somebody has shuffled, or chosen."""
    if isinstance(value, Tensor | np.ndarray) and value.ndim == 1 and len(value) == size:
        value = value.tolist()
    if not isinstance(value, list | tuple | range) or len(value) != size or set(map(type, value)) != {int}:
        return None
    return list(value) if len(set(value)) == size and min(value) >= 0 else None


def _within(dataset: Any, orders: Sequence[Sequence[int]]) -> Iterator[tuple[Any, list[int | None]]]:
    """Data sets that this one is made of, and for each of their examples the number that it has here; None where it has none."""
    parts, begin = getattr(dataset, "datasets", ()), 0
    for part in parts:
        yield part, list(range(begin, begin := begin + len(part)))
    within: list[Any] = [value for value in vars(dataset).values() if isinstance(value, Dataset)]
    for inner in within:
        order = next((order for order in reversed(orders) if max(order) < len(inner)), ())
        numbers: list[int | None] = [None] * len(inner)
        for number, place in enumerate(order):
            numbers[place] = number
        yield inner, numbers


def _made(
    dataset: Any, item: int, seed: int, name: str = "", instead: dict[int, int] | None = None
) -> tuple[list[Any], dict[str, set[int]]]:
    """An example, and which places of each attribute were read for it; with rows of the one so named instead of some."""
    size, rows = len(dataset), dict[str, _Rows]()

    def watched(value: Any, path: str) -> Any:
        if not _holds_rows(value, size):
            return value
        rows[path] = _Rows(value, len(value), set(), (instead or {}) if path == name else {})
        return rows[path]

    example = _read(_copied(dataset, watched), item, seed)
    return example, {attribute: each.read for attribute, each in rows.items()}


def _copied(dataset: Any, watched: Callable[[Any, str], Any] = lambda value, _: value) -> Any:
    """A data set that keeps for itself what it reads, with what ``watched`` gives in the place of an attribute, or a part."""
    dataset = copy.copy(dataset)
    for attribute, value in list(vars(dataset).items()):
        there = watched(value, attribute)
        if type(value) is dict and len(value) <= FEW:
            there = {key: watched(part, f"{attribute}[{key!r}]") for key, part in value.items()}
        elif there is value and type(value) is tuple and len(value) <= FEW:
            there = tuple(watched(part, f"{attribute}[{i}]") for i, part in enumerate(value))
        elif there is value and isinstance(value, _KEPT):
            there = (copy.copy if type(value) in (dict, list) else copy.deepcopy)(value)
        elif there is value and isinstance(value, Tensor | np.ndarray) and value.nbytes <= SMALL:
            there = copy.deepcopy(value)
        vars(dataset)[attribute] = there
    return dataset


def _read(dataset: Any, item: int, seed: int) -> list[Any]:
    """What is equal of an example that is the same one."""
    generators.seed_public(seed)
    example = dataset[item]
    return [*map(_content, tree_leaves(by_name(example)))]


def _content(part: Any) -> tuple[Any, bytes]:
    if isinstance(part, Tensor):
        return part.shape, part.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
    array = np.asarray("" if part is None else part)
    if array.dtype.kind == "O":
        raise TypeError
    return array.shape, array.tobytes()


def _holds_rows(value: Any, size: int) -> bool:
    sized = (
        hasattr(value, "__getitem__")
        and hasattr(value, "__len__")
        and not isinstance(value, str | bytes | dict)
    )
    if not sized or len(value) < size:
        return False
    first: Any = value[0] if isinstance(value, list | tuple | Tensor | np.ndarray) else None
    whole = getattr(first, "ndim", None) == 0 and "float" not in str(first.dtype)
    return not (whole or isinstance(first, int))


class _Rows:
    """What holds rows, and keeps which are read; `instead` gives others in the place of some."""

    def __init__(self, rows: Any, size: int, read: set[int], instead: dict[int, int]):
        self.rows, self.size, self.read, self.instead = rows, size, read, instead

    def __getitem__(self, index: Any) -> Any:
        first, *rest = index if isinstance(index, tuple) else (index,)
        several = isinstance(first, slice) or np.ndim(first) > 0
        if isinstance(first, str) or (several and not isinstance(first, slice) and isinstance(first[0], str)):
            # a column, or some
            return self._of(self.rows[index])
        if not several:
            place = range(self.size)[first]
            self.read.add(place)
            place = self.instead.get(place, place)
            return self.rows[(place, *rest) if rest else place]
        places = np.arange(self.size)[first if isinstance(first, slice) else np.asarray(first)].tolist()
        self.read.update(places)
        if not self.instead:
            return self.rows[index]
        places = [self.instead.get(place, place) for place in places]
        if isinstance(self.rows, list | tuple):
            return type(self.rows)(self.rows[place] for place in places)
        return self.rows[(places, *rest) if rest else places]

    def _of(self, rows: Any) -> _Rows:
        return _Rows(rows, self.size, self.read, self.instead)

    def __len__(self) -> int:
        return self.size

    @property
    def iloc(self) -> _Rows:
        return self._of(self.rows.iloc)

    @property
    def loc(self) -> _Rows:
        return self._of(self.rows.loc)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rows, name)
