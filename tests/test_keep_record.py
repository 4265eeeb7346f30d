"""What of a run's log is kept in its record: a thinned curve, and norms only as what they are."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from scripts.gather import finished
from tests.reproduce.samples import summary

SPEC = importlib.util.spec_from_file_location(
    "keep_record", Path(__file__).parent.parent / "scripts" / "keep_record.py"
)
assert SPEC is not None
assert SPEC.loader is not None
keep_record = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(keep_record)


def test_curves_of_a_log(tmp_path: Path):
    norms = {"quantiles": [0.5, 0.85], "groups": ["a", "b"], "values": [[1.234567, 2], [3, 4]]}
    lines = [
        {"step": 1, "lr": 0.1, "time_s": 2.5}, {"step": 1, "not_private": True, "norm_quantiles": norms},
        {"step": 1, "not_private": True, "loss": 0.7}, {"step": 1, "dev": {"accuracy": 0.5}},
    ]  # fmt: skip
    log = tmp_path / "metrics.jsonl"
    log.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    kept = keep_record.curves(log)
    assert kept["dev"] == [{"step": 1, "time_s": 2.5, "dev": {"accuracy": 0.5}}]
    assert kept["norms"]["not_private"] is True
    assert kept["norms"]["points"] == [{"step": 1, "values": [[1.235, 2.0], [3.0, 4.0]]}]
    assert "loss" not in json.dumps(kept)


def test_the_ratio_of_signal_to_noise_is_a_mean_over_the_first_updates(tmp_path: Path):
    lines = [
        {"step": step, "not_private": True, "signal_to_noise": 0.1 * (step <= keep_record.EARLY)}
        for step in range(1, 50)
    ]
    log = tmp_path / "metrics.jsonl"
    log.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    assert keep_record.curves(log) == {
        "signal_to_noise": {"mean": 0.1, "updates": keep_record.EARLY, "not_private": True}
    }


def test_no_log_no_curves(tmp_path: Path):
    assert keep_record.curves(tmp_path / "nothing.jsonl") == {}


def test_thinning_keeps_both_ends():
    points = list(range(1000))
    kept = keep_record.thinned(points)
    assert (len(kept), kept[0], kept[-1]) == (24, 0, 999)
    assert keep_record.thinned(points[:5]) == points[:5]


def _keep(tmp_path: Path, one: dict, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(keep_record, "RESULTS", tmp_path / "results")
    one["details"] |= {"signature": "0123456789"}
    path = tmp_path / "summary.json"
    path.write_text(json.dumps(one), encoding="utf-8")
    return keep_record.keep(path)


def test_an_audit_is_kept_apart_from_training_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    name = "sst2-minilm-flat-small-eps8-0123456789-seed0.json"
    assert _keep(tmp_path, summary(), monkeypatch) == tmp_path / "results" / "runs" / name
    assert keep_record.keep(tmp_path / "summary.json", "league") == tmp_path / "results" / "league" / name
    audit = summary() | {"audit": {"method": "exposure"}}
    assert _keep(tmp_path, audit, monkeypatch) == tmp_path / "results" / "audits" / name


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"status": "failed"}, "finish the run first"),
        ({"git": {"commit": "a" * 40, "dirty": True}}, "in no commit"),
        ({"git": {"commit": None, "dirty": None}}, "in no commit"),
    ],
)
@pytest.mark.parametrize("more", [{}, {"audit": {"method": "exposure"}}], ids=["run", "audit"])
def test_what_does_not_count_is_not_kept(
    change: dict, words: str, more: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(SystemExit, match=words):
        _keep(tmp_path, summary() | more | change, monkeypatch)
    assert not (tmp_path / "results").exists()


def test_damaged_records_and_torn_logs_are_named_and_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "dev": {"accuracy": 0.5}}\n{"step": 2, "de', encoding="utf-8"
    )
    record = _keep(tmp_path, summary(), monkeypatch)
    assert [point["step"] for point in json.loads(record.read_text())["curves"]["dev"]] == [1]
    (tmp_path / "summary.json").write_text('{"status": "fin', encoding="utf-8")
    with pytest.raises(SystemExit, match="no record, or a damaged one"):
        keep_record.keep(tmp_path / "summary.json")
    assert finished(tmp_path) == {}
    assert "summary.json is damaged" in capsys.readouterr().out


def test_folders_of_the_machine_are_cut():
    assert keep_record.without_folders({"a": ["python -m x data.root=/home/me/data"], "b": 1}) == {
        "a": ["python -m x data.root=data"],
        "b": 1,
    }
