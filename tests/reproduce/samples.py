"""Synthetic records in the form of real ones, for tests of what is made from records."""

from __future__ import annotations

import json
import shlex
from functools import cache
from pathlib import Path
from typing import Any

from dpexp.config import RunConfig, compose, to_dict
from dpexp.reproduce.records import Record


def summary(clip: str = "flat", seed: int = 0, accuracy: float = 0.9, **settings: Any) -> dict[str, Any]:
    """A finished run of SST-2.

    ``settings``: task, model, scale, epsilon, epochs, lr, allocation; optimizer, batch_size, delta, steps, sigma, schedule, spent
    (ε), title (of the task), clip_norm, quantile, share (r), trials, curves.
    """
    said = {
        "task": "sst2",
        "model": "minilm",
        "scale": "small",
        "epsilon": 8.0,
        "epochs": 2.0,
        "lr": 1e-3,
    } | settings
    config = {
        "task": {"name": said["task"], "title": said.get("title"), "max_length": 64},
        "model": {"name": said["model"], "trainable": "all"},
        "clip": {
            "name": clip,
            "clip_norm": said.get("clip_norm", 1.0),
            "target_quantile": said.get("quantile", 0.5),
            "allocation": said.get("allocation", "global"),
            "quantile_budget": said.get("share", 0.1),
        },
        "privacy": {
            "epsilon": said["epsilon"],
            "noise_multiplier": said.get("sigma"),
            "delta": said.get("delta", "n_pow_-1.1"),
        },
        "optim": {
            "name": said.get("optimizer", "adam"),
            "lr": said["lr"],
            "lr_schedule": "constant",
            "batch_size": float(said.get("batch_size", 2048)),
            "epochs": said["epochs"],
            "steps": said.get("steps"),
        },
        "schedule": {"name": said.get("schedule", "constant")},
        "peft": {"name": "full"},
        "runtime": {"precision": "fp32", "threads": seed + 1},
        "seed": seed,
    }
    spent = said.get("spent", said["epsilon"])
    return {
        "task": said["task"], "model": said["model"], "clip": clip, "engine": "auto", "scale": said["scale"],
        "data": {"source": "files", "name": "sst2/train.tsv", "rows": {"train": 67349}, "sha256": {"train": "0" * 64}},
        "privacy": {"epsilon": {"rdp": spent, "gdp": 4.0, "prv": 6.0, "pld": 6.0}, "delta": 4.9e-6, "accountant": "rdp",
                    "noise_multiplier": 0.6, "steps": 66, "sampling": "poisson", "trials": said.get("trials", 1)},
        "metrics": {"accuracy": accuracy, "loss": 0.3}, "performance": {"device": "cpu: a processor, 1 threads"}, "seed": seed,
        "versions": {"python": "3.11"}, "git": {"commit": "a" * 40, "dirty": False}, "command": "python -m dpexp.train",
        "wall_s": 1.0, "status": "finished", "details": {"config": config, "hardware": {"cpu": "a processor"},
                                          "plan": {"steps": 66}},
    } | ({"curves": said["curves"]} if "curves" in said else {})  # fmt: skip


def curves(accuracy: float, layers: int = 0, growth: float = 1.0) -> dict[str, Any]:
    """Dev accuracy rising to a value over 66 steps; norms of so many layers, whose medians grow, the more the nearer to the
    input (the factor of the first one is ``growth``)."""
    steps = (1, 22, 44, 66)
    found: dict[str, Any] = {
        "dev": [
            {"step": step, "time_s": 2.0 * step, "dev": {"accuracy": accuracy * step / 66}} for step in steps
        ]
    }
    if layers:
        values = [[[(1 + (growth - 1) * step / 66 * (1 - k / layers)) * q for q in (0.5, 1.0, 1.5, 2.0)]
                   for k in range(layers)] for step in steps]  # fmt: skip
        points = [{"step": step, "values": of_step} for step, of_step in zip(steps, values, strict=True)]
        groups = [f"layer{k}" for k in range(layers)]
        found["norms"] = {
            "quantiles": [0.25, 0.5, 0.75, 0.85],
            "groups": groups,
            "points": points,
            "not_private": True,
        }
    return found


@cache
def run_of(command: str, side: int = 0) -> RunConfig:
    """What the first (or with -1 the last) job of a command is set to; not to be changed."""
    words = [word.partition("=") for word in shlex.split(command)[3:] if word != "-m"]
    chosen = [f"{k}={v if v.startswith('[') else v.split(',')[side]}" for k, _, v in words]
    return compose(chosen, of_grid=True)


def made_by(command: str, side: int = 0) -> Record:
    """A record that a job of a command makes; a larger batch has more signal."""
    run = run_of(command, side)
    signal = {"mean": float(run.optim.batch_size), "updates": 30, "not_private": True}
    names = {key: getattr(run, key).name for key in ("task", "model", "clip", "scale", "engine")}
    return Record("x.json", names | {
        "details": {"config": to_dict(run)}, "seed": 0, "privacy": {}, "metrics": {"accuracy": 0.8},
        "data": {"rows": {"dev": 872}}, "curves": {"signal_to_noise": signal},
    })  # fmt: skip


def write(folder: Path, *summaries: dict[str, Any]) -> Path:
    """As records in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, one in enumerate(summaries):
        (folder / f"record{number}.json").write_text(json.dumps(one), encoding="utf-8")
    return folder
