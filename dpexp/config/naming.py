"""What names a run: its settings as a whole, ten characters that stand for them, its folder."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from dpexp.durable import flattened
from dpexp.schemas import RunConfig
from dpexp.schemas.declared import declared_num_examples

_NOT_IN_SIGNATURE = frozenset(
    {
        "seed", "trials", "trials_law", "tracker", "data.root", "data.cache", "data.source", "task.hub_id",
        "task.hub_config", "task.files", "task.num_examples", "model.root", "runtime.eval_batch_size",
        "runtime.eval_every", "runtime.checkpoint_every", "runtime.log_every", "runtime.runs_dir", "runtime.parallel",
        "runtime.stages", "runtime.schedule", "runtime.microbatch", "runtime.flat", "runtime.rematerialise", "runtime.park",
        "runtime.dry_run", "privacy.keep_key", "analysis",
    }
)  # fmt: skip


def to_dict(run: RunConfig) -> dict[str, Any]:
    """Give the settings as plain nested dicts, ready for YAML or JSON."""
    return dataclasses.asdict(run)


def signature(run: RunConfig) -> str:
    """Name a run up to its seed, in ten hex characters: the science, the engine and the runtime.

    Left out is what can't change a result: the seed (it names the folder below), the tracker, where data lies, and how
    often a run evaluates, logs and saves. Values equal to the schema's defaults are left out too, so that a new setting
    doesn't rename the runs of yesterday; a default must therefore never change its meaning.
    """
    neutral = dict(flattened(to_dict(RunConfig())))
    settings = {
        key: value for key, value in flattened(to_dict(run)) if key not in neutral or neutral[key] != value
    }
    kept = {
        key: value
        for key, value in settings.items()
        if not any(key == left_out or key.startswith(f"{left_out}.") for left_out in _NOT_IN_SIGNATURE)
    }
    kept["num_examples"] = declared_num_examples(run)
    if run.data.source == "demo":
        kept["data.source"] = "demo"
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:10]


def run_folder(run: RunConfig) -> Path:
    """Name ``runs_dir/<task>/<signature>/seed<k>``: the same settings are the same run and the same folder."""
    return Path(run.runtime.runs_dir) / run.task.name / signature(run) / f"seed{run.seed}"
