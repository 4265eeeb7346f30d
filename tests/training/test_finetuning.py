"""Training under every way to fine-tune: the whole command on embedded data, exports that reload, and RGP step by step."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from dpexp.config import compose, run_folder
from dpexp.models import ModelBundle, adapters, build_model, rgp
from dpexp.models.adapters import load_adapters
from dpexp.schemas import PeftConfig, RunConfig
from dpexp.tasks import build_task
from dpexp.train import train as run_command
from dpexp.training.export import export
from tests.test_record import block, summary
from tests.training.tiny import TinyTask, make_trainer, run_to_end, tiny_run, train

JOB = (
    "task=sst2", "scale=demo", "runtime=cpu", "clip=perlayer", "optim.epochs=null", "optim.steps=2",
    "optim.batch_size=40", "data.num_examples=200", "runtime.physical_batch_size=32", "engine.choice=rule",
    "data.cache=null", "model.config.num_hidden_layers=2",
)  # fmt: skip
WAYS: dict[str, list[str]] = {
    "full": [],
    "lora": ["peft.rank=2"],
    "prefix": ["peft.prefix_length=3", "peft.prefix_hidden=8"],
    "prompt": ["peft.prefix_length=3"],
    "p_tuning": ["peft.prefix_length=3", "peft.prefix_hidden=8"],
    "rgp": [],
    "top2": ["peft.blocks=1"],
    "bitfit": [],
    "head": [],
    "adapters": ["peft.rank=4"],
}


def composed(runs: Path, way: str, *more: str) -> RunConfig:
    return compose([*JOB, f"peft={way}", *WAYS[way], f"runtime.runs_dir={runs}", *more])


def network_of(run: RunConfig, peft: PeftConfig) -> ModelBundle:
    return build_model(run.model, peft, num_labels=2, scale="demo", seed=run.seed)


def reloaded(run: RunConfig, way: str, folder: Path) -> nn.Module:
    """The exported model as its reader gets it back."""
    if way in ("lora", "prefix", "prompt", "p_tuning"):
        from peft import PeftModel

        return PeftModel.from_pretrained(network_of(run, PeftConfig()).model, str(folder))
    if way == "adapters":
        return load_adapters(network_of(run, PeftConfig()).model, folder)
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(folder)


def logits(model: nn.Module, run: RunConfig, tokenizer: Any) -> torch.Tensor:
    task = build_task(run.task, run.data, "demo", tokenizer, run.seed)
    batch = task.collate([task.dev[i] for i in range(8)])
    with torch.no_grad():
        inputs = {k: v for k, v in batch.items() if k in ("input_ids", "attention_mask", "token_type_ids")}
        return model.eval()(**inputs).logits


@pytest.mark.parametrize("way", WAYS)
def test_the_command_trains_and_what_it_exports_is_the_trained_model(tmp_path, way: str) -> None:
    run = composed(tmp_path, way)
    folder = run_folder(run)
    folder.mkdir(parents=True)
    found = run_command(run, folder, Console(quiet=True))
    assert found["status"] == "finished"
    assert found["details"]["config"]["peft"]["name"] == way
    assert 0 < found["privacy"]["epsilon"]["rdp"] <= 8
    bundle = network_of(run, run.peft)
    state = torch.load(folder / "checkpoint" / "state-2.pt", weights_only=True)["model"]
    assert set(bundle.trainable) <= set(state)
    start = dict(bundle.model.named_parameters()) | dict(bundle.model.named_buffers())
    assert not any(torch.equal(start[name], state[name]) for name in bundle.trainable)
    for name, tensor in state.items():
        start[name].data.copy_(tensor)
    again = reloaded(run, way, folder / "model")
    expected = logits(bundle.model, run, bundle.tokenizer)
    torch.testing.assert_close(logits(again, run, bundle.tokenizer), expected)
    untrained = network_of(run, PeftConfig()).model
    assert not torch.allclose(expected, logits(untrained, run, bundle.tokenizer))


class Stack(nn.Module):
    """Three blocks of one class and a head, for `TinyTask`."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(10, 10) for _ in range(3)])
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(10, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.blocks:
            x = x + torch.tanh(layer(self.drop(x)))
        return self.head(x)


def stack(carriers: str = "weights", rank: int = 2) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        head = ["head.weight", "head.bias"]
        return rgp.add_carriers(Stack(), PeftConfig(name="rgp", rank=rank, carriers=carriers), head, seed=0)[
            0
        ]


def whole_state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


class Stopping(TinyTask):
    """Asks for the losses of a few physical batches, then the process is cut off."""

    def __init__(self, after: int):
        super().__init__()
        self.left = after

    def losses(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        self.left -= 1
        if self.left < 0:
            raise ConnectionAbortedError("the power is gone")
        return super().losses(model, batch)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("carriers", ["weights", "history"])
def test_rgp_resumes_to_the_same_weights_and_carriers_bit_for_bit(
    tmp_path, carriers: str, optimizer: str
) -> None:
    run = tiny_run(steps=6)
    run.optim.name = optimizer
    whole = whole_state(run_to_end(tmp_path / "whole", run, model=stack(carriers)).model)
    folder = tmp_path / "cut"
    with pytest.raises(ConnectionAbortedError):
        train(make_trainer(folder, run, model=stack(carriers), task=Stopping(after=12)))
    resumed = make_trainer(folder, run, model=stack(carriers))
    assert 0 < resumed.step < 6
    train(resumed)
    now = whole_state(resumed.model)
    assert now.keys() == whole.keys()
    assert all(torch.equal(now[name], tensor) for name, tensor in whole.items())
    assert resumed.ledger.steps_charged == 6
    parts = ("base.weight", "draws", "left.weight", "right.weight")
    start = stack(carriers).state_dict()
    moved = {name for name, tensor in start.items() if not torch.equal(tensor, whole[name])}
    assert moved == {f"blocks.{i}.{part}" for i in range(3) for part in parts} | {"head.weight", "head.bias"}


def test_rgp_with_full_rank_and_no_noise_is_plain_training(tmp_path) -> None:
    """Carriers that span everything lose nothing: the assembled update is the gradient."""
    run = tiny_run(steps=3, private=False)
    run.optim.name, run.optim.lr = "sgd", 0.5
    carried = run_to_end(tmp_path / "carried", run, model=stack(rank=10)).model
    rgp.restore_layers(carried)
    plain = stack(rank=10)
    rgp.restore_layers(plain)
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_("blocks" not in name or name.endswith("weight"))
    run_to_end(tmp_path / "plain", run, model=plain)
    for (name, one), (_, other) in zip(carried.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(one, other, msg=lambda message, name=name: f"{name}: {message}")


def test_the_noise_of_rgp_stays_in_the_span_of_its_carriers(tmp_path) -> None:
    """An empty batch leaves noise alone, and the weights move by what the carriers can express."""
    run = tiny_run(steps=1, adaptive=False)
    run.optim.name, run.optim.lr = "sgd", 1.0
    model = stack(rank=1)
    before = [layer.weight.clone() for layer in rgp.carried_layers(model)]
    carriers = [
        (c.left.weight.detach().clone(), c.right.weight.detach().clone()) for c in rgp.carried_layers(model)
    ]
    nobody = SimpleNamespace(draw=lambda step, attempt=0: torch.zeros(0, dtype=torch.int64).numpy())
    run_to_end(tmp_path, run, model=model, sampler=nobody)
    for layer, old, (left, right) in zip(rgp.carried_layers(model), before, carriers, strict=True):
        moved = layer.weight - old
        assert moved.norm() > 0
        rest = moved - left @ left.t() @ moved
        torch.testing.assert_close(
            rest - rest @ right.t() @ right, torch.zeros_like(moved), rtol=0, atol=1e-6
        )


def test_exports_of_adapters_say_where_the_network_comes_from(tmp_path) -> None:
    model = nn.Sequential(adapters.Adapted(nn.Linear(4, 4), 4, 2))
    export(SimpleNamespace(model=model, tokenizer=None, source="a network"), summary(block()), tmp_path)
    assert '"network": "a network"' in (tmp_path / "adapters.json").read_text()
    assert (tmp_path / "PRIVACY.md").exists()
