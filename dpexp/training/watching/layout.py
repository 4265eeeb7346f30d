"""How the rows of examples lie in a batch, seen by collating some of them alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from dpexp.clipping.tapping.forwards import tensors_in
from dpexp.training.watching.collating import Collate, collated, example_axes
from dpexp.training.watching.padded import Padding, padding_of
from dpexp.training.watching.places import EndToEnd


@dataclass
class Layout:
    """How the rows of examples lie in the tensors of one batch.

    Attributes:
        axes: tensor -> the dimension in which its examples stand, where that leaves no doubt.
        ends: tensor -> `EndToEnd`, of those that hold the rows of all examples one behind the other.
        padding: see `padded.padding_of`.
    """

    axes: WeakIdKeyDictionary
    ends: WeakIdKeyDictionary
    padding: Padding


def layout_of(collate_fn: Collate, examples: Sequence[Any], units: int, batch: Any) -> Layout:
    """Find how the rows of examples lie in their batch.

    Args:
        collate_fn: a list of examples -> a batch.
        examples: of one batch; copies of them are used.
        units: how many units of privacy they are; adjacent examples are of one.
        batch: what they were collated to.
    """
    made = collate_fn, examples, units, batch
    axes = example_axes(*made)
    return Layout(axes, _ends_of(*made, axes), padding_of(*made))


def _ends_of(
    collate_fn: Collate, examples: Sequence[Any], units: int, batch: Any, axes: WeakIdKeyDictionary
) -> WeakIdKeyDictionary:
    """Find the tensors that are what their examples become alone, one behind the other."""
    found, rows = WeakIdKeyDictionary(), len(examples) // units
    whole = tensors_in(batch)
    left = [place for place, tensor in enumerate(whole) if tensor.dim() and _may_be(tensor, units, axes)]
    if units == 1 or not left:
        return found
    alone = list[list[Tensor]]()
    for first in range(0, len(examples), rows):
        alone.append(tensors_in(collated(collate_fn, examples[first : first + rows])))
        if len(alone[-1]) != len(whole):
            return found
    for place in left:
        parts = [leaves[place] for leaves in alone]
        if _are(parts, whole[place]) and {*map(len, parts)} != {1}:
            found[whole[place]] = EndToEnd(tuple(map(len, parts)))
    return found


def _may_be(tensor: Tensor, units: int, axes: WeakIdKeyDictionary) -> bool:
    """Whether examples may lie end to end in a tensor: where each has a row of its own, they do not."""
    return tensor not in axes or (axes[tensor] == 0 and len(tensor) != units)


def _are(parts: Sequence[Tensor], whole: Tensor) -> bool:
    """Whether these, one behind the other, are the whole."""
    if whole.layout != torch.strided or whole.is_nested or any(p.dtype != whole.dtype for p in parts):
        return False
    if any(not p.dim() or p.shape[1:] != whole.shape[1:] for p in parts):
        return False
    return sum(map(len, parts)) == len(whole) and torch.equal(torch.cat(list(parts)), whole)
