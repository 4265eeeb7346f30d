"""`task=X scale=demo` for every task there is: a short private run from the command's settings to the released model, offline."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from rich.console import Console

from dpexp.config import compose, run_folder
from dpexp.metrics import captions
from dpexp.train import train

# task=custom is a person's own class: tests/tasks/test_custom.py
TASKS = sorted(
    path.stem
    for path in (Path(__file__).parents[2] / "conf" / "task").glob("*.yaml")
    if path.stem != "custom"
)
SHORT = (
    "scale=demo", "clip=adaptive_perlayer", "privacy=noise", "privacy.noise_multiplier=1.0", "runtime=cpu", "data.cache=null",
    "data.num_examples=48", "optim.batch_size=16", "optim.epochs=null", "optim.steps=2", "engine.choice=rule",
    "runtime.physical_batch_size=16",
)  # fmt: skip
SMALLER = {
    "text_classification": ("model.config.hidden_size=8",),
    "text_infilling": ("model.config.hidden_size=8",),
    "generation": ("model.config.n_embd=16", "task.generation.examples=2", "task.generation.max_target=24"),
    "image_classification": (),
}


@pytest.mark.parametrize("name", TASKS)
def test_the_demo_of_every_task_runs_offline(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the demo asked for the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    # its programs are tested with the metrics, and start slowly
    monkeypatch.setattr(captions, "java", lambda: None)
    kind = compose([f"task={name}", *SHORT]).task.kind
    run = compose([f"task={name}", *SHORT, *SMALLER[kind], f"runtime.runs_dir={tmp_path}"])
    folder = run_folder(run)
    folder.mkdir(parents=True)
    summary = train(run, folder, Console(quiet=True))
    assert summary == json.loads((folder / "summary.json").read_text())
    assert (summary["task"], summary["status"]) == (name, "finished")
    assert summary["data"]["source"] == "demo"
    assert "synthetic" in summary["data"]["name"]
    assert summary["data"]["rows"]["train"] == 48
    assert summary["privacy"]["epsilon"]["rdp"] > 0
    lines = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    assert len([line for line in lines if "step" in line]) == 2, "steps are charged, evaluations are not"
    assert (folder / "model" / "PRIVACY.md").is_file()
    if kind == "generation":
        assert summary["metrics"]["nll"] > 0
        generated = [value for key, value in summary["metrics"].items() if key.startswith("generated")]
        assert generated == [2]
        (predictions,) = folder.glob("predictions/*.jsonl")
        _, *rows = (json.loads(line) for line in predictions.read_text().split("\n")[:-1])
        assert [sorted(row) for row in rows] == [["ended", "index", "input", "prediction", "references"]] * 2
    else:
        accuracies = {metric for metric in summary["metrics"] if metric.startswith("accuracy")}
        assert accuracies == {"accuracy"} | ({"accuracy_mismatched"} if name.startswith("mnli") else set())
