"""A look at the forwards of a model now and then, for the methods that do not follow its parameters."""

from __future__ import annotations

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from dpexp.clipping.independence import Independence
from dpexp.clipping.tapping.dataflow import entered, rows_in, tensors_in


class Watched(Independence):
    """An `Independence` with hooks of its own.

    Args:
        model, rows_per_example, fixed_length: see `Independence`.
        whole: a batch is one example here: nothing may stay in the model from one batch to the next, or for whoever gets it (a
            buffer that its forward writes).

    Attributes:
        returned: what the forwards that are looked at have returned.
    """

    def __init__(
        self, model: nn.Module, rows_per_example: int = 1, fixed_length: bool = False, *, whole: bool = False
    ):
        super().__init__(model, rows_per_example, fixed_length)
        self.whole = whole
        self.returned: list[GradientEdge] = []
        self._hooks = [
            model.register_forward_pre_hook(self._entered, with_kwargs=True, prepend=True),
            model.register_forward_hook(lambda module, args, output: self.leave(output)),
        ]

    def leave(self, output: object) -> None:
        """The model's forward has ended."""
        if not self.looking and self.running is not None:
            self.returned += [get_gradient_edge(t) for t in tensors_in(output) if t.grad_fn is not None]
        super().leave(output)

    def check(self, num_examples: int) -> None:
        """As `Independence.check`."""
        self.returned = []
        super().check(num_examples)

    def detach(self) -> None:
        """Give the model back as it was."""
        for hook in self._hooks:
            hook.remove()

    def _entered(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if torch.is_grad_enabled() and not self.looking:
            _, shapes, first = entered((args, kwargs))
            rows = rows_in(shapes, first)
            if self.whole:
                self.rows_per_example = max(1, rows)
            self.enter(args, kwargs, rows)
