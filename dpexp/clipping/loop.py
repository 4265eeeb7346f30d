"""The floor under every formula: one back-propagation per example, which needs to know nothing about an operation."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from dpexp.clipping.gradients.numerics import along
from dpexp.clipping.tapping.forwards import ForwardPass
from dpexp.clipping.tapping.taps import Visit
from dpexp.clipping.tapping.uses import Use
from dpexp.errors import UserError

LOOPED = "one back-propagation per example"
POISON = (
    "{name}: a gradient of this batch is NaN or Inf, and this parameter is used outside of the operations that can bound one "
    "example's share of it. Find the example (torch.isfinite on the inputs and losses) and drop it"
)


def loop_over_examples(
    visit: Visit, params: dict[str, nn.Parameter], retain: bool
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Yield each example's index and its own gradients, by name where there are any.

    Args:
        visit: of the graph behind the roots.
        params: of which gradients are wanted.
        retain: keep the graph after the last example.

    Raises:
        UserError: a gradient that reaches a parameter past all taps is NaN or Inf: one example would poison all.
    """
    names = set(params)
    for i in range(visit.num_examples):
        collected: dict[str, Tensor] = {}

        def collect(
            owner: ForwardPass, use: Use, saved: tuple[Tensor, ...], gy: Tensor, into: dict = collected
        ) -> None:
            wanted = names.intersection(use.names)
            if wanted:
                for name, g in _gradients(use, saved, finite(gy), wanted).items():
                    into[name] = into[name] + g if name in into else g

        one = torch.zeros(visit.num_examples, dtype=visit.roots.dtype, device=visit.roots.device)
        one[i] = 1.0
        last = i == visit.num_examples - 1 and not retain
        native = visit.back_propagate(collect, retain=not last, weights=one, params=list(params.values()))
        for name, g in zip(params, native, strict=True):
            if g is not None:
                # autograd has multiplied one example's NaN by another's zero: the sum would lose everybody
                if not bool(g.isfinite().all()):
                    raise UserError(POISON.format(name=name))
                collected[name] = collected[name] + g if name in collected else g
        yield i, collected


def _gradients(use: Use, saved: tuple[Tensor, ...], gy: Tensor, names: set[str]) -> dict[str, Tensor]:
    """Find the gradients of one example, where the rows of all others arrive as zeros: 0 * NaN is not zero.

    What is infinite in its own rows stays: a mask of scores.
    """
    idle, clean = (gy.unsqueeze(-1).flatten(1) == 0).all(1), [finite(s) for s in saved]

    def of_others(s: Tensor, cleaned: Tensor) -> Tensor:
        if cleaned is s or s.shape[:1] != gy.shape[:1]:
            return s
        return torch.where(along(idle, s), cleaned, s)

    found = use.plain_gradients(tuple(map(of_others, saved, clean)), gy, names)
    if all(bool(g.isfinite().all()) for g in found.values()):
        return found
    # what is finite may be too large for the operation: a row of its own stands in the place of others, or nothing
    own = int((~idle).int().argmax())

    def own_alone(s: Tensor) -> Tensor:
        if s.shape[:1] != gy.shape[:1] or s.layout != torch.strided:
            return s
        instead = torch.zeros_like(s[own]) if bool(idle[own]) else s[own]
        return torch.where(along(idle, s), instead, s)

    return use.plain_gradients(tuple(map(own_alone, clean)), gy, names)


def finite(tensor: Tensor) -> Tensor:
    """Replace NaN and Inf by zero; not in a sparse matrix, of which torch cannot tell."""
    if not tensor.is_floating_point() or tensor.layout != torch.strided or bool(tensor.isfinite().all()):
        return tensor
    return tensor.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
