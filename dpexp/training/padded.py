"""How far the rows of a batch are their own, and how far they are padded: what lies behind its end is there for others' sake."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dpexp.training.collating import EXAMPLES, Collate, collated, leaves_of

# of what lies behind the end of a row: a maximum sees one of them
FACTORS = (3.0, -3.0)
# padded length -> ``[b]``, the own lengths of the examples
Lengths = Mapping[int, Tensor]


def own_lengths(collate_fn: Collate, examples: Sequence[Any], units: int, batch: Any) -> Lengths:
    """Find how long the examples of a batch are by themselves, by collating some of them alone.

    Args:
        collate_fn: a list of examples -> a batch.
        examples: of one batch; copies of a few are used, and the others count as long as they are padded.
        units: how many units of privacy they are.
        batch: what they were collated to.

    Returns:
        The lengths to which tensors ``[b, T, …]`` are padded at their ends, with ``[b]`` own lengths. Nothing where a row is
        another one alone: padded in front, say, or masked by chance.
    """
    together = _sequences(batch, len(examples))
    if len(examples) != units or units == 1 or not together:
        return {}
    found: dict[int, Tensor] = {}
    for i, example in enumerate(examples[:EXAMPLES]):
        alone = _sequences(collated(collate_fn, [example]), 1)
        if len(alone) != len(together):
            return {}
        longest: dict[int, int] = {}
        for whole, one in zip(together, alone, strict=True):
            own, length = one.shape[1], whole.shape[1]
            alike = own <= length and one.shape[2:] == whole.shape[2:] and one.dtype == whole.dtype
            if not alike or not torch.equal(whole[i, :own], one[0]):
                return {}
            longest[length] = max(longest.get(length, 0), own)
        for length, own in longest.items():
            found.setdefault(length, torch.full((units,), length))[i] = own
    return {length: own for length, own in found.items() if bool((own < length).any())}


def behind_the_end(tensor: Tensor, lengths: Lengths, factor: float) -> Tensor | None:
    """Multiply what lies behind the ends of the rows of ``[b, T, …]``; None where it has no such length."""
    own = lengths.get(tensor.shape[1]) if tensor.dim() > 1 and tensor.is_floating_point() else None
    if own is None or len(own) != len(tensor):
        return None
    behind = torch.arange(tensor.shape[1]) >= own[:, None]
    behind = behind.to(tensor.device).reshape(*behind.shape, *[1] * (tensor.dim() - 2))
    return torch.where(behind, tensor * factor, tensor)


def _sequences(batch: Any, count: int) -> list[Tensor]:
    leaves = [] if batch is None else leaves_of(batch)
    return [t for t in leaves if t.layout == torch.strided and t.dim() > 1 and len(t) == count]
