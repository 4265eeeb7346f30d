"""Figures from what runs logged on their way: norms of each layer (He et al. 2, 4), accuracy over epochs (He et al. 3) and
over time (He et al. 7, 8), and sweeps (He et al. 5; Li et al. 2, 4 are tables with a heat map).

`scripts/keep_record.py` copies a thinned curve of every committed run into its record: ``curves.dev`` and ``curves.norms``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dpexp.reproduce import curve_claims
from dpexp.reproduce.documents import Document, Rows, Section
from dpexp.reproduce.drawing import COLOURS, MARKERS, draw, heat
from dpexp.reproduce.records import Record, by_configuration


@dataclass(frozen=True)
class Curves:
    """A figure from the records of runs.

    Attributes:
        select: (settings of) records that belong to it.
        kind: "norms" (a heat map of layer x time for each run), "dev" (metric against epochs), "time" (against seconds),
            or "sweep" (last metric against a setting).
        x: the setting of a sweep.
        metric: of the dev set.
        command: that makes such a record at scale=small; at scale=paper without that word.
        says: the verdict of the seeds, as paragraphs; None where there is no test.
    """

    title: str
    claim: str
    select: Mapping[str, Any]
    kind: str
    command: str
    metric: str = "accuracy"
    x: str = ""
    says: curve_claims.Says | None = None


_TRAIN = "python -m dpexp.train"
_CIFAR = ("cifar10", "cifar10_jpeg")
_THREE = ("flat", "perlayer", "adaptive_perlayer")
TARGETS: dict[str, Curves] = {
    "figure-he-2": Curves(
        "He et al., Figure 2: norms of every layer through training, CIFAR-10",
        "Norms start uniformly low; as training goes on, those of the layers near the input grow.",
        {"task": _CIFAR, "clip": "adaptive_perlayer"}, "norms",
        f"{_TRAIN} task=cifar10_jpeg clip=adaptive_perlayer privacy=eps8 scale=small runtime.eval_every=49 seed=0,1,2 -m",
        says=curve_claims.norms_grow_near_the_input,
    ),
    "figure-he-3": Curves(
        "He et al., Figure 3: accuracy over epochs, CIFAR-10, with and without noise",
        "Adaptive per-layer clipping closes the gap to flat clipping, with and without noise; fixed per-layer clipping does not.",
        {"task": _CIFAR, "clip": _THREE}, "dev",
        f"{_TRAIN} task=cifar10_jpeg clip=flat,perlayer,adaptive_perlayer privacy=eps3 scale=small runtime.eval_every=49"
        " seed=0,1,2 -m",
        says=curve_claims.adaptive_closes_the_gap,
    ),
    "figure-he-4": Curves(
        "He et al., Figure 4: norms of some layers through fine-tuning, SST-2",
        "The distribution of norms shifts as fine-tuning goes on, differently in each layer; the 85% quantile parts two groups.",
        {"task": "sst2", "clip": "adaptive_perlayer"}, "norms",
        f"{_TRAIN} task=sst2 clip=adaptive_perlayer privacy=eps8 scale=small runtime.eval_every=11 seed=0,1,2 -m",
        says=curve_claims.norms_shift_by_layer,
    ),
    "figure-he-5": Curves(
        "He et al., Figure 5: the target quantile",
        "CIFAR-10 is robust to target quantiles from 0.3 to 0.9; on SST-2 those around 0.9 are best.",
        {"task": (*_CIFAR, "sst2"), "clip": "adaptive_perlayer"}, "sweep",
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
MAX_RUNS = 2  # of a figure of norms, two panels each
MAX_LINES = 6  # layers in its second panel


def build(name: str, records: Sequence[Record]) -> Document:
    """The document of one figure; a block for each scale and task, the figure drawn from the first that has runs."""
    target = TARGETS[name]
    matching = [record for record in records if record.matches(target.select)]
    sections, counts, drawn, found = [], [], "", []
    png = b""
    for scale in ("paper", "small"):
        of_scale = [record for record in matching if record.summary["scale"] == scale]
        shown = []
        for tasks in _tasks(target, of_scale):
            own = [record for record in of_scale if record.facts["task"] in tasks]
            rows = _rows(target, own)
            if not rows:
                continue
            heading = f"scale={scale}, {', '.join(tasks)}"
            counts.append(
                f"{scale} {len({r for row in rows for r in row['record'].split(', ')})} runs on {', '.join(tasks)}"
            )
            said = target.says(own) if target.says else ()
            found += [f"{heading}: {said[0].strip('*')}"] if said else []
            if not drawn:
                drawn, png = _draw(target, rows)
            shown.append(Section(heading, said, _COLUMNS[target.kind], rows, scale))
        sections += shown or [Section(f"scale={scale}", (_todo(target, scale),), (), [], scale)]
    private = (
        ("Norms are computed on private data without noise: they are outside every guarantee.",)
        if target.kind == "norms"
        else ()
    )
    ours = "; ".join(found) or ("see the curves; no test" if counts else "cannot tell: not run")
    words = (
        f"**Claim.** {target.claim}",
        f"**Our runs.** {ours}.",
        *private,
        f"Regenerate: `python -m dpexp.report {name}`.",
    )
    return Document(
        name, target.title, name.split("-")[1], words, tuple(sections), _COLUMNS[target.kind], svg=drawn, png=png,
        status=", ".join(counts) or ("not run" if target.command else "not built"),
    )  # fmt: skip


def _tasks(target: Curves, records: Sequence[Record]) -> list[tuple[str, ...]]:
    """The tasks of each block: one by one, but for a sweep whose picture has them all."""
    tasks = sorted({str(record.facts["task"]) for record in records})
    return [tuple(tasks)] if target.kind == "sweep" and tasks else [(task,) for task in tasks]


def _rows(target: Curves, records: Sequence[Record]) -> Rows:
    """Of all records; of one seed for each configuration where norms of all layers would make too many."""
    chosen = (
        [group[0] for group in by_configuration(_with_norms(records))] if target.kind == "norms" else records
    )
    told_apart = _labels(chosen, target.x)
    rows = [
        row | {"run": label}
        for record, label in zip(chosen, told_apart, strict=True)
        for row in _READ[target.kind](record, target)
    ]
    return (
        [] if target.kind == "sweep" and len({row["x"] for row in rows}) < 2 else rows
    )  # one value is no sweep


_APART = {
    "optim.lr": "lr", "optim.batch_size": "B", "optim.epochs": "E", "optim.steps": "steps", "clip.clip_norm": "C",
    "clip.target_quantile": "quantile", "model.trainable": "trains", "peft.name": "peft", "clip.allocation": "allocation",
}  # fmt: skip


def _labels(records: Sequence[Record], x: str) -> list[str]:
    """A name for the line of each record: equal for the seeds of a configuration (and along x), else told apart."""
    found = [_label(record) for record in records]
    for key, word in _APART.items():
        kept = {
            label: {str(r.facts.get(key)) for r, own in zip(records, found, strict=True) if own == label}
            for label in found
        }
        found = [
            f"{label}, {word} {_short(record.facts.get(key))}" if key != x and len(kept[label]) > 1 else label
            for record, label in zip(records, found, strict=True)
        ]
    return found


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def _with_norms(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if record.summary.get("curves", {}).get("norms")]


def _todo(target: Curves, scale: str) -> str:
    if not target.command:
        return "Not built."
    if target.select.get("scale", scale) != scale:
        return "No stand-in at this scale."
    if scale == "paper":  # the data that the paper has, for the length that it trains
        words = [
            w for w in target.command.split() if w != "scale=small" and not w.startswith("runtime.eval_every")
        ]
        return f"Not run: `{' '.join(words).replace('cifar10_jpeg', 'cifar10')}`"
    return f"Not run: `{target.command}`"


def _label(record: Record) -> str:
    facts = record.facts
    spent = facts.get("privacy.epsilon")
    return f"{facts['task']} {facts['model']} {facts['clip']} " + (f"ε = {spent:g}" if spent else "no ε")


def _base(record: Record) -> dict[str, str]:
    spent = record.facts.get("privacy.epsilon")
    return {
        "seed": str(record.facts["seed"]), "ε": f"{spent:g}" if spent else "∞",
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
    return [_base(record) | {"x": _short(x), "value": f"{value:.4g}"}]


_READ: dict[str, Callable[[Record, Curves], Rows]] = {
    "dev": _dev,
    "time": _dev,
    "norms": _norms,
    "sweep": _sweep,
}


def _draw(target: Curves, rows: Rows) -> tuple[str, bytes]:
    if target.kind == "norms":
        runs = list(dict.fromkeys(row["record"] for row in rows))[:MAX_RUNS]
        return draw(lambda axes: _draw_norms(axes, rows, runs), 2 * len(runs), (4.6, 4.2))
    key = {"dev": "epoch", "time": "seconds", "sweep": "x"}[target.kind]
    numeric = all(_is_number(row[key]) for row in rows)
    names = sorted({row[key] for row in rows})

    def plot(axes: Any) -> None:
        apart = target.kind == "time"  # seconds of two seeds are never the same
        for number, run in enumerate(sorted({_line(row, apart) for row in rows})):
            own: dict[float, list[float]] = {}
            for row in rows:
                if _line(row, apart) == run:
                    place = float(row[key]) if numeric else float(names.index(row[key]))
                    own.setdefault(place, []).append(float(row["value"]))
            x = sorted(own)
            colour = COLOURS[number % len(COLOURS)]
            n = max(map(len, own.values()))
            label = run + (f", mean and range of {n} runs" if n > 1 else "")
            middle = [sum(own[at]) / len(own[at]) for at in x]
            axes[0].plot(
                x, middle, label=label, color=colour, marker=MARKERS[number % len(MARKERS)], markersize=3
            )
            if n > 1:
                axes[0].fill_between(
                    x,
                    [min(own[at]) for at in x],
                    [max(own[at]) for at in x],
                    color=colour,
                    alpha=0.15,
                    linewidth=0,
                )
        axes[0].legend()
        axes[0].set_xlabel(target.x or key)
        axes[0].set_ylabel(target.metric)
        if not numeric:
            axes[0].set_xticks(range(len(names)), names)

    return draw(plot, 1, (6.0, 4.0))


def _line(row: dict[str, str], apart: bool) -> str:
    return f"{row['run']}, seed {row['seed']}" if apart else row["run"]


def _draw_norms(axes: Any, rows: Rows, runs: Sequence[str]) -> None:
    """For each run the median of every layer, and the quartiles of some layers, over the steps."""
    for number, run in enumerate(runs):
        own = [row for row in rows if row["record"] == run]
        steps, groups = (list(dict.fromkeys(row[key] for row in own)) for key in ("step", "group"))
        values = {(row["group"], row["step"]): float(row["50%"]) for row in own}
        left, right = axes[2 * number], axes[2 * number + 1]
        heat(left, steps, groups, values, f"{own[0]['run']}: median norm", log=True)
        left.tick_params(axis="y", labelsize=5)
        last = len(groups) - 1
        some = dict.fromkeys(groups[round(i * last / (MAX_LINES - 1))] for i in range(MAX_LINES))
        for colour, group in zip(COLOURS, some, strict=False):
            points = [row for row in own if row["group"] == group]
            x = [float(row["step"]) for row in points]
            right.plot(x, [float(row["50%"]) for row in points], color=colour, label=group, linewidth=1.4)
            low, high = ([float(row[q]) for row in points] for q in ("25%", "75%"))
            right.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
        right.set_yscale("log")
        right.set_title("median and quartiles of some layers", fontsize=9)
        right.legend(fontsize=6)
        for axis in (left, right):
            axis.set_xlabel("step")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
