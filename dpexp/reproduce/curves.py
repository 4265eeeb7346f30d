"""Figures from what runs logged on their way: norms of each layer (He et al. 2, 4), accuracy over epochs (He et al. 3) and
over time (He et al. 7, 8), and sweeps (He et al. 5; Li et al. 2, 4 are tables with a heat map).

`scripts/keep_record.py` copies a thinned curve of every committed run into its record: ``curves.dev`` and ``curves.norms``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

from dpexp.reproduce import curve_claims
from dpexp.reproduce.documents import Document, Rows, Section, counted, grouped, not_run, page
from dpexp.reproduce.drawing import draw, heat, style
from dpexp.reproduce.fillings import budget, measured, method, printed_factor
from dpexp.reproduce.pairs import Finding, choose
from dpexp.reproduce.paper import Entry, as_number, listed, targets
from dpexp.reproduce.records import Record, by_configuration

_ALONG = {"dev": "epoch", "time": "seconds", "norms": "step", "sweep": "x"}
_COLUMNS: dict[str, tuple[str, ...]] = {
    kind: ("run", along, "value", "seed", "ε", "scale", "record") for kind, along in _ALONG.items()
}
_COLUMNS["norms"] = ("run", "step", "group", "25%", "50%", "75%", "85%", "scale", "record")
# label -> x -> the value of each seed
Curves = dict[str, dict[float, list[float]]]
# percent that a panel shows at the least: a tenth of a point is no hill
SPAN = 4.0
# layers in the second panel of a figure of norms
MAX_LINES = 6


def build(name: str, records: Sequence[Record]) -> Document:
    """The document of one figure; a block for each scale and task, the figure drawn from the first that has runs."""
    target = targets("curves")[name]
    matching = [record for record in records if record.matches(target.select)]
    sections, svg = [], ""
    for scale in ("paper", "small"):
        of_scale = [record for record in matching if record.summary["scale"] == scale]
        by_task = dict(sorted(grouped(of_scale, lambda record: str(record.facts["task"])).items()))
        # the picture of a sweep has all tasks
        together = [by_task] if target.kind == "sweep" else [{task: own} for task, own in by_task.items()]
        blocks = []
        for tasks in together:
            own = [record for record in of_scale if record.facts["task"] in tasks]
            if rows := _rows(target, own):
                blocks.append(_block(target, scale, tasks, rows))
                svg = svg or _draw(target, _rows(target, _speaking(target, own)))
        commands = tuple(target.commands.get(scale, ()))
        todo = "No stand-in at this scale." if target.commands else "Not built."
        todo = f"Not run: {', '.join(f'`{command}`' for command in commands)}" if commands else todo
        sections += blocks or [Section(f"scale={scale}", (todo,), scale=scale, commands=commands)]
    has_runs = any(section.rows for section in sections)
    words = (listed("pages")[target.kind] if has_runs else {}) | vars(target)
    return page(
        name, sections, _COLUMNS[target.kind], otherwise="not run" if "paper" in target.commands else "not built", svg=svg,
        untold="see the curves; no test" if has_runs else not_run(target.needs), words=words,
    )  # fmt: skip


def _block(target: Entry, scale: str, tasks: Mapping[str, Sequence[Record]], rows: Rows) -> Section:
    named = {task: f"{task} instead" if task in target.stand_ins else task for task in tasks}
    says = getattr(curve_claims, target.says) if target.says else lambda _: Finding(())
    found = {f"scale={scale}, {named[task]}": says(own) for task, own in tasks.items()}
    told = {where: finding for where, finding in found.items() if finding.pairs}
    # of norms one seed is shown, and all are compared
    kept = [record for own in tasks.values() for record in own if record.logged("norms")]
    runs = len(kept) if target.kind == "norms" else len({row["record"] for row in rows})
    return Section(
        f"scale={scale}, {', '.join(named.values())}",
        tuple(paragraph for finding in told.values() for paragraph in finding.paragraphs),
        _COLUMNS[target.kind], rows, scale,
        done=f"{scale} {counted(runs, 'run')} on {', '.join(tasks)}",
        verdicts=tuple(finding.verdict(where) for where, finding in told.items()),
    )  # fmt: skip


def _rows(target: Entry, records: Sequence[Record]) -> Rows:
    """Of all records; of one seed for each configuration where norms of all layers would make too many."""
    if target.kind == "norms":
        kept = [record for record in records if record.logged("norms")]
        records = [group[0] for group in by_configuration(kept)]
    rows: Rows = []
    for record, label in zip(records, _labels(records, target), strict=True):
        spent = record.facts.get("privacy.epsilon")
        base = {
            "run": label, "seed": str(record.facts["seed"]), "ε": f"{spent:g}" if spent else "∞",
            "scale": record.summary["scale"], "record": record.path,
        }  # fmt: skip
        points = {"norms": _norms, "sweep": _sweep}.get(target.kind, _dev)(record, target)
        rows += [base | point for point in points]
    if target.kind != "sweep":
        return rows
    # one value is no sweep
    by_run = grouped(rows, itemgetter("run"))
    return [row for row in rows if len({one["x"] for one in by_run[row["run"]]}) > 1]


def _dev(record: Record, target: Entry) -> Rows:
    plan = record.summary["details"].get("plan") or {"steps": 1}
    epochs, steps = float(record.facts.get("epochs") or 0.0), max(1, plan["steps"])
    return [
        {"epoch": f"{point['step'] / steps * epochs:.3g}", "seconds": f"{point.get('time_s', 0):.4g}",
         "value": f"{printed_factor(target.metric) * point['dev'][target.metric]:.4g}"}
        for point in record.logged("dev")
        if target.metric in point["dev"]
    ]  # fmt: skip


def _norms(record: Record, target: Entry) -> Rows:
    kept = record.logged("norms")
    return [
        {"step": str(point["step"]), "group": group}
        | {f"{q:.0%}": f"{value:.4g}" for q, value in zip(kept["quantiles"], values, strict=True)}
        for point in kept.get("points", [])
        for group, values in zip(kept["groups"], point["values"], strict=True)
    ]


def _sweep(record: Record, target: Entry) -> Rows:
    name = next((name for name in target.metric.split("|") if record.metric(name) is not None), "")
    x = record.facts.get(target.x)
    if not name or x is None:
        return []
    value = printed_factor(name) * (record.metric(name) or 0.0)
    return [{"x": _short(x), "value": f"{value:.4g}", "metric": name}]


_APART = {
    "optim.lr": "lr", "optim.batch_size": "B", "optim.epochs": "E", "optim.steps": "steps", "clip.clip_norm": "C",
    "clip.target_quantile": "quantile", "clip.quantile_budget": "r", "model.trainable": "trains", "peft.name": "peft",
    "clip.allocation": "allocation",
}  # fmt: skip


def _labels(records: Sequence[Record], target: Entry) -> list[str]:
    """A name for the line of each record: equal for the seeds of a configuration (and along x), else told apart.

    Engines compute the same, and only against time are they another line.
    """
    found = [_label(record, target.x) for record in records]
    words = _APART | ({"engine": "engine"} if target.kind == "time" else {})
    for key in (key for key in words if key not in (target.x, *target.along)):
        own = grouped(zip(found, records, strict=True), itemgetter(0))
        apart = {label for label, runs in own.items() if len({str(r.facts.get(key)) for _, r in runs}) > 1}
        found = [
            f"{label}, {words[key]} {_short(record.facts.get(key))}" if label in apart else label
            for label, record in zip(found, records, strict=True)
        ]  # fmt: skip
    return found


def _label(record: Record, x: str) -> str:
    named = ("task",) if x == "model" else ("task", "model")
    return " ".join([*(str(record.facts[name]) for name in named), method(record), budget(record)])


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def _speaking(target: Entry, records: Sequence[Record]) -> Sequence[Record]:
    """Of runs with curves those of the configuration that speaks for each model, way to clip and ε; of others all."""
    if target.kind not in ("dev", "norms"):
        return records
    # one point is no curve
    curved = (record for record in records if len(record.logged(target.kind)) > 1)
    tried = grouped(measured(curved, target.metric), lambda filling: _label(filling.record, target.x))
    return [record for fillings in tried.values() for record in choose(fillings).filling.records]


def _draw(target: Entry, rows: Rows) -> str:
    if target.kind == "norms":
        first = [row for row in rows if row["record"] == rows[0]["record"]]
        return draw(lambda axes: _draw_norms(axes, first), 2, (5.2, 4.4))
    # tasks differ by more than what is varied: in one panel their lines would be flat
    panels = list(grouped(rows, lambda row: row["run"].partition(" ")[0]).items())
    beside = len(panels) > 1
    found = [(task, curves) for task, own in panels if (curves := _curves(target, own, task))]
    if not found:
        return ""

    def plot(axes: Any) -> None:
        for axis, (task, curves) in zip(axes, found, strict=True):
            _draw_curves(axis, target, curves, rows)
            if beside:
                axis.set_title(task, fontsize=9)
                axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16))
            else:
                # beside the curves, never over them
                axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))

    return draw(plot, len(found), (4.6, 4.2) if beside else (7.2, 3.8))


def _names(target: Entry, rows: Rows) -> list[str]:
    """The places along x, where one of them is no number; else none."""
    names = sorted({row[_ALONG[target.kind]] for row in rows})
    return [] if all(as_number(name) is not None for name in names) else names


def _curves(target: Entry, rows: Rows, task: str) -> Curves:
    """Of one task's rows."""
    key, names = _ALONG[target.kind], _names(target, rows)
    found: Curves = {}
    for row in rows:
        # what all have in common stands above
        line = row["run"].removeprefix(f"{task} ")
        # seconds of two seeds are never the same
        line = f"{line}, seed {row['seed']}" if target.kind == "time" else line
        place = float(names.index(row[key])) if names else float(row[key])
        found.setdefault(line, {}).setdefault(place, []).append(float(row["value"]))
    # one point is no curve
    return {line: own for line, own in sorted(found.items()) if len(own) > 1}


def _draw_curves(axis: Any, target: Entry, curves: Curves, rows: Rows) -> None:
    """The mean of the seeds, from the least to the largest shaded."""
    for number, (line, own) in enumerate(curves.items()):
        x, seeds = sorted(own), max(map(len, own.values()))
        label = line + (f" (n = {seeds})" if seeds > 1 else "")
        middle = [sum(own[at]) / len(own[at]) for at in x]
        axis.plot(x, middle, label=label, markersize=3, **style(number))
        if seeds > 1:
            low, high = ([end(own[at]) for at in x] for end in (min, max))
            axis.fill_between(x, low, high, color=style(number)["color"], alpha=0.15, linewidth=0)
    axis.set_xlabel(_APART.get(target.x, target.x) or _ALONG[target.kind])
    metrics = sorted({row.get("metric", target.metric) for row in rows})
    percent = printed_factor(metrics[0]) > 1
    axis.set_ylabel(" or ".join(metrics) + (", %" if percent else ""))
    low, high = axis.get_ylim()
    if percent and high - low < SPAN:
        axis.set_ylim((low + high - SPAN) / 2, (low + high + SPAN) / 2)
    if names := _names(target, rows):
        axis.set_xticks(range(len(names)), names)


def _draw_norms(axes: Any, rows: Rows) -> None:
    """The median of every layer of a run, and the quartiles of some layers, over the steps."""
    left, right = axes
    # "bert.encoder.layer." says nothing twenty times
    rows = [row | {"group": re.sub(r"^\w+\.(\w+\.)+(?=\d+\.)", "", row["group"])} for row in rows]
    steps, groups = (list(dict.fromkeys(row[key] for row in rows)) for key in ("step", "group"))
    values = {(row["group"], row["step"]): float(row["50%"]) for row in rows}
    heat(left, steps, groups, values, "median norm of each layer", log=True)
    left.figure.suptitle(rows[0]["run"], fontsize=9)
    some = (groups[round(i * (len(groups) - 1) / (MAX_LINES - 1))] for i in range(MAX_LINES))
    for number, group in enumerate(dict.fromkeys(some)):
        points = [row for row in rows if row["group"] == group]
        x, low, middle, high = ([float(row[key]) for row in points] for key in ("step", "25%", "50%", "75%"))
        looks = style(number)
        right.plot(x, middle, label=group, linewidth=1.4, markersize=3, **looks)
        right.fill_between(x, low, high, color=looks["color"], alpha=0.15, linewidth=0)
    right.set_yscale("log")
    right.set_title("median and quartiles of some layers", fontsize=9)
    right.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), fontsize=7)
    for axis in axes:
        axis.set_xlabel("step")
