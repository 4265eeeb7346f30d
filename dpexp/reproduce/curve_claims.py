"""What the seeds of our runs say about a claim that a paper makes with curves: a verdict in words, or nothing to go by."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import groupby

from scipy import stats

from dpexp.reproduce import cells
from dpexp.reproduce.pairs import Pair, paragraphs
from dpexp.reproduce.records import Record, by_configuration
from dpexp.reproduce.statistics import CANNOT_TELL, LEVEL, SUPPORTS, compare, mean_std

MARGIN = 1.0  # points of accuracy: "the gap is closed"
Says = Callable[[Sequence[Record]], tuple[str, ...]]


def adaptive_closes_the_gap(records: Sequence[Record]) -> tuple[str, ...]:
    """He et al., Figure 3: after the last step, adaptive per-layer is not worse than flat, and fixed per-layer is.

    Args:
        records: of one task and scale.
    """
    pairs = []
    for length, own in groupby(sorted(records, key=_budget), key=_budget):
        groups = by_configuration(own)
        best: dict[str, tuple[Record, list[float]]] = {}
        for group in groups:
            values = [100 * value for r in group if (value := r.metric("accuracy")) is not None]
            clip = group[0].summary["clip"]
            if values and (
                clip not in best
                or (len(values), mean_std(values)[0]) > (len(best[clip][1]), mean_std(best[clip][1])[0])
            ):
                best[clip] = group[0], values
        for left, right, expect, margin in (
            ("adaptive_perlayer", "flat", "at_least", MARGIN),
            ("flat", "perlayer", "greater", 0.0),
        ):
            if left in best and right in best:
                sides = best[left][1], best[right][1]
                shown = f"{expect} (margin {margin:g})" if margin else expect
                what = f"{length}, {cells.described(best[left][0])}"
                result = compare(*sides, expect, margin)
                pairs.append(Pair(what, left, right, shown, result, (len(sides[0]), len(sides[1]))))
    return paragraphs(pairs)


def norms_grow_near_the_input(records: Sequence[Record]) -> tuple[str, ...]:
    """He et al., Figure 2: medians grow through training, and more in the half of the layers that is nearer to the input."""
    pairs = []
    for group in by_configuration(records):
        changes = [change for record in group if (change := _log_changes(record))]
        halves = [[_mean(list(c.values())[: len(c) // 2]) for c in changes if len(c) > 1],
                  [_mean(list(c.values())[len(c) // 2 :]) for c in changes if len(c) > 1]]  # fmt: skip
        if halves[0]:
            near, far = (math.exp(_mean(half)) for half in halves)
            what = (
                f"{_budget(group[0])}, {cells.described(group[0])}, log of the last median over the first"
                f" (factor {near:.2f} near the input, {far:.2f} near the output)"
            )
            sizes = len(halves[0]), len(halves[1])
            result = compare(halves[0], halves[1], "greater")
            pairs.append(
                Pair(what, "layers near the input", "layers near the output", "greater", result, sizes)
            )
    return paragraphs(pairs) if pairs else ()


def norms_shift_by_layer(records: Sequence[Record]) -> tuple[str, ...]:
    """He et al., Figure 4: medians move through fine-tuning, by another factor in each layer (analysis of variance)."""
    said = []
    for group in by_configuration(records):
        changes = [change for record in group if (change := _log_changes(record))]
        if not changes:
            continue
        layers = [layer for layer in changes[0] if all(layer in change for change in changes)]
        factors = {layer: math.exp(_mean([change[layer] for change in changes])) for layer in layers}
        if len(factors) < 2:
            continue
        low, high = min(factors, key=lambda k: factors[k]), max(factors, key=lambda k: factors[k])
        words = (
            f"{_budget(group[0])}, {cells.described(group[0])}, n = {len(changes)}: from the first to the last look the median"
            f" norm changes by a factor between {factors[low]:.2f} (`{low}`) and {factors[high]:.2f} (`{high}`)"
        )
        if len(changes) < 2:
            said.append(f"- {words}: {CANNOT_TELL} (one seed)")
            continue
        p = float(stats.f_oneway(*([change[layer] for change in changes] for layer in layers)).pvalue)
        verdict = SUPPORTS if p < LEVEL else CANNOT_TELL
        said.append(
            f"- {words}; analysis of variance over layers, seeds as repetitions, p = {p:.2g}: {verdict}"
        )
    if not said:
        return ()
    every = SUPPORTS if all(line.endswith(SUPPORTS) for line in said) else CANNOT_TELL
    return f"**{every}**", "\n".join(said)


def _budget(record: Record) -> str:
    target = record.facts.get("privacy.epsilon")
    noise = record.facts.get("privacy.noise_multiplier")
    return f"ε = {target:g}" if target else f"σ = {noise:g}" if noise is not None else "no privacy"


def _log_changes(record: Record) -> dict[str, float]:
    """Layer -> log(last median / first median), in the order of the network; layers without gradient left out."""
    kept = record.summary.get("curves", {}).get("norms") or {}
    points = kept.get("points", [])
    if len(points) < 2:
        return {}
    median = kept["quantiles"].index(0.5)
    pairs = zip(kept["groups"], points[0]["values"], points[-1]["values"], strict=True)
    return {
        name: math.log(last[median] / first[median])
        for name, first, last in pairs
        if first[median] > 0 and last[median] > 0
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
