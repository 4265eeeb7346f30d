"""The noise of He et al., and the ε columns of Li et al. (2022), Tables 1, 2, 3, 7 and 8, beside ours.

The σ of Li et al. spends ε = 3 or 8 under RDP (their Appendix B); the columns say what the same σ costs under the
central limit theorem of Gaussian DP and under numerically composed tradeoff functions. Settings that the
paper states are used as stated, the others are those that come closest to all printed values of a data set
at once; every row says which (``results/paper/settings.yaml``)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import torch
import transformers

from dpexp.clipping.groups import build_groups
from dpexp.complexity.architectures import PUBLISHED, build, quiet
from dpexp.models.trainable import set_trainable
from dpexp.models.wide_resnet import WideResNet
from dpexp.privacy.accountants import epsilon, prv_bounds
from dpexp.privacy.events import releases
from dpexp.privacy.plan import Plan, make_plan
from dpexp.reproduce.documents import Document, Section, as_rows, grouped, page
from dpexp.reproduce.paper import listed, paper_table

plan_of = cache(make_plan)

# The noise of He et al.: σ, σ_b and σ_new of every setting (Algorithm 1, Proposition 3.1).


@cache
def num_layers(model: str, trainable: str = "all") -> int:
    """K of per-layer clipping: modules that own a trainable parameter."""
    network: torch.nn.Module
    with torch.device("meta"), quiet():
        if model == "WRN16-4":
            network = WideResNet((3, 32, 32), 10)
        elif model.startswith("RoBERTa"):
            _, sizes = PUBLISHED[model.lower()]
            network = transformers.RobertaForSequenceClassification(transformers.RobertaConfig(**sizes))
        else:
            network = build(model.lower().replace("-", "")).model
    set_trainable(network, trainable)
    return len(build_groups(network, "layer"))


def plan_of_setting(setting: dict[str, Any], target: float, budget: float | None = None) -> Plan:
    """The plan of an entry of ``settings.yaml`` that spends a target ε under RDP; ``budget`` in the place of its own r, the share
    that pays for quantiles."""
    return plan_of(
        num_examples=setting["N"], expected_batch_size=setting["B"], delta=setting["δ"], epsilon=float(target),
        # rounded as the trainer rounds them
        steps=round(setting["E"] * setting["N"] / setting["B"]),
        quantile_budget=setting["r"] if budget is None else budget,
    )  # fmt: skip


def settings_he() -> Iterator[dict[str, Any]]:
    """The settings of He et al.; what has a list in ``settings.yaml`` is spelt out."""
    names = ("model", "E", "trains")
    for entry in listed("settings")["he2023"]:
        lists = ([entry[name]] if not isinstance(entry[name], list) else entry[name] for name in names)
        yield from (entry | dict(zip(names, chosen, strict=True)) for chosen in product(*lists))


def noise_he() -> Document:
    """σ, σ_b and σ_new of every setting of He et al., a row for each ε."""
    lines = []
    for s in settings_he():
        layers = num_layers(s["model"], s["trains"])
        for target in s["ε"]:
            plan = plan_of_setting(s, target)
            lines.append(
                {name: s[name] for name in ("tables", "task", "model", "trains")} | {"ε": target}
                | {name: s[name] for name in ("N", "B", "E")}
                | {"steps": plan.steps, "δ": f"{plan.delta:.3g}", "r": s["r"], "K": layers, "σ": f"{plan.sigma(0):.4f}",
                   "σ_b": f"{plan.sigma_b(0, layers):.2f}", "σ_new": f"{plan.sigma_new(0):.4f}", "not stated": s.get("open")}
            )  # fmt: skip
    return page("noise-he", [Section(rows=as_rows(lines))])


# The ε columns of Li et al.

# a value under the CLT, and composed
Pair = tuple[float, float]


class Run(NamedTuple):
    """N examples, expected batch B, E epochs, δ; steps are E·⌊N/B⌋, as with the last, incomplete batch dropped.
    ``as_in``: N of the data set whose B/N and number of steps are kept, where that is stated."""

    N: int
    B: int
    E: int
    δ: str | float = "half_over_n"
    as_in: int | None = None


def _printed(table: str, of: str) -> dict[float, Pair]:
    """Target ε -> what the paper prints; ``of``: a task, or the method that the names of rows begin with."""
    found = {
        (cell.settings["epsilon"], cell.settings["accountant"]): float(cell.value)
        for cell in paper_table("li2022", table)
        if cell.value
        and cell.settings.get("metric") == "epsilon"
        and of in (cell.settings["task"], cell.row.partition(",")[0])
    }
    return {float(target): (found[target, "gdp"], found[target, "prv"]) for target in ("3", "8")}


@cache
def reproduce(run: Run, target: float, factor: float = 1.0) -> tuple[Plan, Pair]:
    """The plan with σ that spends the target under RDP, times a factor, and what it costs under the CLT and composed."""
    sampled = run.as_in or run.N
    batch, steps = run.B * run.N / sampled, run.E * (sampled // run.B)
    plan = plan_of(num_examples=run.N, expected_batch_size=batch, steps=steps, delta=run.δ, epsilon=target)
    plan = replace(plan, noise_multiplier=plan.noise_multiplier * factor)
    event = plan.event()
    parts = releases(event)
    assert parts is not None
    # what the authors' code reports as its estimate
    composed = prv_bounds(parts, plan.delta, eps_error=0.02)[1]
    return plan, (epsilon(event, plan.delta, "gdp"), composed)


def _to_the_digit(printed: Pair, ours: Pair) -> str:
    """Which of the two values round to what is printed."""
    same = [f"{value:.2f}" == f"{shown:.2f}" for shown, value in zip(printed, ours, strict=True)]
    return ["no", "composed", "CLT", "both"][2 * same[0] + same[1]]


def _sigma_for_both(run: Run, target: float, printed: Pair, ours: Pair) -> str:
    """The change of σ, in percent, with which both values would round to print (to first order); "none" within 1%."""
    if _to_the_digit(printed, ours) == "both":
        return "ours"
    # the slopes are taken from half a percent more noise
    step = 0.005
    _, moved = reproduce(run, target, 1 + step)
    low, high = -0.01, 0.01
    for shown, value, other in zip(printed, ours, moved, strict=True):
        slope = (other - value) / math.log1p(step)
        ends = sorted((shown + side * 0.005 - value) / slope for side in (-1, 1))
        low, high = max(low, ends[0]), min(high, ends[1])
    return f"{100 * min(max(0.0, low), high):+.3f}%" if low <= high else "none"


def accounting_li() -> Document:
    """The page: a section for each table of the paper, in it a row for every printed pair with each of its settings."""
    lines = []
    for row in listed("settings")["li2022"]:
        for (target, printed), tried in product(_printed(row["table"], row["of"]).items(), row["tried"]):
            run = Run(**{name: tried[name] for name in Run._fields if name in tried})
            plan, ours = reproduce(run, target)
            values: dict[str, str] = {}
            for name, a, b in zip(("CLT", "composed"), printed, ours, strict=True):
                values |= {f"printed {name}": f"{a:.2f}", f"our {name}": f"{b:.2f}"}
                values[f"difference {name}"] = f"{b - a:+.3f}"
            lines.append({
                "paper": "Li et al. 2022", "table": row["table"], "row": row["row"], "target ε": f"{target:g}", **values,
                "to the digit": _to_the_digit(printed, ours), "σ that gives both": _sigma_for_both(run, target, printed, ours),
                "settings": tried["source"], "N": run.N, "B": f"{plan.expected_batch_size:.0f}", "E": run.E,
                "steps": plan.steps, "δ": f"{plan.delta:.3g}", "σ": f"{plan.noise_multiplier:.3f}", "note": tried.get("note"),
            })  # fmt: skip
    every = as_rows(lines)
    blocks = grouped(every, lambda row: row["table"])
    sections = [Section(f"Table {name}", (), tuple(own[0])[2:], own) for name, own in blocks.items()]
    return page("accounting-li", sections)
