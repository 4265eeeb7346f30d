"""Figures from what runs logged on their way: norms of each layer (He et al. 2, 4), accuracy over epochs (He et al. 3) and
over time (He et al. 7, 8), and sweeps (He et al. 5; Li et al. 2, 4 are tables with a heat map).

`scripts/keep_record.py` copies a thinned curve of every committed run into its record: ``curves.dev`` and ``curves.norms``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dpexp.reproduce import curve_claims
from dpexp.reproduce.documents import Document, Rows, Section, Verdict
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
        metric: of the dev set; "accuracy|bleu": the first of them that a run has.
        command: what makes such records at scale=small; empty where nothing stands in.
        at_paper: the same with the paper's models, data and length.
        says: the verdict of the seeds, as paragraphs; None where there is no test.
    """

    title: str
    claim: str
    select: Mapping[str, Any]
    kind: str
    command: tuple[str, ...]
    at_paper: tuple[str, ...]
    metric: str = "accuracy"
    x: str = ""
    says: curve_claims.Says | None = None


_SMALL = "python -m dpexp.train {} scale=small {} -m"
_PAPER = "python -m dpexp.train experiment={} -m"
_CIFAR = ("cifar10", "cifar10_jpeg")
_THREE = ("flat", "perlayer", "adaptive_perlayer")
_SEEDS = "seed=0,1,2"
_OFTEN = "runtime.eval_every=122 seed=0,1,2"  # 30 looks at CIFAR-10's 3662 updates
_SIZES = {
    "bert": "model=distilbert,bert_base,bert_large,distilroberta,roberta_base,roberta_large privacy=eps3,eps8",
    "gpt": "model=distilgpt2,gpt2,gpt2_medium,gpt2_large privacy=eps3,eps8",
}
_BY_TIME = (
    _PAPER.format(
        "he2023_figure7_e2e_gpt2_flat engine=opacus,ghost privacy=eps3,eps8 runtime.eval_every=42{}"
    ),
    _PAPER.format("he2023_table5_e2e_gpt2_adaptive_perlayer privacy=eps3,eps8 runtime.eval_every=42{}"),
)
_WORDS = tuple(
    f"{how} task.label_words.1=great,good,awesome"  # the paper's words are in a picture alone
    for how in ("clip=flat privacy=eps3", "clip=nonprivate privacy=none")
)
_E2E = "task=e2e clip=flat,adaptive_perlayer privacy=eps8"
_TEXT = "task.generation.when=always"
TARGETS: dict[str, Curves] = {
    "figure-he-2": Curves(
        "He et al., Figure 2: norms of every layer through training, CIFAR-10",
        "Norms start uniformly low; as training goes on, those of the layers near the input grow.",
        {"task": _CIFAR, "clip": "adaptive_perlayer"}, "norms",
        (_SMALL.format("task=cifar10_jpeg clip=adaptive_perlayer privacy=eps8", f"runtime.eval_every=49 {_SEEDS}"),),
        (_PAPER.format(f"he2023_table2_cifar10_wrn16_4_adaptive_perlayer privacy=eps8 {_OFTEN}"),),
        says=curve_claims.norms_grow_near_the_input,
    ),
    "figure-he-3": Curves(
        "He et al., Figure 3: accuracy over epochs, CIFAR-10, with and without noise",
        "Adaptive per-layer clipping closes the gap to flat clipping, with and without noise; fixed per-layer clipping does not.",
        {"task": _CIFAR, "clip": _THREE}, "dev",
        tuple(
            _SMALL.format(f"task=cifar10_jpeg clip={','.join(_THREE)} {privacy}", f"runtime.eval_every=49 {_SEEDS}")
            for privacy in ("privacy=eps3", "privacy=noise privacy.noise_multiplier=0")
        ),
        tuple(
            _PAPER.format(f"he2023_figure3_cifar10_wrn16_4_clipping clip={','.join(_THREE)} {privacy}{_OFTEN}")
            for privacy in ("", "privacy=noise privacy.noise_multiplier=0 ")
        ),
        says=curve_claims.adaptive_closes_the_gap,
    ),
    "figure-he-4": Curves(
        "He et al., Figure 4: norms of some layers through fine-tuning, SST-2",
        "The distribution of norms shifts as fine-tuning goes on, differently in each layer; the 85% quantile parts two groups.",
        {"task": "sst2", "clip": "adaptive_perlayer"}, "norms",
        (_SMALL.format("task=sst2 clip=adaptive_perlayer privacy=eps8", f"runtime.eval_every=11 {_SEEDS}"),),
        (_PAPER.format(f"he2023_table3_sst2_roberta_base_adaptive_perlayer privacy=eps8 runtime.eval_every=44 {_SEEDS}"),),
        says=curve_claims.norms_shift_by_layer,
    ),
    "figure-he-5": Curves(
        "He et al., Figure 5: the target quantile",
        "CIFAR-10 is robust to target quantiles from 0.3 to 0.9; on SST-2 those around 0.9 are best.",
        {"task": (*_CIFAR, "sst2"), "clip": "adaptive_perlayer"}, "sweep",
        tuple(
            _SMALL.format(f"sweep=he2023_fig5_{sweep} task={task} clip=adaptive_perlayer", _SEEDS)
            for sweep, task in (("sst2", "sst2"), ("cifar10", "cifar10_jpeg"))
        ),
        tuple(
            _PAPER.format(f"{preset} sweep=he2023_fig5_{sweep} {_SEEDS}")
            for preset, sweep in (
                ("he2023_table3_sst2_roberta_base_adaptive_perlayer", "sst2"),
                ("he2023_table2_cifar10_wrn16_4_adaptive_perlayer", "cifar10"),
            )
        ),
        x="clip.target_quantile", says=curve_claims.quantiles_matter_on_text_alone,
    ),
    "figure-he-7": Curves(
        "He et al., Figure 7: loss against wall time, E2E",
        "At any wall time adaptive per-layer clipping has a lower negative log-likelihood than ghost and flat clipping.",
        {"task": "e2e", "clip": ("flat", "adaptive_perlayer")}, "time",
        (_SMALL.format(_E2E, "runtime.eval_every=5"),), tuple(c.format("") for c in _BY_TIME),
        metric="loss",
    ),
    "figure-he-8": Curves(
        "He et al., Figure 8: BLEU against wall time, E2E",
        "At the same wall time adaptive per-layer clipping generally has the better BLEU and ROUGE-L.",
        {"task": "e2e", "clip": ("flat", "adaptive_perlayer")}, "time",
        (_SMALL.format(_E2E, f"runtime.eval_every=5 {_TEXT}"),), tuple(c.format(f" {_TEXT}") for c in _BY_TIME),
        metric="bleu",
    ),
    "figure-li-1": Curves(
        "Li et al., Figure 1: larger models, MNLI and E2E",
        "At a fixed ε accuracy and BLEU rise with the size of the pretrained model.",
        {"task": ("mnli", "e2e"), "clip": "flat", "scale": "paper"}, "sweep", (),
        tuple(
            _PAPER.format(f"li2022_figure1_{task}_model_size {_SIZES[kind]}")
            for task, kind in (("mnli", "bert"), ("e2e", "gpt"))
        ),
        metric="accuracy|bleu_test", x="model",
    ),
    "figure-li-6": Curves(
        "Li et al., Figure 6: larger models on five more tasks",
        "The trend of Figure 1 holds on every task.",
        {"task": ("qnli", "qqp", "sst2", "dart", "personachat"), "clip": "flat", "scale": "paper"}, "sweep", (),
        (
            *(
                _PAPER.format(f"li2022_figure6_{task}_model_size {_SIZES[kind]}")
                for task, kind in (("qnli", "bert"), ("qqp", "bert"), ("sst2", "bert"), ("dart", "gpt"))
            ),
            "python -m dpexp.train task=personachat model=gpt2,gpt2_medium,dialogpt_medium clip=flat privacy=eps3,eps8 -m",
        ),
        metric="accuracy|bleu_test|f1", x="model",
    ),
    "figure-li-8": Curves(
        "Li et al., Figure 8: label words of text infilling, SST-2",
        "Better label words help private learning by 1 to 2 points, and non-private learning not at all.",
        {"task": "sst2_infilling", "clip": ("flat", "nonprivate")}, "sweep",
        tuple(_SMALL.format("task=sst2_infilling", f"{how} {_SEEDS}") for how in _WORDS),
        tuple(f"python -m dpexp.train task=sst2_infilling {how} {_SEEDS} -m" for how in _WORDS),
        x="label words",
    ),
    "figure-monir-15": Curves(
        "Monir et al., Figure 15: accuracy curves of the individualised methods, CIFAR-10",
        "The most extreme splits of the budget converge slowest.",
        {"task": "cifar10", "individual.name": ("sampling", "scaling")}, "dev", (), (),
    ),
}  # fmt: skip
_COLUMNS = {
    "dev": ("run", "epoch", "value", "seed", "ε", "scale", "record"),
    "time": ("run", "seconds", "value", "seed", "ε", "scale", "record"),
    "norms": ("run", "step", "group", "25%", "50%", "75%", "85%", "scale", "record"),
    "sweep": ("run", "x", "value", "seed", "ε", "scale", "record"),
}
MAX_RUNS = 1  # of a figure of norms, two panels each
DASHES = ("-", "--", ":")  # when the colours are used up
MAX_LINES = 6  # layers in its second panel


def build(name: str, records: Sequence[Record]) -> Document:
    """The document of one figure; a block for each scale and task, the figure drawn from the first that has runs."""
    target = TARGETS[name]
    matching = [record for record in records if record.matches(target.select)]
    sections, counts, drawn = [], [], ""
    found: list[Verdict] = []
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
            found += [Verdict(heading, said[0].strip("*"))] if said else []
            if not drawn:
                drawn, png = _draw(target, rows)
            shown.append(Section(heading, said, _COLUMNS[target.kind], rows, scale))
        sections += shown or [Section(f"scale={scale}", (_todo(target, scale),), (), [], scale)]
    private = (
        ("Norms are computed on private data without noise: they are outside every guarantee.",)
        if target.kind == "norms"
        else ()
    )
    ours = "; ".join(map(str, found)) or (
        "cannot tell: see the curves; no test" if counts else "cannot tell: not run"
    )
    words = (
        f"**Claim.** {target.claim}",
        f"**Our runs.** {ours}.",
        *private,
        f"Regenerate: `python -m dpexp.report {name}`.",
    )
    return Document(
        name, target.title, name.split("-")[1], words, tuple(sections), _COLUMNS[target.kind], svg=drawn, png=png,
        status=", ".join(counts) or ("not run" if target.at_paper else "not built"), verdicts=tuple(found),
    )  # fmt: skip


def missing(name: str, records: Sequence[Record], scale: str) -> list[str]:
    """The commands that make a figure's runs at a scale; none where it has some."""
    target = TARGETS[name]
    if any(record.matches(target.select) and record.summary["scale"] == scale for record in records):
        return []
    return list(target.at_paper if scale == "paper" else target.command)


def _tasks(target: Curves, records: Sequence[Record]) -> list[tuple[str, ...]]:
    """The tasks of each block: one by one, but for a sweep whose picture has them all."""
    tasks = sorted({str(record.facts["task"]) for record in records})
    return [tuple(tasks)] if target.kind == "sweep" and tasks else [(task,) for task in tasks]


def _rows(target: Curves, records: Sequence[Record]) -> Rows:
    """Of all records; of one seed for each configuration where norms of all layers would make too many."""
    chosen = (
        [group[0] for group in by_configuration(_with_norms(records))] if target.kind == "norms" else records
    )
    told_apart = _labels(chosen, target.x, target.kind == "time")
    rows = [
        row | {"run": label}
        for record, label in zip(chosen, told_apart, strict=True)
        for row in _READ[target.kind](record, target)
    ]
    if target.kind != "sweep":
        return rows
    reached: dict[str, set[str]] = {}
    for row in rows:
        reached.setdefault(row["run"], set()).add(row["x"])
    return [row for row in rows if len(reached[row["run"]]) > 1]  # one value is no sweep


_APART = {
    "optim.lr": "lr", "optim.batch_size": "B", "optim.epochs": "E", "optim.steps": "steps", "clip.clip_norm": "C",
    "clip.target_quantile": "quantile", "model.trainable": "trains", "peft.name": "peft", "clip.allocation": "allocation",
}  # fmt: skip


def _labels(records: Sequence[Record], x: str, timed: bool) -> list[str]:
    """A name for the line of each record: equal for the seeds of a configuration (and along x), else told apart.

    Engines compute the same, and only against time are they another line.
    """
    found = [_label(record, x) for record in records]
    for key, word in (_APART | ({"engine": "engine"} if timed else {})).items():
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
    commands = target.at_paper if scale == "paper" else target.command
    if not commands:
        return "No stand-in at this scale." if target.at_paper else "Not built."
    return f"Not run: {', '.join(f'`{command}`' for command in commands)}"


def _label(record: Record, x: str) -> str:
    facts = record.facts
    spent = facts.get("privacy.epsilon")
    named = ("task", "clip") if x == "model" else ("task", "model", "clip")
    return " ".join(str(facts[name]) for name in named) + (f" ε = {spent:g}" if spent else " no ε")


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
    value = next((v for name in target.metric.split("|") if (v := record.metric(name)) is not None), None)
    x = record.facts.get(target.x)
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
    places = {(_line(row, target.kind == "time"), row[key]) for row in rows}
    if len(places) == len({line for line, _ in places}):
        return "", b""  # one point for each run is no curve
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
                x, middle, label=label, color=colour, marker=MARKERS[number % len(MARKERS)], markersize=3,
                linestyle=DASHES[number // len(COLOURS) % len(DASHES)],
            )  # fmt: skip
            if n > 1:
                axes[0].fill_between(
                    x,
                    [min(own[at]) for at in x],
                    [max(own[at]) for at in x],
                    color=colour,
                    alpha=0.15,
                    linewidth=0,
                )
        axes[0].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))  # beside the curves, never over them
        axes[0].set_xlabel(target.x or key)
        axes[0].set_ylabel(target.metric.replace("|", " or "))
        if not numeric:
            axes[0].set_xticks(range(len(names)), names)

    return draw(plot, 1, (8.5, 4.0))


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
