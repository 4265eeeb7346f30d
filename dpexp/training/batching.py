"""Logical batches by Poisson sampling or shuffling, and their physical pieces."""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from dpexp.privacy.sampling import CyclicSampler, FixedSizeSampler, GroupedSampler, PoissonSampler, stream


class Sampler(Protocol):
    """Which examples a step sees: a function of secret key, step and attempt alone, so resuming needs no state."""

    def draw(self, step: int, attempt: int = 0) -> np.ndarray:
        """`[n]` int64, distinct; independent for different attempts where the accounting needs it."""
        ...


class ShuffleSampler:
    """Epoch after epoch in a fresh random order, in batches of a fixed size.

    Not what the accountants assume; for comparison with papers that train so and account as if it were Poisson.

    Args:
        num_examples: N.
        batch_size: at most N. A batch that crosses the end of an epoch takes its rest from the next one, except what it
            holds already: it may be a little smaller.
        key: secret.
    """

    def __init__(self, num_examples: int, batch_size: int, key: bytes):
        self.num_examples, self.batch_size, self.key = num_examples, batch_size, key

    def draw(self, step: int, attempt: int = 0) -> np.ndarray:
        """`[n]` int64, sorted and distinct; the same for every attempt, for there is but one order of an epoch."""
        first = step * self.batch_size
        epoch, offset = divmod(first, self.num_examples)
        drawn = self._order(epoch)[offset : offset + self.batch_size]
        if len(drawn) < self.batch_size:
            drawn = np.concatenate([drawn, self._order(epoch + 1)[: self.batch_size - len(drawn)]])
        return np.unique(drawn)

    def _order(self, epoch: int) -> np.ndarray:
        return np.random.default_rng(stream(self.key, "shuffle", epoch)).permutation(self.num_examples)


def sampler_for(
    sampling: str,
    num_examples: int,
    expected_batch: float,
    key: bytes,
    groups: np.ndarray | None = None,
    rates: Sequence[float] = (),
    rate_of: Callable[[int], float] | None = None,
    bands: int = 1,
) -> Sampler:
    """The sampler of a run: ``poisson``, ``fixed`` or ``shuffle``.

    ``groups`` (`[N]`) of examples may have ``rates`` of their own; ``rate_of``: of each step, where batches grow; ``bands``: the
    steps over which noise is correlated.
    """
    if groups is not None:
        return GroupedSampler(groups, rates, key)
    if bands > 1:
        return CyclicSampler(num_examples, expected_batch / num_examples, bands, key)
    if sampling == "poisson":
        return PoissonSampler(num_examples, expected_batch / num_examples, key, rate_of)
    if sampling == "fixed":
        return FixedSizeSampler(num_examples, round(expected_batch), key)
    return ShuffleSampler(num_examples, max(1, round(expected_batch)), key)


def microbatches(indices: np.ndarray, num_examples: int, count: int, seed: int) -> list[np.ndarray]:
    """Cut a logical batch into microbatches of about equal size; empty ones are left out.

    Each example draws its own place, whatever else was drawn: one example more or less changes one microbatch.

    Args:
        indices: of the drawn examples.
        num_examples: N.
        count: microbatches.
        seed: secret, of this step and attempt.
    """
    places = np.random.Generator(np.random.Philox(key=[seed, 0])).integers(count, size=num_examples)[indices]
    return [indices[places == place] for place in range(count) if (places == place).any()]


def physical_batches(
    indices: np.ndarray,
    length: Callable[[int], int] | None,
    size: int,
    rank: int = 0,
    ranks: int = 1,
) -> list[np.ndarray]:
    """Cut a logical batch into physical ones of examples of similar length, so that little is padded.

    The step needs a sum over examples, and a sum has no order: sorting changes nothing but the rounding.

    Args:
        indices: `[n]` int64, the drawn examples; n may be 0.
        length: the length of an example, in tokens; None: the order of `indices`.
        size: examples per physical batch.
        rank, ranks: which of how many processes this is. Shares are of nearly the same size, and no process needs to be told
            which is its own.

    Returns:
        Arrays that together hold `indices`, or the rank's share of them; none for an empty one. The longest examples
        come first, so that a lack of memory shows at once.
    """
    # first, so that no example is in two shares where processes do not agree on its length
    indices = indices[rank::ranks]
    if length is not None:
        lengths = np.array([length(int(i)) for i in indices], dtype=np.int64)
        indices = indices[np.argsort(-lengths, kind="stable")]
    return [indices[start : start + size] for start in range(0, len(indices), size)]
