"""The examples for clusters are what the programs that read them expect, and name settings that exist."""

import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dpexp.config import compose
from dpexp.training import interrupt
from tests.reproduce.samples import summary

ROOT = Path(__file__).resolve().parent.parent.parent
CLUSTER = ROOT / "docs" / "examples" / "cluster"


def settings_of(words: list[str]) -> list[str]:
    return words[words.index("dpexp.train") + 1 :]


def test_the_batch_script_is_a_script_and_its_settings_exist():
    script = CLUSTER / "train.sbatch"
    subprocess.run(["bash", "-n", str(script)], check=True)
    text = script.read_text(encoding="utf-8")
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", text, flags=re.MULTILINE))
    assert options["ntasks-per-node"] == "1"  # torchrun starts the others
    assert "requeue" in options
    command = re.search(r"srun (.*?) \|\|", text.replace("\\\n", " "), flags=re.DOTALL)
    assert command is not None
    words = shlex.split(command[1])
    assert words[1] == "torchrun"
    settings = [word for word in settings_of(words) if word != "$@"]
    assert compose([*settings, "task=sst2", "clip=flat"]).runtime.parallel == "ddp"


@pytest.mark.parametrize(
    ("ending", "turns", "requeued", "status"),
    [(0, 0, False, 0), (1, 0, True, 0), (1, 19, True, 0), (1, 20, False, 1)],
)
def test_a_job_asks_for_another_turn_and_not_for_ever(tmp_path, ending, turns, requeued, status):
    """With programs of Slurm that write down how they were called."""
    programs = {
        "srun": f'echo "$@ $TORCH_ELASTIC_SHUTDOWN_TIMEOUT" > run; exit {ending}',
        "scontrol": 'echo "$@" >> asked',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    given = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_CPUS_PER_TASK": "64",
        "SLURM_GPUS_ON_NODE": "8", "SLURM_NNODES": "2", "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(turns),
    }  # fmt: skip
    done = subprocess.run(
        ["bash", str(CLUSTER / "train.sbatch"), "task=sst2"], cwd=tmp_path, env=given, check=False
    )
    assert done.returncode == status
    assert ("requeue 7" in (tmp_path / "asked").read_text()) == requeued
    # before Slurm ends it by force
    text = (CLUSTER / "train.sbatch").read_text(encoding="utf-8")
    warned = re.search(r"--signal=TERM@(\d+)", text)
    assert warned is not None
    assert 30 < int((tmp_path / "run").read_text().split()[-1]) < int(warned[1])


def test_signals_that_submitit_handles_stay_with_it():
    """It lets SIGTERM pass: a job that ends by itself before it is preempted is not queued again."""

    def passed(*_):
        pass

    before = signal.signal(signal.SIGTERM, passed)
    # whoever runs the tests in the background may have them ignore it
    interrupted = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        interrupt.end_like_ctrl_c()
        with interrupt.Interrupts():
            assert signal.getsignal(signal.SIGTERM) is passed
            assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        interrupt.end_like_ctrl_c()
        assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGINT, interrupted)


def test_the_kubernetes_manifest_is_consistent():
    service, job = yaml.safe_load_all((CLUSTER / "train.yaml").read_text(encoding="utf-8"))
    assert (service["kind"], job["kind"], job["apiVersion"]) == ("Service", "Job", "batch/v1")
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    options = dict(re.findall(r"--([\w-]+)=(\S+)", " ".join(container["args"])))
    assert spec["completionMode"] == "Indexed"  # the names of the pods are known then
    assert spec["completions"] == spec["parallelism"] == int(options["nnodes"])
    host, port = options["rdzv-endpoint"].split(":")
    assert host == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert int(port) in [entry["port"] for entry in service["spec"]["ports"]]
    assert service["spec"]["selector"].items() <= spec["template"]["metadata"]["labels"].items()
    assert service["spec"]["clusterIP"] == "None"
    assert pod["subdomain"] == service["metadata"]["name"]
    (patience,) = (int(e["value"]) for e in container["env"] if e["name"] == "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    assert 30 < patience < pod["terminationGracePeriodSeconds"]
    assert int(options["nproc-per-node"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    run = compose(settings_of(container["args"]))
    assert run.runtime.parallel == "ddp"
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    assert any(run.runtime.runs_dir.startswith(f"{mount}/") for mount in mounts)


@pytest.fixture
def gather(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    spec = importlib.util.spec_from_file_location("gather", ROOT / "scripts" / "gather.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys.modules["keep_record"], "RESULTS", tmp_path / "results")
    return module


def test_records_of_machines_are_gathered_once(gather, tmp_path, capsys):
    def place(machine: str, seed: int, accuracy: float, **changes):
        known = summary(seed=seed)
        known["metrics"] = known["metrics"] | {"accuracy": accuracy}
        known["details"] = {"signature": "5160a70e", "config": {"privacy": {"epsilon": 8.0}}}
        known["git"] = {"commit": "c0de", "dirty": False}
        known |= changes
        file = tmp_path / machine / f"seed{seed}" / "summary.json"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(known), encoding="utf-8")

    place("one", 0, 0.8)
    place("two", 0, 0.8)  # the same run, copied
    place("one", 1, 0.7)
    place("two", 1, 0.6)  # the same settings, another result
    place("two", 2, 0.5)
    place("two", 3, 0.5, status="failed")
    place("two", 4, 0.5, git={"commit": "c0de", "dirty": True})
    kept, odd = gather.gather([tmp_path / "one", tmp_path / "two"])
    seeds = sorted(json.loads(path.read_text(encoding="utf-8"))["seed"] for path in kept)
    assert seeds == [0, 2]
    assert len(odd) == 1
    assert "seed 1" in odd[0]
    told = capsys.readouterr().out
    # a machine that comes later
    place("three", 0, 0.81)
    place("three", 2, 0.5)
    before = kept[0].read_text(encoding="utf-8")
    later, odd = gather.gather([tmp_path / "three"])
    assert [json.loads(path.read_text(encoding="utf-8"))["seed"] for path in later] == [2]
    assert "seed 0" in odd[0]
    assert kept[0].read_text(encoding="utf-8") == before
    assert "seed3/summary.json is failed" in told
    assert "its code is in no commit" in told
