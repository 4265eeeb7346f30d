"""What a collate function pads with: an example that is longer in its batch than alone was padded because of the others."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

# examples that are collated alone
TRIED = 8


def padding_token(collate_fn: Callable[[list[Any]], Any], examples: Sequence[Any], batch: Any) -> int | None:
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
    state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            alone = [_rows(collate_fn([copy.deepcopy(example)]), 1) for example in examples[:TRIED]]
    except Exception:
        # a collate function that does not take a single example, or changes what it takes
        return None
    finally:
        random.setstate(state[0])
        np.random.set_state(state[1])
    for place, rows in enumerate(together):
        for i, single in enumerate(alone):
            if len(single) != len(together) or single[place].shape[1] >= rows.shape[1]:
                continue
            added = rows[i, single[place].shape[1] :].unique()
            if len(added) == 1 and added.item() >= 0:
                return int(added.item())
    return None


def _rows(batch: Any, count: int) -> list[Tensor]:
    """The tensors of whole numbers with two dimensions, one row for each example."""
    return [
        leaf
        for leaf in tree_leaves(dict(batch) if hasattr(batch, "keys") else batch)
        if isinstance(leaf, Tensor)
        and leaf.dim() == 2
        and leaf.shape[0] == count
        and leaf.dtype == torch.int64
    ]
