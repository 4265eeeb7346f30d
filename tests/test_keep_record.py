"""What of a run's log is kept in its record: a thinned curve, and norms only as what they are."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

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


def test_no_log_no_curves(tmp_path: Path):
    assert keep_record.curves(tmp_path / "nothing.jsonl") == {}


def test_thinning_keeps_both_ends():
    points = list(range(1000))
    kept = keep_record.thinned(points)
    assert (len(kept), kept[0], kept[-1]) == (24, 0, 999)
    assert keep_record.thinned(points[:5]) == points[:5]
