"""Layouts that wait for the pass that forms sums: of rows that a model picks, as it did in earlier steps.

Whose such rows are is proven with every batch. The pass that forms sums goes back without weights, as the first one of that proof
does, and takes its place: the weighted ones come first, and each use is settled when its gradient arrives.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dpexp.clipping.survey import layouts
from dpexp.clipping.survey.formula_check import Formulas
from dpexp.clipping.survey.observed import FRONT, Observed
from dpexp.clipping.survey.ownership import LATE, Ownership
from dpexp.clipping.tapping.taps import Visit
from dpexp.clipping.tapping.uses import Use
from dpexp.errors import LateError

# what the rows in front tell of
TOLD = (FRONT, *layouts.IN_ORDER)


class Waiting:
    """The uses whose layout waits, of one backward pass after the other.

    Args:
        ownership: whose the rows of each use are; what is told is written there.
        formulas: those that are proven.

    Attributes:
        allowed: whether any may wait, as long as rows tell whose they are: who sets it begins a step again on a `LateError`.
    """

    def __init__(self, ownership: Ownership, formulas: Formulas):
        self.ownership, self.formulas = ownership, formulas
        self.allowed = False
        self._observed: Observed | None = None

    def begin(self, visit: Visit, pending: dict[int, list[str]], doubted: set[int]) -> bool:
        """Back-propagate with weights alone, where `tell` can settle all that is pending (see `Ownership.pending`).

        Returns:
            Whether it waits for `tell`. Not where something else is to be proven, or losses may have been picked: only a plain
            pass tells, and it comes first then.
        """
        uses = [use for use in visit.uses if id(use) in pending]
        if not self._may_wait(visit, [use for use in uses if id(use) not in doubted]):
            return False
        layout = self.ownership.layout
        looked_at: dict[int, list[str]] = {}
        for use in uses:
            if (here := id(use)) in doubted:
                looked_at[here] = [str(layout[here])]
            else:
                looked_at[here] = [FRONT]
                before = self.ownership.picked[use.place]
                layout[here] = before if before in pending[here] else FRONT
        observed = Observed(visit, looked_at, pending.keys() - doubted)
        if not observed.weigh():
            return False
        self._observed = observed
        return True

    def _may_wait(self, visit: Visit, uses: list[Use]) -> bool:
        """Whether of these uses nothing is to be proven but whose the rows are that the model has picked, as in earlier steps."""
        return bool(
            uses
            and self.allowed
            # what meets other ranks cannot begin again; and in float16 gradients overflow, which tell nothing
            and not (visit.roots.inputs or visit.recorder.shards)
            and not (torch.distributed.is_available() and torch.distributed.is_initialized())
            and not any(use.in_float16 for use in visit.uses)
            and all(self._is_told(use, visit) for use in uses)
            and bool(visit.roots.finite().all())
        )

    def _is_told(self, use: Use, visit: Visit) -> bool:
        """Whether rows told whose they are before, of a use whose formula is proven."""
        before = self.ownership.picked.get(use.place)
        return (
            before in TOLD
            and self.ownership.in_any_order(use, visit.rows)
            and self.formulas.known(use, before, visit.num_examples)
        )

    def tell(self, use: Use, gy: Tensor) -> None:
        """Settle the layout of a use, if it waits, by its gradient without weights.

        Raises:
            LateError: a row does not tell whose it is.
        """
        if self._observed is None or id(use) not in self._observed.pending:
            return
        layout = self.ownership.layout
        found = self._observed.told(use, gy, str(layout[id(use)]))
        if found is None:
            self.allowed = False
            raise LateError(f"{use.owner} ({use.label}) {LATE}")
        layout[id(use)] = found
        del self._observed.pending[id(use)]

    def end(self) -> None:
        """End a backward pass."""
        self._observed = None
