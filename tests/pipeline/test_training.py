"""A configured run in two stages: the sample, thresholds, ε, losses and weights of one process."""

import contextlib
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpexp import native, train
from dpexp.config import compose, run_folder
from dpexp.errors import UserError
from dpexp.parallel import ALONE, Ranks
from dpexp.parallel.shards import is_sharded
from dpexp.pipeline.clipper import WholeModel
from dpexp.pipeline.split import keep_stage
from dpexp.privacy.noise import KeyedGenerator
from dpexp.training import learner, release, stages
from dpexp.training.stages import refuse_unstaged
from tests.parallel.pool import run_ranks
from tests.pipeline.models import language_model
from tests.versions import needs_torch

pytestmark = needs_torch(2, 14)

SMALL = [
    "task=e2e", "scale=demo", "model=gpt2_tiny", "optim=sgd", "optim.lr=0.1", "optim.steps=2", "optim.epochs=null",
    "optim.batch_size=6", "privacy.noise_seed=7", "runtime.threads=1", "task.generation.when=never", "clip.clip_norm=0.5",
    "runtime.device=cpu",
]  # fmt: skip
UNTIED = "model.config={n_embd: 16, n_layer: 2, n_head: 2, n_positions: 256, tie_word_embeddings: false}"
CASES = {
    "adaptive": ["clip=adaptive_perdevice", "peft=lora", "clip.init_threshold=0.02"],
    "flat": ["clip=flat", UNTIED],
    "none": ["clip=nonprivate", "peft=lora"],
}
STAGED = ["runtime=pipeline", "runtime.microbatch=2"]


def numbered_noise(calls: int = 0) -> Any:
    """The same noise for a parameter in the n-th release of every run; real noise is seeded with sums, which rounding moves."""

    def add(tensors: list[Tensor], std: Any, generator: Any = None) -> None:
        nonlocal calls
        calls += 1
        stds = std if isinstance(std, list) else [std] * len(tensors)
        for place, (tensor, sigma) in enumerate(zip(tensors, stds, strict=True)):
            own = torch.Generator().manual_seed(1000 * calls + place)
            noise = torch.randn(tensor.shape, generator=own, dtype=torch.float64).to(tensor.dtype) * sigma
            if is_sharded(tensor):
                from torch.distributed.tensor import distribute_tensor

                noise = distribute_tensor(noise, tensor.device_mesh, tensor.placements, src_data_rank=None)
            tensor.add_(noise)

    return add


def of_step(self: release.Release, name: str, step: int, attempt: int) -> KeyedGenerator:
    return KeyedGenerator(f"{name} {step} {attempt}".encode().rjust(32))


def use_own_cache(folder: Path) -> None:
    """Have norm methods measured anew in this process; native kernels are the machine's."""
    kernels = native.library_path().parent
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        (folder / "native").symlink_to(kernels)
    os.environ["DPEXP_CACHE"] = str(folder)


def trained(ranks: Ranks, folder: Path, overrides: list[str], released: int = 0) -> dict:
    """The end of a run: its summary, with the weights that it exported; `released`: how often noise was added before."""
    before, release.add_gaussian_ = release.add_gaussian_, numbered_noise(released)
    # of correlated noise, which is drawn by steps
    keyed, release.Release.generator = release.Release.generator, of_step
    use_own_cache(folder / "cache")
    try:
        run = compose([*SMALL, *overrides, f"runtime.runs_dir={folder}"])
        train.run_together(run, ranks)
    finally:
        release.add_gaussian_, release.Release.generator = before, keyed
    where = run_folder(run)
    summary = json.loads((where / "summary.json").read_text())
    return summary | {"weights": str(next((where / "model").rglob("*.safetensors")))}


def all_trained(ranks: Ranks, folder: Path) -> list[dict]:
    return [trained(ranks, folder / name, [*more, *STAGED]) for name, more in CASES.items()]


def weights(summary: dict) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(summary["weights"])


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("together")
    (folder / "ranks").mkdir()
    first, _ = run_ranks(2, folder / "ranks", all_trained, folder)
    return dict(zip(CASES, first, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_a_run_in_two_stages_ends_as_one_process_ends(
    together: dict[str, dict], tmp_path: Path, name: str
) -> None:
    alone, staged = trained(ALONE, tmp_path, CASES[name]), together[name]
    assert staged["privacy"]["epsilon"] == alone["privacy"]["epsilon"]
    assert staged["details"]["signature"] == alone["details"]["signature"]
    for metric, value in alone["metrics"].items():
        assert staged["metrics"][metric] == pytest.approx(value, rel=1e-5), metric
    thresholds = torch.tensor(alone["details"]["thresholds"])
    torch.testing.assert_close(torch.tensor(staged["details"]["thresholds"]), thresholds)
    expected = weights(alone)
    for key, tensor in weights(staged).items():
        torch.testing.assert_close(tensor, expected[key], rtol=1e-4, atol=1e-6)
    assert staged["details"]["pipeline"]["stages"] == 2
    sent = staged["performance"]["bytes_per_step"]
    assert sent["activations"] == sent["gradients"] > 0
    assert ("norms" in sent) == (name == "flat")


GOES_ON = ["clip=adaptive_perdevice", "peft=lora", "optim=adam", "optim.lr=0.01", "clip.init_threshold=0.02"]


def one_step(ranks: Ranks, folder: Path) -> str:
    """A run that is lost behind its first step, with a checkpoint."""
    stages.StageTrainer.affordable = lambda trainer: trainer.step < 1

    def lost(trainer: Any, progress: Any, *, final: bool = False) -> Any:
        raise RuntimeError("lost")

    stages.StageTrainer.evaluate = lost
    with pytest.raises(RuntimeError, match="lost"):
        trained(ranks, folder, [*GOES_ON, *STAGED])
    return "lost"


def test_a_run_goes_on_in_one_process(tmp_path: Path) -> None:
    (tmp_path / "ranks").mkdir()
    assert run_ranks(2, tmp_path / "ranks", one_step, tmp_path / "lost") == ["lost", "lost"]
    resumed = trained(ALONE, tmp_path / "lost", GOES_ON, released=2)
    alone = trained(ALONE, tmp_path / "alone", GOES_ON)
    assert resumed["privacy"]["epsilon"] == alone["privacy"]["epsilon"]
    assert resumed["details"]["thresholds"] == pytest.approx(alone["details"]["thresholds"], rel=1e-5)
    expected = weights(alone)
    for key, tensor in weights(resumed).items():
        torch.testing.assert_close(tensor, expected[key], rtol=1e-3, atol=1e-5)


class Cut(Exception):
    """Ends a trainer that is being made."""


def test_the_device_is_given_the_stage_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whose device holds no numbers at all: the whole model is never asked anything there."""
    run = compose([*SMALL, *STAGED, "clip=nonprivate", "peft=lora"])
    model, device, moved = language_model("gpt2", lora=True), torch.device("meta"), []

    def kept(model: nn.Module, stage: int, stages: int) -> nn.Module:
        moved.append({p.device.type for p in model.parameters()})
        return model

    def made(config: Any, parameters: Any) -> None:
        moved.append({p.device.type for p in parameters})
        raise Cut

    monkeypatch.setattr(stages, "keep_stage", kept)
    monkeypatch.setattr(stages, "refuse_unstaged", lambda *arguments: None)
    monkeypatch.setattr(stages, "_groups", lambda *arguments: (None, None, ALONE))
    monkeypatch.setattr(learner, "build_optimizer", made)
    bundle: Any = SimpleNamespace(model=model)
    others: dict[str, Any] = {
        "keys": SimpleNamespace(draws=b""),
        "signature": "",
        "folder": tmp_path,
        "metrics": None,
    }
    with pytest.raises(Cut):
        stages.StageTrainer(
            run, None, bundle, None, build=lambda: bundle, ranks=ALONE, steps=1, sampler=None,
            device=device, **others,
        )  # fmt: skip
    assert moved == [{"cpu"}, {"meta"}]


class OnGpu(Tensor):
    """Lies elsewhere until it is asked for on the CPU."""

    def cpu(self, *arguments: Any) -> Tensor:
        return self.as_subclass(Tensor)


def test_processes_tell_each_other_tensors_of_the_cpu() -> None:
    """One of a GPU opens that GPU in every process that reads it."""
    trainer: Any = stages.StageTrainer.__new__(stages.StageTrainer)
    trainer.model = nn.Linear(3, 2)
    for name, p in trainer.model.named_parameters():
        setattr(trainer.model, name, nn.Parameter(p.detach().as_subclass(OnGpu)))
    trainer.optimizer, trainer.replica = torch.optim.Adam(trainer.model.parameters()), 0
    trainer.names = [name for name, _ in trainer.model.named_parameters()]
    trainer.model(torch.ones(1, 3)).sum().backward()
    trainer.optimizer.step()
    told: list[Any] = []
    trainer.ranks = SimpleNamespace(gather=lambda own: told.append(own) or [own])
    trainer.states()
    ((model, moments),) = told
    tensors = [*model.values(), *(tensor for each in moments.values() for tensor in each.values())]
    assert len(tensors) == 8
    assert {type(tensor) for tensor in tensors} == {Tensor}


DEEP = "model.config={n_embd: 16, n_layer: 4, n_head: 2, n_positions: 256}"
ON_FOUR = {
    "two replicas of two stages": ["runtime.stages=2"],
    "four stages": [DEEP, "clip.devices=4", "runtime.stages=4"],
    "four stages and a threshold for each layer": [DEEP, "clip=adaptive_perlayer", "runtime.stages=4"],
}


def on_four(ranks: Ranks, folder: Path) -> list[dict]:
    return [
        trained(ranks, folder / name, [*CASES["adaptive"], *more, *STAGED]) for name, more in ON_FOUR.items()
    ]


@pytest.mark.skipif(not os.environ.get("DPEXP_ALL_RANKS"), reason="four processes: make test-ranks")
def test_runs_on_four_processes_end_as_one_process_ends(tmp_path: Path) -> None:
    (tmp_path / "ranks").mkdir()
    together = run_ranks(4, tmp_path / "ranks", on_four, tmp_path / "together")[0]
    for (name, more), found in zip(ON_FOUR.items(), together, strict=True):
        alone = trained(ALONE, tmp_path / name, [*CASES["adaptive"], *more[:-1]])
        assert found["privacy"]["epsilon"] == alone["privacy"]["epsilon"], name
        assert found["details"]["pipeline"]["replicas"] == (2 if "replicas" in name else 1)
        for metric, value in alone["metrics"].items():
            assert found["metrics"][metric] == pytest.approx(value, rel=1e-5), (name, metric)
        expected = weights(alone)
        for key, tensor in weights(found).items():
            torch.testing.assert_close(
                tensor, expected[key], rtol=1e-4, atol=1e-6, msg=lambda said, name=name: f"{name}: {said}"
            )


TASK = [
    "task=custom",
    "task.metric=loss",
    "data.num_examples=24",
    "privacy=noise",
    "privacy.noise_multiplier=1",
]


def told_by_tasks(ranks: Ranks, folder: Path) -> list[str]:
    told = []
    for name in ("Mixing", "Typed"):
        task = [*TASK, f"task.factory=tests.pipeline.models:{name}", "clip=perdevice", "peft=lora", *STAGED]
        with pytest.raises(UserError) as caught:
            trained(ranks, folder / name, task)
        told.append(str(caught.value))
    return told


def test_tasks_of_ones_own_are_looked_at_before_the_model_is_cut(tmp_path: Path) -> None:
    """Losses that go by their batch; and what no stage but the last would be given."""
    (tmp_path / "ranks").mkdir()
    for mixing, typed in run_ranks(2, tmp_path / "ranks", told_by_tasks, tmp_path):
        assert "Mixing.losses: " in mixing
        assert "mixes examples" in mixing
        assert "a batch has token_type_ids" in typed
    assert not list(tmp_path.rglob("ledger.jsonl"))


def counting(model: nn.Module, stage: int, stages: int) -> nn.Module:
    """A stage whose last block, in the second process, counts its calls."""
    kept = keep_stage(model, stage, stages)
    if stage == 1:
        block = next(module for name, module in kept.named_modules() if name.endswith("h.1"))
        block.register_buffer("calls", torch.zeros(()))
        block.register_forward_pre_hook(lambda block, given: block.calls.add_(1) and None)
    return kept


def told_of_calls(ranks: Ranks, folder: Path) -> str:
    stages.keep_stage = counting
    with pytest.raises(UserError) as caught:
        trained(ranks, folder, [*CASES["flat"], *STAGED])
    return str(caught.value)


def test_a_stage_that_counts_its_calls_is_refused_in_all_processes(tmp_path: Path) -> None:
    """How many microbatches there are follows from who was drawn; the other stage has seen nothing of it."""
    (tmp_path / "ranks").mkdir()
    for told in run_ranks(2, tmp_path / "ranks", told_of_calls, tmp_path / "run"):
        assert "'calls' of transformer.h.1 (GPT2Block) goes by how often the model was called" in told
    assert not list(tmp_path.rglob("ledger.jsonl"))


def test_what_is_not_exact_in_stages_is_refused_by_name() -> None:
    two = Ranks(0, 2)

    class Task:
        head, rows_per_example = "causal_lm", 1

    class Augmented(Task):
        rows_per_example = 2

    with pytest.raises(UserError, match="several rows for each example"):
        refuse_unstaged(compose([*SMALL, *STAGED, "clip=perdevice"]), Augmented, two)

    for overrides, words in (
        (["runtime.schedule=interleaved1f1b"], "several stages"),
        (["runtime.stages=3"], "does not divide"),
        (["optim=adadp"], "adadp"),
        (["peft=prefix"], "prefix"),
        (["engine=opacus"], "opacus"),
        (["optim.ema_decay=0.9"], "averages"),
    ):
        run = compose([*SMALL, *STAGED, "clip=perdevice", *overrides])
        with pytest.raises(UserError, match=words):
            refuse_unstaged(run, Task, two)
    idle = language_model("gpt2", lora=False)
    for name, parameter in idle.named_parameters():
        parameter.requires_grad_("ln_f" in name)
    with pytest.raises(UserError, match="nothing trains in stage 0 of 2"):
        WholeModel(idle, "flat", 2)
    with pytest.raises(UserError, match=r"cannot be cut into 99 parts.*runtime.stages"):
        WholeModel(idle, "flat", 99)
    with pytest.raises(UserError, match="torchrun"):
        train.refuse_misfits(compose([*SMALL, *STAGED, "clip=perdevice"]))
