"""What outlives one backward pass: what was learnt about the model, and sums that are formed on delivery."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from itertools import count, takewhile
from typing import Any

import torch
from torch import Tensor

from dpexp.clipping.contributions import Contribution
from dpexp.clipping.contributions.scratch import Scratch
from dpexp.clipping.layouts import LOOP


@dataclass
class LateSum:
    """A clipped sum that touches few rows of a table: formed when it is delivered, straight into an existing gradient."""

    contribution: Contribution
    factors: Tensor

    def tensor(self, dtype: torch.dtype) -> Tensor:
        return self.contribution.weighted_sum(self.factors).to(dtype)

    def add_to(self, gradient: Tensor) -> None:
        if gradient.dtype == self.contribution.dtype and gradient.is_contiguous():
            self.contribution.weighted_sum(self.factors, out=gradient)
        else:
            gradient += self.tensor(gradient.dtype)


class ByRepr(dict[Any, str]):
    """A dictionary whose keys are kept by their ``repr``, so that it can be written to a file and read again."""

    def __getitem__(self, key: object) -> str:
        return super().__getitem__(repr(key))

    def __setitem__(self, key: object, value: str) -> None:
        super().__setitem__(repr(key), value)

    def __contains__(self, key: object) -> bool:
        return super().__contains__(repr(key))

    def get(self, key: object, default: Any = None) -> Any:
        return super().get(repr(key), default)


class Recent(dict[Any, str]):
    """What `choose` answered, by exact shapes: asking costs as much as a small layer. Forgets all when it is full."""

    LARGEST = 1 << 12

    def put(self, key: Hashable, method: str) -> None:
        if len(self) >= self.LARGEST:
            self.clear()
        self[key] = method


class Memory:
    """What an attached model has taught us: proven layouts, parameters that need the loop, measured choices."""

    def __init__(self, cap_bytes: int):
        self.cap_bytes = cap_bytes
        self.scratch = Scratch(cap_bytes)
        self.layouts, self.choices = ByRepr(), ByRepr()
        self.recent = Recent()
        self.looped: set[str] = set()
        self.surprises: set[str] = set()
        self.followed: set[str] = set()
        self.methods: dict[str, str] = {}
        self.ways_known = (
            False  # no parameter is used where no tap sees it, as far as one backward pass shows
        )
        self.settled = False  # and every layout is proven
        self.backwards = 0  # since this process attached

    def state(self) -> dict[str, Any]:
        """All that decides how the next backward pass computes, as JSON."""
        return {
            "layouts": dict(self.layouts.items()),
            "choices": dict(self.choices.items()),
            "looped": sorted(self.looped),
            "followed": sorted(self.followed),
            "settled": self.settled,
        }

    def loops(self, owner: str) -> bool:
        """Whether a use of this module needs the loop because of its layout."""
        uses = takewhile(lambda key: key in self.layouts, ((owner, n) for n in count()))
        return any(self.layouts[key] == LOOP for key in uses)

    def due(self) -> bool:
        """Count a backward pass. Whether what was proven is to be proven again: in the 16th, the 64th, the 256th and so on.

        A model may begin to mix examples after its first step (an augmentation that starts late, a flag). To look now and then
        is cheap insurance, not a proof.
        """
        self.backwards += 1
        return self.backwards > 4 and self.backwards.bit_count() == 1 and self.backwards.bit_length() % 2 == 1

    def load_state(self, state: dict[str, Any]) -> None:
        dict.update(self.layouts, state.get("layouts", {}))
        dict.update(self.choices, state.get("choices", {}))
        self.recent.clear()
        self.looped |= set(state.get("looped", ()))
        self.followed |= set(state.get("followed", ()))
        self.settled = self.ways_known = bool(state.get("settled", False))
