"""Poisson sampling, and the seeds that follow from a run's secret key (`dpexp.privacy.keys`)."""

from __future__ import annotations

import hmac
import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from dpexp.errors import UserError


class PoissonSampler:
    """Each of ``num_examples`` is in the sample of a step with probability ``sample_rate``, independently
    of all else.

    Counter based: the draw of a step depends on (key, step, attempt) alone, so that resuming needs no
    state. Raises `UserError` for a rate outside [0, 1] or no examples. ``rate_of``: of each step, where it changes."""

    def __init__(
        self,
        num_examples: int,
        sample_rate: float,
        key: bytes,
        rate_of: Callable[[int], float] | None = None,
    ) -> None:
        if num_examples < 1 or not 0 <= sample_rate <= 1:
            raise UserError(
                f"cannot sample {num_examples} examples at rate {sample_rate:.4g}: N >= 1 and 0 <= q <= 1 are wanted. A batch "
                "(optim.batch_size, batch_size of an engine) is at most all examples"
            )
        self.num_examples = num_examples
        self.sample_rate = sample_rate
        self.rate_of = rate_of
        self._key = key

    def draw(self, step: int, attempt: int = 0) -> NDArray[np.int64]:
        """Indices of the sample, sorted and distinct; may be empty.

        A repeated step (another ``attempt`` in the ledger) must draw anew: its charge is that of an
        independent sample."""
        rate = self.sample_rate if self.rate_of is None else self.rate_of(step)
        return _coins(_generator(self._key, step, attempt), self.num_examples, rate)


def _coins(rng: np.random.Generator, number: int, rate: float) -> NDArray[np.int64]:
    """Throw a coin for each of ``number`` examples, and return the places of those that are in.

    Not their number first: numpy's binomial is an approximation (signs of its Stirling series are wrong), under which
    whether one example is in would depend on how many others are."""
    if rate > 0.25:
        return np.flatnonzero(rng.random(number) < rate)
    # the gaps from one to the next are geometric: as much work as there is to find
    found, last = [np.zeros(0, np.int64)], -1
    while rate > 0 and last < number:
        gaps = rng.geometric(rate, int(rate * number + 6 * math.sqrt(rate * number)) + 8)
        # none but those within the data counts, and sums of longer ones could overflow
        found.append(last + np.cumsum(np.minimum(gaps, number + 1)))
        last = int(found[-1][-1])
    places = np.concatenate(found)
    return places[places < number]


class FixedSizeSampler:
    """Exactly ``batch_size`` of ``num_examples`` in every step, all sets of that size equally likely, steps independent.

    See `PoissonSampler`. Raises `UserError` for a size outside of 1 to N."""

    def __init__(self, num_examples: int, batch_size: int, key: bytes) -> None:
        if not 1 <= batch_size <= num_examples:
            raise UserError(f"cannot draw {batch_size} of {num_examples} examples")
        self.num_examples, self.batch_size, self._key = num_examples, batch_size, key

    def draw(self, step: int, attempt: int = 0) -> NDArray[np.int64]:
        """Indices of the sample, sorted and distinct; another ``attempt`` draws anew."""
        rng = _generator(self._key, step, attempt)
        drawn = rng.choice(self.num_examples, size=self.batch_size, replace=False, shuffle=False)
        return np.sort(drawn).astype(np.int64)


class GroupedSampler:
    """Poisson sampling with a rate for each group of examples (`dpexp.privacy.individual`).

    Args:
        groups: ``[N]``, which group each example is in.
        rates: q_g of each group.
        key: secret; every group draws from a key of its own that follows from it.
    """

    def __init__(self, groups: NDArray[np.int64], rates: Sequence[float], key: bytes) -> None:
        self._members = [np.flatnonzero(groups == group) for group in range(len(rates))]
        self._samplers = [
            PoissonSampler(len(members), rate, _derive(key, "sampling of group", group, 0))
            for group, (members, rate) in enumerate(zip(self._members, rates, strict=True))
        ]

    def draw(self, step: int, attempt: int = 0) -> NDArray[np.int64]:
        """Indices of the sample, sorted and distinct; may be empty. See `PoissonSampler.draw`."""
        drawn = zip(self._members, self._samplers, strict=True)
        return np.sort(np.concatenate([members[sampler.draw(step, attempt)] for members, sampler in drawn]))


class CyclicSampler:
    """Poisson sampling from one part of the data after the other: step t draws from part t mod b, at the rate b·q.

    For noise that is correlated over b steps (`dpexp.privacy.correlated`): an example takes part once in b steps at most, and a
    sample has the expected size that it has without parts. See `PoissonSampler`.

    The examples are dealt into b parts of equal size (up to one) by a chance that is public, for no price rests on it: the same
    in every session, whatever key it has (a copy of a run draws under another one) and whichever version of the libraries. Who
    moved to another part would be drawn twice in b steps.

    Args:
        num_examples: N.
        sample_rate: q.
        bands: b.
        key: secret.
    """

    def __init__(self, num_examples: int, sample_rate: float, bands: int, key: bytes) -> None:
        chance = generator_from(b"dpexp parts of the data").bit_generator
        order = chance.random_raw(num_examples).argsort(kind="stable")
        self._members = [np.sort(order[part::bands]) for part in range(bands)]
        rate = min(1.0, bands * sample_rate)
        self._samplers = [PoissonSampler(len(members), rate, key) for members in self._members]

    def draw(self, step: int, attempt: int = 0) -> NDArray[np.int64]:
        """Indices of the sample, sorted and distinct; may be empty. See `PoissonSampler.draw`."""
        part = step % len(self._members)
        return self._members[part][self._samplers[part].draw(step, attempt)]


def stream(key: bytes, name: str, step: int, attempt: int = 0) -> int:
    """A seed in [0, 2^63) for the generator called ``name``, by HMAC-SHA-256 of the name, step and attempt.

    Different names, steps or attempts give unrelated seeds. An attempt that was charged again (see
    `dpexp.privacy.ledger`) must pass its number: two sums under the same noise reveal their difference."""
    return int.from_bytes(_derive(key, name, step, attempt)[:8], "little") >> 1


def _generator(key: bytes, step: int, attempt: int) -> np.random.Generator:
    return generator_from(_derive(key, "sampling", step, attempt))


def generator_from(digest: bytes) -> np.random.Generator:
    """Philox under the first 16 bytes of a hash: counter based, and the same on every machine."""
    return np.random.Generator(np.random.Philox(key=np.frombuffer(digest[:16], dtype=np.uint64)))


def _derive(key: bytes, name: str, step: int, attempt: int) -> bytes:
    return hmac.digest(key, f"{name}\0{step}\0{attempt}".encode(), "sha256")
