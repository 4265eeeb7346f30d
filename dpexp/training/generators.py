"""Random generators of a data set itself, which are seeded from the run's key as those of torch, numpy and Python are.

Such a generator goes from one example to the next. Under a seed that others know, one example more would change what is
drawn for all that are read after it, in this batch and in every later one, and no noise is for that. In secret all places are
alike, and what is drawn for a batch can be drawn again after a crash.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

Generator = random.Random | np.random.Generator | np.random.RandomState | torch.Generator

# how deep a generator may lie: the transform of a list of transforms of a data set of which this one is a part
DEPTH = 6
# parts of a list that are looked at: transforms, and no rows
FEW = 64


def of(dataset: Any) -> list[Generator]:
    """Find those in its attributes, in data sets that it is made of, and in transforms; what functions take from a module is not
    seen."""
    return list(_within(dataset, DEPTH, set()))


def seed(generator: Generator, number: int) -> None:
    """Let a generator begin with a number in [0, 2^63)."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(number)
    elif isinstance(generator, random.Random):
        generator.seed(number)
    elif isinstance(generator, np.random.RandomState):
        generator.seed([number & 0xFFFFFFFF, number >> 32])
    else:
        generator.bit_generator.state = type(generator.bit_generator)(number).state


def _within(value: Any, depth: int, seen: set[int]) -> Iterator[Generator]:
    if isinstance(value, Generator):
        if id(value) not in seen:
            seen.add(id(value))
            yield value
        return
    if not depth or id(value) in seen or isinstance(value, Tensor | np.ndarray | ModuleType | type):
        return
    seen.add(id(value))
    for part in _parts(value):
        yield from _within(part, depth - 1, seen)


def _parts(value: Any) -> list[Any]:
    if isinstance(value, MethodType):
        return [value.__self__]
    if isinstance(value, FunctionType):
        return [part for cell in value.__closure__ or () for part in _held(cell)]
    if isinstance(value, list | tuple | dict):
        few = value.values() if isinstance(value, dict) else value
        return list(few) if len(value) <= FEW else []
    held = getattr(value, "__dict__", None)
    return list(held.values()) if isinstance(held, dict) else []


def _held(cell: CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:
        # of a variable that is not assigned yet
        return []
