"""What a training step releases, in the event classes of ``dp_accounting``.

Adjacency is add/remove one example everywhere. Noise multipliers are standard deviations in units of the L2
sensitivity of what is released."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import attr
import dp_accounting
import numpy as np
from dp_accounting import (
    ComposedDpEvent,
    DpEvent,
    GaussianDpEvent,
    NonPrivateDpEvent,
    NoOpDpEvent,
    PoissonSampledDpEvent,
    SampledWithoutReplacementDpEvent,
    SelfComposedDpEvent,
)

from dpexp.errors import UserError
from dpexp.privacy.mechanisms import OWN_EVENTS, noise_multiplier

Releases = Mapping[tuple[float, float], int]
"""Poisson-sampled Gaussians: (sampling rate q, noise multiplier) -> how many times. All accountants work on
this."""

# Equal up to rounding is equal: the multipliers of a budget that was split and put together again differ
# from the one before in the last bits, far below what any accountant resolves.
_DIGITS = 13
ADD_OR_REMOVE_ONE = (
    "add or remove one example; N is public and stays, so the example is zeroed out (zero-out adjacency)"
)
REPLACE_ONE = "replace one example by another"

# below it, squares underflow
_NO_NOISE = 1e-150
# kinds among which the best borders are searched
_GRID = 512


@dataclass(frozen=True)
class GroupEvents:
    """What a step releases about an example of each group, where groups of examples have budgets of their own.

    ``membership``: SHA-256 of who is in which group; see `dpexp.privacy.individual`."""

    events: tuple[DpEvent, ...]
    membership: str


def step_event(
    sample_rate: float, noise_multipliers: Sequence[float], others: Sequence[DpEvent] = ()
) -> DpEvent:
    """One step: everything that is released from one Poisson sample, composed *inside* the sampling.

    ``others``: releases of the same sample that are not Gaussian (`dpexp.privacy.mechanisms`).

    Sampling each release by itself would claim that an example can be in the sample for the gradient and
    outside it for the counts, and reports too small an epsilon (see ``docs/privacy.md``)."""
    parts = [*(GaussianDpEvent(float(sigma)) for sigma in noise_multipliers), *others]
    inner = parts[0] if len(parts) == 1 else ComposedDpEvent(parts)
    return PoissonSampledDpEvent(float(sample_rate), inner)


def fixed_size_event(num_examples: int, batch_size: int, noise_multipliers: Sequence[float]) -> DpEvent:
    """One step on a batch of exactly ``batch_size`` of the examples, all sets of that size equally likely.

    Such a batch shows N; so its neighbours replace an example. That takes one contribution out and puts another one in, which
    moves every release twice as far as adding or removing: the multipliers, in units of the latter, are halved here."""
    gaussians = [GaussianDpEvent(float(sigma) / 2) for sigma in noise_multipliers]
    inner = gaussians[0] if len(gaussians) == 1 else ComposedDpEvent(gaussians)
    return SampledWithoutReplacementDpEvent(int(num_examples), int(batch_size), inner)


def neighbouring(event: DpEvent) -> str:
    """Which data sets the event's ε speaks of, in words."""
    return (
        REPLACE_ONE
        if any(isinstance(e, SampledWithoutReplacementDpEvent) for e in _within(event))
        else ADD_OR_REMOVE_ONE
    )


def without_noise(event: DpEvent) -> bool:
    """Whether anything in the event is released with no noise, or next to none."""
    return any(
        isinstance(e, NonPrivateDpEvent)
        or (isinstance(e, GaussianDpEvent) and e.noise_multiplier < _NO_NOISE)
        for e in _within(event)
    )


def _within(event: DpEvent) -> Iterator[DpEvent]:
    """The event and all that it is made of."""
    yield event
    inner = getattr(event, "event", None)
    for part in [inner] if isinstance(inner, DpEvent) else getattr(event, "events", []):
        yield from _within(part)


def composed(counts: Iterable[tuple[DpEvent, int]]) -> DpEvent:
    """Each event as often as its count says, one after the other (adaptively)."""
    parts = [
        event if count == 1 else SelfComposedDpEvent(event, count) for event, count in counts if count > 0
    ]
    if not parts:
        return NoOpDpEvent()
    return parts[0] if len(parts) == 1 else ComposedDpEvent(parts)


def releases(event: DpEvent) -> Releases | None:
    """The event as Poisson-sampled Gaussians, or None where it holds anything else.

    A search counts as the Gaussian that dominates it (`dpexp.privacy.mechanisms`).
    Gaussians that see the same sample are one Gaussian of multiplier (Σ 1/σ_i²)^(-1/2): scale each release
    by its own standard deviation, and together they are one vector of sensitivity (Σ 1/σ_i²)^(1/2) under
    unit noise. σ = 0 stands for a release without noise; what releases nothing (q = 0, no steps, infinite
    noise) is left out."""
    if (counts := _gaussians(event)) is None:
        return None
    unsampled = [_information(sigma) * n for (q, sigma), n in counts.items() if q == 1]
    merged = {key: n for key, n in counts.items() if 0 < key[0] < 1 and math.isfinite(key[1])}
    if unsampled and (information := sum(unsampled)) > 0:
        merged[1.0, _tidy(information**-0.5)] = 1
    return merged


def coarsen(parts: Releases, limit: int) -> Releases:
    """At most ``limit`` different kinds of release, for noise that changes in every step.

    Neighbours are put together with the largest q and the smallest σ among them, which can only raise epsilon: on a
    logarithmic grid, and where q is the same everywhere (noise schedules) then at the borders that raise it least.
    """
    if len(parts) <= limit:
        return parts
    if len({q for q, _ in parts}) == 1:
        return _join(_on_grid(parts, max(limit, _GRID)), limit)
    return _on_grid(parts, limit)


def _on_grid(parts: Releases, limit: int) -> Releases:
    """`coarsen` on a logarithmic grid."""
    if len(parts) <= limit:
        return parts
    rates, sigmas = {q for q, _ in parts}, {sigma for _, sigma in parts}
    bins = (1, limit) if len(rates) == 1 else (limit, 1) if len(sigmas) == 1 else (math.isqrt(limit),) * 2
    rate_bin, sigma_bin = _binning(rates, bins[0]), _binning(sigmas, bins[1])
    cells: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for q, sigma in parts:
        cells.setdefault((rate_bin(q), sigma_bin(sigma)), []).append((q, sigma))
    rounded: Counter[tuple[float, float]] = Counter()
    for members in cells.values():
        worst = max(q for q, _ in members), min(sigma for _, sigma in members)
        rounded[worst] += sum(parts[member] for member in members)
    return rounded


def _join(parts: Releases, limit: int) -> Releases:
    """`coarsen` for a single q, by dynamic programming over the sorted σ.

    What a bin adds is measured by the terms of the central limit theorem: Σ n_i·(w(σ_min) - w(σ_i)), w = e^{1/σ²} - 1.
    Where the borders are best is a matter of tightness alone; any borders are sound."""
    q = next(iter(parts))[0]
    sigmas = sorted(sigma for _, sigma in parts)
    counts = np.asarray([parts[q, sigma] for sigma in sigmas], dtype=np.float64)
    weights = np.expm1(np.minimum(np.asarray(sigmas) ** -2.0, 500.0))
    number, mass = (np.concatenate([[0.0], np.cumsum(x)]) for x in (counts, counts * weights))
    # extra[i, j]: of the bin that holds sigmas[i:j]
    extra = weights[:, None] * (number[None, :] - number[:-1, None]) - (mass[None, :] - mass[:-1, None])
    extra[np.arange(len(sigmas))[:, None] >= np.arange(len(sigmas) + 1)[None, :]] = math.inf
    least, starts = extra[0], []
    for _ in range(limit - 1):
        through = least[:-1, None] + extra
        starts.append(through.argmin(axis=0))
        least = through.min(axis=0)
    joined: Counter[tuple[float, float]] = Counter()
    end = len(sigmas)
    for start_of in (*reversed(starts), np.zeros(len(sigmas) + 1, dtype=np.int64)):
        start = int(start_of[end])
        joined[q, sigmas[start]] += sum(parts[q, sigma] for sigma in sigmas[start:end])
        end = start
    return joined


def encode(event: DpEvent | GroupEvents) -> dict[str, Any]:
    """An event as plain JSON values: its class name and its fields."""
    if isinstance(event, GroupEvents):
        groups = [encode(inner) for inner in event.events]
        return {"type": "GroupEvents", "events": groups, "membership": event.membership}
    fields = attr.asdict(event, recurse=False)
    return {"type": type(event).__name__} | {name: _encode_value(value) for name, value in fields.items()}


def decode_groups(record: Mapping[str, Any]) -> GroupEvents | None:
    """The inverse of `encode` for a `GroupEvents`; None for the record of anything else."""
    if record.get("type") != "GroupEvents":
        return None
    return GroupEvents(tuple(decode(inner) for inner in record["events"]), record["membership"])


def decode(record: Mapping[str, Any]) -> DpEvent:
    """The inverse of `encode`. Raises `UserError` for what is not an event."""
    name = str(record.get("type"))
    kind = OWN_EVENTS.get(name) or getattr(dp_accounting, name, None)
    if not (isinstance(kind, type) and issubclass(kind, DpEvent)):
        raise UserError(f"{record.get('type')!r} is not an event of dp_accounting")
    try:
        return kind(**{name: _decode_value(value) for name, value in record.items() if name != "type"})
    except TypeError as error:
        raise UserError(f"{kind.__name__} does not fit its fields: {error}") from None


def sequence(event: DpEvent, count: int = 1) -> Iterator[tuple[DpEvent, int]]:
    """Yield what is composed one after the other, outside of any sampling, and how often; what releases nothing is left out."""
    if isinstance(event, SelfComposedDpEvent):
        yield from sequence(event.event, count * event.count)
    elif isinstance(event, ComposedDpEvent):
        for inner in event.events:
            yield from sequence(inner, count)
    elif count and not isinstance(event, NoOpDpEvent):
        yield event, count


def sampled(event: DpEvent) -> tuple[float, DpEvent]:
    """Find the rate of Poisson sampling, 1 where there is none, and what is released from the sample."""
    if isinstance(event, PoissonSampledDpEvent):
        # a product of rates may be rounded to more than all
        return min(1.0, float(event.sampling_probability)), event.event
    return 1.0, event


def _gaussians(event: DpEvent) -> Counter[tuple[float, float]] | None:
    """The event as in `releases`, unmerged; None where it holds something that is not a (sampled) Gaussian."""
    counts: Counter[tuple[float, float]] = Counter()
    for part, count in sequence(event):
        if isinstance(part, NonPrivateDpEvent):
            counts[1.0, 0.0] += count
            continue
        q, inner = sampled(part)
        if isinstance(part, GaussianDpEvent):
            seen = Counter({(1.0, float(part.noise_multiplier)): 1})
        elif (dominating := noise_multiplier(part)) is not None:
            seen = Counter({(1.0, dominating): 1})
        elif inner is part or (within := _gaussians(inner)) is None:
            return None
        else:
            seen = within
        # a sample of a sample is not one Gaussian
        if any(inner_q != 1 for inner_q, _ in seen):
            return None
        if q == 0 or not seen:
            continue
        information = sum(n * _information(sigma) for (_, sigma), n in seen.items())
        counts[q, _tidy(information**-0.5) if information else math.inf] += count
    return counts


def _information(sigma: float) -> float:
    """1/σ²: 0 of infinite noise, inf of next to none; finite noise whose square would overflow counts as less than it is."""
    if math.isinf(sigma):
        return 0.0
    return math.inf if sigma < _NO_NOISE else min(sigma, 1 / _NO_NOISE) ** -2


def _binning(values: Collection[float], bins: int) -> Callable[[float], int]:
    """A function that says in which of ``bins`` equal parts of the range of log(values) a value is."""
    low, high = math.log(min(values)), math.log(max(values))
    if high == low:
        return lambda value: 0
    return lambda value: min(bins - 1, int((math.log(value) - low) / (high - low) * bins))


def _tidy(sigma: float) -> float:
    return float(f"{sigma:.{_DIGITS}g}")


def _encode_value(value: Any) -> Any:
    if isinstance(value, DpEvent):
        return encode(value)
    return [_encode_value(item) for item in value] if isinstance(value, list | tuple) else value


def _decode_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return decode(value)
    return [_decode_value(item) for item in value] if isinstance(value, list) else value
