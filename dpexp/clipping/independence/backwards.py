"""The backward pass of a forward in two batches: is the gradient of what some examples get the same where the others are gone?

A backward of one's own, a hook, or a factor of a gradient alone (``(s - s * g).detach() + s * g``) may go by the number of rows
or by other rows' values, and moves no output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dpexp.clipping.groups import trainable_parameters
from dpexp.clipping.independence.arguments import Inputs
from dpexp.clipping.independence.batches import Variant
from dpexp.clipping.independence.comparison import Comparison, outputs
from dpexp.clipping.independence.replay import Replay, again

# numbers of parameters whose gradients are compared, the smallest ones: what goes wrong behind a layer shows in its bias; and of
# the first one, which is behind everything in most models
MOST, FIRST = 1 << 20, 1 << 21
# largest difference of one gradient, relative to its norm, by bits
DIFFERENCE = {16: 0.2, 32: 0.01, 64: 1e-4}

# by parameter, the sum over the rows of its gradient, with random signs
Folded = dict[str, Tensor]


class Backwards:
    """Compares what goes back for the examples of a variant with what goes back for them in the batch that entered.

    Args:
        replay: of the forward; it has to keep its graph.
        comparison: of the outputs, which has found where their rows are.
    """

    def __init__(self, replay: Replay, comparison: Comparison):
        self._replay, self._comparison = replay, comparison
        self._names = _some(trainable_parameters(replay.model))

    def parameter_that_differs(self, variant: Variant, batch: Inputs) -> str:
        """Return the name of a parameter whose gradient is another one in a variant; "" if none.

        Args:
            variant: another batch.
            batch: what enters of it.
        """
        before = again(self._gradients, self._replay.inputs, variant, False)
        return self._unlike(before, again(self._gradients, batch, variant, True)) if before else ""

    def agree(self, variant: Variant, batch: Inputs) -> bool:
        """Tell whether no gradient differs; see `parameter_that_differs`."""
        return not self.parameter_that_differs(variant, batch)

    def _gradients(self, batch: Inputs, variant: Variant, here: bool) -> Folded:
        """What goes back for the examples of a variant in a batch; ``here``: which is that variant."""
        found: Folded = {}
        with self._replay.begun():
            # others, where that computes in 64 bits
            params = {name: p for name, p in self._replay.model.named_parameters() if name in self._names}
            leaves = outputs(self._replay.run(batch), self._replay.used)
            directions = {
                n: self._comparison.direction(n, t, variant, here)
                for n, t in leaves.items()
                if t.requires_grad
            }
            asked = {n: g for n, g in directions.items() if g is not None}
            tensors = [leaves[n] for n in asked]
            # of the graph, nothing is held but by what goes back
            leaves.clear()
            # what is computed again on the way back draws nothing either
            with _folding(params, found), self._replay.without_chance():
                if tensors and params:
                    torch.autograd.grad(
                        tensors, list(params.values()), list(asked.values()), allow_unused=True
                    )
        return found

    def _unlike(self, before: Folded, here: Folded) -> str:
        """The name of the first gradient that differs."""
        largest = max((float(gradient.norm()) for gradient in before.values()), default=0.0)
        for name in [name for name in self._names if name in before or name in here]:
            # a parameter that is not reached has a gradient of zero: its expert has no row in one of them, say
            a, b = (found.get(name, torch.zeros(())) for found in (before, here))
            # beside a much larger gradient, a small one is rounding
            size = max(float(a.norm()), float(b.norm()), 1e-3 * largest)
            if float((a - b).norm()) > DIFFERENCE[self._comparison.bits] * size:
                return name
        return ""


def _some(params: dict[str, nn.Parameter]) -> list[str]:
    taken, total = {name for name in list(params)[:1] if params[name].numel() <= FIRST}, 0
    for name, p in sorted(params.items(), key=lambda item: item[1].numel()):
        total += p.numel()
        if total > MOST and taken:
            break
        taken.add(name)
    return [name for name in params if name in taken]


@contextmanager
def _folding(params: dict[str, nn.Parameter], found: dict[str, Tensor]) -> Iterator[None]:
    """Inside, of the gradient of each parameter only the sum over its rows, with random signs, is kept, in ``found``."""

    def hook(name: str) -> Callable[[Tensor], Tensor]:
        def fold(gradient: Tensor) -> Tensor:
            found[name] = _folded(gradient, signs)
            # autograd would hold the gradients of all parameters to the end
            return gradient.new_zeros(()).expand(gradient.shape)

        return fold

    # made here: on the way back, chance gives constants
    signs = {len(p): _signs(len(p)) for p in params.values() if p.dim() > 1}
    handles = [p.register_hook(hook(name)) for name, p in params.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _signs(count: int) -> Tensor:
    return torch.randint(2, (count,), generator=torch.Generator().manual_seed(count), device="cpu") * 2 - 1


def _folded(gradient: Tensor, signs: Mapping[int, Tensor]) -> Tensor:
    """``[numbers of a row]`` of a gradient: two that differ do so in this, too, by about the same norm."""
    gradient = gradient.to_dense() if gradient.layout != torch.strided else gradient
    if gradient.dim() < 2:
        return gradient.clone()
    return signs[len(gradient)].to(gradient) @ gradient.flatten(1)
