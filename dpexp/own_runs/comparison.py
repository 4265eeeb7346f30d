"""Finished runs of one's own by configuration: means over seeds with their intervals, and differences from the first one.

The tests are those of the league (`dpexp.reproduce.statistics`): Welch's t, two-sided, and Holm's correction for several
configurations. The spread over seeds is all that they know of; the choice among many configurations is not in ε.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dpexp.durable import flattened
from dpexp.privacy.shown import upwards
from dpexp.reproduce.documents import number
from dpexp.reproduce.records import ELSEWHERE
from dpexp.reproduce.statistics import Comparison, against, interval, mean_std

# of the metric's own unit
HEAD = (
    "metric",
    "configuration",
    "seeds",
    "ε",
    "mean ± std",
    "95% interval",
    "minus the first",
    "95% of it",
    "p",
    "p (Holm)",
)
# what differs between repetitions of one configuration, or says nothing about it
REPETITION = (
    "seed",
    # precision is not among them: bf16 is no second seed of fp32
    *(name for name in ELSEWHERE if name.startswith("runtime.")),
    "tracker.",
    "trials",
    "data.cache",
    "privacy.keep_key",
    "privacy.noise_seed",
)

Settings = Mapping[str, Any]
Row = tuple[str, ...]


def by_configuration(settings: Sequence[Settings]) -> dict[str, list[int]]:
    """Put runs that differ by their seed alone together.

    Args:
        settings: of each run, nested.

    Returns:
        What tells a configuration from the others, such as ``clip.name=flat``, and the numbers of its runs; in the order given.
    """
    flat = [dict(flattened(dict(each))) for each in settings]
    names = dict.fromkeys(name for each in flat for name in each if not name.startswith(REPETITION))
    differing = [name for name in names if len({repr(each.get(name)) for each in flat}) > 1]
    # a choice of a group (clip=flat) says more than all settings that come with it
    differing.sort(key=lambda name: not name.endswith(".name"))
    told: list[tuple[str, ...]] = [() for _ in flat]
    for name in differing:
        finer = [(*old, f"{name}={each.get(name)}") for old, each in zip(told, flat, strict=True)]
        if len(set(finer)) > len(set(told)):
            told = finer
    found: dict[str, list[int]] = {}
    for at, parts in enumerate(told):
        found.setdefault(", ".join(parts) or "all", []).append(at)
    return found


def repeated(settings: Sequence[Settings]) -> list[int]:
    """Number the runs whose configuration and seed an earlier one has: they are no second measurement.

    Args:
        settings: of each run, nested.
    """
    found = []
    for runs in by_configuration(settings).values():
        seeds = [settings[i].get("seed") for i in runs]
        found += [i for at, i in enumerate(runs) if seeds[at] in seeds[:at]]
    return sorted(found)


def comparison(summaries: Sequence[Mapping[str, Any]], settings: Sequence[Settings]) -> list[Row]:
    """Compare finished runs, a row for each metric and configuration, with the columns `HEAD`.

    Args:
        summaries: of each run, see `dpexp.record`.
        settings: of each run; no two of one configuration and seed (`repeated`).

    Returns:
        No rows for fewer than two runs, or of different tasks.
    """
    if len(summaries) < 2 or len({summary.get("task") for summary in summaries}) > 1:
        return []
    groups = by_configuration(settings)
    measured = [summary.get("metrics", {}) for summary in summaries]
    common = [name for name in measured[0] if all(name in each for each in measured)]
    rows: list[Row] = []
    for metric in common:
        values = {name: [float(measured[i][metric]) for i in runs] for name, runs in groups.items()}
        first, *others = values
        beside = against(values[first], [values[name] for name in others])
        for name, told in zip(values, [("",) * 4, *(_told(*each) for each in beside)], strict=True):
            budgets = _budgets([summaries[i] for i in groups[name]])
            rows.append((metric, name, str(len(values[name])), budgets, *_spread(values[name]), *told))
    return rows


def _told(result: Comparison, corrected: float | None) -> Row:
    """The columns about the difference from the first one."""
    between = _interval(result.low, result.high)
    return f"{result.difference:+.4g}", between, number(result.p_two_sided, ".2g"), number(corrected, ".2g")


def _budgets(summaries: Sequence[Mapping[str, Any]]) -> str:
    """ε by the accountant that decided the noise, of all runs of a configuration."""
    privacy = [summary.get("privacy", {}) for summary in summaries]
    spent = {(each.get("epsilon") or {}).get(each.get("accountant")) for each in privacy}
    return " to ".join(
        upwards(value, ".3g")
        for value in sorted({v for v in spent if v is not None})[:: max(1, len(spent) - 1)]
    )


def _spread(values: Sequence[float]) -> tuple[str, str]:
    mean, std = mean_std(values)
    if std is None:
        return f"{mean:.4g}", ""
    return f"{mean:.4g} ± {std:.2g}", _interval(*interval(values))


def _interval(low: float, high: float) -> str:
    return f"[{low:.4g}, {high:.4g}]" if math.isfinite(low) and math.isfinite(high) else ""
