"""The first screen of the page: claims with their verdicts, all runs, hyper-parameters in print and in the presets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dpexp.config import compose
from dpexp.reproduce import hyperparameters, overview
from dpexp.reproduce.documents import Document, Section, Verdict
from dpexp.reproduce.paper import listed, paper_table
from dpexp.reproduce.records import load
from tests.reproduce.samples import summary, write


def _document(name: str, *verdicts: Verdict) -> Document:
    section = Section("", done="small 1/2", verdicts=verdicts)
    return Document(name, name, sections=(section,), claim=f"{name} is so.")


def test_a_claim_has_one_row_and_decided_ones_come_first():
    unsure = _document("table-he-unsure", Verdict("scale=small", "cannot tell: one seed"))
    both = _document(
        "table-he-both", Verdict("a", "supports (1)", "+1"), Verdict("b", "contradicts (2)", "-1")
    )
    part = _document("table-he-part", Verdict("on mnist instead", "supports for a part of the claim, half"))
    half = _document(
        "table-he-half", Verdict("", "cannot tell: one seed"), Verdict("in miniature", "supports (1)")
    )
    sure = Verdict("", "supports: it is so", "it is so")
    arithmetic = replace(_document("figure-he-6", sure), sections=(Section("", verdicts=(sure,)),))
    rows = overview.verdicts([unsure, arithmetic, both, part, half, Document("table-he-page", "no claim")])
    assert [(row["where"], row["verdict"]) for row in rows] == [
        ("table-he-both", "mixed"), ("table-he-part", "supports"), ("table-he-half", "supports"),
        ("figure-he-6", "supports"), ("table-he-unsure", "cannot tell"),
    ]  # fmt: skip
    assert rows[0]["ours"] == "supports: a: +1\ncontradicts: b: -1"
    assert rows[1]["evidence"] == "small 1/2, a part of the claim (half), stand-in data"
    assert rows[2]["evidence"] == "small 1/2, 1 of 2 tests decide, stand-in data"
    assert (rows[3]["ours"], rows[3]["evidence"]) == ("it is so", "recomputed")


def test_rows_of_different_settings_do_not_read_alike(tmp_path: Path):
    asked: list[dict[str, Any]] = [{}, {"quantile": 0.9}, {"allocation": "weighted"}]
    adaptive = [summary("adaptive_perlayer", accuracy=0.8, **settings) for settings in asked]
    flat = [summary("flat", accuracy=0.8, clip_norm=norm) for norm in (0.1, 1.0)]
    models = [row["model"] for row in overview.leaders(load(write(tmp_path, *adaptive, *flat)))]
    assert len(models) == len(set(models)) == 5
    assert sum(model.endswith("quantile 0.5, weighted allocation") for model in models) == 1


def test_leaders_are_the_best_of_each_task_and_know_their_gap(tmp_path: Path):
    records = load(
        write(
            tmp_path,
            summary("flat", accuracy=0.8),
            summary("flat", seed=1, accuracy=0.9),
            summary("perlayer", accuracy=0.7),
        )
    )
    rows = overview.leaders(records)
    assert [(row["method"], row["value"], row["n"]) for row in rows] == [
        ("flat", "85.00", "2"),
        ("perlayer", "70.00", "1"),
    ]
    assert rows[0]["± std"] == "7.07"
    assert all(row["gap to non-private"] == "" for row in rows)  # no non-private run


@pytest.mark.parametrize(
    ("printed", "accepted"),
    [
        ("{1, 2, 4} x 10^-4", [1e-4, 2e-4, 4e-4]), ("1%", [0.01]), ("(0.9, 0.98)", [[0.9, 0.98]]), ("Linear Decay", ["linear"]),
        ("{yes, no}", ["linear", "constant"]), ("1e-6", [1e-6]), ("{1, 2, 4} x 2^9", [512.0, 1024.0, 2048.0]),
        ("reuse best of left", None),
    ],
)  # fmt: skip
def test_a_printed_value_admits(printed: str, accepted: list | None):
    found = hyperparameters.values(printed)
    assert (found is None) == (accepted is None)
    for one, other in zip(found or [], accepted or [], strict=True):
        assert one == pytest.approx(other) if isinstance(other, float) else one == other


def test_presets_have_the_printed_hyper_parameters():
    rows = hyperparameters.hyperparameters().rows
    told = [row for row in rows if row["agrees"] in ("yes", "no")]
    assert len(told) > 120
    assert [row for row in told if row["agrees"] == "no"] == []
    # of fixed per-layer clipping C times the rate is given, and its thresholds begin as they stay
    shown = {(row["setting"], row["of"]): row["preset"] for row in told}
    assert shown["Learning Rate", "Fixed per-layer"] == "20, times C 2"
    assert shown["Init Threshold", "RoBERTa-base, Fixed"] == "0.1"


@pytest.mark.parametrize("table", ["7", "8", "9"])
def test_adaptive_thresholds_are_rescaled_on_cifar_alone(table: str):
    """He et al., App. A.1, where no first threshold is printed; Tables 8 and 9 print one, and follow Algorithm 1 as it is."""
    begins = [cell for cell in paper_table("he2023", table) if cell.row == "Init Threshold"]
    presets = listed("hyperparameters")["presets"][f"he2023_{table}"]
    runs = [compose(f"experiment={name}".split()) for key, name in presets.items() if key != "by"]
    rescaled = {run.clip.rescale for run in runs if run.clip.name == "adaptive_perlayer"}
    assert rescaled == {not begins}
