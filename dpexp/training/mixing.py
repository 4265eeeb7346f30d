"""Whether a collate function keeps its examples apart: mixup and CutMix stand there, and what they mix no gradient shows."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from dpexp.clipping.dataflow import tensors_in
from dpexp.errors import UserError

# examples that are collated, and how often: chance may decide whether anything is mixed
EXAMPLES, TIMES = 8, 4
# largest difference of numbers that are taken to be equal, relative to the largest of them
ROUNDING = 1e-4

Collate = Callable[[list[Any]], Any]


def refuse_mixing(collate_fn: Collate, examples: Sequence[Any], rows_per_unit: int = 1) -> bool:
    """Collate a few examples twice, by the same random numbers: as they are, and with other pictures and numbers in half of them.

    Lengths, texts and labels stay what they are, so that nothing is padded or sorted in another way.

    Args:
        collate_fn: a list of examples -> a batch.
        examples: of one batch; copies of a few are used.
        rows_per_unit: adjacent examples that may be mixed, because they are one user's.

    Returns:
        Whether anything could be compared.

    Raises:
        UserError: a row of the batch depends on several examples.
    """
    units = min(len(examples) // rows_per_unit, max(2, EXAMPLES // rows_per_unit))
    few = list(examples[: units * rows_per_unit])
    compared = False
    with _generators_kept():
        for seed in range(TIMES if units > 1 else 0):
            try:
                # neighbours, mirror images and halves are all apart
                kept = [(i // rows_per_unit).bit_count() % 2 == seed % 2 for i in range(len(few))]
                changed = [r if k else tree_map(_changed, r) for r, k in zip(few, kept, strict=True)]
                pair = [_collated(collate_fn, rows, seed) for rows in (few, changed)]
                verdicts = [_mixed(a, b, sum(kept), len(few)) for a, b in zip(*pair, strict=True)]
            except Exception:
                # a collate function that does not take these, or changes what it takes
                return compared
            if any(verdicts):
                raise UserError(
                    "collate_fn mixes examples: what it makes of one changes when others of its batch do (mixup, CutMix, a mean "
                    "over the batch). An example would then move the gradients of others, and clipping bounds nothing. Make each "
                    "row of its own example alone, with public numbers"
                )
            compared = compared or False in verdicts
            if not compared:
                # texts and labels alone
                return False
    return compared


def _collated(collate_fn: Collate, examples: list[Any], seed: int) -> list[Tensor]:
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    return tensors_in(collate_fn(copy.deepcopy(examples)))


def _mixed(a: Tensor, b: Tensor, kept: int, count: int) -> bool | None:
    """Whether fewer rows are found again than examples were kept; None where nothing has changed, or rows are not known."""
    if a.shape != b.shape or not a.dim() or not len(a) or len(a) % count:
        return None
    a, b = (t.detach().double().reshape(count, -1) for t in (a, b))
    allowed = ROUNDING * torch.maximum(a.abs(), 1e-3 * a.abs().amax(0))
    if bool((a - b).abs().le(allowed).all()):
        return None
    lost = [bool(((row - b).abs() > limit).any(1).all()) for row, limit in zip(a, allowed, strict=True)]
    return count - sum(lost) < kept


def _changed(leaf: Any) -> Any:
    """Another picture, or other numbers, of the same kind and size, within the same bounds; anything else as it is."""
    if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.dtype == torch.uint8):
        return (leaf.flatten().flip(0).reshape(leaf.shape) / 2).to(leaf.dtype)
    if isinstance(leaf, np.ndarray | np.floating) and leaf.dtype.kind in "fu":
        return (np.flip(np.asarray(leaf)) / 2).astype(leaf.dtype)
    if isinstance(leaf, float):
        return leaf / 2
    if hasattr(leaf, "rotate") and hasattr(leaf, "point"):
        # of Pillow
        return leaf.rotate(180).point(lambda value: value // 2)
    return leaf


@contextmanager
def _generators_kept() -> Iterator[None]:
    """Leave the random generators as they were found."""
    state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(state[0])
        np.random.set_state(state[1])
