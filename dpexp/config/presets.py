"""Settings that follow from others: what ``conf/`` writes as ``${own_batch:...}``.

With a given number of steps T the noise in the mean gradient is proportional to √T/N, whatever the batch: so few steps, and a
batch as large as the time allows (Li et al. 2022, section 3.1).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from dpexp.schemas.declared import declared_units

STEPS = 300
# units in a batch: examples, or users with unit=user
FEWEST, MOST = 8, 4096
# units, where a run without privacy counts them later
UNKNOWN = 10_000


def own_batch(num_units: int | None) -> int:
    """Choose B for a person's own data: the power of two nearest to 8√N, at most N/2: 256 of 1,000, 2,048 of 100,000."""
    total = num_units or UNKNOWN
    near = 2 ** round(math.log2(8 * math.sqrt(max(total, 1))))
    largest = 2 ** int(math.log2(max(total / 2, 1)))
    return max(1, min(near, largest, MOST) if total >= 2 * FEWEST else largest)


def own_epochs(num_units: int | None, batch_size: float) -> float:
    """Choose the epochs that make `STEPS` steps, in two digits."""
    return float(f"{STEPS * batch_size / max(num_units or UNKNOWN, 1):.2g}")


def own_rate(num_units: int | None) -> float:
    """Choose η of SGD on fixed features, N/10,000: the noise of such a run, and so the step that it bears, goes with 1/N."""
    return (num_units or UNKNOWN) / 10_000


def if_equal(value: Any, wanted: Any, then: Any, otherwise: Any) -> Any:
    """Choose what suits one choice, or what suits all others: `${if_equal:${peft.name},full,head,all}`."""
    return then if value == wanted else otherwise


RESOLVERS: dict[str, Callable[..., Any]] = {
    # the settings that are composed have the names of a RunConfig
    "declared_units": lambda *, _root_: declared_units(_root_),
    "own_batch": own_batch,
    "own_epochs": own_epochs,
    "own_rate": own_rate,
    "if_equal": if_equal,
}
