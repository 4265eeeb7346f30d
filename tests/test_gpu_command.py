"""``make gpu``, rehearsed where there is no GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dpexp.benchmark import gpu
from dpexp.benchmark.gpu import Part, main, parts, run
from dpexp.benchmark.methods import chosen_methods
from dpexp.benchmark.workloads import workload_named
from dpexp.config import compose


def test_the_whole_plan_fits_its_time_and_names_what_exists(tmp_path: Path) -> None:
    planned = parts(tmp_path, rehearse=False)
    assert sum(part.seconds for part in planned) <= gpu.LIMIT_S + 5
    assert gpu.LIMIT_S < 9 * 60
    for name in gpu.WORKLOADS:
        workload_named(name)
    assert set(gpu.METHODS) <= set(chosen_methods(list(gpu.METHODS)))
    for part in planned:
        if part.command[0] == "dpexp.train":
            assert compose(part.command[1:]).task.name == "cifar10_jpeg"
        if part.command[0] == "pytest":
            assert all(Path(word).is_file() for word in part.command if word.endswith(".py"))


@pytest.mark.slow
def test_a_rehearsal_leaves_a_record(tmp_path: Path) -> None:
    assert main(["--rehearse", "--out", str(tmp_path)]) == 0, (tmp_path / "record.json").read_text()
    record = json.loads((tmp_path / "record.json").read_text())
    rows = {row["part"]: row for row in record["parts"]}
    assert {row["status"] for row in rows.values()} == {"ok"}
    assert record["rehearsal"]
    assert '"equal_to_the_cpu": true' in rows["noise"]["output"]
    measured = {row["method"] for row in rows["speed_fp32"]["record"]["rows"]}
    assert measured == {"nonprivate", "auto/flat"}
    assert str(tmp_path) not in rows["speed_fp32"]["command"]


def test_what_cannot_run_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DPEXP_DATA", raising=False)
    command = ("this", "--version")
    assert run(Part("a", command, 9.0, needs=("no_such_module",)), 99.0, tmp_path)["why"] == (
        "not installed: no_such_module"
    )
    assert "DPEXP_DATA has no x" in run(Part("b", command, 9.0, data="x"), 99.0, tmp_path)["why"]
    assert run(Part("c", command, 9.0), 1.0, tmp_path)["why"] == "no time was left"
    failed = run(Part("d", ("no_such_module",), 30.0), 99.0, tmp_path)
    assert failed["status"] == "failed with exit status 1"
    assert "no_such_module" in failed["output"]


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main([]) == 2
    assert "--rehearse" in capsys.readouterr().err
