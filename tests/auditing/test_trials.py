"""The committed record of the audits' power and false alarms, and that its script makes such a record."""

import json
from pathlib import Path

import pytest

from dpexp.auditing import trials

RECORD = Path(__file__).parents[2] / "results" / "audit" / "trials.json"


def test_the_record_says_what_was_asked_for():
    """Lower bounds of 0.8 ε and more from minutes of one core, and at most 10 false alarms in 200."""
    found = json.loads(RECORD.read_text())
    assert [round(row["claimed"], 3) for row in found["power"]] == [4.0, 8.0]
    for row in found["power"]:
        assert 0.8 * row["claimed"] <= max(r["epsilon_lower"] for r in row["rows"]) <= row["claimed"]
        assert row["cpu_seconds"] <= 300
        assert {"Steinke", "f-DP", "two worlds", "Gaussian pair"} == {r["estimator"] for r in row["rows"]}
    assert found["runs"] == len(found["bounds"]) == 200
    assert found["false_alarms"] == sum(bound > claimed for claimed, bound in found["bounds"]) <= 10
    assert RECORD.with_suffix(".md").read_text() == trials.page(found)


def test_a_run_is_audited(tmp_path, monkeypatch):
    monkeypatch.setattr(trials, "POWER", {8.0: 300})
    trials.main(str(tmp_path), alarms=1)
    (row,) = json.loads((tmp_path / "trials.json").read_text())["power"]
    assert row["claimed"] == pytest.approx(8.0)
    assert max(r["epsilon_lower"] for r in row["rows"]) > 0
