"""What the seeds of our runs say about a claim that a paper makes with curves: a verdict in words, or nothing to go by."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import groupby

from scipy import stats

from dpexp.reproduce import cells
from dpexp.reproduce.cells import Filling
from dpexp.reproduce.pairs import Choice, Pair, choose, compared, paragraphs
from dpexp.reproduce.records import Record, by_configuration
from dpexp.reproduce.statistics import (
    CANNOT_TELL,
    LEVEL,
    Comparison,
    compare,
    compare_paired,
    judge,
    overall,
)

MARGIN = 1.0  # points of accuracy: "the gap is closed"
SAME_FACTOR = 1.1  # two layers whose norms change by factors closer than this move together
Says = Callable[[Sequence[Record]], tuple[str, ...]]


def adaptive_closes_the_gap(records: Sequence[Record]) -> tuple[str, ...]:
    """He et al., Figure 3: after the last step, adaptive per-layer is not worse than flat, and fixed per-layer is.

    Args:
        records: of one task and scale.
    """
    pairs = []
    for length, own in groupby(sorted(records, key=_budget), key=_budget):
        tried: dict[str, list[Filling]] = {}
        for filling in cells.measured(own, "accuracy"):
            tried.setdefault(filling.records[0].summary["clip"], []).append(filling)
        best = {clip: choose(fillings) for clip, fillings in tried.items()}
        for left, right, expect, margin in (
            ("adaptive_perlayer", "flat", "at_least", MARGIN),
            ("flat", "perlayer", "greater", 0.0),
        ):
            if left in best and right in best:
                sides = best[left], best[right]
                what = f"{length}, {cells.described(sides[0].filling.records[0])}"
                result = compare(sides[0].filling.values, sides[1].filling.values, expect, margin)
                pairs.append(compared(what, (left, right), sides, expect, margin, result))
    noiseless = any(record.facts.get("privacy.noise_multiplier") == 0 for record in records)
    return paragraphs(pairs, "" if noiseless else "the half with noise")


def quantiles_matter_on_text_alone(records: Sequence[Record]) -> tuple[str, ...]:
    """He et al., Figure 5: accuracies at quantiles from 0.3 to 0.9 are close on images; on SST-2 0.9 beats the smallest one.

    Args:
        records: of one scale; of configurations that differ in nothing but the quantile, those with most values speak.
    """
    name = "clip.target_quantile"
    grids: dict[str, dict[float, Filling]] = {}
    for group in by_configuration(records):
        measured = [(r, 100 * value) for r in group if (value := r.metric("accuracy")) is not None]
        if measured:
            rest = {key: value for key, value in group[0].science.items() if key != name}
            filling = Filling(tuple(r for r, _ in measured), tuple(value for _, value in measured))
            grids.setdefault(str(sorted(rest.items(), key=str)), {})[float(group[0].facts[name])] = filling
    pairs = []
    for grid in (grid for grid in grids.values() if len(grid) > 2):
        record = next(iter(grid.values())).records[0]
        text = record.facts["task"] == "sst2"
        means = {q: _mean(f.values) for q, f in grid.items() if text or 0.3 <= q <= 0.9}
        if text:
            high, low, expect, margin = min(means, key=lambda q: abs(q - 0.9)), min(means), "greater", 0.0
        else:
            best = max(means, key=lambda q: means[q])
            high, low, expect, margin = best, min(means, key=lambda q: means[q]), "close", MARGIN
        if high == low:
            continue
        sides = Choice(grid[high], len(means)), Choice(grid[low], len(means))
        what = f"{record.facts['task']}, {_budget(record)}, {cells.described(record)}"
        result = compare(sides[0].filling.values, sides[1].filling.values, expect, margin)
        pairs.append(
            compared(what, (f"quantile {high:g}", f"quantile {low:g}"), sides, expect, margin, result)
        )
    done = {pair.what.partition(",")[0] for pair in pairs}
    part = "" if len(done) > 1 else f"the one about {next(iter(done))}" if done else ""
    return paragraphs(pairs, part) if pairs else ()


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
            result = compare_paired(halves[0], halves[1], "greater")
            names = "layers near the input", "layers near the output"
            pairs.append(Pair(what, *names, "greater", result, sizes, paired=True))
    part = "the growth; that norms start uniformly low is not tested"
    return paragraphs(pairs, part) if pairs else ()


def norms_shift_by_layer(records: Sequence[Record]) -> tuple[str, ...]:
    """He et al., Figure 4: medians move through fine-tuning, by another factor in each layer.

    Supported where an analysis of variance over the layers finds one. Contradicted where every layer's factor is within
    `SAME_FACTOR` of their geometric mean (two one-sided t-tests for each layer, all of which must hold): then they move
    together, or not at all. Both have the seeds as repetitions.
    """
    said: list[str] = []
    results: list[Comparison] = []
    for group in by_configuration(records):
        changes = [change for record in group if (change := _log_changes(record))]
        if not changes:
            continue
        layers = [layer for layer in changes[0] if all(layer in change for change in changes)]
        factors = {layer: math.exp(_mean([change[layer] for change in changes])) for layer in layers}
        if len(factors) < 2:
            continue
        low, high = min(factors, key=lambda k: factors[k]), max(factors, key=lambda k: factors[k])
        middle = math.exp(_mean([math.log(factor) for factor in factors.values()]))
        words = (
            f"{_budget(group[0])}, {cells.described(group[0])}, n = {len(changes)}: from the first to the last look the median"
            f" norm changes by a factor between {factors[low]:.2f} (`{low}`) and {factors[high]:.2f} (`{high}`)"
        )
        if len(changes) < 2:
            results.append(Comparison(0.0, -math.inf, math.inf, None, None, CANNOT_TELL))
            said.append(f"- {words}: {CANNOT_TELL} (one seed)")
            continue
        p_for = float(stats.f_oneway(*([change[layer] for change in changes] for layer in layers)).pvalue)
        p_against = max(
            _within(
                [change[layer] - _mean([change[one] for one in layers]) for change in changes],
                math.log(SAME_FACTOR),
            )
            for layer in layers
        )
        p_for = 1.0 if p_against < LEVEL or math.isnan(p_for) else p_for  # a difference too small to speak of
        verdict = judge(p_for, p_against)
        results.append(
            Comparison(math.log(factors[high] / factors[low]), -math.inf, math.inf, p_for, p_against, verdict)
        )
        said.append(
            f"- {words}; p for another factor in each layer (analysis of variance) {p_for:.2g}, against (all within a factor of"
            f" {SAME_FACTOR:g} of {middle:.2f}) {p_against:.2g}: {verdict}"
        )
    if not said:
        return ()
    return (
        f"**{overall(results)}**",
        "\n".join(said),
        "Tested is the shift that differs between layers; the two groups that the 85% quantile parts are for the eye.",
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
