"""The survey of a model's graph: what is proven before anything is summed.

Shapes suggest which rows of an operation belong to which example; a second back-propagation with weighted losses proves it
(`ownership`). Gradients that reach a parameter by a way that no tap covers hand it to the loop over examples. And each formula is
compared with autograd on its own operation, under random weights of the examples. What holds is remembered by place.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from dpexp.clipping.gradients.memory import give_back_freed_memory
from dpexp.clipping.survey import layouts
from dpexp.clipping.survey.formula_check import Formulas
from dpexp.clipping.survey.observed import Observed, apart, views
from dpexp.clipping.survey.ownership import MIXED, Ownership
from dpexp.clipping.survey.waiting import Waiting
from dpexp.clipping.tapping.forwards import NATIVE, SHARED
from dpexp.clipping.tapping.taps import Visit
from dpexp.clipping.tapping.uses import Use
from dpexp.errors import LateError, UserError


class Survey:
    """What is known of a model's uses of its parameters.

    Attributes:
        roles: what was decided of each operation on a followed value; see `following`.
        ownership: whose the rows of each use are.
        formulas: those that are proven.
        waiting: layouts that the pass that forms sums settles.
        looped: parameters that need the loop over examples.
        settled: whether every use of the last forward pass is known.
        settled_alone: the same of batches of one example, whose rows are all its own: nothing is to be proven of them.
        operations: by parameter, those seen; an ordered set.
    """

    def __init__(self) -> None:
        self.roles: dict[str, str] = {}
        self.ownership, self.formulas = Ownership(), Formulas()
        self.waiting = Waiting(self.ownership, self.formulas)
        self.looped: set[str] = set()
        self.settled = self.settled_alone = False
        self.operations: dict[str, dict[str, None]] = {}
        # of the looped, those that this backward pass has found; and those that need the loop for this batch alone
        self._new: set[str] = set()
        self._today: set[str] = set()
        self._backwards = 0
        # whether this backward pass left something to the next one; and whether any has met rows that the model picked
        self._undecided = self._picks = False
        # sequences of uses whose layouts are proven, see `_sequence`
        self._sequences: set[int] = set()
        self._new_sequence = True

    # -- what outlives a process --------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return all that decides how the next backward pass computes, as JSON."""
        return self.ownership.state() | {
            "roles": dict(self.roles),
            "looped": sorted(self.looped),
            "settled": self.settled,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over what another process has found."""
        self.ownership.load_state(state)
        self.roles.update(state.get("roles", {}))
        self.looped |= set(state.get("looped", ()))
        self.settled = bool(state.get("settled", self.settled))

    # -- one backward pass --------------------------------------------------------------------------------------------

    def curious(self, visit: Visit) -> bool:
        """Tell whether anything is to be proven of the graph behind ``visit``, or looped over: more than one visit of it."""
        again = layouts.due_for_rows(self._backwards + 1) or _sequence(visit) not in self._sequences
        return bool(
            not self.knows(visit.num_examples)
            or self.looped
            or again
            or self.ownership.pending(visit, again)[0]
            or self._unproven(visit)
        )

    def look(self, visit: Visit, params: dict[str, nn.Parameter]) -> None:
        """Prove what is not proven yet of the graph behind ``visit``.

        Raises:
            UserError: examples influence each other's gradients.
        """
        self.ownership.begin()
        known = set(self.looped)
        native = {key for owner in visit.passes for key, role in owner.roles.items() if role == NATIVE}
        # from the next forward on, ordinary autograd carries these: it is to be looked at as closely as this one
        self._undecided = any(self.roles.get(key) != NATIVE for key in native)
        self.roles.update(dict.fromkeys(native, NATIVE))
        self._backwards += 1
        sequence = _sequence(visit)
        self._new_sequence = sequence not in self._sequences
        pending, doubted = self.ownership.pending(
            visit, layouts.due_for_rows(self._backwards) or self._new_sequence
        )
        known_uses, layout = self.knows(visit.num_examples), self.ownership.layout
        waits = not self.looped and self.waiting.begin(visit, pending, doubted)
        if not waits and (pending or not known_uses):
            self._observe(visit, params, pending, doubted)
        # whoever has picked rows may do it again, and is watched for good; behind the last use, too
        self._picks |= any(use.is_routed(visit.rows) for use in visit.uses)
        self._undecided |= self._picks or any(
            isinstance(found, layouts.Owned) or found == layouts.NOBODY for found in layout.values()
        )
        # what met others may be of these rows now, or with the next batch
        self._undecided |= any(not owner.picked.isdisjoint((0, visit.rows)) for owner in visit.passes)
        loops = [use for use in visit.uses if layout[id(use)] == layouts.LOOP]
        lasting = self.looped.union(*(use.names for use in loops if use.place in self.ownership.layouts))
        self.looped = lasting.union(*(use.names for use in loops))
        self._today = self.looped - lasting
        if unproven := self._unproven(visit):
            for use in self.formulas.check(visit, unproven, layout):
                self.ownership.leave_to_loop(use)
                self.looped.update(use.names)
        if self.looped:
            _check_returned(visit)
        self._new = self.looped - known
        if not known_uses:
            for use in visit.uses:
                for name in use.names:
                    self.operations.setdefault(name, {})[use.label] = None
        if visit.passes and not self._undecided:
            self.settled_alone |= visit.num_examples == 1
            self.settled |= visit.num_examples > 1
        unwatched = any(use.from_batch is None for use in visit.uses)
        if self._new_sequence and visit.num_examples > 1 and unwatched:
            # nobody watched whether rows were picked on this way: the next forward is, and it is proven until it was
            self.settled = False
        elif not self._undecided:
            self._sequences.add(sequence)
        if visit.num_examples > 1 or self.settled or self.settled_alone:
            for owner in visit.passes:
                self.roles.update(owner.roles)

    def knows(self, num_examples: int) -> bool:
        """Tell whether every use in a forward of so many examples is known."""
        return self.settled or (num_examples == 1 and self.settled_alone)

    def unsettle(self) -> None:
        """Look at the next forward as closely as at the first one."""
        self.settled = self.settled_alone = False

    def finish(self, visit: Visit) -> None:
        """End a backward pass."""
        # whether the batch was another input than the forward had assumed
        moved = visit.finish()
        self.waiting.end()
        self.looped -= self._today
        self._today = set()
        for use in self.ownership.shared:
            # the next forward derives it, and needs no loop
            self.roles[use.place[0]] = SHARED
            visit.recorder.templates.pop(use.place[0], None)
            self.ownership.layouts.pop(use.place, None)
            self.looped -= self._new.intersection(use.names)
            self.unsettle()
        if moved:
            # the next forward takes another way: look at it as closely as at the first one
            self.looped -= self._new
            self.roles.clear()
            self.ownership.forget()
            visit.recorder.templates.clear()
            self.unsettle()

    def _unproven(self, visit: Visit) -> set[int]:
        """Uses at which per-example gradients are formed by a formula that is to be compared with autograd."""
        layout = self.ownership.layout
        found = {
            id(use)
            for use in visit.uses
            if layout[id(use)] not in (layouts.LOOP, layouts.NOBODY)
            and not self.formulas.known(use, layout[id(use)], visit.num_examples)
            and not self.looped.issuperset(use.names)
            and use.output_shape[:1] != (0,)
        }
        return found & visit.reached if found else found

    def _observe(
        self, visit: Visit, params: dict[str, nn.Parameter], pending: dict[int, list[str]], doubted: set[int]
    ) -> None:
        """Back-propagate plainly and with weights, and settle what is pending.

        These visits form no sums, so they are the place to find parameters that are used where no tap sees it: the visit that
        forms sums can then free the graph as it goes, and the first step needs no more memory than the others.
        """
        ownership = self.ownership
        # what is left to the loop is seen, too: where each such use saw one example, another one may have as many rows by chance
        loops: dict[int, list[str]] = {
            id(use): [] for use in visit.uses if pending and ownership.layout.get(id(use)) == layouts.LOOP
        }
        unordered = {
            id(use)
            for use in visit.uses
            if id(use) in pending.keys() - doubted
            and ownership.may_be_untold(use, pending[id(use)], visit.rows)
        }
        observed = Observed(visit, loops | pending, unordered, bool(doubted))
        self.looped |= observed.back_propagate(params)
        if not pending:
            return
        if (leaf := observed.mixed_input()) is not None:
            raise UserError(f"the input {list(leaf.shape)} of this stage: {MIXED}")
        for use in visit.uses:
            if id(use) in pending and (id(use) not in doubted or self._refuted(use, observed)):
                self._settle(use, observed)

    def _settle(self, use: Use, observed: Observed) -> None:
        try:
            self._undecided |= not self.ownership.settle(use, observed, self.looped, self.settled)
        except LateError:
            # the next forward is watched
            self.settled = False
            raise

    def _refuted(self, use: Use, observed: Observed) -> bool:
        """Whether a layout that was proven before does not hold any more.

        Raises:
            UserError: in a model that took the same way as before.
        """
        # of this use: another one of its place may have been left to the loop just now
        holds = self.ownership.holds(use, observed)
        self._undecided |= holds is None
        if holds is not False:
            return False
        if not self._new_sequence:
            # who goes on is looked at again
            self.ownership.layouts.pop(use.place, None)
            self.unsettle()
            raise UserError(f"{use.owner} ({use.label}), other than in earlier steps: {MIXED}")
        # the model took another way than before, and this is another use than the place had so far
        return True


def _check_returned(visit: Visit) -> None:
    """Prove that each row of what the model returned follows the loss of one example.

    It is asked where parameters are left to the loop, of which no tap may see whose gradient is on its way to them.

    Raises:
        UserError: a loss goes by other examples.
    """
    edges, seen = list(visit.returned.values()), []
    for weights in (None, layouts.weights(visit.num_examples)) if edges else ():
        found = visit.back_propagate(lambda *_: None, retain=True, weights=weights, params=edges)
        seen.append([(views(g), g.dtype) for g in found if g is not None])
        del found
        give_back_freed_memory()
    for plain, weighted in zip(*seen, strict=True):
        if not apart([plain[0], weighted[0]], plain[1]):
            raise UserError(f"what the model returns: {MIXED}")


def _sequence(visit: Visit) -> int:
    """What tells two ways through a model apart: its uses in order, which dimensions have as many rows as the batch, and what
    else autograd has seen: rows may be put in order where they are not."""
    rows = visit.rows
    return hash(
        (rows == visit.rows // max(1, visit.num_examples), visit.way)
        + tuple(
            [
                (use.place, len(use.output_shape), use.output_shape[0] == rows, rows in use.output_shape[1:2])
                for use in visit.uses
            ]
        )
    )
