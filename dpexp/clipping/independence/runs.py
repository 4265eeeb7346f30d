"""What a forward gives that is run again: outputs by number, whatever they are held in, and buffers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dpexp.clipping.independence.arguments import Inputs
from dpexp.clipping.independence.comparison import outputs, thin
from dpexp.clipping.independence.replay import Replay, again
from dpexp.clipping.tapping.forwards import is_tensors

# number of an output that was a list
LIST = -1

# by module and name, a copy, and whether the model's state holds it
Buffers = dict[tuple[str, str], tuple[Tensor, bool]]


@dataclass
class Run:
    """What came out of the last of some batches, and the buffers after the first of them."""

    batches: list[Inputs]
    outputs: dict[int, Tensor]
    buffers: Buffers


class Runs:
    """Runs a forward again.

    Args:
        replay: the forward.
        rows: how many enter it.
    """

    def __init__(self, replay: Replay, rows: int):
        self._replay, self._rows = replay, rows
        # of what the model returns as a list with an entry for each example, how long the longest entry is
        self._longest: int | None = None

    def of(self, batches: list[Inputs]) -> tuple[list[dict[int, Tensor]], list[Buffers]]:
        """Return the outputs of batches one after the other, by number, and the buffers after each."""
        return again(self._outputs, batches)

    def _outputs(self, batches: list[Inputs]) -> tuple[list[dict[int, Tensor]], list[Buffers]]:
        found, kept = [], []
        with self._replay.begun():
            for batch in batches:
                # no name keeps the outputs while the next batch makes its own
                leaves = self._leaves(self._replay.run(batch), batch).items()
                found.append({number: thin(leaf) for number, leaf in leaves})
                del leaves
                kept.append(self._buffers())
        return found, kept

    def _buffers(self) -> Buffers:
        buffers = {
            (name, key): (b.detach().clone(), key not in module._non_persistent_buffers_set)
            for name, module in self._replay.model.named_modules()
            for key, b in module._buffers.items()
            if b is not None
        }
        for name, p in self._replay.written().items():
            owner, _, local = name.rpartition(".")
            buffers[owner, local] = p.detach().clone(), True
        return buffers

    def _leaves(self, value: Any, batch: Inputs) -> dict[int, Tensor]:
        """The outputs by number; of a list with an entry for each example, as long as it likes, one with a row for each."""
        leaves = outputs(value, self._replay.used)
        sizes = {len(part) for part in tree_leaves(batch, is_leaf=is_tensors) if is_tensors(part)}
        if (
            len(leaves) not in sizes
            or len({(leaf.dim() or 1, leaf.shape[1:]) for leaf in leaves.values()}) > 1
        ):
            return leaves
        entries = [leaf.reshape(-1, *leaf.shape[1:]) for leaf in leaves.values()]
        lengths = {len(entry) for entry in entries}
        if self._longest is None and len(entries) == self._rows and lengths != {self._rows}:
            self._longest = max(lengths)
        if self._longest is None:
            return leaves
        padded = [
            F.pad(entry, (0, 0) * (entry.dim() - 1) + (0, self._longest - len(entry))) for entry in entries
        ]
        return {LIST: torch.stack(padded)}
