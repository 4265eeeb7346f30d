"""The noise of He et al.: σ, σ_b and σ_new of every setting (Algorithm 1, Proposition 3.1)."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import transformers

from dpexp.benchmark.workloads import workload_named
from dpexp.clipping.groups import build_groups
from dpexp.complexity.architectures import PUBLISHED, build, quiet
from dpexp.models.trainable import set_trainable
from dpexp.privacy.plan import Plan, make_plan
from dpexp.reproduce.documents import Document, Rows, Section, as_rows


class Setting(NamedTuple):
    """One setting of He et al.; what the paper leaves open is in ``open``."""

    tables: str
    task: str
    model: str
    trainable: str
    num_examples: int
    batch_size: int
    epochs: int
    delta: str | float
    quantile_budget: float
    epsilons: tuple[float, ...]
    open: str = ""

    def plan(self, target: float, budget: float | None = None) -> Plan:
        """That spends the target ε; ``budget`` in the place of its own r."""
        # rounded as the trainer rounds them
        steps = round(self.epochs * self.num_examples / self.batch_size)
        share = self.quantile_budget if budget is None else budget
        return plan_of(self.num_examples, self.batch_size, steps, self.delta, target, share)


_GLUE_B = "B is one of 512, 1024, 2048: the mark of the chosen one is lost in our copy"
_BOTH = f"{_GLUE_B}; A.2 trains attention and head alone, the captions say all: both are given"
_DELTA = "δ is not stated: 1/(2N) as Li et al."
_MODELS = ("RoBERTa-base", "RoBERTa-large")


def _sst2(tables: str, model: str, trainable: str, epochs: int, unstated: str) -> Setting:
    return Setting(
        tables, "SST-2", model, trainable, 67349, 1024, epochs, "n_pow_-1.1", 0.1, (3, 8), unstated
    )


FINE_TUNING = [_sst2("1b, 3, 10, 11b", model, "all", 20, _GLUE_B) for model in _MODELS]
HE_SETTINGS = (
    Setting("1a, 2, 11a, Figure 3", "CIFAR-10", "WRN16-4", "all", 50000, 4096, 300, 1e-5, 0.01, (1, 3, 5, 8)),
    *FINE_TUNING,
    *(
        _sst2("4, 12", model, trainable, epochs, _BOTH)
        for model in _MODELS
        for epochs in (3, 10, 20, 30)
        for trainable in ("all", "attention+head")
    ),
    Setting("5", "E2E", "GPT-2", "all", 42061, 1000, 10, "half_over_n", 0.01, (3, 8), _DELTA),
    Setting("5", "DART", "GPT-2", "all", 62659, 1500, 15, "half_over_n", 0.01, (3, 8), _DELTA),
)
NOISE_COLUMNS = (
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


def noise_rows() -> Rows:
    """One row for each setting and ε."""
    lines = []
    for s in HE_SETTINGS:
        layers = num_layers(s.model, s.trainable)
        for target in s.epsilons:
            plan = s.plan(target)
            lines.append((
                s.tables, s.task, s.model, s.trainable, f"{target:g}", s.num_examples, s.batch_size, s.epochs, plan.steps,
                f"{plan.delta:.3g}", f"{s.quantile_budget:g}", layers, f"{plan.sigma(0):.4f}", f"{plan.sigma_b(0, layers):.2f}",
                f"{plan.sigma_new(0):.4f}", s.open,
            ))  # fmt: skip
    return as_rows(NOISE_COLUMNS, lines)


def noise_he() -> Document:
    """σ, σ_b and σ_new of every setting of He et al."""
    words = (
        "σ spends ε under RDP over all steps; of each step's budget the share r pays for the K counts: σ_b = σ·√(K/(4r)),"
        " σ_new = σ/√(1-r) (Proposition 3.1, Remark 3.1, with centred counts). The paper prints none of these numbers; they"
        " follow from what it states. K counts the modules that own a trainable parameter (WRN16-4 with GroupNorm). Fixed"
        " thresholds and flat clipping take σ."
    )
    section = Section("", (), NOISE_COLUMNS, noise_rows())
    return Document("noise-he", "He et al.: the noise of every table", (words,), (section,))
