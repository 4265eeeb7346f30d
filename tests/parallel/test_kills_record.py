"""The committed record of ranks that were killed."""

import json
from pathlib import Path

from tests.parallel import kills

RECORD = Path(__file__).parents[2] / "results" / "ranks" / "kills.json"


def test_thirty_kills_changed_no_end_and_no_ledger():
    found = json.loads(RECORD.read_text())
    rows = found["runs"]
    assert [row["runtime"] for row in rows] == list(kills.RUNTIMES)
    assert sum(row["kills"] for row in rows) >= 30
    assert all(row["endings_equal"] and row["ledgers_equal"] for row in rows)
    assert RECORD.with_suffix(".md").read_text() == kills.page(found)
