"""Tables and figures are made from the committed records, and from nothing else."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dpexp import report
from dpexp.errors import UserError
from dpexp.reproduce import catalogue, site
from dpexp.reproduce.catalogue import Context
from dpexp.reproduce.statistics import CANNOT_TELL
from tests.reproduce.samples import summary, write

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"
RECORDS = sorted((RESULTS / "runs").glob("*.json"))
SLOW = {
    "accounting-li",
    "figure-li-3",
    "figure-li-7",
    "noise-he",
    "figure-he-6",
    "complexity-bu-table8",
    "figure-bu-7",
    "figure-monir-10",
}
QUICK = [name for name in catalogue.builders() if name not in SLOW]


@pytest.fixture(scope="module")
def context() -> Context:
    return Context(RESULTS)


def _assert_committed(name: str, context: Context, tmp_path: Path) -> None:
    for path in catalogue.write(context.document(name), tmp_path):
        committed = RESULTS / path.relative_to(tmp_path)
        assert path.read_bytes() == committed.read_bytes(), (
            f"{path.name}: run `make tables figures` and commit"
        )


@pytest.mark.parametrize("name", QUICK)
def test_regenerating_gives_the_committed_files(name: str, context: Context, tmp_path: Path):
    _assert_committed(name, context, tmp_path)


@pytest.mark.slow
def test_the_arithmetic_and_the_page_are_what_is_committed(context: Context, tmp_path: Path):
    """In one test: the page holds every document, and those of arithmetic take longest."""
    for name in sorted(SLOW):
        _assert_committed(name, context, tmp_path)
    for name in catalogue.EXACT:
        page = context.document(name)
        # exact is what is computed, stands beside a printed number, or decides a claim
        columns = {column for section in page.sections for column in section.shown}
        beside = any(column.startswith(("printed", "paper")) for column in columns)
        decided = any(verdict.word != CANNOT_TELL for verdict in page.verdicts)
        assert page.status == "computed" or beside or decided, name
    documents = [context.document(name) for name in catalogue.builders()]
    assert site.page(documents, context.read("runs")).encode() == (RESULTS / "report.html").read_bytes(), (
        "report.html: run `make report` and commit"
    )


def test_nothing_is_committed_that_no_target_makes():
    made = {f"{name}{ending}" for name in catalogue.builders() for ending in (".md", ".csv", ".svg")}
    every = [path for folder in ("tables", "figures") for path in (RESULTS / folder).glob("*")]
    # pictures of an earlier version, which git ignores
    found = [path.name for path in every if path.suffix != ".png"]
    assert set(found) <= made


def test_every_record_is_a_row_with_what_it_measured(context: Context):
    table = context.document("runs").rows
    assert len(table) == len(RECORDS) > 0
    for row in table:
        record = json.loads((ROOT / row["record"]).read_text(encoding="utf-8"))
        accuracy = record["metrics"].get("accuracy")
        assert row["accuracy"] == ("" if accuracy is None else f"{100 * accuracy:.2f}")
        assert (record["clip"], record["scale"]) == (row["clip"], row["scale"])


@pytest.mark.parametrize("name", ["runs", "table-he-1b", "coverage"])
@pytest.mark.parametrize("change", [{"git": {"commit": "0" * 40, "dirty": True}}, {"versions": None}])
def test_a_record_without_provenance_is_refused(
    change: dict, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    write(
        tmp_path / "runs", summary(), {k: v for k, v in (summary(seed=1) | change).items() if v is not None}
    )
    (tmp_path / "bench").mkdir()
    assert report.main([name, "--results", str(tmp_path)]) == 2
    assert "record1.json" in capsys.readouterr().err
    assert not (tmp_path / "tables").exists()


def test_a_benchmark_without_provenance_is_refused_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    shutil.copytree(RESULTS / "bench", tmp_path / "bench")
    (victim, *_) = sorted((tmp_path / "bench").glob("*.json"))
    record = json.loads(victim.read_text(encoding="utf-8"))
    victim.write_text(json.dumps(record | {"git": {"commit": None, "dirty": None}}), encoding="utf-8")
    assert report.main(["figure-bu-2", "--results", str(tmp_path)]) == 2
    assert victim.name in capsys.readouterr().err


def test_an_unknown_report_names_the_close_one(capsys: pytest.CaptureFixture[str]):
    assert report.main(["accounting-lee"]) == 2
    assert "did you mean accounting-li" in capsys.readouterr().err
    assert report.main(["table-he-22"]) == 2
    assert "table-he-2" in capsys.readouterr().err


def test_names():
    assert catalogue.resolve(["table-he-1"]) == ["table-he-1a", "table-he-1b"]
    assert catalogue.resolve(["table-bu-4", "complexity-bu-table4"]) == ["complexity-bu-table4"]
    figures, tables = catalogue.resolve(["figures"]), catalogue.resolve(["tables"])
    assert set(figures) | set(tables) == set(catalogue.resolve(["all"])) == set(catalogue.builders())
    assert not set(figures) & set(tables)
    with pytest.raises(UserError, match="did you mean figure-li-3"):
        catalogue.resolve(["figure-li-33"])


def test_nothing_asked_for_gets_one_sentence(capsys: pytest.CaptureFixture[str]):
    assert report.main([]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert "dpexp report run FOLDER" in said


def test_list_names_every_target(capsys: pytest.CaptureFixture[str]):
    assert report.main(["list"]) == 0
    listed = capsys.readouterr().out.split()
    assert {"table-he-2", "figure-li-3", "accounting-li", "tables", "report"} <= set(listed)


def test_make_hands_names_and_scale_on():
    def planned(*words: str) -> str:
        done = subprocess.run(
            ["make", "-n", f"PYTHON={sys.executable}", *words],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout

    assert "-m dpexp.report table-he-2" in planned("table-he-2")
    assert "--run" not in planned("table-he-2")
    assert "-m dpexp.report figure-li-3 --run --scale paper" in planned("figure-li-3", "RUN=1", "SCALE=paper")
    for target in ("tables", "figures", "report"):
        assert f"-m dpexp.report {target}" in planned(target)


def test_run_first_runs_what_is_missing_and_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """RUN=1 runs the commands of the empty cells, each once, and a failed run leaves its cells empty."""
    (tmp_path / "runs").mkdir()
    commands: list[list[str]] = []

    def fake(words: list[str], check: bool) -> subprocess.CompletedProcess[str]:
        commands.append(words)
        return subprocess.CompletedProcess(words, 1)

    monkeypatch.setattr(report.subprocess, "run", fake)
    assert report.main(["table-he-1b", "--results", str(tmp_path), "--run", "--scale", "small"]) == 0
    assert len(commands) == 4
    assert all(
        words[:3] == [sys.executable, "-m", "dpexp.train"] and "scale=small" in words for words in commands
    )
    assert "not run" in (tmp_path / "tables" / "table-he-1b.md").read_text(encoding="utf-8")


def test_run_1_of_a_figure_runs_its_commands_or_says_why_there_are_none(tmp_path, monkeypatch, capsys):
    results = tmp_path / "results"
    shutil.copytree(RESULTS / "paper", results / "paper")
    context = Context(results)
    assert "task=sst2" in context.document("figure-he-4").commands("small")[0]
    for name in catalogue.builders().keys() - catalogue.EXACT.keys():
        for command in context.document(name).commands("small"):
            assert command.startswith(("python -m dpexp.train ", "python -m dpexp.audit "))
    monkeypatch.chdir(ROOT)
    assert report.main(["figure-he-6", "--results", str(results), "--run"]) == 0
    assert "figure-he-6: nothing is run: it is arithmetic" in capsys.readouterr().out
