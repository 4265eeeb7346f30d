"""The backward pass of a forward in two batches: is the gradient of what some examples get the same where the others are gone?

A backward of one's own, a hook, or a factor of a gradient alone (``(s - s * g).detach() + s * g``) may go by the number of rows
or by other rows' values, and moves no output.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from dpexp.clipping.independence.arguments import Inputs
from dpexp.clipping.independence.batches import Variant
from dpexp.clipping.independence.chance import WithoutChance
from dpexp.clipping.independence.comparison import Comparison, outputs
from dpexp.clipping.independence.replay import Replay

# numbers of parameters, the smallest of them, whose gradients are compared: what goes wrong behind a layer shows in its bias
MOST = 1 << 22
# largest difference of one gradient, relative to its norm, by bits
DIFFERENCE = {16: 0.2, 32: 0.01, 64: 1e-4}


def parameter_that_differs(
    replay: Replay,
    autocast: bool,
    comparison: Comparison,
    bits: int,
    inputs: Sequence[Inputs],
    variant: Variant,
) -> str:
    """Return the name of a parameter whose gradient, of what the examples of ``variant`` get, is another one there; "" if none.

    Args:
        replay: of the forward; it keeps its graph from here on.
        autocast: whether to compute in 16 bits where the forward did.
        comparison: of the outputs, which has found where their rows are.
        bits: of the numbers, see `bits_of`.
        inputs: as they entered, and those of the variant.
        variant: a batch.
    """
    params = dict(_small((n, p) for n, p in replay.model.named_parameters() if p.requires_grad))
    replay.keeps = True
    found: list[list[Tensor | None]] = []
    for batch, here in zip(inputs, (False, True), strict=True):
        with replay.begun(autocast):
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
                found.append(
                    list(
                        torch.autograd.grad(
                            [t for t, _ in asked],
                            list(params.values()),
                            [g for _, g in asked],
                            allow_unused=True,
                        )
                    )
                )
            del asked
    whole = [
        (name, a, b) for name, a, b in zip(params, *found, strict=True) if a is not None and b is not None
    ]
    largest = max((float(a.norm()) for _, a, _ in whole), default=0.0)
    for name, a, b in whole:
        # beside a much larger gradient, a small one is rounding
        size = max(float(a.norm()), float(b.norm()), 1e-3 * largest)
        if float((a - b).norm()) > DIFFERENCE[bits] * size:
            return name
    return ""


def _small(params: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
    """The smallest parameters, at least one."""
    total = 0
    for name, p in sorted(params, key=lambda item: item[1].numel()):
        total += p.numel()
        if total > MOST and total > p.numel():
            return
        yield name, p
