"""Parameters and buffers of an attached model, by where they lie: what a loop of one's own may not do to them.

Parameters that stand beside the model, and that the batch goes through, are found here, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from dpexp.clipping.tapping.node import BY_TAP
from dpexp.clipping.tapping.roots import nodes_behind
from dpexp.errors import UserError
from dpexp.training.watching.guards import TOUCHED
from dpexp.training.watching.lines import PLAIN, Call, storage_of

WRITTEN = (
    "the loop writes values of its batch to {name} of the model, without noise. This voids any guarantee: leave it out, or make "
    "it of public data"
)
ASKED = (
    "the loop asks autograd for the gradient of {name}, and an attached model has none: gradients are found by example within "
    "engine.step(losses). Leave it out (a gradient penalty, meta-learning, influence, balance of losses), or do it on public "
    "data with a copy of the weights in a model without an engine. Gradients of inputs are free"
)


class Owned:
    """The tensors of a model.

    Args:
        model: attached.
        outside: parameters are added to it that the batch goes through and that are not the model's.
    """

    def __init__(self, model: nn.Module, outside: WeakIdKeyDictionary):
        self._model, self._outside = model, outside
        named = [
            (name, getattr(tensor, "_local_tensor", tensor))
            for name, tensor in (*model.named_parameters(), *model.named_buffers())
        ]
        self._names = {storage_of(tensor): name for name, tensor in named if type(tensor) in PLAIN}
        # of tensors without a place
        self._names.pop(0, None)
        self._sums: dict[int, tuple[str, nn.Parameter]] = {}

    def __contains__(self, tensor: Tensor) -> bool:
        return storage_of(tensor) in self._names

    def look_for_sums(self) -> None:
        """Find where the gradients lie now, also as ``p.grad.data``, which has no version."""
        parameters = self._model.named_parameters()
        self._sums = {
            storage_of(p.grad): (name, p) for name, p in parameters if p.grad is not None and p.grad.numel()
        }
        # a shard may be empty here
        self._sums.pop(0, None)

    def forget_sums(self) -> None:
        """Let gradients be written to: they are released."""
        self._sums = {}

    def refuse_written_sum(self, written: Tensor) -> None:
        """Refuse what writes to a gradient; what lies where a gradient was that is gone is none."""
        name, param = self._sums.get(storage_of(written), ("", None))
        if param is not None and param.grad is not None and storage_of(param.grad) == storage_of(written):
            raise UserError(TOUCHED.format(name=name, what="was written to"))

    def refuse_differentiated(self, given: list[Tensor]) -> None:
        """Refuse to differentiate by the model's parameters, of which autograd finds nothing behind a tap."""
        names = [self._names.get(storage_of(t)) for t in given if type(t) is nn.Parameter]
        name = next((name for name in names if name is not None), None)
        # who visits taps is a clipper
        taps = (node for node in nodes_behind([t.grad_fn for t in given]) if isinstance(node, BY_TAP))
        if name is not None and any(tap.recorder.visiting is None for tap in taps):
            raise UserError(ASKED.format(name=name))

    def look_at_parameters(self, call: Call, private: WeakIdKeyDictionary) -> None:
        """Refuse values of the batch that are written to the model, and note parameters of others that it goes through."""
        given = call.given
        places = [storage_of(t) if type(t) in PLAIN else 0 for t in given]
        written = given[:1] if call.name == "__set__" else call.written
        names = [self._names[storage_of(t)] for t in written if storage_of(t) in self._names]
        if names and any(t in private for t in given):
            raise UserError(WRITTEN.format(name=names[0]))
        for tensor, place in zip(given, places, strict=True):
            trains = type(tensor) is nn.Parameter and tensor.requires_grad and torch.is_grad_enabled()
            if trains and place not in self._names:
                self._outside[tensor] = None

    def look_at_leaves(
        self,
        roots: Iterable[Any],
        beyond: Iterable[Any],
        private: WeakIdKeyDictionary,
        fits: Callable[..., Any],
    ) -> None:
        """Note what is no part of the model and gets a gradient that holds values of the batch, however it was met.

        Args:
            roots: nodes of the graph.
            beyond: nodes behind which nothing is looked for.
            private: the tensors of the batch, and what was made of their values.
            fits: whether a leaf may have the rows of the batch.
        """
        for node in nodes_behind(roots, beyond):
            leaf = getattr(node, "variable", None)
            if leaf is None or leaf in self or leaf in private:
                continue
            # rows that are added to those of the batch are looked for by the loop, and not learnt
            if type(leaf) is nn.Parameter or not fits(leaf):
                self._outside[leaf] = None
