"""The noise of He et al.: σ, σ_b and σ_new of every setting (Algorithm 1, Proposition 3.1)."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import transformers

from dpexp.benchmark.workloads import workload_named
from dpexp.clipping.groups import build_groups
from dpexp.complexity.architectures import PUBLISHED, build, quiet
from dpexp.models.trainable import set_trainable
from dpexp.privacy.plan import Plan, make_plan
from dpexp.reproduce.documents import Document, as_rows, block, page
from dpexp.reproduce.paper import settings_of_runs

COLUMNS = (
    "tables", "task", "model", "trains", "ε", "N", "B", "E", "steps", "δ", "r", "K", "σ", "σ_b", "σ_new", "not stated",
)  # fmt: skip


@cache
def num_layers(model: str, trainable: str = "all") -> int:
    """K of per-layer clipping: modules that own a trainable parameter."""
    with torch.device("meta"), quiet():
        if model == "WRN16-4":
            network = workload_named("wrn").parts("full").model()
        elif model.startswith("RoBERTa"):
            _, sizes = PUBLISHED[model.lower()]
            network = transformers.RobertaForSequenceClassification(transformers.RobertaConfig(**sizes))
        else:
            network = build(model.lower().replace("-", "")).model
    set_trainable(network, trainable)
    return len(build_groups(network, "layer"))


@cache
def plan_of(
    num_examples: int, batch_size: float, steps: int, delta: str | float, target: float, budget: float = 0.0
) -> Plan:
    """The plan that spends ε = ``target`` under RDP; ``budget`` is r, the share that pays for quantiles."""
    return make_plan(
        num_examples=num_examples,
        expected_batch_size=batch_size,
        steps=steps,
        delta=delta,
        epsilon=target,
        quantile_budget=budget,
    )


def plan_of_setting(setting: dict[str, Any], target: float, budget: float | None = None) -> Plan:
    """The plan of an entry of ``settings.yaml`` that spends a target ε; ``budget`` in the place of its own r."""
    # rounded as the trainer rounds them
    steps = round(setting["E"] * setting["N"] / setting["B"])
    share = setting["r"] if budget is None else budget
    return plan_of(setting["N"], setting["B"], steps, setting["δ"], float(target), share)


def noise_he() -> Document:
    """σ, σ_b and σ_new of every setting of He et al., a row for each ε."""
    lines = []
    for s in settings_of_runs("he2023"):
        layers = num_layers(s["model"], s["trains"])
        for target in s["ε"]:
            plan = plan_of_setting(s, target)
            lines.append((
                *(s[name] for name in COLUMNS[:4]), target, s["N"], s["B"], s["E"], plan.steps, f"{plan.delta:.3g}", s["r"],
                layers, f"{plan.sigma(0):.4f}", f"{plan.sigma_b(0, layers):.2f}", f"{plan.sigma_new(0):.4f}", s.get("open", ""),
            ))  # fmt: skip
    return page("noise-he", [block(as_rows(COLUMNS, lines))])
