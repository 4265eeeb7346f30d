"""From a printed cell to the records that fill it, and to the command that would.

The transcription says what a cell is about (``task=sst2; clip=flat; epsilon=3``; `dpexp.reproduce.paper.Cell.settings`). At
scale "paper" all of it selects records. At scale "small" the task names its own model, length and batch size, so these do not:
a record's own configuration stands beside every number instead.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dpexp.config import conf_dir
from dpexp.metrics.text import PERCENT
from dpexp.reproduce.paper import Cell
from dpexp.reproduce.records import Near, Record, by_configuration
from dpexp.reproduce.statistics import mean_std

# A setting of a cell -> the fact of a record, and the override on the command line.
FACTS = {
    "task": "task", "model": "model", "clip": "clip", "epsilon": "privacy.epsilon", "delta": "privacy.delta",
    "epochs": "optim.epochs", "batch_size": "optim.batch_size", "lr": "optim.lr", "allocation": "clip.allocation",
    "peft": "peft.name", "rank": "peft.rank", "clip_norm": "clip.clip_norm", "quantile": "clip.target_quantile",
    "quantile_budget": "clip.quantile_budget", "schedule": "schedule.name", "trainable": "model.trainable",
    "sigma": "privacy.noise_multiplier", "sigma_initial": "privacy.noise_multiplier", "init": "model.retrain",
    "individual": "individual.name", "budgets": "individual.epsilons", "optim": "optim.name",
}  # fmt: skip
NOISE = ("sigma", "sigma_initial")  # where a paper gives the noise, its ε and its epochs are what came out
# Their values are files of conf/; the last three are variants of DP-SGD.
GROUPS = ("task", "model", "clip", "peft", "schedule", "individual", "optim")
# At scale small these are the task's own; every other setting of a cell holds at every scale.
LEFT_TO_THE_TASK = ("model", "epochs", "batch_size", "lr", "rank", "delta", "clip_norm", "quantile")
EXPOSURE = "exposure"  # the metric of canaries, which `dpexp.audit` measures
TRAINING = ("train", "training")  # splits on which the papers print accuracies too
SEEDS = "0,1,2"


@dataclass(frozen=True)
class Filling:
    """One configuration that fills a cell.

    Attributes:
        records: its seeds.
        values: the metric of each, in the unit of the cell.
        metric: its name; "" where it does not matter.
    """

    records: tuple[Record, ...]
    values: tuple[float, ...]
    metric: str = ""

    @property
    def dev_error(self) -> float | None:
        """The standard error of the mean accuracy, in points, that comes from the number of dev examples: √(p(1 - p)/n).

        All seeds are measured on the same examples, so that more seeds don't make it smaller. None for other metrics.
        """
        rows = self.records[0].summary["data"]["rows"].get("dev")
        if not rows or self.metric not in ("accuracy", "accuracy_mismatched"):
            return None
        share = min(1.0, max(0.0, mean_std(self.values)[0] / 100))
        return 100 * math.sqrt(share * (1 - share) / float(rows))


@dataclass(frozen=True)
class Slot:
    """A printed cell at one scale.

    Attributes:
        cell: as transcribed.
        scale: "paper", "small".
        where: what selects its records.
        metric: the key of the summary's metrics.
        reason: why no run fills it: quoted from elsewhere, not built; "" for a cell that can be run.
        command: that fills it; "" where there is a reason.
    """

    cell: Cell
    scale: str
    where: Mapping[str, Any]
    metric: str
    reason: str
    command: str

    def fillings(self, records: Sequence[Record]) -> list[Filling]:
        """Every configuration of these records that fills the cell, sorted."""
        if self.reason:
            return []
        # noise that decays, and random weights to begin with, only where the cell says so
        where = {"schedule.name": (None, "constant"), "model.retrain": (None, False), **self.where}
        return measured((record for record in records if record.matches(where)), self.metric)


def measured(records: Iterable[Record], metric: str) -> list[Filling]:
    """Every configuration of these records that has the metric, sorted; values as in print."""
    factor = printed_factor(metric)
    found = []
    for group in by_configuration(records):
        values = [(r, value) for r in group if (value := r.metric(metric)) is not None]
        if values:
            found.append(Filling(tuple(r for r, _ in values), tuple(factor * v for _, v in values), metric))
    return found


def printed_factor(metric: str) -> float:
    """100 for what is a fraction in a record and printed in percent."""
    return 100.0 if metric.removesuffix("_test") in _PRINTED_TIMES_100 else 1.0


_PRINTED_TIMES_100 = PERCENT | {"accuracy", "train_accuracy", "accuracy_mismatched"}


@dataclass(frozen=True)
class Presets:
    """Where the command of a cell at scale=paper finds its settings, so that one printed number has one configuration.

    Attributes:
        tables: whose presets hold the runs of a cell, the first that has one: its own table, then those that print the same runs.
        tuned: (settings of a cell, what they add to the command): values that were tuned for some cells alone.
    """

    tables: tuple[str, ...] = ()
    tuned: tuple[tuple[Mapping[str, str], str], ...] = ()

    def added(self, cell: Cell) -> list[str]:
        """What is added to the command of a cell."""
        return [
            word
            for settings, words in self.tuned
            if all(cell.settings.get(name) == value for name, value in settings.items())
            for word in shlex.split(words)
        ]


def slot(
    cell: Cell,
    scale: str,
    stand_ins: Mapping[str, Any] | None = None,
    task: str = "",
    presets: Presets | None = None,
) -> Slot:
    """The cell at a scale.

    Args:
        cell: of a paper.
        scale: "paper" or "small".
        stand_ins: for scale small: setting -> {printed value: value there, or null where it has no stand-in}. A setting that
            is listed selects, and a value that is not listed has no stand-in. "=" stands for itself (or all values do),
            "*": whatever the task names.
        task: for scale small: another data set that stands in for the cell's, with settings of its own; "" for the cell's.
        presets: of its table; None: those of its own name.
    """
    said = dict(cell.settings)
    if "learning_rate" in said:
        said["optim"] = said.pop("learning_rate")
    if any(name in said for name in ("schedule", "individual", "optim")):
        said.setdefault("clip", "flat")  # they are variants of DP-SGD
    if said.get("init") == "random":
        said["init"] = "true"
    reason = _not_ours(cell, said)
    if said.get("formulation") == "infilling":
        said["task"] = f"{said.get('task', '')}_infilling"
    left_out: tuple[str, ...] = () if scale == "paper" else LEFT_TO_THE_TASK
    for name, values in (stand_ins or {}).items() if scale != "paper" else ():
        if name not in said:
            continue
        if values == "=":
            values = {said[name]: "="}
        if values.get(said[name]) is None:
            reason = reason or f"no stand-in for {name}={said[name]} at scale={scale}"
        elif values[said[name]] == "*":
            continue  # stands for it, whatever the task names
        else:
            said[name] = said[name] if values[said[name]] == "=" else str(values[said[name]])
            left_out = tuple(key for key in left_out if key != name)
    if scale != "paper" and "epsilon" in said:
        left_out += NOISE  # calibrated to the printed ε for the length of a small run
    if task:
        said["task"] = task
    chosen = {name: value for name, value in said.items() if name in FACTS and name not in left_out}
    where: dict[str, Any] = {FACTS[name]: value for name, value in chosen.items()}
    if said.get("metric") == EXPOSURE:
        where["method"] = EXPOSURE
    if FACTS["init"] in where:
        where[FACTS["init"]] = True
    if FACTS["sigma"] in where:
        for name, fact in (("epsilon", "spent"), ("epochs", "epochs")):
            if where.pop(FACTS[name], None) is not None:
                where[fact] = Near(float(chosen[name]))
    if chosen.get("clip") == "nonprivate":
        where["privacy.epsilon"] = None
        where.pop("privacy.delta", None)
    where["scale"] = scale
    metric = metric_of(cell)
    if said.get("split") in TRAINING:
        reason = reason or "not measured: accuracy on the training set is private, and no record releases it"
    if not reason:
        reason = _not_built(chosen, said)
    return Slot(cell, scale, where, metric, reason, "" if reason else command(cell, scale, chosen, presets))


def metric_of(cell: Cell) -> str:
    """The key of the summary's metrics that a cell is about."""
    said = cell.settings
    name = said.get("metric", "")
    if said.get("split") in TRAINING:
        return f"train_{name}"
    if name == EXPOSURE:
        return f"{name}_{said.get('repetitions', '')}"
    if (
        said.get("subset", "matched") != "matched"
    ):  # which is MNLI's dev set: `accuracy`, and `accuracy_mismatched` (conf/task/mnli)
        return f"{name}_{said['subset']}"
    if said.get("split") == "test" and _has_test(said.get("task", "")):
        return f"{name}_test"
    return name


def command(cell: Cell, scale: str, chosen: Mapping[str, str], presets: Presets | None = None) -> str:
    """What fills the cell with three seeds: a preset where there is one for its row, else the settings one by one."""
    overrides = []
    added = presets.added(cell) if presets and scale == "paper" else []
    tables = (cell.table, *(presets.tables if presets else ()))
    covered: set[str] = set()
    noise = next((name for name in NOISE if name in chosen), "")
    if scale == "paper" and (preset := _preset(cell, chosen, tables)):
        overrides.append(f"experiment={preset}")
        covered = {"task", "model", "delta", "peft", "init", "schedule", "individual", "optim", noise}
        covered |= (
            {"clip"}
            if preset.endswith(
                tuple(chosen[name] for name in ("clip", "schedule", "individual", "optim") if name in chosen)
            )
            else set()
        )
    elif noise:
        overrides.append("privacy=noise")
    if noise:
        covered |= {"epsilon"}  # it comes out
    if "epochs" in chosen and (noise or _has_steps(chosen.get("task", ""), scale)):
        overrides.append("optim.steps=null")  # its length is given in epochs
    for name, value in chosen.items():
        if name in covered or (name == "peft" and value == "full"):
            continue
        if chosen.get("clip") == "nonprivate" and name in ("epsilon", "delta"):
            continue
        overrides.append(f"{name if name in GROUPS else FACTS[name]}={value}")
    if chosen.get("clip") == "nonprivate":
        overrides.append("privacy=none")
    if scale != "paper":
        overrides.append(f"scale={scale}")
    program = "train"
    if cell.settings.get("metric") == EXPOSURE:
        program = "audit"
        counts = (
            [] if any(word.startswith("repetitions=") for word in added) else [cell.settings["repetitions"]]
        )
        overrides = [f"method={EXPOSURE}", *overrides, *(f"repetitions=[{count}]" for count in counts)]
    words = [*overrides, *added, f"seed={SEEDS}", "-m"]
    return f"python -m dpexp.{program} " + " ".join(shlex.quote(word) for word in words)


def _has_test(task: str) -> bool:
    """Is there a test set beside the dev set? (Where print has "test" for the only one, as of images, it is our dev set.)"""
    path = conf_dir() / "task" / f"{task}.yaml"
    return path.is_file() and "test" in (yaml.safe_load(path.read_text(encoding="utf-8")).get("files") or {})


def _has_steps(task: str, scale: str) -> bool:
    """Does the task give the length of its runs at this scale in steps?"""
    path = conf_dir() / "task_at_scale" / task / f"{scale}.yaml"
    settings = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else None
    return bool(((settings or {}).get("optim") or {}).get("steps"))


def _preset(cell: Cell, chosen: Mapping[str, str], tables: Sequence[str]) -> str:
    """The name of the preset of a cell's row in the first of the tables that has one, "" where none has."""
    method = next(
        (chosen[name] for name in ("schedule", "individual", "optim", "clip") if name in chosen), ""
    )
    kind = "infilling" if cell.settings.get("formulation") == "infilling" else chosen.get("peft", "")
    kind = "retrain" if "init" in chosen else kind
    before = [cell.settings.get("task", ""), chosen.get("model", "")]
    ends = [[method], [kind]] if kind else [[method], ["full"]]
    if chosen.get("clip") == "nonprivate" or kind:
        ends.append([kind, "flat"])
    for table in tables:
        for end in ends:
            name = "_".join((cell.paper, _numbered(table), *filter(None, [*before, *end])))
            if (conf_dir() / "experiment" / f"{name}.yaml").is_file():
                return name
    return ""


def has_presets(paper: str, table: str) -> bool:
    """Can a row of it be run, even where no single cell is one run (a gain is the difference of two)?"""
    return any((conf_dir() / "experiment").glob(f"{paper}_{_numbered(table)}_*.yaml"))


def _numbered(table: str) -> str:
    return f"table{table}" if table[:1].isdigit() else table


def _not_ours(cell: Cell, said: Mapping[str, str]) -> str:
    for part in cell.conditions.split("; "):
        if part.startswith(
            ("quoted", "printed as -", "no fine-tuning", "from the authors' code base", "from the leader")
        ):
            return part
    if said.get("metric") == "epsilon":
        return "arithmetic: see accounting-li"
    if not cell.value:
        return "empty in print"
    if cell.unit == "points" or not {"task", "metric", "clip"} <= said.keys():
        return "no run of its own: derived from other cells, or not stated"
    return ""


def _not_built(chosen: Mapping[str, str], said: Mapping[str, str]) -> str:
    """Why this repository cannot run it, where a choice that it needs does not exist."""
    missing = [
        f"{name}={chosen[name]}"
        for name in GROUPS
        if name in chosen and not (conf_dir() / name / f"{chosen[name]}.yaml").is_file()
    ]
    return f"not built: {', '.join(missing)}" if missing else ""


def columns(filling: Filling, digits: int) -> dict[str, str]:
    """What a table says of a configuration: mean ± std, n, configuration, privacy, hardware, records."""
    record, privacy = filling.records[0], filling.records[0].summary["privacy"]
    mean, std = mean_std(filling.values)
    unclean = sorted({problem for r in filling.records for problem in r.problems})
    return {
        "ours": f"{mean:.{digits}f}" + (f" ± {std:.2f}" if std is not None else ""),
        "n": str(len(filling.values)),
        "dev error": "" if filling.dev_error is None else f"± {filling.dev_error:.2f}",
        "configuration": described(record) + (f" (UNCLEAN: {'; '.join(unclean)})" if unclean else ""),
        "ε": "∞" if record.spent is None else f"{record.spent:.2f}",
        "δ": "" if privacy.get("delta") is None else f"{privacy['delta']:.3g}",
        "accountant": privacy.get("accountant") or "none",
        "sampling": str(privacy.get("sampling")),
        "hardware": record.summary["performance"].get("device", ""),
        "record": ", ".join(repository_path(r) for r in filling.records),
    }


def described(record: Record, beside: Sequence[str] = ()) -> str:
    """The configuration of a record in a few words: what a reader must know to judge its number."""
    facts = record.facts
    trainable = facts.get("model.trainable")
    peft = facts.get("peft.name")
    length = facts.get("optim.epochs")
    words = [
        str(facts["model"]),
        "" if peft in (None, "full") else str(peft),
        "" if facts.get("model.pooling") in (None, "own") else f"{facts['model.pooling']} pooling",
        "" if facts.get("model.head") in (None, "linear") else f"{facts['model.head']} head",
        "frozen features" if facts.get("model.frozen_features") else "",
        "" if trainable in (None, "all") else f"trains {trainable}",
        f"E = {length:g}" if length is not None else f"{facts.get('optim.steps')} steps",
        f"B = {facts.get('optim.batch_size'):g}",
        f"lr {facts.get('optim.lr'):g}",
        *beside,
    ]
    if facts.get("method") == EXPOSURE:
        counts = "/".join(str(count) for count in facts.get("repetitions") or ())
        words.append(f"{facts.get('secrets')} canaries of each r = {counts} in one training set")
    precision = facts.get("runtime.precision")
    words.append("" if precision in (None, "fp32") else str(precision))
    return ", ".join(word for word in words if word)


def repository_path(record: Record) -> str:
    """Where a record lies, as a link from the top of the repository."""
    return str(Path("results") / record.folder / record.name)
