"""How far a computed norm may be from the norm of what is added to ``p.grad``, where the terms of a gradient cancel.

An example's gradient is a sum of terms, ``g = sum_t g_t a_tᵀ``. What it adds to ``p.grad`` is that sum as a matrix product
rounds it, off by a small multiple of ``u * sum_t |g_t||a_t|`` (Higham 2002, *Accuracy and Stability of Numerical Algorithms*,
section 3.5), with u = 2^-24 in float32. Where the terms cancel, that is more than ``|g|``, and a norm that knows nothing of it
would let the example add many times its threshold. So every norm whose gradient is not summed from the very rows that were
measured is an upper bound of the norm of what is added.

The bound needs the *magnitude* m of a gradient: what its norm would be if nothing cancelled. Gram matrices give
``m² = sum_t sum_s |a_t·a_s||g_t·g_s|``, which is about ``|g|²`` for ordinary examples; elsewhere it is the product of the
Frobenius norms of activations and output gradients, up to ``sqrt(T)`` times the norm of an ordinary example.

A bound does not help the others in the batch. One product over all examples rounds each partial sum, and where huge terms of
one example pass through it, the errors depend on who else is there: by up to u m of what an example adds, for everyone who
leaves. So examples whose m is far above their norm are *rough*: they are left out of the product, summed alone, where their terms
cancel first, and then added. Their own gradient is rounding too, and another one wherever the product that forms it is: for one
example, for several, by this method or that. So what is measured of them, and what is added, is the product of each alone. A GPU
would have to be waited for to find them; there the bound is raised until none is rough.

What this does not cover is what every sum has: the rounding of the total over the batch, of ``p.grad`` where the parameter
itself has 16 bits, and of convolutions whose library adds up more than some thousand equal products in one register (a blank
image of 64 x 64 pixels under a constant output gradient: 5e-5).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dpexp.clipping.gradients.numerics import unit

# All in units of u, measured with products of float32 matrices on CPUs; the guarantee's own 1e-6 is another 16 u.
#
# A product of two Gram matrices is off by at most 30 m² (of equal numbers) ...
GRAM = 32.0
# ... so they are not trusted with m² of more than so many times the square of the norm, where that can be avoided.
CANCELS = 6.0
# In a group of many parameters, a bound that is too large by so much of the group's squared norm changes nothing.
NEGLIGIBLE = 2**-24
# A sum of T products is off by at most (1 + T/16) m, and 5 m ...
SUM, SUM_BY_TERMS = 4.0, 1 / 16
# ... unless the terms are built to be rounded all in one direction: by T/8 m. Where they don't cancel, libraries limit T,
# because they begin a new sum after a few hundred.
ONE_DIRECTION, LONGEST = 1 / 8, 256
# Of ordinary examples, m² is at most so many times the square of the norm: where Gram matrices gave it, and otherwise, by T.
ORDINARY, UNCORRELATED = 256.0, 16.0


# What rounding in company may cost, in units of the norm that an example may have.
IN_COMPANY = 1e-5


def rough(squares: Tensor, magnitudes: Tensor, terms: int = 1) -> Tensor:
    """``[B]``, bool: whose terms must cancel alone, before anything else is added to them.

    Args:
        squares: ``[B]``, |g|².
        magnitudes: ``[B]``, m².
        terms: T where m² may be T times too large, as products of Frobenius norms are; otherwise 1.
    """
    return magnitudes * _share(squares.dtype, terms) > squares


def raised(bounds: Tensor, magnitudes: Tensor, terms: int = 1) -> Tensor:
    """Bounds ``[B]`` under which no example is `rough`."""
    return torch.maximum(bounds, magnitudes * _share(bounds.dtype, terms))


def _share(dtype: torch.dtype, terms: int) -> float:
    return min((SUM * unit(dtype) / IN_COMPANY) ** 2, 1 / (UNCORRELATED * max(terms, 1)))


def cancels(squares: Tensor, magnitudes: Tensor) -> Tensor:
    """``[B]``, bool: whether so much of a gradient cancels that Gram matrices are not trusted with its norm."""
    return magnitudes > CANCELS * squares


def of_gram_norms(squares: Tensor, magnitudes: Tensor, terms: int, cancels: Tensor) -> Tensor:
    """Upper bounds ``[B]`` of squared norms that Gram matrices gave.

    Args:
        squares: ``[B]``, |g|².
        magnitudes: ``[B]``, m².
        terms: T, how many terms a gradient is the sum of.
        cancels: ``[B]``, of which gradients much cancels.
    """
    u, usual = unit(squares.dtype), 1.5 * ONE_DIRECTION * min(terms, LONGEST)
    bounds = squares.add(magnitudes, alpha=usual * u)
    return bounds.add_(torch.where(cancels, magnitudes, 0.0), alpha=GRAM * u)


def of_instantiated_norms(squares: Tensor, magnitudes: Tensor, terms: int, ordinary: float) -> Tensor:
    """Upper bounds ``[B]`` of squared norms of rows that are not themselves summed: ``(|g| + c u m + d u |g|)²``.

    The second term is for gradients of which nothing cancels, but all is rounded in one direction, as of a blank image.

    Args:
        squares: ``[B]``, |g|².
        magnitudes: ``[B]``, m².
        terms: T, how many terms a gradient is the sum of.
        ordinary: the largest m² / |g|² of examples that are not built to cancel.
    """
    u = unit(squares.dtype)
    usual, worst = min(SUM, 1 + SUM_BY_TERMS * terms), SUM + 2 * ONE_DIRECTION * terms
    of_magnitude = torch.where(magnitudes > ordinary * squares, worst * u, usual * u)
    longer = squares.sqrt() * (1 + ONE_DIRECTION * min(terms, LONGEST) * u)
    return (longer + of_magnitude * magnitudes.sqrt()).square()
