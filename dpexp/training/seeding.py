"""What a physical batch draws besides its examples follows from the run's key: dropout, masks, what generators of data and model
give.

These draw by place in the batch, and one more example moves the places of the others. In public that would let it move the sum by
more than its own share; in secret all places are alike (docs/privacy.md).
"""

import hashlib
import random
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dpexp.errors import UserError
from dpexp.privacy.sampling import stream
from dpexp.training import generators


class Seeds:
    """Seeds each physical batch, and notices when anyone else seeds torch's generators between a batch and its losses.

    A seed depends on key, step, attempt and number of the batch alone, so that resuming needs no state.

    Args:
        device: of the model.
        key: the run's secret.
        model, data: what examples go through, and what makes them (a data set, a task); generators in them are seeded, too.
    """

    def __init__(self, device: torch.device, key: bytes, model: nn.Module, data: Any = None):
        self.key, self.model, self.data = key, model, data
        self._watched = [torch.default_generator]
        # of CUDA and XPU; other kinds of devices do not say
        there = getattr(torch.get_device_module(device), "default_generators", ())
        self._watched += there[device.index or 0 :][:1]
        self._own: list[generators.Generator] = []
        # step, attempt, and number of the batch among those of all ranks
        self._place = 0, 0, 0
        self._look()

    def find(self) -> None:
        """Find the generators of data and model again: a loop may have given them others."""
        self._own = [*generators.of(self.data), *generators.of_modules(self.model)]

    def knows(self, generator: Any) -> bool:
        """Whether a generator is among those that are seeded."""
        return any(generator is known for known in (*self._watched, *self._own))

    def begin(self, step: int, attempt: int, number: int) -> None:
        """Seed what a batch draws; it has this number among those that all ranks take in the step."""
        self._place = step, attempt, number
        self._seed(f"dropout {number}")
        for place, generator in enumerate(self._own):
            generators.seed(generator, stream(self.key, f"data {number} {place}", step, attempt))

    def leave(self) -> None:
        """Seed again behind a step: many a checkpoint holds states of generators, from which the last dropout follows."""
        self.begin(*self._place[:2], -1)

    def made(self) -> None:
        """Seed again where the present batch is made, and making it has seeded: a data set does so by its rows."""
        if self._seeds != self._now():
            self._seed(f"forward {self._place[2]}")

    def check(self) -> None:
        """Raise `UserError` where the losses of the present batch have drawn from another seed."""
        for generator, seed in zip(self._watched, self._seeds, strict=True):
            if (now := generator.initial_seed()) == seed:
                continue
            fresh = torch.Generator(generator.device).manual_seed(now)
            if not torch.equal(fresh.get_state(), generator.get_state()):
                raise UserError(
                    f"torch.manual_seed({now}) was called between a batch and its losses, and dropout, or what else draws by the "
                    "place in the batch, has drawn from it: with numbers that others can know, one example more moves the "
                    "masks of all behind it, and no noise is for that. Leave it out (the engine seeds every batch, from the "
                    "run's key, and repeats it after a crash), or call it outside of the loop over batches"
                )

    def _seed(self, name: str) -> None:
        seed = stream(self.key, name, *self._place[:2])
        seed_torch(seed)
        random.seed(seed)
        np.random.seed([seed & 0xFFFFFFFF, seed >> 32])
        self._look()

    def _look(self) -> None:
        self._seeds = self._now()

    def _now(self) -> list[int]:
        return [generator.initial_seed() for generator in self._watched]


def seed_torch(seed: int) -> None:
    """Seed torch's default generators, of every device, for what a forward pass draws (dropout).

    The CPU's gets its whole state from the seed, in [0, 2^63); ``torch.manual_seed`` would keep 32 bits of it."""
    layout = _state_layout()
    if layout is None or _accelerated():
        # each time it writes down who asked, for a device that is there and not in use yet: dear where a step takes milliseconds
        torch.manual_seed(seed)
    if layout is not None:
        torch.default_generator.set_state(_full_state(layout, seed.to_bytes(8, "little")))


@cache
def _accelerated() -> bool:
    """Whether there are other generators than the CPU's."""
    return torch.accelerator.is_available()


def _full_state(layout: NDArray[np.uint64], seed: bytes) -> Tensor:
    state = layout.copy()
    state[3:627] = _words(seed)
    return torch.from_numpy(state.view(np.uint8))


def _words(seed: bytes) -> NDArray[np.uint32]:
    return np.frombuffer(hashlib.shake_256(seed).digest(4 * 624), dtype=np.uint32)


@lru_cache(maxsize=1)
def _state_layout() -> NDArray[np.uint64] | None:
    """A freshly seeded state of torch's CPU generator, where its 624 words are found at 3; None for another
    layout."""
    state = torch.Generator().manual_seed(5489).get_state().numpy().view(np.uint64).copy()
    second = (1812433253 * (5489 ^ (5489 >> 30)) + 1) & 0xFFFFFFFF
    return state if len(state) > 627 and state[3] == 5489 and state[4] == second else None
