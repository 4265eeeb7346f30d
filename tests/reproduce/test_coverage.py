"""The coverage matrix leaves nothing out, and finds its statuses instead of stating them."""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path

import pytest

from dpexp.reproduce import catalogue, coverage
from dpexp.reproduce.paper import PAPERS, paper_tables
from tests.reproduce.samples import summary, write

# Tables and figures by the papers' own numbering; Bu et al. refer to Tables 6-10 of an appendix that our copy lacks.
PRINTED = {
    "he2023": {
        "table": "1a 1b 2 3 4 5 6 7 8 9 10 11a 11b 12",
        "figure": "1 2 3 4 5 6 7 8 9",
        "algorithm": "1 2 3 4",
    },
    "bu2023": {"table": "1 2 3 4 5 6 7 8 9 10", "figure": "1 2 3 4 5 6 7", "algorithm": "1 5"},
    "li2022": {"table": "1 2 3 4 5 6 7 8 9 10 11 12 13", "figure": "1 2 3 4 5 6 7 8 9", "algorithm": "1 2"},
    "monir2023": {"table": "7 8 9 10", "figure": "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15", "algorithm": "1 2"},
}
# at least; quoted ones
SYSTEMS = {
    "he2023": (53, 0),
    "bu2023": (60, 0),
    "li2022": (95, 5),
    "monir2023": (50, 0),
}


TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    results = tmp_path_factory.mktemp("results")
    write(results / "runs", summary("flat"), summary("perlayer", scale="paper", model="roberta_base"))
    (results / "bench").mkdir()
    return catalogue.Context(results).document("coverage").rows


def _row(matrix: list[dict[str, str]], paper: str, name: str) -> dict[str, str]:
    (row,) = [row for row in matrix if (row["paper"], row["name"]) == (paper, name)]
    return row


@pytest.mark.parametrize("paper", PRINTED)
@pytest.mark.parametrize("kind", ["table", "figure", "algorithm"])
def test_every_numbered_thing_has_a_row(paper: str, kind: str):
    listed = [row["name"] for row in coverage.listed() if (row["paper"], row["kind"]) == (paper, kind)]
    assert listed == [f"{kind.capitalize()} {number}" for number in PRINTED[paper][kind].split()]


def test_every_transcription_belongs_to_a_row():
    listed = {(row["paper"], row["name"].lower().replace(" ", "")) for row in coverage.listed()}
    for paper, table in paper_tables():
        assert table == "text" or (paper, table) in listed, (paper, table)


@pytest.mark.parametrize("paper", SYSTEMS)
def test_systems_are_listed_once(paper: str):
    own = [row for row in coverage.listed() if row["paper"] == paper and row["kind"] not in PRINTED[paper]]
    counts = Counter((row["kind"], row["name"]) for row in own)
    assert max(counts.values()) == 1
    assert len(own) >= SYSTEMS[paper][0]
    assert sum(row["importance"] == "quoted" for row in own) >= SYSTEMS[paper][1]
    assert {row["importance"] for row in own} <= {"core", "described", "quoted"}


def test_the_list_is_that_of_the_papers_claims():
    """Against the list that was made by reading the papers, where it is to be had."""
    folder = os.environ.get("DPEXP_PAPERS")
    if not folder:
        pytest.skip(
            "DPEXP_PAPERS is not set: the reading list of the papers (CLAIMS.md) is not part of the repository"
        )
    text = (Path(folder) / "CLAIMS.md").read_text(encoding="utf-8").partition("## 3. Coverage list")[2]
    items = re.findall(r"^- \[(?:core|quoted numbers|described only)\] (.*)$", text, re.M)
    names = [row["name"] + (f": {row['printed']}" if row["printed"] else "") for row in coverage.listed()]
    assert len(items) > 300
    assert [item for item in items if item not in names] == []


def test_statuses_are_of_the_kinds_that_the_page_explains(matrix: list[dict[str, str]]):
    assert {row["status"] for row in matrix} <= set(coverage.STATUSES)
    assert len(matrix) == len(coverage.listed())
    assert {row["paper"] for row in matrix} == set(PAPERS)


def test_statuses_follow_from_records(matrix: list[dict[str, str]]):
    assert _row(matrix, "he2023", "Table 1b")["status"] == "paper"  # one record at each scale
    assert _row(matrix, "he2023", "Table 12")["status"] == "small"
    assert _row(matrix, "he2023", "Table 11a")["status"] in ("not run", "not built")
    flat = [
        row
        for row in matrix
        if row["paper"] == "he2023" and row["name"].startswith("flat clipping with a fixed")
    ]
    assert flat[0]["status"] == "small"
    assert "1 record" in flat[0]["where"]
    assert _row(matrix, "bu2023", "Table 3")["status"] == "exact"
    # the paper prints neither decay rates nor a number of the curve
    assert _row(matrix, "monir2023", "Figure 10")["status"] == "computed"
    assert _row(matrix, "he2023", "RoBERTa-large (355M)")["status"] == "not run"
    assert _row(matrix, "he2023", "GPT-3 (175B, original)")["status"] == "not built"


def test_a_run_on_the_scale_of_another_paper_is_none_of_this_one(tmp_path: Path):
    write(tmp_path / "runs", summary("flat", task="mnist", scale="paper"))
    evidence = catalogue.Context(tmp_path).read("evidence")
    found = {
        row["paper"]: evidence.status(row)["status"]
        for row in coverage.listed()
        if (row["choice"], row["test"], row["runs"]) == ("clip/flat", "", "clip=flat")
    }
    assert found == {"he2023": "not run", "monir2023": "paper"}


def test_what_was_measured_before_any_training_shows_no_training(tmp_path: Path):
    write(tmp_path / "runs", summary("nonprivate", epochs=None, steps=0))
    evidence = catalogue.Context(tmp_path).read("evidence")
    (row,) = (r for r in coverage.listed() if r["paper"] == "he2023" and r["name"] == "non-private training")
    assert evidence.status(row)["status"] == "not run"


def test_a_pointer_to_nothing_is_not_built():
    assert not coverage.Evidence({}).has("choice", "clip/nosuch")
    assert not coverage.Evidence({}).has("target", "table-he-99")
    assert coverage.Evidence({}).has("choice", "clip/flat")


def test_every_test_that_a_row_names_is_one_of_this_suite():
    """The matrix believes the list, as an installed copy must, which comes without tests."""
    named = {name for row in coverage.listed() for name in row["test"].split()}
    assert named
    for file, test in (name.split("::") for name in sorted(named)):
        path = TESTS / file
        assert path.is_file(), file
        assert f"\ndef {test}(" in path.read_text(encoding="utf-8"), f"{file} has no {test}"


def test_a_row_names_what_is_there_or_says_that_it_is_missing():
    known = coverage.Evidence(dict.fromkeys(catalogue.builders(), ""))
    for row in coverage.listed():
        named = [(kind, name) for kind in coverage.KINDS for name in row[kind].split()]
        assert bool(named) != (row["otherwise"] in ("missing", "diagram", "this list")), row["name"]
        assert [one for one in named if not known.has(*one)] == [], row["name"]


def test_every_selector_names_settings_that_records_have():
    facts = {"task", "model", "clip", "optim.name", "optim.lr", "optim.lr_schedule", "optim.warmup_ratio", "peft.name",
             "peft.rank", "model.trainable", "clip.allocation", "clip.clip_norm", "privacy.epsilon",
             "privacy.noise_multiplier", "search.name", "optim.batch_size", "optim.steps", "task.generation.num_beams",
             "task.generation.shots", "task.generation.top_p"}  # fmt: skip
    for row in coverage.listed():
        for part in filter(None, row["runs"].split(",")):
            assert part == "bench" or part.partition("=")[0] in facts, row
