"""Whether a forward leaves something in the model, where what is clipped is a whole batch and not each example of it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from dpexp.clipping.dataflow import entered, rows_in
from dpexp.clipping.independence import Independence
from dpexp.clipping.roots import Roots


class Apart:
    """Looks at the forwards of a model now and then, as all clipping does (`Independence`): a batch is one example here.

    Args:
        model: nothing may stay in it from one batch to the next, or for whoever gets it (a buffer that its forward writes).
    """

    def __init__(self, model: nn.Module):
        self._independence = Independence(model)
        self._hooks = [
            model.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True),
            model.register_forward_hook(lambda module, args, output: self._independence.leave(output)),
        ]
        self.notes = self._independence.notes

    def begin(self, loss: Tensor, params: Iterable[Tensor]) -> None:
        """Before the back-propagation of a batch's loss, a single number."""
        self._independence.begin(Roots.of_losses(loss[None]), params)

    def check(self) -> None:
        """Look, where that is due, behind the back-propagation.

        Raises:
            UserError: what a batch gets depends on an earlier one, or its forward writes to a buffer. Names the module.
        """
        self._independence.check(1)

    def detach(self) -> None:
        """Give the model back as it was."""
        for hook in self._hooks:
            hook.remove()

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if torch.is_grad_enabled() and not self._independence.looking:
            _, shapes, first = entered((args, kwargs))
            rows = rows_in(shapes, first)
            self._independence.rows_per_example = max(1, rows)
            self._independence.enter(args, kwargs, rows)
