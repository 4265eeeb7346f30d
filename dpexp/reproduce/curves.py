"""Figures from what runs logged on their way: norms of each layer (He et al. 2, 4), accuracy over epochs (He et al. 3) and
over time (He et al. 7, 8), and sweeps (He et al. 5; Li et al. 2, 4 are tables with a heat map).

`scripts/keep_record.py` copies a thinned curve of every committed run into its record: ``curves.dev`` and ``curves.norms``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dpexp.reproduce.documents import Document, Rows, Section
from dpexp.reproduce.drawing import draw, heat, lines
from dpexp.reproduce.records import Record


@dataclass(frozen=True)
class Curves:
    """A figure from the records of runs.

    Attributes:
        select: (settings of) records that belong to it.
        kind: "norms" (a heat map of layer x time for each run), "dev" (metric against epochs), "time" (against seconds),
            or "sweep" (last metric against a setting).
        x: the setting of a sweep.
        metric: of the dev set.
        command: that makes such a record.
        eval_every: of the command: how many points.
    """

    title: str
    claim: str
    select: Mapping[str, Any]
    kind: str
    command: str
    metric: str = "accuracy"
    x: str = ""


_TRAIN = "python -m dpexp.train"
_THREE = ("flat", "perlayer", "adaptive_perlayer")
TARGETS: dict[str, Curves] = {
    "figure-he-2": Curves(
        "He et al., Figure 2: norms of every layer through training, CIFAR-10",
        "Norms start uniformly low; as training goes on, those of the layers near the input grow.",
        {"task": "cifar10", "clip": "adaptive_perlayer", "privacy.epsilon": 8}, "norms",
        f"{_TRAIN} task=cifar10 clip=adaptive_perlayer privacy=eps8 scale=small runtime.eval_every=20",
    ),
    "figure-he-3": Curves(
        "He et al., Figure 3: accuracy over epochs, CIFAR-10, with and without noise",
        "Adaptive per-layer clipping closes the gap to flat clipping, with and without noise; fixed per-layer clipping does not.",
        {"task": "cifar10", "clip": _THREE}, "dev",
        f"{_TRAIN} task=cifar10 clip=flat,perlayer,adaptive_perlayer privacy=eps3 scale=small runtime.eval_every=20"
        " seed=0,1,2 -m",
    ),
    "figure-he-4": Curves(
        "He et al., Figure 4: norms of some layers through fine-tuning, SST-2",
        "The distribution of norms shifts as fine-tuning goes on, differently in each layer; the 85% quantile parts two groups.",
        {"task": "sst2", "clip": "adaptive_perlayer", "privacy.epsilon": 8}, "norms",
        f"{_TRAIN} task=sst2 clip=adaptive_perlayer privacy=eps8 scale=small runtime.eval_every=11",
    ),
    "figure-he-5": Curves(
        "He et al., Figure 5: the target quantile",
        "CIFAR-10 is robust to target quantiles from 0.3 to 0.9; on SST-2 those around 0.9 are best.",
        {"task": ("cifar10", "sst2"), "clip": "adaptive_perlayer"}, "sweep",
        f"{_TRAIN} sweep=he2023_fig5_sst2 task=sst2 clip=adaptive_perlayer scale=small",
        x="clip.target_quantile",
    ),
    "figure-he-7": Curves(
        "He et al., Figure 7: loss against wall time, E2E",
        "At any wall time adaptive per-layer clipping has a lower negative log-likelihood than ghost and flat clipping.",
        {"task": "e2e", "clip": ("flat", "adaptive_perlayer")}, "time",
        f"{_TRAIN} task=e2e clip=flat,adaptive_perlayer privacy=eps8 scale=small runtime.eval_every=20 -m",
        metric="loss",
    ),
    "figure-he-8": Curves(
        "He et al., Figure 8: BLEU against wall time, E2E",
        "At the same wall time adaptive per-layer clipping generally has the better BLEU and ROUGE-L.",
        {"task": "e2e", "clip": ("flat", "adaptive_perlayer")}, "time",
        f"{_TRAIN} task=e2e clip=flat,adaptive_perlayer privacy=eps8 scale=small runtime.eval_every=20 -m",
        metric="bleu",
    ),
    "figure-li-1": Curves(
        "Li et al., Figure 1: larger models, MNLI and E2E",
        "At a fixed ε accuracy and BLEU rise with the size of the pretrained model.",
        {"task": ("mnli", "e2e"), "clip": "flat", "scale": "paper"}, "sweep",
        f"{_TRAIN} task=mnli model=distilroberta,roberta_base,roberta_large clip=flat privacy=eps3 -m", x="model",
    ),
    "figure-li-6": Curves(
        "Li et al., Figure 6: larger models on five more tasks",
        "The trend of Figure 1 holds on every task.",
        {"task": ("qnli", "qqp", "sst2", "dart", "personachat"), "clip": "flat", "scale": "paper"}, "sweep",
        f"{_TRAIN} task=sst2 model=distilroberta,roberta_base,roberta_large clip=flat privacy=eps3 -m", x="model",
    ),
    "figure-li-8": Curves(
        "Li et al., Figure 8: label words of text infilling, SST-2",
        "Better label words help private learning by 1 to 2 points, and non-private learning not at all.",
        {"task": "sst2_infilling"}, "sweep",
        f"{_TRAIN} task=sst2_infilling clip=flat privacy=eps3 scale=small", x="task.label_words",
    ),
    "figure-li-9": Curves(
        "Li et al., Figure 9: batch size and learning rate, more tasks",
        "As Figure 2: large batches with large learning rates are best at fixed epochs.",
        {"task": "sst2", "clip": "flat", "privacy.delta": "half_over_n"}, "sweep",
        f"{_TRAIN} sweep=li2022_fig2 task=sst2 clip=flat scale=small", x="optim.batch_size",
    ),
    "figure-monir-15": Curves(
        "Monir et al., Figure 15: accuracy curves of the individualised methods, CIFAR-10",
        "The most extreme splits of the budget converge slowest.",
        {"task": "cifar10", "privacy.individual": ("sampling", "scaling")}, "dev", "",
    ),
}  # fmt: skip
_COLUMNS = {
    "dev": ("run", "epoch", "value", "seed", "ε", "scale", "record"),
    "time": ("run", "seconds", "value", "seed", "ε", "scale", "record"),
    "norms": ("run", "step", "group", "25%", "50%", "75%", "85%", "scale", "record"),
    "sweep": ("run", "x", "value", "seed", "ε", "scale", "record"),
}
MAX_RUNS = 4  # panels of a figure of norms


def build(name: str, records: Sequence[Record]) -> Document:
    """The document of one figure; scales in blocks of their own, the figure drawn from the largest scale that has runs."""
    target = TARGETS[name]
    matching = [record for record in records if record.matches(target.select)]
    sections, counts, drawn = [], [], ""
    png = b""
    for scale in ("paper", "small"):
        own = [record for record in matching if record.summary["scale"] == scale]
        rows = [row for record in own for row in _READ[target.kind](record, target)]
        if target.kind == "sweep" and len({row["x"] for row in rows}) < 2:
            rows = []  # one value is no sweep
        if rows:
            counts.append(f"{scale} {len({row['record'] for row in rows})} runs")
            if not drawn:
                drawn, png = _draw(target, rows)
        said = () if rows else (_todo(target, scale),)
        sections.append(Section(f"scale={scale}", said, _COLUMNS[target.kind] if rows else (), rows, scale))
    private = (
        ("Norms are computed on private data without noise: they are outside every guarantee.",)
        if target.kind == "norms"
        else ()
    )
    found = "see the curves; no test" if counts else "cannot tell: not run"
    words = (
        f"**Claim.** {target.claim}",
        f"**Our runs.** {found}.",
        *private,
        f"Regenerate: `python -m dpexp.report {name}`.",
    )
    return Document(
        name, target.title, name.split("-")[1], words, tuple(sections), _COLUMNS[target.kind], svg=drawn, png=png,
        status=", ".join(counts) or ("not run" if target.command else "not built"),
    )  # fmt: skip


def _todo(target: Curves, scale: str) -> str:
    if not target.command:
        return "Not built."
    if target.select.get("scale", scale) != scale:
        return "No stand-in at this scale."
    return f"Not run: `{target.command.replace(' scale=small', '') if scale == 'paper' else target.command}`"


def _label(record: Record) -> str:
    facts = record.facts
    spent = facts.get("privacy.epsilon")
    return f"{facts['task']} {facts['model']} {facts['clip']} " + (f"ε = {spent:g}" if spent else "no ε")


def _base(record: Record) -> dict[str, str]:
    spent = record.facts.get("privacy.epsilon")
    return {
        "run": _label(record), "seed": str(record.facts["seed"]), "ε": f"{spent:g}" if spent else "∞",
        "scale": record.summary["scale"], "record": f"results/runs/{record.name}",
    }  # fmt: skip


def _dev(record: Record, target: Curves) -> Rows:
    steps = max(
        1,
        record.summary["details"].get("plan", {}).get("steps")
        if record.summary["details"].get("plan")
        else 1,
    )
    epochs = record.facts.get("optim.epochs") or 0.0
    return [
        _base(record) | {"epoch": f"{point['step'] / steps * epochs:.3g}", "seconds": f"{point.get('time_s', 0):.4g}",
                         "value": f"{point['dev'][target.metric]:.4g}"}
        for point in record.summary.get("curves", {}).get("dev", [])
        if target.metric in point["dev"]
    ]  # fmt: skip


def _norms(record: Record, target: Curves) -> Rows:
    kept = record.summary.get("curves", {}).get("norms") or {}
    return [
        _base(record) | {"step": str(point["step"]), "group": group}
        | {f"{q:.0%}": f"{value:.4g}" for q, value in zip(kept["quantiles"], values, strict=True)}
        for point in kept.get("points", [])
        for group, values in zip(kept["groups"], point["values"], strict=True)
    ]  # fmt: skip


def _sweep(record: Record, target: Curves) -> Rows:
    value, x = record.metric(target.metric), record.facts.get(target.x)
    if value is None or x is None:
        return []
    return [
        _base(record) | {"x": f"{x:g}" if isinstance(x, int | float) else str(x), "value": f"{value:.4g}"}
    ]


_READ: dict[str, Callable[[Record, Curves], Rows]] = {
    "dev": _dev,
    "time": _dev,
    "norms": _norms,
    "sweep": _sweep,
}


def _draw(target: Curves, rows: Rows) -> tuple[str, bytes]:
    if target.kind == "norms":
        runs = list(dict.fromkeys(row["record"] for row in rows))[:MAX_RUNS]
        return draw(lambda axes: _draw_norms(axes, rows, runs), len(runs), (5.0, 4.2))
    key = {"dev": "epoch", "time": "seconds", "sweep": "x"}[target.kind]
    numeric = all(_is_number(row[key]) for row in rows)
    names = sorted({row[key] for row in rows})

    def plot(axes: Any) -> None:
        series = []
        for run in (
            sorted({(row["run"], row["seed"]) for row in rows})
            if target.kind != "sweep"
            else sorted({(r["run"], "") for r in rows})
        ):
            own = [row for row in rows if row["run"] == run[0] and run[1] in ("", row["seed"])]
            points = sorted(
                (float(row[key]) if numeric else float(names.index(row[key])), float(row["value"]))
                for row in own
            )
            label = run[0] + (f", seed {run[1]}" if run[1] else "")
            series.append((label, [x for x, _ in points], [y for _, y in points]))
        lines(axes[0], series)
        axes[0].set_xlabel(target.x or key)
        axes[0].set_ylabel(target.metric)
        if not numeric:
            axes[0].set_xticks(range(len(names)), names)

    return draw(plot, 1, (6.0, 4.0))


def _draw_norms(axes: Any, rows: Rows, runs: Sequence[str]) -> None:
    for axis, run in zip(axes, runs, strict=True):
        own = [row for row in rows if row["record"] == run]
        steps, groups = (
            list(dict.fromkeys(r["step"] for r in own)),
            list(dict.fromkeys(r["group"] for r in own)),
        )
        values = {(row["group"], row["step"]): float(row["50%"]) for row in own}
        heat(axis, steps, groups, values, f"{own[0]['run']}: median norm")
        axis.set_xlabel("step")
        axis.tick_params(axis="y", labelsize=5)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
