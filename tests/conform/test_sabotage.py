"""Checks are silent where nothing is wrong, and a part of the defects is planted: all of them are in results/sabotage."""

import json

import pytest

from dpexp.conform import sabotage
from dpexp.conform.adapters import quiet
from dpexp.conform.defects import DEFECTS, planted
from dpexp.conform.replay import differences, settings
from dpexp.conform.sabotage import CHECKS, asked

# Each check, and defects that it alone of the cheap ones sees.
SEEN = [
    ("conformance", "one layer is not clipped"),
    ("draws", "batches of a fixed size called Poisson"),
    ("draws", "twice the sampling rate that is accounted for"),
    ("draws", "dropout from a seed that all steps share"),
    ("ledger", "an empty batch is skipped without a release"),
    ("ledger", "steps charged with twice the noise"),
    ("record and replay", "division by the drawn size of the batch"),
    ("record and replay", "counts that are not centred"),
    ("record and replay", "thresholds from the batch's own norms"),
    ("record and replay", "noise added again for every physical batch"),
    ("record and replay", "losses averaged over the batch"),
    ("noise", "noise for the first thresholds although they have moved"),
    ("noise", "noise from the step number alone, the same for other sums"),
    ("audit", "noise halved"),
]


@pytest.mark.parametrize("check", CHECKS)
def test_nothing_is_found_where_nothing_is_wrong(check):
    assert asked(check)[0] == []


@pytest.mark.parametrize(("check", "name"), SEEN)
def test_a_defect_is_seen(check, name):
    with planted(DEFECTS[name]):
        assert asked(check)[0]


@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize("groups", ["layer", "flat"])
def test_with_the_releases_frozen_nothing_else_depends_on_an_example(adaptive, groups):
    run = settings(5, adaptive=adaptive)
    run.clip.groups = groups
    assert differences(run, [0, 33]) == []


def test_there_are_more_than_twenty_defects_and_one_that_is_unseen_is_said(tmp_path, monkeypatch):
    assert len(DEFECTS) >= 20
    some = {"nothing at all": [], "noise halved": DEFECTS["noise halved"]}
    monkeypatch.setattr(sabotage, "DEFECTS", some)
    monkeypatch.setattr(sabotage, "CHECKS", {"audit": CHECKS["audit"]})
    with quiet():
        assert sabotage.main(str(tmp_path)) == 1
    assert [bool(row["seen"]) for row in json.loads((tmp_path / "sabotage.json").read_text())] == [
        False,
        True,
    ]
    assert "**unseen**" in (tmp_path / "sabotage.md").read_text()
