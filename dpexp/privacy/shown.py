"""How a bound is written for a person: an ε that was spent, or what an audit has found."""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal, localcontext

# relative; what rounding errors alone add
_SLACK = Decimal("1e-11")


def upwards(value: float | None, spec: str = ".4f") -> str:
    """Write an ε, or another upper bound, for a person: never a smaller one; what rounding errors alone add is left.

    Args:
        value: None, for what is not known, gives "-".
        spec: how many digits, in the words of `format`.
    """
    return _written(value, spec, ROUND_CEILING, 1 - _SLACK)


def downwards(value: float | None, spec: str = ".4f") -> str:
    """Write a lower bound, such as an audit's: never a larger one. Otherwise as `upwards`."""
    return _written(value, spec, ROUND_FLOOR, 1 + _SLACK)


def _written(value: float | None, spec: str, rounding: str, slack: Decimal) -> str:
    if value is None or not math.isfinite(value):
        return "-" if value is None else str(value)
    with localcontext() as context:
        context.rounding = rounding
        rounded = format(Decimal(value) * slack, spec)
    # a decimal writes exponents and zeros otherwise
    return format(float(rounded), spec)
