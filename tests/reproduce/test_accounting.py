"""The ε columns of Li et al.: close to print. That the committed table is what the code makes is in `tests/test_report.py`."""

import csv
from pathlib import Path

import pytest

TABLES = Path(__file__).parents[2] / "results" / "tables"


@pytest.fixture(scope="module")
def table():
    with (TABLES / "accounting-li.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_the_closest_settings_are_within_two_hundredths(table):
    """Three for the CLT values of Table 1; and SST-2's are not had from the paper's own settings."""
    closest = {(row["table"], row["row"], row["target ε"]): row for row in table}  # the last of each stands
    assert len(closest) == 2 * 18
    for row in closest.values():
        assert abs(float(row["difference composed"])) <= 0.02, row
        if row["row"] == "SST-2":
            assert float(row["difference CLT"]) < -0.15
        else:
            assert abs(float(row["difference CLT"])) <= (0.03 if row["table"] == "1" else 0.02), row


def test_stated_settings_of_the_generation_tasks_come_close(table):
    """E2E and DART as stated, δ = 1/(2N): the composed values to 0.03, the CLT values to 0.05."""
    stated = [row for row in table if row["settings"] == "stated" and row["row"].startswith(("E2E", "DART"))]
    assert len(stated) == 12
    for row in stated:
        assert abs(float(row["difference composed"])) <= 0.03, row
        assert abs(float(row["difference CLT"])) <= 0.05, row
