"""Which rows a data set reads to make one example, seen by asking it again: mixup may stand in ``__getitem__``, too."""

from __future__ import annotations

import copy
import random
from collections.abc import Hashable, Iterator, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset, TensorDataset

from dpexp.errors import UserError
from dpexp.training.watching.collating import generators_kept

# examples that are made, and how often: chance may decide whether anything is mixed
EXAMPLES, TIMES = 8, 2
# parts of an attribute that are looked at: the columns of a table, and no table of words
FEW = 64
# the numbers of later examples, and rows that are kept for them, stay what they are
_KEPT = (random.Random, np.random.Generator, np.random.RandomState, MutableMapping, list)
READS_OTHERS = (
    "the data set makes one example of several rows: another row of its {name} changes it (mixup, CutMix or mosaic in "
    "__getitem__, a partner, a negative, a neighbour in time). What somebody gave would then be in the gradients of other "
    "examples too, and move more than one clipped gradient. Make each example of its own row alone, and take what stands beside "
    "it from public rows; let one example be all that belongs together, with no row in two of them; or say whose each row is "
    "(users=, unit=user)"
)


def refuse_other_rows(dataset: Any, users: Sequence[Hashable] | None = None) -> None:
    """Make a few examples, and make them again with others in the place of the rows that are not theirs.

    Looked at is what has as many items as the data set, and is an attribute of it or a part of one: lists, tensors, arrays,
    frames, data sets. A table that is not read at the place of each example holds no rows, nor do whole numbers (classes,
    offsets, an order).

    Args:
        dataset: has a length, and examples at 0 … length - 1.
        users: who gave each example: rows of one user may be in an example. Data sets within are not looked at then, because
            their numbers are others.

    Raises:
        UserError: what stands in another row changes an example.
    """
    with generators_kept():
        try:
            name = _mixed(dataset, users)
        except Exception:
            # what does not let itself be copied or compared
            return
    if name is not None:
        raise UserError(READS_OTHERS.format(name=name))


def _mixed(dataset: Any, users: Sequence[Hashable] | None = None) -> str | None:
    """The attribute of which an example takes several rows, and is changed by one of others."""
    # a copy of what closes its files when it goes would close them
    known = type(dataset) is TensorDataset or hasattr(dataset, "with_format") or hasattr(dataset, "__del__")
    if known or not hasattr(dataset, "__dict__"):
        return None
    for inner in [*vars(dataset).values(), *getattr(dataset, "datasets", ())]:
        if users is None and isinstance(inner, Dataset) and (name := _mixed(inner)) is not None:
            return name
    items = sorted({i * (len(dataset) - 1) // (EXAMPLES - 1) for i in range(EXAMPLES)})
    made = {(item, seed): _made(dataset, item, seed) for item in items for seed in range(TIMES)}
    for name in made[items[0], 0][1] if len(items) == EXAMPLES else ():
        read = {key: places[name] for key, (_, places) in made.items() if places[name]}
        if any(item not in places for (item, _), places in read.items()):
            continue
        for (item, seed), places in read.items():
            others = {place for place in places if users is None or users[place] != users[item]} - {item}
            for other in set(items) - places if others else ():
                instead = dict.fromkeys(others, other)
                now, there = _made(dataset, item, seed), _made(dataset, item, seed, name, instead)
                # not of what is another one whenever it is asked for
                if made[item, seed] == now and now[0] != there[0]:
                    return name
    return None


def _made(
    dataset: Any, item: int, seed: int, name: str = "", instead: dict[int, int] | None = None
) -> tuple[list[Any], dict[str, set[int]]]:
    """An example, and which places of each attribute were read for it; with rows of the one so named instead of some."""
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    dataset, size, rows = copy.copy(dataset), len(dataset), dict[str, _Rows]()

    def watched(value: Any, path: str) -> Any:
        if not _holds_rows(value, size):
            return value
        rows[path] = _Rows(value, size, set(), (instead or {}) if path == name else {})
        return rows[path]

    for attribute, value in list(vars(dataset).items()):
        there = watched(value, attribute)
        if type(value) is dict and len(value) <= FEW:
            there = {key: watched(part, f"{attribute}[{key!r}]") for key, part in value.items()}
        elif there is value and type(value) is tuple and len(value) <= FEW:
            there = tuple(watched(part, f"{attribute}[{i}]") for i, part in enumerate(value))
        elif there is value and isinstance(value, _KEPT):
            there = (copy.copy if type(value) in (dict, list) else copy.deepcopy)(value)
        vars(dataset)[attribute] = there
    example = dataset[item]
    parts = map(_content, tree_leaves(dict(example) if hasattr(example, "keys") else example))
    return list(parts), {attribute: each.read for attribute, each in rows.items()}


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
    if not sized or len(value) != size:
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
        # a name, or several at once
        if isinstance(first, str | slice) or np.ndim(first):
            return self.rows[index]
        place = range(self.size)[first]
        self.read.add(place)
        place = self.instead.get(place, place)
        return self.rows[(place, *rest) if rest else place]

    def __len__(self) -> int:
        return self.size

    @property
    def iloc(self) -> _Rows:
        return _Rows(self.rows.iloc, self.size, self.read, self.instead)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rows, name)
