"""The survey of a model's graph: what is proven before anything is summed.

Shapes suggest which rows of an operation belong to which example; a second back-propagation with weighted losses proves it
(`layouts`). Gradients that reach a parameter by a way that no tap covers hand it to the loop over examples. And each formula is
compared with autograd on its own operation, under random weights of the examples. What holds is remembered by place.
"""

from __future__ import annotations

import ast
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

from dpexp.clipping.gradients.memory import give_back_freed_memory
from dpexp.clipping.survey import layouts
from dpexp.clipping.survey.formula_check import formula_is_right
from dpexp.clipping.survey.observed import FRONT, Observed, apart, views
from dpexp.clipping.tapping.taps import Visit
from dpexp.clipping.tapping.uses import NATIVE, SHARED, ForwardPass, Use
from dpexp.errors import LateError, UserError

MIXED = (
    "the gradient at this layer's output mixes examples: they influence each other's losses (a batch statistic, a loss "
    "normalised over the batch, attention across the batch), which voids any guarantee. Make each loss depend on its own "
    "example alone; where rows enter the model in another order than the losses have, give the losses in the model's order. (A "
    "backward or a hook that clamps or normalises gradients cannot be told from that: leave it out. Nor can a dimension in front "
    "that has as many entries as the batch by chance, heads or frames: take physical batches of another size)"
)

# batches in which some examples tell nothing, after which the others are believed
PATIENCE = 16
# what the rows in front tell of
TOLD = (FRONT, *layouts.IN_ORDER)

LATE = "was used in a way that earlier steps did not show. It is known now: run this step again, or use engine='loop'"


class Survey:
    """What is known of a model's uses of its parameters.

    Attributes:
        roles: what was decided of each operation on a followed value; see `following`.
        layouts: place of a use -> which rows belong to which example.
        looped: parameters that need the loop over examples.
        settled: whether every use of the last forward pass is known.
        settled_alone: the same of batches of one example, whose rows are all its own: nothing is to be proven of them.
        waits: whether the pass that forms sums may be the plain one of the proof of rows that the model picks, as long as they
            tell whose they are: who sets it begins a step again on a `LateError`.
        layout: id of a use of this backward pass -> its layout.
    """

    def __init__(self) -> None:
        self.roles: dict[str, str] = {}
        self.layouts: dict[tuple[str, int], str] = {}
        self.looped: set[str] = set()
        # of the looped, those that this backward pass has found; and those that need the loop for this batch alone
        self._new: set[str] = set()
        self._today: set[str] = set()
        self.settled = self.settled_alone = self.waits = False
        self.backwards = 0
        self.layout: dict[int, layouts.Layout] = {}
        # by parameter, those seen; an ordered set
        self.operations: dict[str, dict[str, None]] = {}
        # by place, for which `layouts.surplus` blocks are proven
        self._surplus: dict[tuple[str, int], set[int | None]] = {}
        # by place, in how many batches some examples told nothing
        self._glimpses: dict[tuple[str, int], int] = {}
        # uses that turned out to be functions of parameters
        self._shared: list[Use] = []
        self._undecided = self._picks = False
        # places whose rows entered end to end, as many as each example has: no shape tells whose they are
        self.end_to_end: set[tuple[str, int]] = set()
        # places whose rows lie in any order -> how they lay last; and what waits for the pass that forms sums
        self._picked: dict[tuple[str, int], str] = {}
        self._awaited: Observed | None = None
        self._new_sequence = True
        # sequences of uses whose layouts are proven, see `_sequence`; and uses whose formula agreed with autograd
        self._sequences: set[int] = set()
        self._right: set[Hashable] = set()

    # -- what outlives a process --------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return all that decides how the next backward pass computes, as JSON."""
        return {
            "roles": dict(self.roles),
            "layouts": {repr(place): layout for place, layout in self.layouts.items()},
            "looped": sorted(self.looped),
            "end_to_end": sorted(map(repr, self.end_to_end)),
            "settled": self.settled,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over what another process has found."""
        self.roles.update(state.get("roles", {}))
        self.layouts |= {
            ast.literal_eval(place): layout for place, layout in state.get("layouts", {}).items()
        }
        self.looped |= set(state.get("looped", ()))
        self.end_to_end |= {ast.literal_eval(place) for place in state.get("end_to_end", ())}
        self.settled = bool(state.get("settled", self.settled))

    # -- one backward pass --------------------------------------------------------------------------------------------

    def curious(self, visit: Visit) -> bool:
        """Tell whether anything is to be proven of the graph behind ``visit``, or looped over: more than one visit of it."""
        again = _due(self.backwards + 1) or _sequence(visit) not in self._sequences
        return bool(
            not self.knows(visit.num_examples)
            or self.looped
            or again
            or self._pending(visit, again)[0]
            or self._unproven(visit)
        )

    def look(self, visit: Visit, params: dict[str, nn.Parameter]) -> None:
        """Prove what is not proven yet of the graph behind ``visit``.

        Raises:
            UserError: examples influence each other's gradients.
        """
        self.layout, self._shared = {}, []
        known = set(self.looped)
        native = {key for owner in visit.passes for key, role in owner.roles.items() if role == NATIVE}
        # from the next forward on, ordinary autograd carries these: it is to be looked at as closely as this one
        self._undecided = any(self.roles.get(key) != NATIVE for key in native)
        self.roles.update(dict.fromkeys(native, NATIVE))
        self.backwards += 1
        sequence = _sequence(visit)
        self._new_sequence = sequence not in self._sequences
        pending, doubted = self._pending(visit, _due(self.backwards) or self._new_sequence)
        known_uses = self.knows(visit.num_examples)
        waits = self._may_wait(visit, pending, doubted) and self._wait(visit, pending, doubted)
        if not waits and (pending or not known_uses):
            self._observe(visit, params, pending, doubted)
        # whoever has picked rows may do it again, and is watched for good; behind the last use, too
        self._picks |= any(use.is_routed(visit.rows) for use in visit.uses)
        self._undecided |= self._picks or any(
            isinstance(known, layouts.Owned) for known in self.layout.values()
        )
        # what met others may be of these rows now, or with the next batch
        self._undecided |= any(not owner.picked.isdisjoint((0, visit.rows)) for owner in visit.passes)
        loops = [use for use in visit.uses if self.layout[id(use)] == layouts.LOOP]
        lasting = self.looped.union(*(use.names for use in loops if use.place in self.layouts))
        self.looped = lasting.union(*(use.names for use in loops))
        self._today = self.looped - lasting
        unproven = self._unproven(visit)
        if unproven:
            self._check_formulas(visit, unproven)
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
        if (
            self._new_sequence
            and visit.num_examples > 1
            and any(use.from_batch is None for use in visit.uses)
        ):
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
        self.looped -= self._today
        self._today, self._awaited = set(), None
        for use in self._shared:
            # the next forward derives it, and needs no loop
            self.roles[use.place[0]] = SHARED
            visit.recorder.templates.pop(use.place[0], None)
            self.layouts.pop(use.place, None)
            self.looped -= self._new.intersection(use.names)
            self.unsettle()
        if moved:
            # the next forward takes another way: look at it as closely as at the first one
            self.looped -= self._new
            self.roles.clear()
            self.layouts.clear()
            self._surplus.clear()
            visit.recorder.templates.clear()
            self.unsettle()

    def _may_wait(self, visit: Visit, pending: dict[int, list[str]], doubted: set[int]) -> bool:
        """Whether nothing new is to be proven but whose the rows are that the model has picked, as in earlier steps."""
        uses = [use for use in visit.uses if id(use) in pending and id(use) not in doubted]
        return bool(
            uses
            and self.waits
            # what meets other ranks cannot begin again; and in float16 gradients overflow, which tell nothing
            and not (self.looped or visit.roots.inputs or visit.recorder.shards)
            and not (torch.distributed.is_available() and torch.distributed.is_initialized())
            and not any(use.in_float16 for use in visit.uses)
            and all(self._in_any_order(use, visit.rows) and _kind(use) in self._right for use in uses)
            and all(self._picked.get(use.place) in TOLD for use in uses)
            and bool(visit.roots.finite().all())
        )

    def _wait(self, visit: Visit, pending: dict[int, list[str]], doubted: set[int]) -> bool:
        """Back-propagate with weights alone: the pass that forms sums is the plain one, and `tell` compares.

        Returns:
            False where losses may have been picked: only a plain pass tells, and it comes first then.
        """
        looked_at: dict[int, list[str]] = {}
        for use in visit.uses:
            if (here := id(use)) in doubted:
                looked_at[here] = [str(self.layout[here])]
            elif here in pending:
                looked_at[here] = [FRONT]
                before = self._picked[use.place]
                self.layout[here] = before if before in pending[here] else FRONT
        awaited = Observed(visit, looked_at, pending.keys() - doubted)
        if not awaited.weigh():
            return False
        self._awaited = awaited
        return True

    def tell(self, use: Use, gy: Tensor) -> None:
        """Settle the layout of a use that waits for the gradient without weights, which is here.

        Raises:
            LateError: a row does not tell whose it is.
        """
        if self._awaited is None or id(use) not in self._awaited.pending:
            return
        found = self._awaited.told(use, gy, str(self.layout[id(use)]))
        if found is None:
            self.waits = False
            raise LateError(f"{use.owner} ({use.label}) {LATE}")
        self.layout[id(use)] = found
        del self._awaited.pending[id(use)]

    def _in_any_order(self, use: Use, rows: int) -> bool:
        """Whether what is proven of the rows of a use, in a batch of so many, holds for this batch alone."""
        return use.place in self.end_to_end or use.is_routed(rows)

    def _may_be_untold(self, use: Use, found: list[str], rows: int) -> bool:
        """Whether shapes may not tell whose the rows of a use are: examples may have other numbers of them each."""
        # fewer rows than examples are those of a part of the batch, one after the other in a loop of the model
        several = use.from_batch is not False and use.output_shape[:1] >= (rows,)
        return self._in_any_order(use, rows) or (layouts.ROWS not in found and several)

    def _clips(self, use: Use) -> bool:
        """Whether per-example gradients are formed at this use."""
        return self.layout[id(use)] != layouts.LOOP and not self.looped.issuperset(use.names)

    def _pending(self, visit: Visit, again: bool) -> tuple[dict[int, list[str]], set[int]]:
        """Uses whose layout is to be proven, with the layouts that their shapes allow; and those proven before."""
        pending: dict[int, list[str]] = {}
        doubted: set[int] = set()
        # of each operation, how the rows lie in its uses: where shapes allow several of these, the order of the uses may change
        ways: dict[str, set[str]] = {}
        for (key, _), layout in self.layouts.items():
            ways.setdefault(key, set()).add(layout)
        for use in visit.uses:
            found = layouts.candidates(use.input_shape, use.output_shape, visit.rows)
            known = self.layouts.get(use.place)
            shape = use.output_shape if use.input_shape is None else use.input_shape
            if visit.rows and shape[:1] == use.output_shape[:1] == (0,):
                # an expert without a row: there is nothing to prove, or to learn
                self.layout[id(use)] = layouts.Owned.of_nobody(0, visit.num_examples, visit.roots.device)
            elif visit.num_examples == 1:
                # one dimension in and out may be the features of a single, squeezed example
                told = len(shape) >= 2 or use.input_shape != use.output_shape
                whole = told and shape[0] == use.output_shape[0] and shape[0] > 0
                self.layout[id(use)] = layouts.BLOCKED if whole and known != layouts.LOOP else layouts.LOOP
            elif id(use) in visit.loose and known not in found:
                pending[id(use)] = found
            elif known == layouts.LOOP:
                self.layout[id(use)] = layouts.LOOP
            elif self._in_any_order(use, visit.rows):
                pending[id(use)] = found
            elif known in found:
                self.layout[id(use)] = known
                surplus = layouts.surplus(known, use.output_shape, visit.rows, visit.columns)
                several = len(ways[use.place[0]].intersection(found)) > 1
                if several or surplus not in self._surplus.get(use.place, (None,)):
                    pending[id(use)] = found
                elif again:
                    pending[id(use)] = found
                    doubted.add(id(use))
            else:
                pending[id(use)] = found
        for identity in pending.keys() - doubted - visit.reached if pending.keys() - doubted else ():
            # a head whose output nobody took: there is nothing to prove
            found = pending.pop(identity)
            self.layout[identity] = found[0] if found else layouts.UNSEEN
        return pending, doubted

    def _unproven(self, visit: Visit) -> set[int]:
        """Uses whose formula is to be compared with autograd."""
        found = {
            id(use)
            for use in visit.uses
            if _kind(use) not in self._right and self._clips(use) and use.output_shape[:1] != (0,)
        }
        return found & visit.reached if found else found

    def _observe(
        self, visit: Visit, params: dict[str, nn.Parameter], pending: dict[int, list[str]], doubted: set[int]
    ) -> None:
        """Back-propagate plainly and with weights, and settle what is pending.

        These visits form no sums, so they are the place to find parameters that are used where no tap sees it: the visit that
        forms sums can then free the graph as it goes, and the first step needs no more memory than the others.
        """
        # what is left to the loop is seen, too: where each such use saw one example, another one may have as many rows by chance
        loops: dict[int, list[str]] = {
            id(use): [] for use in visit.uses if pending and self.layout.get(id(use)) == layouts.LOOP
        }
        unordered = {
            id(use)
            for use in visit.uses
            if id(use) in pending.keys() - doubted and self._may_be_untold(use, pending[id(use)], visit.rows)
        }
        observed = Observed(visit, loops | pending, unordered)
        self.looped |= observed.back_propagate(params)
        if not pending:
            return
        if (leaf := observed.mixed_input()) is not None:
            raise UserError(f"the input {list(leaf.shape)} of this stage: {MIXED}")
        for use in visit.uses:
            if id(use) in pending:
                (self._doubt if id(use) in doubted else self._settle)(use, observed)

    def _settle(self, use: Use, observed: Observed) -> None:
        found, visit, rows = observed.pending[id(use)], observed.visit, observed.visit.rows
        self.layout[id(use)] = found[0] if found else layouts.UNSEEN
        unordered = self._in_any_order(use, rows)
        if not observed.arrived(use):
            # its output was not used, or the forward was another one that still waits: it never arrives
            return
        verdicts = {layout: observed.proven(use, layout) for layout in found}
        refuted = all(verdict is False for verdict in verdicts.values())
        untold = refuted and self._may_be_untold(use, found, rows)
        if id(use) in visit.loose or untold or not found:
            self._refuse_mixed(use, observed)
        owned = observed.owned(use) if untold and (unordered or not observed.one_each(use)) else None
        if owned or (untold and unordered):
            # this holds for this batch alone, and where rows do not tell, so does the loop
            self.layout[id(use)] = owned or layouts.LOOP
            if owned:
                self._picked[use.place] = FRONT
                if not use.is_routed(rows):
                    self.end_to_end.add(use.place)
            return
        if not found:
            # remembered: another batch size may make the leading dimension look like the batch
            self.layouts[use.place] = self.layout[id(use)] = layouts.LOOP
            return
        if all(verdict is None for verdict in verdicts.values()):
            self._undecided = True
            # all gradients are zero: contribute nothing now, prove it next time
            if found[0] == layouts.SECOND and observed.silent(use):
                # these may be features, as many as there are examples
                self.layout[id(use)] = layouts.Owned.of_nobody(
                    use.output_shape[0], visit.num_examples, visit.roots.device
                )
            return
        proven = [layout for layout, verdict in verdicts.items() if verdict]
        if proven:
            layout = proven[0]
            # right today; decide when a batch tells them apart, or never
            passing = id(use) in visit.ragged | visit.loose and layout in layouts.BLOCKS
            partly = not observed.tells_of_all(use, layout) and self._glimpsed(use)
            if unordered:
                self._picked[use.place] = layout
            if len(proven) > 1 or unordered or passing or partly:
                self.layout[id(use)], self._undecided = layout, True
                return
        elif observed.one_each(use):
            layout = layouts.LOOP
        elif use.input_shape is None and self.looped.issuperset(use.names):
            # no operation on the batch; its first dimension happens to have as many rows
            layout = layouts.LOOP
        elif use.from_batch is None and layouts.ROWS in found and self.settled:
            # look closely again: a table that all examples share, or a coupling?
            self.settled = False
            raise LateError(f"{use.owner} ({use.label}) {LATE}")
        elif use.from_batch is not False and layouts.ROWS in found:
            raise UserError(f"{use.owner} ({use.label}): {MIXED}")
        else:
            layout = layouts.LOOP
        if layout == layouts.LOOP:
            self._refuse_mixed(use, observed)
        self.layout[id(use)] = layout
        if layout == layouts.LOOP and use.from_batch is False:
            # a function of parameters, whose shape looked like the batch
            self._shared.append(use)
        if self.layouts.get(use.place) in found and self.layouts[use.place] != layout:
            # two forward passes that wait for this backward pass differ here
            layout = layouts.LOOP
        self.layouts[use.place] = layout
        surplus = layouts.surplus(layout, use.output_shape, rows, visit.columns)
        self._surplus.setdefault(use.place, {None}).add(surplus)

    def _glimpsed(self, use: Use) -> bool:
        """Whether to wait for a batch in which more examples tell, as some never do."""
        self._glimpses[use.place] = self._glimpses.get(use.place, 0) + 1
        return self._glimpses[use.place] < PATIENCE

    def _refuse_mixed(self, use: Use, observed: Observed) -> None:
        """Raise `UserError` where rows whose examples no shape tells are not one example's each.

        The loop would find what each loss adds. It cannot see that a loss, and so what it adds, goes by other examples.
        """
        own = observed.visit.of_examples
        if id(use) in own and use.from_batch is not False and not observed.apart(use):
            raise UserError(f"{use.owner} ({use.label}): {MIXED}")

    def _doubt(self, use: Use, observed: Observed) -> None:
        """Look at a proven layout again."""
        # of this use: another one of its place may have been left to the loop just now
        if observed.arrived(use) and observed.refuted(use, self.layout[id(use)]):
            if not self._new_sequence:
                # who goes on is looked at again
                self.layouts.pop(use.place, None)
                self.unsettle()
                raise UserError(f"{use.owner} ({use.label}), other than in earlier steps: {MIXED}")
            # the model took another way than before, and this is another use than the place had so far
            self._settle(use, observed)

    # -- formulas -----------------------------------------------------------------------------------------------------

    def _check_formulas(self, visit: Visit, unproven: set[int]) -> None:
        """Compare each formula's weighted sum with what autograd says of its operation; a wrong one is left to the loop."""
        weights = layouts.weights(visit.num_examples).to(visit.roots.device)

        def check(owner: ForwardPass, use: Use, saved: tuple[Tensor, ...], gy: Tensor) -> None:
            if id(use) not in unproven:
                return
            layout = self.layout[id(use)]
            if isinstance(layout, layouts.Owned) and not bool(gy.any()):
                # nobody's rows: what is summed of them now is nothing, and the formula stays unproven
                return
            if layout != layouts.UNSEEN and formula_is_right(use, saved, gy, layout, visit.rows, weights):
                self._right.add(_kind(use))
            else:
                self.layouts[use.place] = self.layout[id(use)] = layouts.LOOP
                self.looped.update(use.names)

        visit.back_propagate(check, retain=True)
        give_back_freed_memory()


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


def _due(number: int) -> bool:
    """Tell whether the backward pass of this number proves again what was proven: the rows of the first batch may have been in
    order by chance, and put in order by something that nobody watches."""
    return number == 2 or layouts.due(number)


def _sequence(visit: Visit) -> int:
    """What tells two ways through a model apart: its uses in order, which dimensions have as many rows as the batch, and how many
    nodes autograd made: rows may be put in order where they are not."""
    rows = visit.rows
    return hash(
        (rows == visit.rows // max(1, visit.num_examples), *[owner.nodes for owner in visit.passes])
        + tuple(
            [
                (use.place, len(use.output_shape), use.output_shape[0] == rows, rows in use.output_shape[1:2])
                for use in visit.uses
            ]
        )
    )


def _kind(use: Use) -> Hashable:
    """What the verdict on a formula holds for: a place, and where the operation is any function, its shapes."""
    if use.formula.label is not None:
        return use.place, None if use.input_shape is None else len(use.input_shape)
    return use.place, use.output_shape, use.batched
