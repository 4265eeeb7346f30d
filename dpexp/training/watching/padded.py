"""Where the rows of a batch are their own, and where they are padding, which is there for others' sake."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dpexp.training.watching.collating import EXAMPLES, Collate, collated, leaves_of

# of what stands in padding; a maximum sees one of them
FACTORS = (3.0, -3.0)
# of each length T to which rows are padded, ``[b, T]``: whether padding stands there
Padding = Sequence[Tensor]


def padding_of(collate_fn: Collate, examples: Sequence[Any], units: int, batch: Any) -> Padding:
    """Find where the rows of a batch are padded, by collating some of its examples alone.

    Args:
        collate_fn: a list of examples -> a batch.
        examples: of one batch; copies of a few are used, and the rows of the others count as their own.
        units: how many units of privacy they are.
        batch: what they were collated to.

    Returns:
        Where padding stands in tensors ``[b, T, …]``, at one end of their rows. Nothing where a row is another one alone, as one
        that is masked by chance.
    """
    together = _sequences(batch, len(examples))
    if len(examples) != units or units == 1 or not together:
        return []
    found = {whole.shape[1]: torch.zeros(units, whole.shape[1], dtype=torch.bool) for whole in together}
    for i, example in enumerate(examples[:EXAMPLES]):
        alone = _sequences(collated(collate_fn, [example]), 1)
        if len(alone) != len(together):
            return []
        here = {length: torch.ones(length, dtype=torch.bool) for length in found}
        for whole, one in zip(together, alone, strict=True):
            padding = _added(whole[i], one[0])
            if padding is None:
                return []
            here[len(padding)] &= padding
        for length, padding in here.items():
            found[length][i] = padding
    return [padding for padding in found.values() if bool(padding.any())]


def in_padding(tensor: Tensor, there: Tensor, factor: float) -> Tensor | None:
    """Multiply what stands in the padding of ``[b, T, …]``; None where it has no such length."""
    if tensor.shape[:2] != there.shape or not tensor.is_floating_point():
        return None
    there = there.to(tensor.device).reshape(*there.shape, *[1] * (tensor.dim() - 2))
    return torch.where(there, tensor * factor, tensor)


def padded_further(tensor: Tensor, there: Tensor) -> Tensor | None:
    """Add another column of padding to ``[b, T, …]``, such as stands there already; None where it has no such length."""
    if tensor.shape[:2] != there.shape:
        return None
    behind = bool(there[:, -1].any())
    row = int(there[:, -1 if behind else 0].int().argmax())
    column = tensor[row, -1 if behind else 0].expand_as(tensor[:, 0]).unsqueeze(1)
    return torch.cat([tensor, column] if behind else [column, tensor], 1)


def _added(row: Tensor, alone: Tensor) -> Tensor | None:
    """Tell, ``[T]``, where a row was padded that is ``alone`` by itself; None where that is not in it."""
    own, places = len(alone), torch.arange(len(row))
    if own > len(row) or row.shape[1:] != alone.shape[1:] or row.dtype != alone.dtype:
        return None
    if torch.equal(row[:own], alone):
        return places >= own
    return places < len(row) - own if torch.equal(row[len(row) - own :], alone) else None


def _sequences(batch: Any, count: int) -> list[Tensor]:
    leaves = [] if batch is None else leaves_of(batch)
    return [t for t in leaves if t.layout == torch.strided and t.dim() > 1 and len(t) == count]
