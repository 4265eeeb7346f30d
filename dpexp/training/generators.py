"""Random generators: those of torch, numpy and Python, kept while something is tried, and those of a data set or a model itself.

The latter are seeded from the run's key as the others are. Such a generator goes from one example to the next. Under a seed that
others know, one example more would change what is drawn for all that are read after it, in this batch and in every later one, and
no noise is for that. In secret all places are alike, and what is drawn for a batch can be drawn again after a crash.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpexp.clipping.given import modules_of
from dpexp.clipping.gradients.numerics import has_generator, states_of_chance

Generator = random.Random | np.random.Generator | np.random.RandomState | torch.Generator

# how deep a generator may lie: the transform of a list of transforms of a data set of which this one is a part
DEPTH = 6
# parts of a list that are looked at: transforms, and no rows
FEW = 64
# most of what a data set holds, and nothing in it
PLAIN = {int, float, str, bytes, bool, type(None)}
# most of what a module holds; to ask whether a value is a generator of torch runs Python, and each step asks for all of them
USUAL = PLAIN | {dict, OrderedDict, set, list, tuple}
# numpy's own sources of bits, which begin with a number whatever a class made of one asks for
SOURCES = (np.random.MT19937, np.random.PCG64, np.random.PCG64DXSM, np.random.Philox, np.random.SFC64)


@contextmanager
def kept() -> Iterator[None]:
    """Leave those of Python, numpy and torch as they were found, and those of the device that is in use."""
    state, device = (random.getstate(), np.random.get_state()), _in_use()
    there = [device.index] if has_generator(device) else []
    try:
        with torch.random.fork_rng(there, device_type=device.type):
            yield
    finally:
        random.setstate(state[0])
        np.random.set_state(state[1])


def seed_public(number: int) -> None:
    """Let those that `kept` sets back begin with a number that everybody knows."""
    random.seed(number)
    np.random.seed(number)
    # torch's own function notes who called it, a millisecond for each kind of device that is not in use
    torch.default_generator.manual_seed(number)
    if has_generator(device := _in_use()):
        torch.get_device_module(device).manual_seed(number)


def states() -> tuple[Any, ...]:
    """Say where they stand."""
    return states_of_chance(_in_use())


class Drawn:
    """Counts what is drawn from the generators of Python and numpy from now on."""

    def __init__(self) -> None:
        self._python, self._numpy = random.getstate(), np.random.get_state()

    def count(self, most: int) -> int:
        """Return how many words of 32 bits each was asked for, together; at most ``most`` of each."""
        python, numpy = random.Random(), np.random.RandomState()
        python.setstate(self._python)
        numpy.set_state(self._numpy)
        words = 0
        for now, state, draw in (
            (random.getstate()[1], lambda: python.getstate()[1], lambda: python.getrandbits(32)),
            (_place(np.random.get_state()), lambda: _place(numpy.get_state()), lambda: numpy.bytes(4)),
        ):
            for _ in range(most):
                if state() == now:
                    break
                draw()
                words += 1
        return words


def _place(state: Any) -> tuple[bytes, int]:
    return state[1].tobytes(), state[2]


def _in_use() -> torch.device:
    """The accelerator, where somebody has begun to use one; else the CPU."""
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    if has_generator(device) and torch.get_device_module(device).is_initialized():
        return torch.device(device.type, torch.accelerator.current_device_index())
    return torch.device("cpu")


def of(dataset: Any) -> list[Generator]:
    """Find those in its attributes, in data sets that it is made of, and in transforms; what functions take from a module is not
    seen."""
    found: list[Generator] = []
    seen: set[int] = set()
    level = [dataset]
    # what is near comes first: what is met on a long way is looked into where a short one leads there, too
    for _ in range(DEPTH + 1):
        below: list[Any] = []
        for value in level:
            if id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, Generator):
                found.append(value)
            elif not isinstance(value, Tensor | np.ndarray | ModuleType | type):
                below += [part for part in _parts(value) if type(part) not in PLAIN]
        level = below
    return found


def of_modules(model: nn.Module) -> list[Generator]:
    """Find those that modules have as attributes."""
    held = (
        value for module in modules_of(model) for value in vars(module).values() if type(value) not in USUAL
    )
    return [value for value in held if isinstance(value, Generator)]


def seed(generator: Generator, number: int) -> None:
    """Let a generator begin with a number in [0, 2^63)."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(number)
    elif isinstance(generator, random.Random):
        generator.seed(number)
    elif isinstance(generator, np.random.RandomState):
        # forgets the second of two normal numbers, too
        generator.set_state(_state(generator._bit_generator, number))
    else:
        generator.bit_generator.state = _state(generator.bit_generator, number)


def _state(bits: Any, number: int) -> dict[str, Any]:
    """The state of a source of bits that begins with a number."""
    source = next((kind for kind in SOURCES if isinstance(bits, kind)), type(bits))
    return {**source(number).state, "bit_generator": type(bits).__name__}


def _parts(value: Any) -> list[Any]:
    if isinstance(value, MethodType):
        return [value.__self__]
    if isinstance(value, FunctionType):
        return [part for cell in value.__closure__ or () for part in _held(cell)]
    # of one that reads its rows when it is asked for them, no row is read
    if isinstance(value, dict):
        return list(dict.values(value)) if dict.__len__(value) <= FEW else []
    if isinstance(value, list):
        return list(list.__iter__(value)) if list.__len__(value) <= FEW else []
    if isinstance(value, tuple):
        return list(tuple.__iter__(value)) if tuple.__len__(value) <= FEW else []
    held = getattr(value, "__dict__", None)
    return list(held.values()) if isinstance(held, dict) else []


def _held(cell: CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:
        # of a variable that is not assigned yet
        return []
