"""What a collate function does to examples, seen by asking it again: what it pads with, and whether it keeps their order."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dpexp.errors import UserError

Collate = Callable[[list[Any]], Any]

# examples that are collated alone
TRIED = 8


def padding_token(collate_fn: Collate, examples: Sequence[Any], batch: Any) -> int | None:
    """Find the token with which examples are made equally long, by collating some of them alone.

    Random generators are left as they were found. A batch without texts asks for nothing.

    Args:
        collate_fn: a list of examples -> a batch, of which tensors of whole numbers ``[b, T]`` are looked at.
        examples: of one batch; copies of a few are used.
        batch: what they were collated to.

    Returns:
        A number that is not negative; None where nothing is padded, or not with one such number.
    """
    together = _rows(batch, len(examples))
    if not together:
        return None
    tried = [_collated(collate_fn, [example]) for example in examples[:TRIED]]
    if any(other is None for other in tried):
        return None
    alone = [_rows(other, 1) for other in tried]
    for place, rows in enumerate(together):
        for i, single in enumerate(alone):
            if len(single) != len(together) or single[place].shape[1] >= rows.shape[1]:
                continue
            added = rows[i, single[place].shape[1] :].unique()
            if len(added) == 1 and added.item() >= 0:
                return int(added.item())
    return None


def refuse_other_order(collate_fn: Collate, examples: Sequence[Any], batch: Any) -> None:
    """Refuse a collate function that puts examples in an order of its own: whose rows are whose would be lost.

    Args:
        collate_fn, examples, batch: see `padding_token`.

    Raises:
        UserError: the same examples from last to first do not come out from last to first.
    """
    turned = _collated(collate_fn, examples[::-1])
    for here, there in zip(_leaves(batch), [] if turned is None else _leaves(turned), strict=False):
        if here.dim() and len(here) == len(examples) and here.shape == there.shape:
            rows, others = _bytes(here), _bytes(there)
            if others != rows[::-1] and sorted(others) == sorted(rows):
                raise UserError(
                    "collate_fn puts its examples in an order of its own (by length, say), and with users= it says whose "
                    "rows are whose: leave it as it is, or give length= to engine.batches()"
                )


def _collated(collate_fn: Collate, examples: Sequence[Any]) -> Any:
    """Collate copies, and leave random generators as they were found; None where that fails, as of a single example."""
    state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            return collate_fn([copy.deepcopy(example) for example in examples])
    except Exception:
        return None
    finally:
        random.setstate(state[0])
        np.random.set_state(state[1])


def _bytes(rows: Tensor) -> list[bytes]:
    return [row.numpy().tobytes() for row in rows.detach().cpu().reshape(len(rows), -1).view(torch.uint8)]


def _leaves(batch: Any) -> list[Tensor]:
    leaves = tree_leaves(dict(batch) if hasattr(batch, "keys") else batch)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _rows(batch: Any, count: int) -> list[Tensor]:
    """The tensors of whole numbers with two dimensions, one row for each example."""
    return [
        leaf
        for leaf in _leaves(batch)
        if leaf.dim() == 2 and leaf.shape[0] == count and leaf.dtype == torch.int64
    ]
