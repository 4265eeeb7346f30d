"""The tables are made from the committed records, and from nothing else."""

import json
import shutil
from pathlib import Path

import pytest

from dpexp import report
from dpexp.reproduce import runs

ROOT = Path(__file__).parent.parent
RECORDS = sorted((ROOT / "results" / "runs").glob("*.json"))


def test_the_committed_table_is_that_of_the_committed_records(tmp_path: Path):
    runs.main(tmp_path, ROOT / "results" / "runs")
    for name in ("runs.md", "runs.csv"):
        assert (tmp_path / name).read_bytes() == (ROOT / "results" / "tables" / name).read_bytes()


def test_every_record_is_a_row_with_what_it_measured():
    table = runs.rows(ROOT / "results" / "runs")
    assert len(table) == len(RECORDS) > 0
    for row in table:
        summary = json.loads((ROOT / row["record"]).read_text(encoding="utf-8"))
        assert float(row["accuracy"]) == pytest.approx(100 * summary["metrics"]["accuracy"], abs=0.005)
        assert summary["clip"] == row["clip"]
        assert summary["scale"] == row["scale"]


@pytest.mark.parametrize("change", [{"git": {"commit": "0" * 40, "dirty": True}}, {"versions": None}])
def test_a_record_without_provenance_is_refused(
    change: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    shutil.copytree(ROOT / "results" / "runs", tmp_path / "runs")
    victim = tmp_path / "runs" / RECORDS[0].name
    summary = json.loads(victim.read_text(encoding="utf-8")) | change
    victim.write_text(json.dumps({k: v for k, v in summary.items() if v is not None}), encoding="utf-8")
    assert report.main(["runs", "--results", str(tmp_path)]) == 2
    assert victim.name in capsys.readouterr().err


def test_an_unknown_report_names_the_close_one(capsys: pytest.CaptureFixture[str]):
    assert report.main(["accounting-lee"]) == 2
    assert "did you mean accounting-li" in capsys.readouterr().err
