"""Work that has no order, shared out over ranks: evaluation and decoding.

Who calls for it need not know of ranks: `sharing` says who takes part, and without it this process does everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from dpexp.parallel.ranks import ALONE, Ranks

Item = TypeVar("Item")
Result = TypeVar("Result")
_sharing: ContextVar[Ranks] = ContextVar("sharing", default=ALONE)


@contextmanager
def sharing(ranks: Ranks) -> Iterator[None]:
    """Inside, work is shared out over these ranks; all of them must ask for the same work."""
    token = _sharing.set(ranks)
    try:
        yield
    finally:
        _sharing.reset(token)


def shared_out(items: Sequence[Item], work: Callable[[Item], Result]) -> Iterator[tuple[Item, Result]]:
    """Yield each item with its result, in order and on every rank; each item is worked on by one of them.

    An item is what one process would compute at once (a batch, not an example), so that its result is the same to the last bit.

    Args:
        items: the same on all ranks.
        work: on an item; its result must survive pickling, and lie on the CPU.
    """
    ranks = _sharing.get()
    for start in range(0, len(items), ranks.size):
        block = items[start : start + ranks.size]
        mine = work(block[ranks.rank]) if ranks.rank < len(block) else None
        yield from zip(block, ranks.gather(mine), strict=False)


def by_one(work: Callable[[], Result]) -> Result:
    """Return the result of what cannot be shared out; rank 0 works, and tells the others."""
    return _sharing.get().once(work)


def writes() -> bool:
    """Whether this process writes the files of the work that is shared out."""
    return _sharing.get().writes
