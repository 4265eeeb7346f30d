"""Kills at random instants: the committed record, and that the script sees what it should."""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from dpexp.conform import kills

RECORD = Path(__file__).parents[2] / "results" / "kills" / "kills.json"


def test_the_record_holds_a_hundred_kills_and_no_fault():
    found = json.loads(RECORD.read_text())
    rows = found["runs"]
    assert found["kills"] == sum(row["kills"] for row in rows) >= 100
    assert {"training", "audit"} <= {row["kind"] for row in rows} <= set(kills.KINDS)
    assert not any(row["faults"] for row in rows)
    assert any(row["second_attempts"] for row in rows)
    assert all(
        row["epsilon"] == row["epsilon_undisturbed"] for row in rows if not row["processes_with_other_sums"]
    )
    assert RECORD.with_suffix(".md").read_text() == kills.page(found)


class Killed(Exception):
    pass


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    """A run that is left alone; one that dies in its eighth step and goes on; one that then computes other sums."""
    found = {}
    for name in ("whole", "again", "other"):
        folder = tmp_path_factory.mktemp(name)
        if name != "whole":
            calls = itertools.count()

            def dies(file, calls=calls):
                if next(calls) == 7:
                    raise Killed

            with mock.patch.object(kills, "os", SimpleNamespace(fsync=dies)), pytest.raises(Killed):
                kills.train(folder, 1, "training")
        kills.train(folder, 1, "training", other_sums=name == "other")
        lines = {tuple(line.split()) for line in (folder / kills.RELEASED).read_text().splitlines()}
        found[name] = json.loads((folder / kills.END).read_text()) | {"released": sorted(lines)}
        found[name]["processes_with_other_sums"] = int(name == "other")
    return found


def test_a_run_that_goes_on_ends_as_a_whole_one_and_other_sums_are_charged_again(ends):
    event = kills._event()
    assert kills.faults(ends["again"], ends["whole"], event) == []
    assert ends["again"]["charged"] == [1] * kills.STEPS
    assert kills.faults(ends["other"], ends["whole"], event) == []
    assert ends["other"]["charged"] == [1] * 6 + [2] * 2 + [1] * 4
    assert ends["other"]["epsilon"] > ends["whole"]["epsilon"]


def test_what_is_wrong_is_said(ends):
    whole, event = ends["whole"], kills._event()
    cheap = whole | {"epsilon": 0.9 * whole["epsilon"]}
    assert any("below" in said for said in kills.faults(cheap, whole, event))
    unknown = whole | {"released": [*whole["released"], ("3", "1", "x")]}
    assert any("not in the ledger" in said for said in kills.faults(unknown, whole, event))
    twice = whole | {"released": [*whole["released"], ("3", "0", "x")]}
    assert any("two different" in said for said in kills.faults(twice, whole, event))
    assert kills.faults(whole | {"weights": "x"}, whole, event) == [
        "the end is another one than that of the run without kills"
    ]
