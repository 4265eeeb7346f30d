"""The backward pass of a forward in two batches: is the gradient of what some examples get the same where the others are gone?

A backward of one's own, a hook, or a factor of a gradient alone (``(s - s * g).detach() + s * g``) may go by the number of rows
or by other rows' values, and moves no output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dpexp.clipping.independence.arguments import Inputs
from dpexp.clipping.independence.batches import Variant
from dpexp.clipping.independence.chance import WithoutChance
from dpexp.clipping.independence.comparison import Comparison, outputs
from dpexp.clipping.independence.replay import Replay

# numbers of parameters whose gradients are compared, the smallest ones: what goes wrong behind a layer shows in its bias; and of
# the first one, which is behind everything in most models
MOST, FIRST = 1 << 20, 1 << 21
# largest difference of one gradient, relative to its norm, by bits
DIFFERENCE = {16: 0.2, 32: 0.01, 64: 1e-4}


def parameter_that_differs(
    replay: Replay, comparison: Comparison, inputs: Sequence[Inputs], variant: Variant
) -> str:
    """Return the name of a parameter whose gradient, of what the examples of ``variant`` get, is another one there; "" if none.

    Args:
        replay: of the forward; it keeps its graph from here on.
        comparison: of the outputs, which has found where their rows are.
        inputs: as they entered, and those of the variant.
        variant: a batch.
    """
    params = _some({name: p for name, p in replay.model.named_parameters() if p.requires_grad})
    replay.keeps = True
    found: list[dict[str, Tensor]] = [{}, {}]
    for batch, here in zip(inputs, (False, True), strict=True):
        with replay.begun(), _folding(params, found[here]):
            leaves = outputs(replay.run(batch), replay.used).items()
            pairs = [
                (t, comparison.direction(number, t, variant, here)) for number, t in leaves if t.requires_grad
            ]
            asked = [(t, g) for t, g in pairs if g is not None]
            del leaves, pairs
            if not asked or not params:
                return ""
            # what is computed again on the way back draws nothing either
            with replay.silence(), WithoutChance(replay.chance):
                tensors, gradients = zip(*asked, strict=True)
                torch.autograd.grad(tensors, list(params.values()), gradients, allow_unused=True)
            del asked, tensors, gradients
    sizes = [{name: float(g.norm()) for name, g in folded.items()} for folded in found]
    largest = max(sizes[0].values(), default=0.0)
    for name in params:
        if name in found[0] and name in found[1]:
            # beside a much larger gradient, a small one is rounding
            size = max(sizes[0][name], sizes[1][name], 1e-3 * largest)
            if float((found[0][name] - found[1][name]).norm()) > DIFFERENCE[comparison.bits] * size:
                return name
    return ""


def _some(params: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    taken, total = {name for name in list(params)[:1] if params[name].numel() <= FIRST}, 0
    for name, p in sorted(params.items(), key=lambda item: item[1].numel()):
        total += p.numel()
        if total > MOST and taken:
            break
        taken.add(name)
    return {name: p for name, p in params.items() if name in taken}


@contextmanager
def _folding(params: dict[str, nn.Parameter], found: dict[str, Tensor]) -> Iterator[None]:
    """Inside, of the gradient of each parameter only the sum over its rows, with random signs, is kept, in ``found``."""

    def hook(name: str) -> Callable[[Tensor], Tensor]:
        def fold(gradient: Tensor) -> Tensor:
            found[name] = _folded(gradient)
            # autograd would hold the gradients of all parameters to the end
            return gradient.new_zeros(()).expand(gradient.shape)

        return fold

    handles = [p.register_hook(hook(name)) for name, p in params.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _folded(gradient: Tensor) -> Tensor:
    """``[numbers of a row]`` of a gradient: two that differ do so in this, too, by about the same norm."""
    gradient = gradient.to_dense() if gradient.layout != torch.strided else gradient
    if gradient.dim() < 2:
        return gradient.clone()
    generator = torch.Generator().manual_seed(len(gradient))
    signs = torch.randint(2, (len(gradient),), generator=generator, device="cpu") * 2 - 1
    return signs.to(gradient) @ gradient.flatten(1)
