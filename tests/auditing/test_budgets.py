"""The committed record of audits of individual budgets, and that its script makes such a record."""

import json
from pathlib import Path

import numpy as np
import pytest

from dpexp.auditing import budgets

RECORD = Path(__file__).parents[2] / "results" / "audit" / "budgets.json"


def test_no_budget_is_refuted_and_the_bounds_come_near():
    found = json.loads(RECORD.read_text())
    assert set(found["runs"]) == set(budgets.METHODS)
    for run in found["runs"].values():
        # what the pld accountant makes of budgets that the Rényi accountant was asked to keep
        for part, budget in zip(run["groups"], budgets.EPSILONS, strict=True):
            assert 0.7 * budget < part["epsilon_claimed"] <= budget
        assert all(part["refuted"] <= 0.05 * found["repeats"] for part in run["groups"])
    for part in found["runs"]["scaling"]["groups"]:
        # one run's bound is a draw, 0.7 to 0.95 of the smallest claim: the mean of the runs is what the audit can do
        assert np.mean(part["epsilon_lower"]) > 0.8 * part["epsilon_claimed"]
    assert RECORD.with_suffix(".md").read_text() == budgets.page(found)


def test_a_run_is_audited_group_by_group(tmp_path, monkeypatch):
    monkeypatch.setattr(budgets, "METHODS", {"scaling": 1.0})
    monkeypatch.setattr(budgets, "CANARIES", 300)
    monkeypatch.setattr(budgets, "RUNS", 2)
    assert budgets.main(str(tmp_path)) in (0, 1)
    groups = json.loads((tmp_path / "budgets.json").read_text())["runs"]["scaling"]["groups"]
    assert [len(part["epsilon_lower"]) for part in groups] == [2, 2, 2]
    assert [part["epsilon_claimed"] for part in groups] == pytest.approx(budgets.EPSILONS, rel=0.15)
