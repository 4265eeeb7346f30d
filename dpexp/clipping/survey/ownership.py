"""Whose the rows of each use are: shapes propose it, weighted losses (`observed`) settle it, and places remember it."""

from __future__ import annotations

import ast
from typing import Any

from dpexp.clipping.survey import layouts
from dpexp.clipping.survey.observed import FRONT, Observed
from dpexp.clipping.tapping.taps import Visit
from dpexp.clipping.tapping.uses import Use
from dpexp.errors import LateError, UserError

MIXED = (
    "the gradient at this layer's output mixes examples: they influence each other's losses (a batch statistic, as of a batch "
    "norm that model.train() has put into training mode again, a loss normalised over the batch, attention across the batch), "
    "which voids any guarantee. Make each loss depend on its own example alone; where rows enter the model in another order than "
    "the losses have, give the losses in the model's order. (A backward or a hook that clamps or normalises gradients cannot be "
    "told from that: leave it out. Nor can a dimension in front that has as many entries as the batch by chance, heads or "
    "frames: take physical batches of another size)"
)
LATE = "was used in a way that earlier steps did not show. It is known now: run this step again, or use engine='loop'"

# batches in which some examples tell nothing, after which the others are believed
PATIENCE = 16


class Ownership:
    """What is known of whose the rows of each use are.

    Attributes:
        layout: id of a use of this backward pass -> its layout.
        layouts: place of a use -> which rows belong to which example.
        end_to_end: places whose rows entered end to end, as many as each example has: no shape tells whose they are.
        picked: places whose rows lie in any order -> how they lay last.
        shared: uses of this backward pass that turned out to be functions of parameters.
    """

    def __init__(self) -> None:
        self.layout: dict[int, layouts.Layout] = {}
        self.layouts: dict[tuple[str, int], str] = {}
        self.end_to_end: set[tuple[str, int]] = set()
        self.picked: dict[tuple[str, int], str] = {}
        self.shared: list[Use] = []
        # of each operation, how rows have lain in its uses
        self._ways: dict[str, set[str]] = {}
        # by place, for which `layouts.surplus` blocks are proven
        self._surplus: dict[tuple[str, int], set[int | None]] = {}
        # by place, in how many batches some examples told nothing
        self._glimpses: dict[tuple[str, int], int] = {}

    def state(self) -> dict[str, Any]:
        """Return what outlives a process, as JSON."""
        return {
            "layouts": {repr(place): layout for place, layout in self.layouts.items()},
            "ways": {key: sorted(ways) for key, ways in self._ways.items()},
            "end_to_end": sorted(map(repr, self.end_to_end)),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over what another process has found."""
        self.layouts |= {
            ast.literal_eval(place): layout for place, layout in state.get("layouts", {}).items()
        }
        for key, ways in state.get("ways", {}).items():
            self._ways.setdefault(key, set()).update(ways)
        self.end_to_end |= {ast.literal_eval(place) for place in state.get("end_to_end", ())}

    def begin(self) -> None:
        """Begin a backward pass."""
        self.layout, self.shared = {}, []

    def forget(self) -> None:
        """Forget what is proven: the next forward takes another way."""
        self.layouts.clear()
        self._ways.clear()
        self._surplus.clear()

    def leave_to_loop(self, use: Use) -> None:
        """Find the gradient of each example at a use by a back-propagation of its own, now and later."""
        self.layouts[use.place] = self.layout[id(use)] = layouts.LOOP

    def pending(self, visit: Visit, again: bool) -> tuple[dict[int, list[str]], set[int]]:
        """Find the uses whose layout is to be proven; that of the others is known then.

        Args:
            visit: of this backward pass.
            again: prove also what was proven before.

        Returns:
            By id, the layouts that the shapes of each allow; and those of them whose layout was proven before.
        """
        pending: dict[int, list[str]] = {}
        doubted: set[int] = set()
        for use in visit.uses:
            found = layouts.candidates(use.input_shape, use.output_shape, visit.rows)
            known = self.layouts.get(use.place)
            shape = use.output_shape if use.input_shape is None else use.input_shape
            if visit.rows and shape[:1] == use.output_shape[:1] == (0,):
                # an expert without a row: there is nothing to prove, or to learn
                self.layout[id(use)] = layouts.NOBODY
            elif visit.num_examples == 1:
                # one dimension in and out may be the features of a single, squeezed example
                told = len(shape) >= 2 or use.input_shape != use.output_shape
                whole = told and shape[:1] == use.output_shape[:1] and 0 not in shape[:1]
                self.layout[id(use)] = layouts.BLOCKED if whole and known != layouts.LOOP else layouts.LOOP
            elif id(use) in visit.loose and known not in found:
                pending[id(use)] = found
            elif known == layouts.LOOP:
                self.layout[id(use)] = layouts.LOOP
            elif known not in found or self.in_any_order(use, visit.rows):
                pending[id(use)] = found
            else:
                self.layout[id(use)] = known
                surplus = layouts.surplus(known, use.output_shape, visit.rows, visit.columns)
                # where shapes allow several of the ways that were seen, it may be any of them
                several = len(self._ways.get(use.place[0], set()).intersection(found)) > 1
                if several or surplus not in self._surplus.get(use.place, (None,)):
                    pending[id(use)] = found
                elif again:
                    pending[id(use)] = found
                    doubted.add(id(use))
        for identity in pending.keys() - doubted - visit.reached if pending.keys() - doubted else ():
            # a head whose output nobody took: there is nothing to prove
            found = pending.pop(identity)
            self.layout[identity] = found[0] if found else layouts.UNSEEN
        return pending, doubted

    def in_any_order(self, use: Use, rows: int) -> bool:
        """Whether what is proven of the rows of a use, in a batch of so many, holds for this batch alone."""
        return use.place in self.end_to_end or use.is_routed(rows)

    def may_be_untold(self, use: Use, found: list[str], rows: int) -> bool:
        """Whether shapes may not tell whose the rows of a use are: examples may have other numbers of them each."""
        # fewer rows than examples are those of a part of the batch, one after the other in a loop of the model
        several = use.from_batch is not False and use.output_shape[:1] >= (rows,)
        return self.in_any_order(use, rows) or (layouts.ROWS not in found and several)

    def settle(self, use: Use, observed: Observed, looped: set[str], settled: bool) -> bool:
        """Settle the layout of a use that is pending.

        Args:
            use: whose output gradient may have arrived.
            observed: what has arrived, plainly and with weights.
            looped: parameters that are left to the loop.
            settled: whether every use of the forward was known, so that nobody watched what it was computed from.

        Returns:
            Whether that is decided; else a later batch decides it.

        Raises:
            LateError: what was not watched has to be.
            UserError: examples influence each other's gradients.
        """
        found, visit, rows = observed.pending[id(use)], observed.visit, observed.visit.rows
        self.layout[id(use)] = found[0] if found else layouts.UNSEEN
        if not observed.arrived(use):
            # a backward on the way returns none: it never arrives
            return True
        unordered = self.in_any_order(use, rows)
        verdicts = {layout: observed.proven(use, layout) for layout in found}
        if not verdicts.get(layouts.SECOND_BLOCKED, True) and verdicts != {layouts.SECOND_BLOCKED: None}:
            # nearly any number of positions may be one of these: what is not proven says nothing of the others
            del verdicts[layouts.SECOND_BLOCKED]
            found = list(verdicts)
        refuted = all(verdict is False for verdict in verdicts.values())
        untold = refuted and self.may_be_untold(use, found, rows)
        if id(use) in visit.loose or untold or not found:
            _refuse_mixed(use, observed)
        owned = observed.owned(use) if untold and (unordered or not observed.one_each(use)) else None
        if owned or (untold and unordered):
            # this holds for this batch alone, and where rows do not tell, so does the loop
            self.layout[id(use)] = owned or layouts.LOOP
            if owned:
                self.picked[use.place] = FRONT
                if not use.is_routed(rows):
                    self.end_to_end.add(use.place)
            return True
        if not found:
            # remembered: another batch size may make the leading dimension look like the batch
            self.leave_to_loop(use)
            return True
        if all(verdict is None for verdict in verdicts.values()):
            # all gradients are zero: contribute nothing now, prove it next time
            if found[0] in layouts.TURNED and observed.silent(use):
                # these may be features, as many as there are examples
                self.layout[id(use)] = layouts.NOBODY
            return False
        proven = [layout for layout, verdict in verdicts.items() if verdict]
        if not proven:
            # each saw one example; or no operation on the batch, whose first dimension happens to have as many rows
            alone = observed.one_each(use) or (use.input_shape is None and looped.issuperset(use.names))
            if not alone and layouts.ROWS in found and use.from_batch is not False:
                if use.from_batch is None and settled:
                    # to be looked at closely: a table that all examples share, or a coupling?
                    raise LateError(f"{use.owner} ({use.label}) {LATE}")
                raise UserError(f"{use.owner} ({use.label}): {MIXED}")
            _refuse_mixed(use, observed)
            if use.from_batch is False:
                # a function of parameters, whose shape looked like the batch
                self.shared.append(use)
            self._remember(use, layouts.LOOP, observed)
            return True
        layout = proven[0]
        # right today; decide when a batch tells them apart, or never
        passing = id(use) in visit.ragged | visit.loose and layout in layouts.SEVERAL
        if unordered:
            self.picked[use.place] = layout
        partly = self._partly(use, layout, observed)
        if len(proven) > 1 or unordered or passing or partly:
            self.layout[id(use)] = layout
            return False
        self._remember(use, layout, observed)
        return True

    def holds(self, use: Use, observed: Observed) -> bool | None:
        """Tell whether the layout of a use, proven before, is still the right one; None where a later batch decides that."""
        layout = self.layout[id(use)]
        # whose were picked is proven anew, and never doubted
        assert isinstance(layout, str)
        if not observed.arrived(use):
            return True
        verdict = observed.proven(use, layout)
        if verdict is False:
            # small gradients may be rounding alone, and refute nothing; but not where they follow another layout
            others = set(observed.pending[id(use)]) - {layout}
            explained = any(observed.proven(use, other) for other in others)
            return False if explained or observed.refuted(use, layout) else None
        return None if verdict is None or self._partly(use, layout, observed) else True

    def _remember(self, use: Use, layout: str, observed: Observed) -> None:
        """Let this be the layout of a use, and of those at its place in later forwards."""
        self.layout[id(use)], before = layout, self.layouts.get(use.place)
        self._ways.setdefault(use.place[0], set()).add(layout)
        if before in observed.pending[id(use)] and before != layout:
            # two forward passes that wait for this backward pass differ here
            layout = layouts.LOOP
        self.layouts[use.place] = layout
        surplus = layouts.surplus(layout, use.output_shape, observed.visit.rows, observed.visit.columns)
        self._surplus.setdefault(use.place, {None}).add(surplus)

    def _partly(self, use: Use, layout: str, observed: Observed) -> bool:
        """Whether to wait for a batch in which more examples tell; some never do."""
        if observed.tells_of_all(use, layout):
            return False
        self._glimpses[use.place] = self._glimpses.get(use.place, 0) + 1
        return self._glimpses[use.place] < PATIENCE


def _refuse_mixed(use: Use, observed: Observed) -> None:
    """Raise `UserError` where rows whose examples no shape tells are not one example's each.

    The loop would find what each loss adds. It cannot see that a loss, and so what it adds, goes by other examples.
    """
    own = observed.visit.of_examples
    if id(use) in own and use.from_batch is not False and not observed.apart(use):
        raise UserError(f"{use.owner} ({use.label}): {MIXED}")
