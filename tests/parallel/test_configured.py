"""`dpexp.train` on several processes: under torchrun, with a rank that dies, and one run that goes through all runtimes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dpexp import train
from dpexp.config import compose, run_folder
from dpexp.parallel import ALONE, Ranks
from dpexp.training.loop import Trainer
from dpexp.training.stages import StageTrainer
from tests.parallel.pool import run_ranks
from tests.pipeline.test_training import SMALL, trained

ROOT = Path(__file__).parents[2]
DIGITS = [
    "task=mnist", "scale=demo", "model=cnn_small", "clip=adaptive_perlayer", "optim=sgd", "optim.lr=0.1", "optim.steps=4",
    "optim.epochs=null", "optim.batch_size=24", "privacy.noise_seed=7", "engine.choice=rule", "runtime.threads=1",
    "runtime.device=cpu", "runtime.physical_batch_size=8", "runtime.checkpoint_every=10",
]  # fmt: skip


def end_of(folder: Path) -> dict[str, Any]:
    """What a finished run has left: summary, the bytes of its weights, and the steps and attempts of its ledger."""
    where = next(folder.rglob("summary.json")).parent
    lines = [json.loads(line) for line in (where / "ledger.jsonl").read_text().splitlines()]
    return {
        "summary": json.loads((where / "summary.json").read_text()),
        "weights": [path.read_bytes() for path in sorted((where / "model").glob("model*"))],
        "charged": [(line["step"], line["attempt"]) for line in lines],
    }


def whole_run(ranks: Ranks, folder: Path) -> None:
    train.run_together(compose([*DIGITS, "runtime=ddp", f"runtime.runs_dir={folder}"]), ranks)


def test_torchrun_starts_all_ranks_again_when_one_dies(tmp_path: Path) -> None:
    """Rank 1 is killed behind the third charge, before any checkpoint: three steps are repeated, none is charged twice."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1",
        "-m", "tests.parallel.dying", *DIGITS, "runtime=ddp", f"runtime.runs_dir={tmp_path / 'died'}",
    ]  # fmt: skip
    settings = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | settings, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (tmp_path / "ranks").mkdir()
    run_ranks(2, tmp_path / "ranks", whole_run, tmp_path / "lived")
    died, lived = end_of(tmp_path / "died"), end_of(tmp_path / "lived")
    assert died["charged"] == lived["charged"] == [(step, 0) for step in range(4)]
    assert died["summary"]["privacy"]["epsilon"] == lived["summary"]["privacy"]["epsilon"]
    assert died["summary"]["details"]["processes"] == 2
    assert len(lived["weights"]) == 1
    assert died["weights"] == lived["weights"]


ADAM = [
    "clip=adaptive_perlayer", "peft=lora", "optim=adam", "optim.lr=0.01", "optim.steps=4", "clip.init_threshold=0.02",
    "runtime.checkpoint_every=1", "runtime.physical_batch_size=4",
]  # fmt: skip
ROUTE = (["runtime=ddp"], ["runtime=fsdp"], ["runtime=pipeline", "runtime.microbatch=2"])


def three_legs(ranks: Ranks, folder: Path) -> list[str]:
    """One step in each runtime; each session is lost behind the checkpoint of its step."""

    def lost(trainer: Any, progress: Any, *, final: bool = False) -> Any:
        raise RuntimeError(f"lost after step {trainer.step}")

    Trainer.evaluate = StageTrainer.evaluate = lost
    told = []
    for leg, runtime in enumerate(ROUTE):
        Trainer.affordable = lambda trainer, last=leg + 1: trainer.step < last
        with pytest.raises(RuntimeError, match="lost") as caught:
            trained(ranks, folder, [*ADAM, *runtime], released=2 * leg)
        told.append(str(caught.value))
    return told


def test_a_run_goes_through_all_runtimes(tmp_path: Path) -> None:
    """DDP, FSDP2, a pipeline, one process: each takes a step, with Adam's moments and the thresholds of the one before."""
    (tmp_path / "ranks").mkdir()
    moved = tmp_path / "moved"
    told = run_ranks(2, tmp_path / "ranks", three_legs, moved)
    assert told == [[f"lost after step {step}" for step in (1, 2, 3)]] * 2
    resumed = trained(ALONE, moved, ADAM, released=6)
    alone = trained(ALONE, tmp_path / "alone", ADAM)
    assert end_of(moved)["charged"] == [(step, 0) for step in range(4)]
    assert resumed["privacy"]["epsilon"] == alone["privacy"]["epsilon"]
    assert resumed["details"]["thresholds"] == pytest.approx(alone["details"]["thresholds"], rel=1e-5)
    assert run_folder(compose([*SMALL, *ADAM])).name == run_folder(compose([*SMALL, *ADAM, *ROUTE[1]])).name
    expected = load_file(alone["weights"])
    for name, tensor in load_file(resumed["weights"]).items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=1e-5)
