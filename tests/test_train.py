"""The command itself, on the embedded data: to its end, a second time, interrupted, killed, and on bad input."""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console

from dpexp import record
from dpexp.clipping.engines import ENGINES
from dpexp.config import compose, run_folder
from dpexp.errors import UserError
from dpexp.train import build_plan, choose_device, report_finished, train

ROOT = Path(__file__).parents[1]
JOB = ["task=sst2", "clip=adaptive_perlayer", "scale=demo", "optim.epochs=null", "runtime=cpu"]
# The papers' rule decides the same every time; a measurement may come out differently in another folder.
SHORT = [*JOB, "optim.steps=3", "runtime.physical_batch_size=64", "engine.choice=rule", "data.cache=null"]


def prepare(runs, *overrides):
    run = compose([*SHORT, f"runtime.runs_dir={runs}", *overrides])
    folder = run_folder(run)
    folder.mkdir(parents=True)
    return run, folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    run, folder = prepare(tmp_path_factory.mktemp("runs"))
    console = Console(record=True, width=160)
    return train(run, folder, console), folder, console.export_text()


def test_the_folder_holds_what_a_run_leaves(finished):
    summary, folder, _ = finished
    assert json.loads((folder / "summary.json").read_text()) == json.loads(json.dumps(summary))
    assert tuple(summary)[: len(record.SUMMARY_KEYS)] == record.SUMMARY_KEYS
    assert yaml.safe_load((folder / "config.yaml").read_text())["optim"]["steps"] == 3
    assert len((folder / "ledger.jsonl").read_text().splitlines()) == summary["privacy"]["steps"] == 3
    assert stat.S_IMODE((folder / "secret.key").stat().st_mode) == 0o600
    assert (folder / "metrics.jsonl").exists()
    assert (folder / "checkpoint" / "latest.json").exists()


def test_the_epsilon_asked_for_is_met_and_all_accountants_are_shown(finished):
    summary, _, printed = finished
    epsilon = summary["privacy"]["epsilon"]
    assert 7.9 < epsilon["rdp"] <= 8.0
    assert 0 < epsilon["gdp"] < epsilon["prv"] <= epsilon["rdp"]
    for value in epsilon.values():
        assert f"{value:.4f}" in printed
    assert "synthetic" in printed


def test_the_exported_model_is_the_trained_one(finished):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    summary, folder, _ = finished
    model = AutoModelForSequenceClassification.from_pretrained(folder / "model")
    assert AutoTokenizer.from_pretrained(folder / "model")("a film")["input_ids"]
    checkpoint = torch.load(folder / "checkpoint" / "state-3.pt", weights_only=True)["model"]
    trained = {name: p for name, p in model.named_parameters() if name in checkpoint}
    assert trained
    assert all(torch.equal(p, checkpoint[name]) for name, p in trained.items())
    card = (folder / "model" / "PRIVACY.md").read_text()
    assert f"({summary['privacy']['epsilon']['rdp']:.4f}, " in card


def test_asking_for_a_finished_run_reports_it_and_whether_the_code_is_the_same(finished):
    summary, folder, _ = finished
    console = Console(record=True, width=160)
    report_finished(record.finished_summary(folder), folder, console)
    same = console.export_text()
    assert "is finished" in same
    assert "has changed" not in same
    report_finished({**summary, "details": {"code": "older"}}, folder, console)
    assert "the code has changed since" in console.export_text()


def test_without_privacy_epsilon_is_null_and_there_is_no_ledger(tmp_path):
    run, folder = prepare(tmp_path, "clip=nonprivate", "optim.steps=1")
    summary = train(run, folder, Console(quiet=True))
    assert set(summary["privacy"]["epsilon"].values()) == {None}
    assert summary["engine"] == "none"
    assert not (folder / "ledger.jsonl").exists()


def test_a_corrupt_checkpoint_and_a_missing_device_are_refused(tmp_path):
    run, folder = prepare(tmp_path, "optim.steps=2")
    train(run, folder, Console(quiet=True))
    state = folder / "checkpoint" / "state-2.pt"
    state.write_bytes(state.read_bytes()[:-1])
    with pytest.raises(UserError, match="corrupt checkpoint"):
        train(run, folder, Console(quiet=True))
    with pytest.raises(UserError, match="is no device"):
        choose_device("gpu7")


def command(runs, *overrides):
    return [sys.executable, "-m", "dpexp.train", *SHORT, f"runtime.runs_dir={runs}", *overrides]


def ledger_lines(folder):
    ledger = folder / "ledger.jsonl"
    return len(ledger.read_text().splitlines()) if ledger.exists() else 0


def interrupted(runs, number, *overrides):
    """Start the command and send it a signal once four steps are charged. Returns its folder, status and output."""
    folder = run_folder(compose([*SHORT, f"runtime.runs_dir={runs}", *overrides]))
    process = subprocess.Popen(
        command(runs, *overrides), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
    )
    deadline = time.monotonic() + 120
    while ledger_lines(folder) < 4 and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.02)
    os.kill(process.pid, number)
    output, _ = process.communicate(timeout=120)
    return folder, process.returncode, output


@pytest.mark.slow
def test_interrupted_or_killed_the_same_command_goes_on_to_the_same_model(tmp_path):
    longer = ["optim.steps=40", "privacy.noise_seed=7", "runtime.checkpoint_every=3"]
    whole = subprocess.run(
        command(tmp_path / "whole", *longer), capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert whole.returncode == 0, whole.stderr
    model = next((tmp_path / "whole").rglob("model.safetensors")).read_bytes()

    folder, status, output = interrupted(tmp_path / "cut", signal.SIGINT, *longer)
    assert status == 130, output
    assert "run the same command again" in output
    assert not (folder / "summary.json").exists()
    folder, status, output = interrupted(tmp_path / "killed", signal.SIGKILL, *longer)
    assert status == -signal.SIGKILL

    for runs in (tmp_path / "cut", tmp_path / "killed"):
        again = subprocess.run(command(runs, *longer), capture_output=True, text=True, cwd=ROOT, check=False)
        assert again.returncode == 0, again.stderr
        folder = next(runs.rglob("summary.json")).parent
        assert (folder / "model" / "model.safetensors").read_bytes() == model
        assert (
            json.loads((folder / "summary.json").read_text())["privacy"]["steps"]
            == ledger_lines(folder)
            == 40
        )


@pytest.mark.slow
def test_bad_input_is_one_line_and_exit_status_2(tmp_path):
    done = subprocess.run(
        command(tmp_path, "clip=adaptive_perlyer"), capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "adaptive_perlayer" in done.stderr
    assert "Traceback" not in done.stderr


def test_engine_and_runtime_change_no_plan():
    """What must not change the science does not: the same frozen plan, to the last bit, and the same event."""
    settings = ["task=sst2", "scale=demo", "clip=adaptive_perlayer"]
    reference = build_plan(compose(settings), 16000, 120)
    others = [[f"engine={name}"] for name in sorted(ENGINES)]
    others += [
        ["runtime.threads=1"],
        ["runtime.physical_batch_size=8"],
        ["runtime=cpu"],
        ["tracker=tensorboard"],
    ]
    for other in others:
        plan = build_plan(compose([*settings, *other]), 16000, 120)
        assert plan.fingerprint() == reference.fingerprint(), other
        assert plan.event() == reference.event()
