"""Clipping rules: how a per-example norm becomes a factor.

Each rule maps squared norms and thresholds to factors such that ``factor * norm <= threshold`` (except ``none``), each factor by
its own norm alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dpexp.errors import UserError
from dpexp.importing import imported

Rule = Callable[[Tensor, Tensor | float], Tensor]

AUTOMATIC_GAMMA = 0.01
SMALLEST = 1e-12
"""Of thresholds, and of norms that a gradient is divided by: float32 has no squares of numbers below 1e-19, and a gradient of a
billion of them would be longer than its norm says."""
LARGEST = 1e12
"""Of factors: one of the two tensors whose product is a gradient is multiplied by it, may be as large as the other is small, and
overflows: infinity times zero is NaN in the sum of all."""


def abadi(sq_norms: Tensor, thresholds: Tensor | float) -> Tensor:
    """``min(1, C / ||g||)`` (Abadi et al. 2016; He et al., section 2). A zero gradient keeps the factor 1."""
    return (sq_norms.rsqrt() * thresholds).clamp_(max=1.0)


def automatic(sq_norms: Tensor, thresholds: Tensor | float) -> Tensor:
    """``C / (||g|| + gamma)`` with gamma = 0.01 (AUTO-S, the stable form of automatic clipping, Bu et al. 2022b)."""
    return (thresholds / (sq_norms.sqrt() + AUTOMATIC_GAMMA)).clamp_(max=LARGEST)


def normalized(sq_norms: Tensor, thresholds: Tensor | float) -> Tensor:
    """``C / ||g||`` (AUTO-V, automatic clipping without gamma, Bu et al. 2022b), ``C / SMALLEST`` for what is shorter than that,
    and at most `LARGEST`.

    A zero gradient has the factor 0.
    """
    lengths = sq_norms.clamp(min=SMALLEST**2)
    return (lengths.rsqrt() * thresholds).clamp_(max=LARGEST).masked_fill_(sq_norms == 0, 0.0)


def shortened(gradient: Tensor, factor: Tensor) -> Tensor:
    """The gradient times its factor, rounded once: below 1e-38 a factor in 32 bits may be twice what it is."""
    return (gradient.double() * factor.double()).to(gradient.dtype)


def none(sq_norms: Tensor, thresholds: Tensor | float) -> Tensor:
    """Factor 1: the plain sum, with the norms as a by-product. Nothing is clipped: there is no guarantee."""
    return torch.ones_like(sq_norms)


RULES: dict[str, Rule] = {"abadi": abadi, "automatic": automatic, "normalized": normalized, "none": none}
# those that bound what one example adds
CLIPPING = tuple(name for name in RULES if name != "none")


def known_rule(name: str) -> Rule:
    """Return a rule by its name, once it was looked at on norms of all sizes: ε rests on what it bounds.

    Args:
        name: one of `RULES`, or ``package.module:function`` or ``file.py:function`` of a rule of one's own.

    Raises:
        UserError: there is none, it takes or gives something else, a gradient stays longer than its threshold, or its factor
            goes by the other norms of a batch.
    """
    if ":" in name:
        RULES[name] = imported("rule", name)
    if name not in RULES:
        own = "or package.module:function, or file.py:function, of your own"
        raise UserError(f"rule={name!r} is not known; choose {', '.join(RULES)}, {own}")
    rule = RULES[name]
    norms = torch.cat([torch.zeros(1, device="cpu"), torch.logspace(-18, 18, 1801, device="cpu")]).float()
    # by name: the same function under a name of one's own is not known to bound nothing
    for threshold in (1e-6, 1.0, 1e6) if name != "none" else ():
        factors = _factors(name, norms, threshold)
        if not bool((factors.abs() * norms <= threshold * (1 + 1e-5)).all()):
            raise UserError(
                f"rule={name!r} leaves gradients longer than their threshold, and epsilon would be too small: its factor times "
                "the norm must be at most the threshold"
            )
        for some in (slice(None, None, 2), slice(1, None, 2), slice(1000, 1001)):
            if not torch.allclose(_factors(name, norms[some], threshold), factors[some], rtol=1e-5):
                raise UserError(
                    f"rule={name!r} gives a gradient another factor in other company (a maximum, a mean or a quantile of the "
                    "batch): one example would move what the others add. Let each factor follow its own norm"
                )
    return rule


def _factors(name: str, norms: Tensor, threshold: float) -> Tensor:
    try:
        factors = RULES[name](norms.square(), threshold)
        if factors.shape == norms.shape:
            return factors
        found = f"it gives the shape {list(factors.shape)} for {list(norms.shape)}"
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    raise UserError(
        f"rule={name!r} is called with squared norms, a tensor [B], and a threshold (a number, or a tensor [B]), and gives a "
        f"factor for each: {found}"
    )
