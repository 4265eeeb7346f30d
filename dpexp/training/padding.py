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


def padding_token(collate_fn: Callable[[list[Any]], Any], examples: Sequence[Any]) -> int | None:
    """Find the token with which examples are made equally long, by collating some together and one by one.

    Random generators are left as they were found.

    Args:
        collate_fn: a list of examples -> a batch, of which tensors of whole numbers ``[b, T]`` are looked at.
        examples: of one batch; a copy of a few is used.

    Returns:
        A number that is not negative; None where nothing is padded, or not with one such number.
    """
    some = copy.deepcopy(list(examples[:TRIED]))
    state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            alone = [_rows(collate_fn([copy.deepcopy(example)]), 1) for example in some]
            together = _rows(collate_fn(some), len(some))
    except Exception:
        # a collate function that does not take so few examples
        return None
    finally:
        random.setstate(state[0])
        np.random.set_state(state[1])
    for place, batch in enumerate(together):
        for i, single in enumerate(alone):
            if len(single) != len(together) or single[place].shape[1] >= batch.shape[1]:
                continue
            added = batch[i, single[place].shape[1] :].unique()
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
