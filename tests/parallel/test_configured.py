"""`dpexp.train` on several processes: under torchrun, with a rank that dies, and one run that goes through all runtimes."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dpexp import train
from dpexp.config import compose, run_folder
from dpexp.errors import UserError
from dpexp.parallel import ALONE, Ranks
from dpexp.training import steps
from dpexp.training.loop import Trainer
from dpexp.training.stages import StageTrainer
from tests.commands import called
from tests.parallel.pool import run_ranks
from tests.pipeline.test_training import CASES, SMALL, STAGED, trained
from tests.versions import needs_torch

DYING = Path(__file__).with_name("dying.py")
DIGITS = [
    "task=mnist", "scale=demo", "model=cnn_small", "clip=adaptive_perlayer", "optim=sgd", "optim.lr=0.1", "optim.steps=4",
    "optim.epochs=null", "optim.batch_size=24", "privacy.noise_seed=7", "engine.choice=rule", "runtime.threads=1",
    "runtime.device=cpu", "runtime.physical_batch_size=8", "runtime.checkpoint_every=10",
]  # fmt: skip


def charged_in(folder: Path) -> list[tuple[int, int]]:
    """Steps and attempts in the ledger of a finished run."""
    lines = next(folder.rglob("ledger.jsonl")).read_text().splitlines()
    return [(line["step"], line["attempt"]) for line in map(json.loads, lines)]


def run_of(ranks: Ranks, folder: Path, cache: str, settings: list[str]) -> None:
    os.environ["DPEXP_CACHE"] = cache
    train.run_together(compose([*settings, f"runtime.runs_dir={folder}"]), ranks)


def each_to_its_own_disk(ranks: Ranks, folder: Path) -> str:
    place = folder / f"machine {ranks.rank}"
    place.mkdir()
    os.chdir(place)
    with pytest.raises(UserError) as caught:
        train.run_together(compose([*DIGITS, "runtime=fsdp", "runtime.runs_dir=runs"]), ranks)
    return str(caught.value)


def test_a_folder_that_not_all_machines_see_is_refused_before_anything_is_charged(tmp_path: Path) -> None:
    for told in run_ranks(2, tmp_path, each_to_its_own_disk, tmp_path):
        assert "not all processes see runs/mnist" in told
    assert not list(tmp_path.rglob("ledger.jsonl"))


STAGES = [
    *SMALL,
    *STAGED,
    *CASES["adaptive"],
    "optim.steps=4",
    "engine.choice=rule",
    "runtime.checkpoint_every=10",
]
EARLY = "runtime.checkpoint_every=2"
WHOLE, SHARDED = ([*DIGITS, f"runtime={name}"] for name in ("ddp", "fsdp"))
often = pytest.mark.skipif(not os.environ.get("DPEXP_ALL_RANKS"), reason="many lives: make test-ranks")


@pytest.mark.parametrize(
    ("settings", "kills"),
    [
        pytest.param(WHOLE, "0:1:charge:3", id="whole"),
        pytest.param([*SHARDED, EARLY], "0:1:part:1", id="sharded", marks=needs_torch(2, 15)),
        pytest.param([*STAGES, EARLY], "0:0:line:4", id="staged", marks=needs_torch(2, 14)),
        pytest.param([*WHOLE, EARLY], "0:0:line:1,1:1:noise:2,2:0:pointer:2", id="whole, often", marks=often),
        pytest.param([*SHARDED, EARLY], "0:0:line:1,1:1:noise:2,2:0:part:2,3:0:pointer:1", id="sharded, often", marks=often),
        pytest.param([*STAGES, EARLY], "0:1:charge:1,1:1:noise:2,2:0:pointer:2", id="staged, often", marks=often),
    ],
)  # fmt: skip
def test_torchrun_starts_all_ranks_again_when_one_dies(
    tmp_path: Path, settings: list[str], kills: str
) -> None:
    """Steps are repeated from the last checkpoint, or from the beginning, and none is charged twice.

    A step is charged once because its sum is the same to the last bit in all lives.
    """
    count = kills.count(",") + 1
    # lives that are forked need not import everything again
    done = called(
        "torch.distributed.run", "--standalone", "--nproc-per-node=2", f"--max-restarts={count}",
        "--start-method=fork", "--run-path", str(DYING), kills, *settings, f"runtime.runs_dir={tmp_path / 'died'}", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.count("killed: ") == count
    (tmp_path / "ranks").mkdir()
    run_ranks(2, tmp_path / "ranks", run_of, tmp_path / "lived", os.environ["DPEXP_CACHE"], settings)
    died, lived = tmp_path / "died", tmp_path / "lived"
    assert charged_in(died) == charged_in(lived) == [(step, 0) for step in range(4)]
    ends, expected = (json.loads(next(run.rglob("summary.json")).read_text()) for run in (died, lived))
    assert ends["privacy"]["epsilon"] == expected["privacy"]["epsilon"]
    assert ends["details"]["processes"] == 2
    files = [sorted(path.relative_to(run) for path in run.rglob("*")) for run in (died, lived)]
    assert files[0] == files[1]
    exported = next(path for pattern in ("model.pt", "*.safetensors") for path in lived.rglob(pattern))
    assert (died / exported.relative_to(lived)).read_bytes() == exported.read_bytes()


ADAM = [
    "clip=adaptive_perlayer", "peft=lora", "optim=adam", "optim.lr=0.01", "optim.steps=4", "clip.init_threshold=0.02",
    "runtime.checkpoint_every=1", "runtime.physical_batch_size=4",
]  # fmt: skip
ROUTE = (["runtime=ddp"], ["runtime=fsdp"], ["runtime=pipeline", "runtime.microbatch=2"])


def three_legs(ranks: Ranks, folder: Path, settings: list[str]) -> list[str]:
    """One step in each runtime; each session is lost behind the checkpoint of its step."""

    def lost(trainer: Any, progress: Any, *, final: bool = False) -> Any:
        raise RuntimeError(f"lost after step {trainer.step}")

    Trainer.evaluate = StageTrainer.evaluate = lost
    told = []
    for leg, runtime in enumerate(ROUTE):
        Trainer.affordable = lambda trainer, last=leg + 1: trainer.step < last
        with pytest.raises(RuntimeError, match="lost") as caught:
            trained(
                ranks,
                folder,
                [*settings, *runtime],
                released=leg if "privacy.bands=3" in settings else 2 * leg,
            )
        told.append(str(caught.value))
    return told


MICROBATCHES = ["clip=microbatch", "clip.microbatch=2", "optim.batch_size=10", "peft=lora"]


def run_of_microbatches(ranks: Ranks, folder: Path) -> dict:
    # each machine may have its cache in a place of its own
    cache = f"data.cache={folder}/cache of {ranks.rank}"
    return trained(ranks, folder, [*MICROBATCHES, cache, "runtime=ddp"])


def test_each_process_clips_whole_microbatches(tmp_path: Path) -> None:
    """Dupuy et al. 2022: a device has microbatches of its own; their sum is that of one process."""
    (tmp_path / "ranks").mkdir()
    first, _ = run_ranks(2, tmp_path / "ranks", run_of_microbatches, tmp_path / "two")
    alone = trained(ALONE, tmp_path / "alone", MICROBATCHES)
    assert first["details"]["processes"] == 2
    assert first["privacy"]["epsilon"] == alone["privacy"]["epsilon"]
    expected = load_file(alone["weights"])
    for name, tensor in load_file(first["weights"]).items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-6)
    with pytest.raises(UserError, match="choose runtime=auto"):
        compose([*SMALL, *MICROBATCHES, "runtime=fsdp"])


def cuts_otherwise(ranks: Ranks, folder: Path) -> str:
    if not ranks.writes:
        cut = steps.microbatches
        steps.microbatches = lambda drawn, examples, count, seed: cut(drawn, examples, count, seed + 1)
    with pytest.raises(UserError) as caught:
        run_of_microbatches(ranks, folder)
    return str(caught.value)


def test_microbatches_that_ranks_cut_in_several_ways_are_refused(tmp_path: Path) -> None:
    """An example would be in those of two ranks."""
    (tmp_path / "ranks").mkdir()
    for told in run_ranks(2, tmp_path / "ranks", cuts_otherwise, tmp_path / "two"):
        assert "step 0 (sample) of rank 1 differs" in told
    assert not list(tmp_path.rglob("ledger.jsonl"))


def signals_in(folder: Path) -> list[float]:
    """The ratios of signal to noise that a run has logged, in the order of steps."""
    lines = map(json.loads, next(folder.rglob("metrics.jsonl")).read_text().splitlines())
    return [line["signal_to_noise"] for line in lines if "signal_to_noise" in line]


@needs_torch(2, 15)
@pytest.mark.parametrize("more", [[], ["privacy.bands=3"]], ids=["independent", "correlated"])
def test_a_run_goes_through_all_runtimes(tmp_path: Path, more: list[str]) -> None:
    """DDP, FSDP2, a pipeline, one process: each takes a step, with Adam's moments, thresholds and noise of those before."""
    settings = [*ADAM, *more]
    (tmp_path / "ranks").mkdir()
    moved = tmp_path / "moved"
    told = run_ranks(2, tmp_path / "ranks", three_legs, moved, settings)
    assert told == [[f"lost after step {step}" for step in (1, 2, 3)]] * 2
    resumed = trained(ALONE, moved, settings, released=3 if more else 6)
    alone = trained(ALONE, tmp_path / "alone", settings)
    assert charged_in(moved) == [(step, 0) for step in range(4)]
    assert resumed["privacy"]["epsilon"] == alone["privacy"]["epsilon"]
    assert resumed["details"]["thresholds"] == pytest.approx(alone["details"]["thresholds"], rel=1e-5)
    signals = signals_in(tmp_path / "alone")
    assert signals_in(moved) == pytest.approx(signals, rel=1e-4)
    assert len(signals) == 4
    assert (
        run_folder(compose([*SMALL, *settings])).name
        == run_folder(compose([*SMALL, *settings, *ROUTE[1]])).name
    )
    expected = load_file(alone["weights"])
    for name, tensor in load_file(resumed["weights"]).items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=1e-5)
