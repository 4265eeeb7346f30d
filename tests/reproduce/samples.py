"""Synthetic records in the form of real ones, for tests of what is made from records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def summary(clip: str = "flat", seed: int = 0, accuracy: float = 0.9, **settings: Any) -> dict[str, Any]:
    """A finished run of SST-2; ``settings``: task, model, scale, epsilon, epochs, lr, allocation."""
    said = {
        "task": "sst2",
        "model": "minilm",
        "scale": "small",
        "epsilon": 8.0,
        "epochs": 2.0,
        "lr": 1e-3,
    } | settings
    config = {
        "task": {"name": said["task"], "max_length": 64},
        "model": {"name": said["model"], "trainable": "all"},
        "clip": {
            "name": clip,
            "clip_norm": 1.0,
            "allocation": said.get("allocation", "global"),
            "quantile_budget": 0.1,
        },
        "privacy": {"epsilon": said["epsilon"], "delta": "n_pow_-1.1"},
        "optim": {
            "name": "adam",
            "lr": said["lr"],
            "batch_size": 2048.0,
            "epochs": said["epochs"],
            "steps": None,
        },
        "peft": {"name": "full"},
        "runtime": {"precision": "fp32", "threads": seed + 1},
        "seed": seed,
    }
    return {
        "task": said["task"], "model": said["model"], "clip": clip, "engine": "auto", "scale": said["scale"],
        "data": {"source": "files", "name": "sst2/train.tsv", "rows": {"train": 67349}, "sha256": {"train": "0" * 64}},
        "privacy": {"epsilon": {"rdp": said["epsilon"], "gdp": 4.0, "prv": 6.0, "pld": 6.0}, "delta": 4.9e-6, "accountant": "rdp",
                    "noise_multiplier": 0.6, "steps": 66, "sampling": "poisson", "trials": 1},
        "metrics": {"accuracy": accuracy, "loss": 0.3}, "performance": {"device": "cpu: a processor, 1 threads"}, "seed": seed,
        "versions": {"python": "3.11"}, "git": {"commit": "a" * 40, "dirty": False}, "command": "python -m dpexp.train",
        "wall_s": 1.0, "status": "finished", "details": {"config": config, "hardware": {"cpu": "a processor"}},
    }  # fmt: skip


def write(folder: Path, *summaries: dict[str, Any]) -> Path:
    """As records in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, one in enumerate(summaries):
        (folder / f"record{number}.json").write_text(json.dumps(one), encoding="utf-8")
    return folder
