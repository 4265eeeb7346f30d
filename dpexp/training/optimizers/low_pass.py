"""What makes a linear filter a low-pass filter of gradients."""

from collections.abc import Sequence

import numpy as np

from dpexp.errors import UserError


def check_low_pass(a: Sequence[float], b: Sequence[float]) -> None:
    """Refuse a filter m_t = -Σ a_τ·m_(t-τ) + Σ b_τ·g_(t-τ) that does not settle, or does not pass a constant.

    Raises:
        UserError: a root of z^n + a_1·z^(n-1) + … lies on or outside of the unit circle, or b does not begin with and add up to a
            positive number.
    """
    poles = np.abs(np.roots([1.0, *a]))
    if not b or poles.max(initial=0.0) >= 1 or sum(b) <= 0 or b[0] <= 0:
        raise UserError(
            f"optim.filter_a={list(a)}, optim.filter_b={list(b)} is no low-pass filter: the roots of 1 + a·z must lie within the "
            "unit circle, and b begin with and add up to a positive number (filter_a=[-0.9] filter_b=[0.1])"
        )
