"""Which examples of data sets are the same one, as far as the data sets tell where their rows come from."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset

MADE = (dict, list, tuple, torch.Tensor, np.ndarray)
"""Rows, of which no two are one object by chance; numbers and texts may be."""


def rows_in_common(dataset: Any, other: Any) -> int:
    """Count the examples of ``other`` that stand in ``dataset`` too, where `Subset` or `datasets` has cut them out of it."""
    if isinstance(dataset, list) and isinstance(other, list):
        known = {id(row) for row in dataset if isinstance(row, MADE)}
        return sum(id(row) in known for row in other)
    met: dict[int, int] = {}
    return int(np.isin(origins(other, met), origins(dataset, met)).sum())


def origins(dataset: Any, met: dict[int, int]) -> np.ndarray:
    """Number the examples of a data set, ``[N]``, so that copies have one number.

    Args:
        dataset: a `Subset`, a `ConcatDataset` and a `datasets.Dataset` tell what they are made of; any other one counts as made
            of different examples.
        met: the parts that were met before, by identity, and which of them it was.
    """

    def first(identity: int) -> int:
        return met.setdefault(identity, len(met)) << 32

    if isinstance(dataset, Subset):
        return origins(dataset.dataset, met)[np.asarray(dataset.indices, dtype=np.int64)]
    if isinstance(dataset, ConcatDataset):
        return np.concatenate([origins(part, met) for part in dataset.datasets])
    if hasattr(dataset, "_indices") and getattr(dataset, "column_names", False):
        # where the rows lie in memory, which concatenate_datasets() leaves as it is
        chunks = dataset.data.column(0).chunks
        # empty buffers may all lie at one place
        kept = [[b.address for b in chunk.buffers() if b is not None and b.size] for chunk in chunks]
        places = [own[-1] if own else id(chunk) for own, chunk in zip(kept, chunks, strict=True)]
        pairs = zip(places, chunks, strict=True)
        parts = [first(place) + chunk.offset + np.arange(len(chunk)) for place, chunk in pairs]
        found = np.concatenate([np.zeros(0, dtype=np.int64), *parts])
        return found if dataset._indices is None else found[dataset._indices.column(0).to_numpy()]
    return first(id(dataset)) + np.arange(len(dataset))
