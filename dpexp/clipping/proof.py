"""The proof of layouts at the beginning of a backward pass: `layouts` says what is compared, this says when and what follows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dpexp.clipping import layouts
from dpexp.clipping.contributions.pages import give_back_freed_memory
from dpexp.clipping.memory import Memory
from dpexp.clipping.taps import Call, ForwardPass
from dpexp.errors import UserError

if TYPE_CHECKING:
    from dpexp.clipping.backward import BackwardPass

MIXED = (
    "the gradient at this layer's output mixes examples: they influence each other's losses (a batch statistic, a loss "
    "normalised over the batch, attention across the batch), which voids any guarantee. Make each loss depend on its own "
    "example alone"
)

LATE = "was used in a way that earlier steps did not show. It is known now: run this step again, or use engine='loop'"


class Proof:
    """Which rows of every call belong to which example, proven on the graph of one backward pass.

    Attributes:
        layout: id of a call -> its layout.
        undecided: whether something has to be proven again with the next batch.
        ways_known: whether every parameter is used where a tap sees it, as far as is known.
    """

    def __init__(self, memory: Memory):
        self.memory = memory
        self.layout: dict[int, str] = {}
        self.undecided = self.ways_known = False
        self.alone: dict[
            int, float
        ] = {}  # id of a call that saw one example -> the weight of that example's loss
        self.one_by_one = False

    def run(self, step: BackwardPass) -> None:
        """Back-propagate plainly and with random weights where the layout of some call is not proven yet.

        These passes form no sums, so they are the place to find parameters that are used where no tap sees it: the pass that
        forms them can then free the graph as it goes, and the first step needs no more memory than the others.
        """
        compiled = (
            step.graph is not None and step.graph.traced and not step.passes
        )  # its taps refuse surprises
        self.ways_known = self.memory.ways_known or compiled
        pending: dict[int, list[str]] = {}
        doubted: set[int] = set()
        again = self.memory.due()
        for owner in step.passes:
            for call in owner.calls:
                found = layouts.candidates(call.input_shape, call.output_shape, step.rows)
                known = self.memory.layouts.get(call.key)
                if step.num_examples == 1:
                    shape = call.output_shape if call.input_shape is None else call.input_shape
                    # one dimension in and out may be the features of a single, squeezed example
                    told = len(shape) >= 2 or call.input_shape != call.output_shape
                    whole = told and shape[0] == call.output_shape[0] and shape[0] > 0
                    self.layout[id(call)] = layouts.BLOCKED if whole else layouts.LOOP
                elif known == layouts.LOOP:
                    self.layout[id(call)] = layouts.LOOP
                elif call.routed:
                    pending[id(call)] = found
                elif known in found and not again:
                    self.layout[id(call)] = known
                elif known in found:
                    pending[id(call)] = [known]
                    doubted.add(id(call))
                else:
                    pending[id(call)] = found
        if not pending:
            return
        observed: list[dict[tuple[int, str], tuple[Tensor, Tensor]]] = []
        dtypes: dict[int, torch.dtype] = {}
        row_weights = layouts.weights(step.num_examples, layouts.SIGNED)
        for weights in (None, row_weights):
            seen: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}

            def look(
                owner: ForwardPass, call: Call, saved: tuple[Tensor, ...], gy: Tensor, seen: dict = seen
            ) -> None:
                if id(call) in pending:
                    dtypes[id(call)] = gy.dtype
                    for layout in pending[id(call)]:
                        seen[id(call), layout] = layouts.signature(gy, layout, step.rows)
                    if not pending[id(call)] and gy.dim():
                        seen[id(call), layouts.UNSEEN] = layouts.signature(gy, layouts.ROWS, gy.shape[0])

            step._handle = look
            params = list(step.params.values()) if not observed else []
            native = step._back_propagate(retain=True, weights=weights, params=params)
            self.memory.surprises |= {n for n, g in zip(step.params, native, strict=False) if g is not None}
            del native
            observed.append(seen)
            give_back_freed_memory()
        self.memory.looped |= self.memory.surprises
        self.ways_known = all(call.certain for owner in step.passes for call in owner.calls)
        by_row = row_weights.repeat_interleave(step.rows // step.num_examples)
        calls = {id(call): call for owner in step.passes for call in owner.calls}
        self._find_examples_alone(observed, dtypes, set(row_weights.tolist()))
        for identity, found in pending.items():
            settle = self._doubt if identity in doubted else self._settle
            settle(calls[identity], found, observed, by_row, dtypes.get(identity))

    def _find_examples_alone(
        self, observed: list, dtypes: dict[int, torch.dtype], weights: set[float]
    ) -> None:
        """Find the calls that saw one example each, in models that go through the batch in a Python loop.

        That is believed where such calls are there for every weight. A single one may as well be a batch that is mixed, and of
        which one example alone has a loss.
        """
        for (identity, layout), plain in observed[0].items():
            if (identity, layout) not in observed[1]:
                continue
            weight = layouts.single_weight(plain, observed[1][identity, layout], dtypes[identity])
            if weight is not None:
                self.alone[identity] = weight
        self.one_by_one = set(self.alone.values()) == weights

    def _settle(
        self, call: Call, found: list[str], observed: list, by_row: Tensor, dtype: torch.dtype | None
    ) -> None:
        self.layout[id(call)] = found[0] if found else layouts.UNSEEN
        if dtype is None:
            return  # its output was not used, or the forward was another one that still waits: it never arrives
        if not found:
            # remembered: another batch size may make the leading dimension look like the batch
            self.memory.layouts[call.key] = self.layout[id(call)] = layouts.LOOP
            return
        verdicts = {
            layout: layouts.proven(
                observed[0][id(call), layout], observed[1][id(call), layout], by_row, dtype
            )
            for layout in found
        }
        if all(verdict is None for verdict in verdicts.values()):
            self.undecided = True
            return  # all gradients are zero: contribute nothing now, prove it next time
        proven = [layout for layout, verdict in verdicts.items() if verdict]
        if proven:
            layout = proven[0]
            if len(proven) > 1 or call.routed:  # right today; decide when a batch tells them apart, or never
                self.layout[id(call)], self.undecided = layout, True
                return
        elif call.routed or (self.one_by_one and id(call) in self.alone):
            layout = layouts.LOOP
        elif call.input_shape is None and self.memory.looped.issuperset(call.source.names):
            layout = (
                layouts.LOOP
            )  # no operation on the batch; its first dimension happens to have as many rows
        elif call.from_batch is None and layouts.ROWS in found and self.memory.settled:
            self.memory.settled = False  # look closely again: a table that all examples share, or a coupling?
            raise UserError(f"{call.source.owner} ({call.source.label}) {LATE}")
        elif call.from_batch is not False and layouts.ROWS in found:
            raise UserError(f"{call.source.owner} ({call.source.label}): {MIXED}")
        else:
            layout = layouts.LOOP
        self.layout[id(call)] = layout
        if self.memory.layouts.get(call.key) in found and self.memory.layouts[call.key] != layout:
            layout = layouts.LOOP  # two forward passes that wait for this backward pass differ here
        self.memory.layouts[call.key] = layout

    def _doubt(
        self, call: Call, found: list[str], observed: list, by_row: Tensor, dtype: torch.dtype | None
    ) -> None:
        """A proven layout was looked at again."""
        (layout,) = found
        self.layout[id(call)] = layout
        if dtype is None:
            return  # no gradient arrived
        if layouts.refuted(observed[0][id(call), layout], observed[1][id(call), layout], by_row, dtype):
            raise UserError(
                f"{call.source.owner} ({call.source.label}), other than in earlier steps: {MIXED}"
            )
