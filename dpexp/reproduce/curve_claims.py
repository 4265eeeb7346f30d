"""What the seeds of our runs say about a claim that a paper makes with curves; without pairs where there is nothing to go by.
``claims.yaml`` names these functions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean

from scipy import stats

from dpexp.reproduce.documents import grouped
from dpexp.reproduce.fillings import Filling, described, measured
from dpexp.reproduce.pairs import Choice, Finding, Pair, Side, choose, compared
from dpexp.reproduce.records import Record, by_configuration
from dpexp.reproduce.statistics import LEVEL, Comparison, compare

# points of accuracy: "the gap is closed"
MARGIN = 1.0
# two layers whose norms change by factors closer than this move together
SAME_FACTOR = 1.1


def adaptive_closes_the_gap(records: Sequence[Record]) -> Finding:
    """He et al., Figure 3: after the last step, adaptive per-layer is not worse than flat, and fixed per-layer is.

    Args:
        records: of one task and scale.
    """
    pairs = []
    for budget, own in sorted(grouped(records, _budget).items()):
        tried = grouped(measured(own, "accuracy"), lambda filling: filling.record.summary["clip"])
        best = {clip: choose(fillings) for clip, fillings in tried.items()}
        for left, right, expect, margin in (
            ("adaptive_perlayer", "flat", "at_least", MARGIN),
            ("flat", "perlayer", "greater", 0.0),
        ):
            if left in best and right in best:
                what = f"{budget}, {described(best[left].filling.record)}"
                pairs.append(compared(what, (left, best[left]), (right, best[right]), expect, margin))
    noiseless = any(record.facts.get("privacy.noise_multiplier") == 0 for record in records)
    return Finding(pairs, "" if noiseless else "the half with noise")


def quantiles_matter_on_text_alone(records: Sequence[Record]) -> Finding:
    """He et al., Figure 5: accuracies at quantiles from 0.3 to 0.9 are close on images; on SST-2 0.9 beats the smallest one.

    Args:
        records: of one scale; of configurations that differ in nothing but the quantile, those with most values speak.
    """
    name = "clip.target_quantile"
    grids: dict[str, dict[float, Filling]] = {}
    for filling in measured(records, "accuracy"):
        record = filling.record
        grids.setdefault(record.without({name}), {})[float(record.facts[name])] = filling
    pairs, tasks = [], set()
    for grid in (grid for grid in grids.values() if len(grid) > 2):
        record = next(iter(grid.values())).record
        text = record.facts["task"] == "sst2"
        means = {q: filling.mean for q, filling in grid.items() if text or 0.3 <= q <= 0.9}
        if text:
            high, low = min(means, key=lambda q: abs(q - 0.9)), min(means)
        else:
            high, low = (end(means, key=means.__getitem__) for end in (max, min))
        if high == low:
            continue
        what = f"{record.facts['task']}, {_budget(record)}, {described(record)}"
        left, right = ((f"quantile {q:g}", Choice(grid[q], len(means))) for q in (high, low))
        pairs.append(compared(what, left, right, *(("greater", 0.0) if text else ("close", MARGIN))))
        tasks.add(record.facts["task"])
    part = f"the one about {next(iter(tasks))}" if len(tasks) == 1 else ""
    return Finding(pairs, part)


def norms_grow_near_the_input(records: Sequence[Record]) -> Finding:
    """He et al., Figure 2: medians grow through training, and more in the half of the layers that is nearer to the input."""
    pairs = []
    for said, seeds in _changes(records):
        changes = [list(change.values()) for change in seeds if len(change) > 1]
        near, far = [fmean(c[: len(c) // 2]) for c in changes], [fmean(c[len(c) // 2 :]) for c in changes]
        if near:
            factors = f"factor {_factor(near):.2f} near the input, {_factor(far):.2f} near the output"
            pairs.append(Pair(
                f"{said}, log of the last median over the first ({factors})",
                (Side("layers near the input", len(near)), Side("layers near the output", len(far))),
                "above 0", compare(near, far, "greater", paired=True), "Student's t on pairs",
            ))  # fmt: skip
    return Finding(pairs, "the growth; that norms start uniformly low is not tested")


def norms_shift_by_layer(records: Sequence[Record]) -> Finding:
    """He et al., Figure 4: medians move through fine-tuning, by another factor in each layer.

    Supported where an analysis of variance over the layers finds one. Contradicted where every layer's factor is within
    `SAME_FACTOR` of their geometric mean (two one-sided t-tests for each layer, all of which must hold): then they move
    together, or not at all. Both have the seeds as repetitions.
    """
    pairs = []
    for said, seeds in _changes(records):
        layers = [layer for layer in seeds[0] if all(layer in seed for seed in seeds)]
        if len(layers) < 2:
            continue
        factors = {layer: _factor([seed[layer] for seed in seeds]) for layer in layers}
        low, high = min(layers, key=factors.__getitem__), max(layers, key=factors.__getitem__)
        result = Comparison(math.log(factors[high] / factors[low]))
        if len(seeds) > 1:
            centred = [
                [seed[layer] - fmean(seed[name] for name in layers) for seed in seeds] for layer in layers
            ]
            p_for = float(stats.f_oneway(*([seed[layer] for seed in seeds] for layer in layers)).pvalue)
            p_against = max(_within(own, math.log(SAME_FACTOR)) for own in centred)
            # a difference too small to speak of
            p_for = 1.0 if p_against < LEVEL or math.isnan(p_for) else p_for
            result = replace(result, p_for=p_for, p_against=p_against)
        pairs.append(Pair(
            f"{said}, log of the last median over the first (factors {factors[high]:.2f} and {factors[low]:.2f})",
            (Side(high, len(seeds)), Side(low, len(seeds))),
            f"another factor in each layer, not all within a factor of {SAME_FACTOR:g} of their mean", result,
            "analysis of variance",
        ))  # fmt: skip
    return Finding(
        pairs,
        "the shift that differs between layers; the two groups that the 85% quantile parts are for the eye",
    )


def _within(values: Sequence[float], margin: float) -> float:
    """p-value against a mean outside (-margin, margin); 1 where values without a spread leave no test."""
    if len(set(values)) < 2:
        return 1.0
    below = stats.ttest_1samp(values, margin, alternative="less").pvalue
    above = stats.ttest_1samp(values, -margin, alternative="greater").pvalue
    return float(max(below, above))


def _budget(record: Record) -> str:
    target = record.facts.get("privacy.epsilon")
    noise = record.facts.get("privacy.noise_multiplier")
    return f"ε = {target:g}" if target else f"σ = {noise:g}" if noise is not None else "no privacy"


def _factor(logs: Sequence[float]) -> float:
    """Their geometric mean."""
    return math.exp(fmean(logs))


def _changes(records: Sequence[Record]) -> Iterator[tuple[str, list[dict[str, float]]]]:
    """Of each configuration: what it is, and for each seed that logged norms, layer -> log(last median / first median)."""
    for group in by_configuration(records):
        if found := [change for record in group if (change := _log_changes(record))]:
            yield f"{_budget(group[0])}, {described(group[0])}", found


def _log_changes(record: Record) -> dict[str, float]:
    """In the order of the network; layers without gradient left out."""
    kept = record.logged("norms")
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
