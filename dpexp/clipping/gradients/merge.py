"""Per-example gradients out of others: the sum of two uses of one parameter, and what is instantiated to be kept."""

from __future__ import annotations

from functools import reduce
from typing import Any

from dpexp.clipping.gradients.base import PerExampleGradient
from dpexp.clipping.gradients.dense import Dense
from dpexp.clipping.gradients.grouped import Grouped
from dpexp.clipping.gradients.lookup import Lookup
from dpexp.clipping.gradients.outer import Outer
from dpexp.clipping.gradients.tied import Tied


def merge(first: PerExampleGradient, second: PerExampleGradient) -> PerExampleGradient:
    """Return one object whose per-example gradients are the sums of both.

    Matrix products and lookups, in any mixture, merge without being instantiated, as do uses of stacked matrices. Everything
    else is instantiated and added: ``B`` times the parameter's size.

    Raises:
        ValueError: they are not of the same parameter and the same examples.
    """
    if first.shape != second.shape or first.num_examples != second.num_examples:
        raise ValueError(
            f"per-example gradients {first.num_examples} x {tuple(first.shape)} and {second.num_examples} x "
            f"{tuple(second.shape)} do not belong to the same parameter and batch"
        )
    if isinstance(first, Grouped) and isinstance(second, Grouped):
        return first.joined(second)
    parts = (*_parts(first), *_parts(second))
    outers = [part for part in parts if isinstance(part, Outer)]
    lookups = [part for part in parts if isinstance(part, Lookup)]
    if len(outers) + len(lookups) < len(parts) or len({part.padding_idx for part in lookups}) > 1:
        lengths = first.magnitudes().sqrt() + second.magnitudes().sqrt()
        return Dense(first.instantiate() + second.instantiate(), lengths.square())
    joined: list[Any] = [reduce(lambda a, b: a.joined(b), own) for own in (outers, lookups) if own]
    return Tied(*joined) if len(joined) > 1 else joined[0]


def _parts(per_example: PerExampleGradient) -> tuple[PerExampleGradient, ...]:
    return (per_example.outer, per_example.lookup) if isinstance(per_example, Tied) else (per_example,)


def instantiated(per_example: PerExampleGradient, method: str) -> Dense:
    """Return the gradients themselves, without the activations that they were made of."""
    if isinstance(per_example, Dense):
        return per_example
    rows, squares = per_example.rows_and_norms(method)
    return Dense(rows, squares=squares)
