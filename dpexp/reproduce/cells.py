"""From a printed cell to the records that fill it, and to the command that would.

The transcription says what a cell is about (``task=sst2; clip=flat; epsilon=3``; `dpexp.reproduce.paper.Cell.settings`). At
scale "paper" all of it selects records. At scale "small" the task names its own model, length and batch size, so these do not:
a record's own configuration stands beside every number instead.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml

from dpexp.config import conf_dir
from dpexp.reproduce.fillings import EXPOSURE, Filling, measured
from dpexp.reproduce.paper import Cell, Entry, numbered
from dpexp.reproduce.records import Near, Record

# A setting of a cell -> the fact of a record, and the override on the command line.
FACTS = {
    "task": "task", "model": "model", "clip": "clip", "epsilon": "privacy.epsilon", "delta": "privacy.delta",
    "epochs": "optim.epochs", "batch_size": "optim.batch_size", "lr": "optim.lr", "allocation": "clip.allocation",
    "peft": "peft.name", "rank": "peft.rank", "clip_norm": "clip.clip_norm", "quantile": "clip.target_quantile",
    "quantile_budget": "clip.quantile_budget", "schedule": "schedule.name", "trainable": "model.trainable",
    "sigma": "privacy.noise_multiplier", "sigma_initial": "privacy.noise_multiplier", "init": "model.retrain",
    "individual": "individual.name", "budgets": "individual.epsilons", "optim": "optim.name",
}  # fmt: skip
# where a paper gives the noise, its ε and its epochs are what came out
NOISE = ("sigma", "sigma_initial")
# Their values are files of conf/; the last three are variants of DP-SGD.
GROUPS = ("task", "model", "clip", "peft", "schedule", "individual", "optim")
# At scale small these are the task's own; every other setting of a cell holds at every scale.
LEFT_TO_THE_TASK = ("model", "epochs", "batch_size", "lr", "rank", "delta", "clip_norm", "quantile")
# splits on which the papers print accuracies too
TRAINING = ("train", "training")
# of several that a cell names, the first is its method
METHODS = ("schedule", "individual", "optim", "clip")
SEEDS = "0,1,2"
# in this order
SHOWN = ("small", "paper")


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
        # noise that decays or is correlated, and random weights to begin with, only where the cell says so
        plain = {
            "schedule.name": (None, "constant"),
            "privacy.bands": (None, "1"),
            "model.retrain": (None, False),
        }
        # in the order of the cell: its task tells most records apart
        where = {**self.where, **(plain | dict(self.where))}
        return measured((record for record in records if record.matches(where)), self.metric)


class Claim(Entry):
    """One that printed cells answer."""

    @property
    def filled_with(self) -> str:
        """The task of the block whose commands fill the table at scale=small; "" for the cells' own."""
        return next(iter(self.instead), "")

    @property
    def blocks(self) -> Iterator[tuple[str, str]]:
        """(scale, task that stands in for the cells' own, or "") of every block."""
        for scale in SHOWN:
            yield scale, ""
            yield from ((scale, task) for task in (self.instead if scale == "small" else ()))

    def slot(self, cell: Cell, scale: str, task: str = "") -> Slot:
        """A cell in a block."""
        said = _said(cell)
        reasons = [_not_ours(cell, said)]
        left_out: set[str] = set()
        if scale != "paper":
            # for the printed ε and the length of a small run
            left_out.update(LEFT_TO_THE_TASK, NOISE if "epsilon" in said else ())
            for name, values in self.stand_ins.items():
                if name not in said:
                    continue
                there = "=" if values == "=" else values.get(said[name])
                if there is None:
                    reasons.append(f"no stand-in for {name}={said[name]} at scale={scale}")
                elif there != "*":
                    said[name] = said[name] if there == "=" else str(there)
                    left_out.discard(name)
        said["task"] = task or said.get("task", "")
        kept = FACTS.keys() - left_out
        chosen = {name: value for name, value in said.items() if name in kept and value}
        if said.get("split") in TRAINING:
            reasons.append("not measured: accuracy on the training set is private, and no record releases it")
        groups = (name for name in GROUPS if name in chosen)
        if unknown := [f"{name}={chosen[name]}" for name in groups if not _choice(name, chosen[name])]:
            reasons.append(f"not built: {', '.join(unknown)}")
        reason = next(filter(None, reasons), "")
        where = {**_where(said, chosen, scale), **self.where, **self.instead.get(task, {})}
        command = "" if reason else self._command(cell, scale, chosen)
        return Slot(cell, scale, where, metric_of(cell), reason, command)

    def _command(self, cell: Cell, scale: str, chosen: Mapping[str, str]) -> str:
        """What fills the cell with three seeds: a preset where there is one for its row, else the settings one by one."""
        plain = chosen.get("clip") == "nonprivate"
        noise = next((name for name in NOISE if name in chosen), "")
        preset, covered, added = "", set[str](), list[str]()
        if scale == "paper":
            added = [word for one in self.tuned if cell.has(one["where"]) for word in shlex.split(one["add"])]
            preset, covered = _preset(cell, chosen, (cell.table, *self.same_runs))
        overrides = [f"experiment={preset}"] if preset else ["privacy=noise"] if noise else []
        # where the noise is given it comes out
        covered |= {"epsilon", "delta"} if plain else {"epsilon"} if noise else set()
        at_scale = _choice(f"task_at_scale/{chosen.get('task', '')}", scale).get("optim") or {}
        if "epochs" in chosen and (noise or at_scale.get("steps")):
            # the length of the cell is given in epochs
            overrides.append("optim.steps=null")
        overrides += [
            f"{name if name in GROUPS else FACTS[name]}={value}"
            for name, value in chosen.items()
            if name not in covered and (name, value) != ("peft", "full")
        ]
        overrides += ["privacy=none"] if plain else []
        overrides += [f"scale={scale}"] if scale != "paper" else []
        program = "train"
        if cell.settings.get("metric") == EXPOSURE:
            program, overrides = "audit", [f"method={EXPOSURE}", *overrides]
            if not any(word.startswith("repetitions=") for word in added):
                overrides.append(f"repetitions=[{cell.settings['repetitions']}]")
        words = [*overrides, *added, f"seed={SEEDS}", "-m"]
        return f"python -m dpexp.{program} " + " ".join(map(shlex.quote, words))


def _said(cell: Cell) -> dict[str, str]:
    """The settings of a cell, by the names of `FACTS`."""
    said = dict(cell.settings)
    if said.get("formulation") == "infilling":
        said["task"] += "_infilling"
    if any(name in said for name in ("schedule", "individual", "optim")):
        # they are variants of DP-SGD
        said.setdefault("clip", "flat")
    if said.get("init") == "random":
        said["init"] = "true"
    return said


def _where(said: Mapping[str, str], chosen: Mapping[str, str], scale: str) -> dict[str, Any]:
    """What selects the records of a cell."""
    where: dict[str, Any] = {FACTS[name]: value for name, value in chosen.items()}
    if said.get("metric") == EXPOSURE:
        where["method"] = EXPOSURE
    if FACTS["init"] in where:
        where[FACTS["init"]] = True
    if FACTS["sigma"] in where:
        for name, fact in (("epsilon", "spent"), ("epochs", "epochs")):
            if where.pop(FACTS[name], None) is not None:
                where[fact] = Near(chosen[name])
    if chosen.get("clip") == "nonprivate":
        where["privacy.epsilon"] = None
        where.pop("privacy.delta", None)
    return where | {"scale": scale}


def metric_of(cell: Cell) -> str:
    """The key of the summary's metrics that a cell is about."""
    said = cell.settings
    name = said.get("metric", "")
    if said.get("split") in TRAINING:
        return f"train_{name}"
    if name == EXPOSURE:
        return f"{name}_{said.get('repetitions', '')}"
    # that is MNLI's dev set (conf/task/mnli)
    if (subset := said.get("subset", "matched")) != "matched":
        return f"{name}_{subset}"
    # where print has "test" for the only one, as of images, it is our dev set
    if said.get("split") == "test" and "test" in (_choice("task", said.get("task", "")).get("files") or ()):
        return f"{name}_test"
    return name


@cache
def _choice(group: str, name: str) -> dict[str, Any]:
    """A file of conf/, {} where there is none."""
    path = conf_dir() / group / f"{name}.yaml"
    return (yaml.safe_load(path.read_text(encoding="utf-8")) or {"": None}) if path.is_file() else {}


@cache
def presets(paper: str, table: str) -> list[str]:
    """Those of a table, whose names begin with its own; the most specific come first."""
    stem = f"{paper}_{numbered(table)}"
    names = [path.stem for path in (conf_dir() / "experiment").glob(f"{stem}*.yaml")]
    return sorted((name for name in names if f"{name}_".startswith(f"{stem}_")), key=len, reverse=True)


def _preset(cell: Cell, chosen: Mapping[str, str], tables: Sequence[str]) -> tuple[str, set[str]]:
    """The preset of a cell's row in the first of the tables that has one, and the settings that it makes; "" without one.

    Its name says nothing but choices of the cell. One that says neither task nor model holds several rows of the table: the
    command adds what it leaves open.
    """
    methods = [chosen[name] for name in METHODS if name in chosen]
    infilling = cell.settings.get("formulation") == "infilling"
    kind = "retrain" if "init" in chosen else "infilling" if infilling else chosen.get("peft", "")
    either = "|flat" if kind or chosen.get("clip") == "nonprivate" else ""
    said = {
        "task": cell.settings.get("task"), "model": chosen.get("model"), "kind": kind or "full", "clip": f"{methods[0]}{either}",
    }  # fmt: skip
    pattern = "".join(f"(_(?P<{name}>{text}))?" for name, text in said.items() if text)
    for table in tables:
        for preset in presets(cell.paper, table):
            if found := re.fullmatch(f"{cell.paper}_{numbered(table)}{pattern}", preset):
                named = found.groupdict()
                made = {name for name in ("task", "model") if named.get(name)}
                made |= {"clip"} if named["clip"] in methods else set()
                return preset, {*made, "delta", "peft", "init", "schedule", "individual", "optim", *NOISE}
    return "", set()


def _not_ours(cell: Cell, said: Mapping[str, str]) -> str:
    """Why a cell is no run of ours, in words; "" where it may be one."""
    for part in cell.conditions.split("; "):
        if part.startswith(_QUOTED):
            return part
    if said.get("metric") == "epsilon":
        return "arithmetic: see accounting-li"
    if not cell.value:
        return "empty in print"
    if cell.unit == "points" or not {"task", "metric", "clip"} <= said.keys():
        return "no run of its own: derived from other cells, or not stated"
    return ""


_QUOTED = ("quoted", "printed as -", "no fine-tuning", "from the authors' code base", "from the leader")
