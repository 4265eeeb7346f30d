"""How a spent ε is written for a person."""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, Decimal, localcontext


def upwards(value: float | None, spec: str = ".4f") -> str:
    """Write an ε, or another upper bound, for a person: never a smaller one; what rounding errors alone add is left.

    Args:
        value: None, for what is not known, gives "-".
        spec: how many digits, in the words of `format`.
    """
    if value is None or not math.isfinite(value):
        return "-" if value is None else str(value)
    with localcontext() as context:
        context.rounding = ROUND_CEILING
        rounded = format(Decimal(value) * (1 - Decimal("1e-11")), spec)
    # a decimal writes exponents and zeros otherwise
    return format(float(rounded), spec)
