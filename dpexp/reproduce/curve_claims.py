"""What the seeds of our runs say about a claim that a paper makes with curves; without pairs where there is nothing to go by.

``claims.yaml`` names these functions. Each takes the records of one task and scale, and compares configurations that agree in
everything but what the claim is about."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from statistics import fmean

from scipy import stats

from dpexp.reproduce.documents import grouped
from dpexp.reproduce.fillings import Filling, budget, described, measured, method
from dpexp.reproduce.pairs import Choice, Finding, Pair, Side, agreeing, best_of_each, compared
from dpexp.reproduce.records import Record, by_configuration
from dpexp.reproduce.statistics import LEVEL, Comparison, compare

# points of accuracy: "the gap is closed"
MARGIN = 1.0
# Millions of parameters of pretrained models.
SIZES = {
    "minilm": 23, "distilbert": 66, "distilroberta": 82, "mpnet": 109, "bert_base": 110, "roberta_base": 125,
    "bert_large": 340, "roberta_large": 355,
}  # fmt: skip
_WHICH_MODEL = ("model", "model.name", "model.id", "model.family", "model.architecture", "runtime.precision")
# two layers whose norms change by factors closer than this move together
SAME_FACTOR = 1.1


def _described(record: Record) -> str:
    return f"{budget(record)}, {described(record)}"


def adaptive_closes_the_gap(records: Sequence[Record]) -> Finding:
    """He et al., Figure 3: after the last step, adaptive per-layer is not worse than flat, and fixed per-layer is."""
    pairs = []
    for spent, own in sorted(grouped(records, budget).items()):
        tried = grouped(measured(own, "accuracy"), lambda filling: filling.record.summary["clip"])
        for left, right, expect, margin in (
            ("adaptive_perlayer", "flat", "at_least", MARGIN),
            ("flat", "perlayer", "greater", 0.0),
        ):
            for one, two in agreeing(tried.get(left, ()), tried.get(right, ()), {"clip"}, ("clip.",)):
                what = f"{spent}, {described(one.filling.record)}"
                pairs.append(compared(what, (left, one), (right, two), expect, margin))
    noiseless = any(record.facts.get("privacy.noise_multiplier") == 0 for record in records)
    return Finding(pairs, "" if noiseless else "the half with noise")


def _grids(
    records: Sequence[Record], name: str, most: float = math.inf
) -> Iterator[tuple[Record, dict[float, Filling]]]:
    """Yield the accuracies of configurations that differ in one setting alone, by its values up to ``most``: three or more."""
    alike = grouped(measured(records, "accuracy"), lambda filling: filling.record.without({name}))
    for own in alike.values():
        grid = {value: f for f in own if (value := float(f.record.facts[name])) <= most}
        if len(grid) >= 3:
            yield own[0].record, grid


def quantiles_matter_on_text_alone(records: Sequence[Record]) -> Finding:
    """He et al., Figure 5: accuracies at quantiles from 0.3 to 0.9 are close on images; on SST-2 0.9 beats the smallest one."""
    pairs = []
    for record, grid in _grids(records, "clip.target_quantile"):
        text = record.facts["task"] == "sst2"
        means = {q: filling.mean for q, filling in grid.items() if text or 0.3 <= q <= 0.9}
        if text:
            high, low = min(means, key=lambda q: abs(q - 0.9)), min(means)
        else:
            high, low = (end(means, key=means.__getitem__) for end in (max, min))
        if high == low:
            continue
        what = f"{record.facts['task']}, {_described(record)}"
        left, right = ((f"quantile {q:g}", Choice(grid[q], len(means))) for q in (high, low))
        pairs.append(compared(what, left, right, *(("greater", 0.0) if text else ("close", MARGIN))))
    return Finding(pairs, f"the one about {records[0].facts['task']}")


def shares_for_quantiles_hardly_matter(records: Sequence[Record]) -> Finding:
    """He et al., Figure 6: the accuracies at shares of the budget from 0.01% to 20% are close."""
    pairs = []
    for record, grid in _grids(records, "clip.quantile_budget", most=0.2):
        high, low = (end(grid, key=lambda share: grid[share].mean) for end in (max, min))
        what = f"{record.facts['task']}, {_described(record)}"
        left, right = ((f"r = {share:g}", Choice(grid[share], len(grid))) for share in (high, low))
        pairs.append(compared(what, left, right, "close", MARGIN))
    return Finding(pairs, "accuracies up to r = 20%")


def larger_models_are_better(records: Sequence[Record]) -> Finding:
    """Li et al., Figure 6: at every ε the largest pretrained model beats the smallest, all else being equal."""
    settings: dict[str, dict[str, Choice]] = {}
    for name, own in grouped(measured(records, "accuracy"), lambda f: str(f.record.facts["model"])).items():
        for context, choice in best_of_each(own, _WHICH_MODEL).items() if name in SIZES else ():
            settings.setdefault(context, {})[name] = choice
    pairs = []
    for found in settings.values():
        smallest, largest = (end(found, key=SIZES.__getitem__) for end in (min, max))
        if smallest != largest:
            record = found[largest].filling.record
            left, right = ((f"{name} ({SIZES[name]}M)", found[name]) for name in (largest, smallest))
            pairs.append(compared(_described(record), left, right, "greater"))
    return Finding(pairs, "some models, one task")


def quality_follows_signal(records: Sequence[Record]) -> Finding:
    """Li et al., Figure 3 (right): of runs of equally many updates, those with more signal to noise at the start end better."""
    name, signal = "optim.batch_size", "signal_to_noise"
    pairs = []
    for _, grid in _grids([record for record in records if record.facts[signal]], name):
        runs = [record for filling in grid.values() for record in filling.records]
        doublings = [math.log2(record.facts[signal]) for record in runs]
        points = [100 * (record.metric("accuracy") or 0.0) for record in runs]
        found = stats.linregress(doublings, points)
        t = stats.t(len(runs) - 2, found.slope, found.stderr)
        low, high = t.interval(1 - LEVEL)
        result = Comparison(found.slope, low, high, t.cdf(0), t.sf(0))
        twice = f"accuracy at twice the ratio, r = {found.rvalue:.2f}"
        sides = Side(twice, len(runs)), Side("at the ratio", len(runs))
        most = max(runs, key=lambda record: float(record.facts[name]))
        ratios = f"ratios of {2 ** min(doublings):.3f} to {2 ** max(doublings):.3f}"
        what = f"{_described(most)} and smaller batches, {ratios}"
        pairs.append(Pair(what, sides, "above 0", result, "linear regression"))
    return Finding(pairs, "that they go together; where it ends is for the eye")


def extreme_splits_are_slower(records: Sequence[Record]) -> Finding:
    """Monir et al., Figure 15: after equally many epochs, the more the budgets of the groups differ, the lower the accuracy. The
    budgets that differ least are compared with each of the others."""
    pairs, name = [], "individual.epsilons"
    for how, own in grouped(measured(records, "accuracy"), lambda filling: method(filling.record)).items():
        splits = grouped(own, lambda filling: tuple(filling.record.facts[name]))
        even, *others = sorted(splits, key=lambda budgets: max(budgets) / min(budgets))
        for one, two in chain.from_iterable(agreeing(splits[even], splits[s], {name}) for s in others):
            left, right = ((budget(side.filling.record), side) for side in (one, two))
            pairs.append(compared(f"{how}, {described(two.filling.record)}", left, right, "greater"))
    return Finding(pairs, unstated="network, batch size, length and learning rate")


def norms_grow_near_the_input(records: Sequence[Record]) -> Finding:
    """He et al., Figure 2: medians grow through training, and more in the half of the layers that is nearer to the input."""
    pairs = []
    for said, seeds in _changes(records):
        changes = [list(change.values()) for change in seeds if len(change) > 1]
        near, far = [fmean(c[: len(c) // 2]) for c in changes], [fmean(c[len(c) // 2 :]) for c in changes]
        if not near:
            continue
        factors = f" (factor {_factor(near):.2f} near the input, {_factor(far):.2f} near the output)"
        for how, one, two, right in (
            (factors, "layers near the input", "layers near the output", far),
            (", near the input", "the last median", "the first", [0.0] * len(near)),
        ):
            pairs.append(Pair(
                f"{said}, log of the last median over the first{how}", (Side(one, len(near)), Side(two, len(near))),
                "above 0", compare(near, right, "greater", paired=True), "Student's t on pairs",
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
            by_layer = [[seed[layer] for seed in seeds] for layer in layers]
            means = [fmean(of_a_seed) for of_a_seed in zip(*by_layer, strict=True)]
            p_for = float(stats.f_oneway(*by_layer).pvalue)
            p_against = max(_alike(logs, means) for logs in by_layer)
            # a difference too small to speak of
            p_for = 1.0 if p_against < LEVEL or math.isnan(p_for) else p_for
            result = replace(result, p_for=p_for, p_against=p_against)
        pairs.append(Pair(
            f"{said}, log of the last median over the first (factors {factors[high]:.2f} and {factors[low]:.2f})",
            (Side(high, len(seeds)), Side(low, len(seeds))),
            f"another factor in each layer, not all within a factor of {SAME_FACTOR:g} of their mean", result,
            "analysis of variance",
        ))  # fmt: skip
    part = "the shift that differs between layers; the two groups that the 85% quantile parts are for the eye"
    return Finding(pairs, part)


def _alike(values: Sequence[float], others: Sequence[float]) -> float:
    """p-value against factors outside of `SAME_FACTOR`; 1 where differences without a spread leave no test."""
    result = compare(values, others, "close", math.log(SAME_FACTOR), paired=True)
    return result.p_for if result.tested else 1.0


def _factor(logs: Sequence[float]) -> float:
    """Their geometric mean."""
    return math.exp(fmean(logs))


def _changes(records: Sequence[Record]) -> Iterator[tuple[str, list[dict[str, float]]]]:
    """Of each configuration: what it is, and for each seed that logged norms, layer -> log(last median / first median)."""
    for group in by_configuration(records):
        if found := [change for record in group if (change := _log_changes(record))]:
            yield _described(group[0]), found


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
