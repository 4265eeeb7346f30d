"""Records are believed only with their provenance, and found by their settings."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dpexp.errors import UserError
from dpexp.reproduce import fillings, records
from dpexp.reproduce.catalogue import Context
from dpexp.reproduce.pairs import Finding, choose, compared
from dpexp.reproduce.records import load
from tests.reproduce.samples import summary, write

RESULTS = Path(__file__).parents[2] / "results"


def _without(path: str) -> dict[str, Any]:
    found = summary()
    *way, last = path.split(".")
    place = found
    for key in way:
        place = place[key]
    del place[last]
    return found


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("details.config", "configuration"), ("git.commit", "commit"), ("git.dirty", "differed"), ("versions", "versions"),
        ("details.hardware", "hardware"), ("seed", "seed"), ("data.source", "source"), ("data.sha256", "checksum"),
        ("command", "command"), ("status", "status"),
    ],
)  # fmt: skip
def test_a_record_that_lacks_something_is_refused_by_name(path: str, word: str, tmp_path: Path):
    write(tmp_path, _without(path))
    with pytest.raises(UserError, match=rf"record0\.json.*{word}"):
        records.load(tmp_path)


def test_code_that_differed_from_its_commit_is_refused(tmp_path: Path):
    write(tmp_path, summary() | {"git": {"commit": "a" * 40, "dirty": True}})
    with pytest.raises(UserError, match="differed"):
        records.load(tmp_path)


def test_a_checksum_that_is_empty_is_none(tmp_path: Path):
    data = summary()["data"] | {"sha256": {"train": None}}
    assert "lacks a checksum of its data" in records.provenance_problems(summary() | {"data": data})


@pytest.mark.parametrize("value", ["0.9", True, [0.9]])
def test_a_metric_that_is_no_number_is_refused(value: Any, tmp_path: Path):
    write(tmp_path, summary() | {"metrics": {"accuracy": value}})
    with pytest.raises(UserError, match=r"record0\.json.*its accuracy is"):
        records.load(tmp_path)


@pytest.mark.parametrize("part", ["details", "privacy", "metrics", "performance", "git"])
def test_a_part_of_another_kind_is_refused_by_name(part: str, tmp_path: Path):
    write(tmp_path, summary() | {part: "text"})
    with pytest.raises(UserError, match=rf"record0\.json.*its {part} is no group of values"):
        records.load(tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda record: record["privacy"].update(epsilon="8"),
        lambda record: record["privacy"].update(epsilon={record["privacy"].get("accountant"): "much"}),
        lambda record: record["details"].update(config="text"),
        lambda record: record["data"].update(rows=[1], sha256={"train": "a"}),
    ],
)
def test_a_value_of_another_kind_is_refused_with_the_name_of_the_file(damage: Any, tmp_path: Path):
    record = summary() | {"privacy": {"accountant": "rdp", "epsilon": {"rdp": 8.0}}}
    record["details"]["config"]["optim"] = {"steps": 3, "batch_size": 4, "epochs": None}
    damage(record)
    write(tmp_path, record)
    with pytest.raises(UserError, match=r"record0\.json: a value is of another kind"):
        records.load(tmp_path)


def test_a_run_that_diverged_is_shown_and_is_never_the_best(tmp_path: Path):
    diverged = summary(seed=1) | {"metrics": {"accuracy": None}}
    write(
        tmp_path,
        summary(seed=0),
        diverged,
        summary(seed=0, lr=2e-3, accuracy=0.5),
        summary(seed=1, lr=2e-3, accuracy=0.5),
    )
    found = fillings.measured(records.load(tmp_path), "accuracy")
    assert [filling.said() for filling in found if len(filling.values) == 2] == ["nan ± nan", "50.00 ± 0.00"]
    assert choose(found).filling.mean == 50.0
    one, two = (("a side", choose([filling])) for filling in found)
    finding = Finding([compared("both", one, two, "greater")])
    assert finding.said == "cannot tell: a run ended without a number"
    assert (
        "nan"
        in Context(tmp_path.parent, kept={"runs": records.load(tmp_path)}).document("runs").as_markdown()
    )


def test_a_file_that_is_no_record_is_named(tmp_path: Path):
    (tmp_path / "broken.json").write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match=r"broken\.json is not JSON"):
        records.load(tmp_path)


def test_seeds_of_one_configuration_are_together_and_other_settings_apart(tmp_path: Path):
    write(tmp_path, summary(seed=1), summary(seed=0), summary(seed=0, lr=2e-3), summary("perlayer"))
    groups = records.by_configuration(records.load(tmp_path))
    assert sorted(len(group) for group in groups) == [1, 1, 2]
    (pair,) = [group for group in groups if len(group) == 2]
    assert [record.facts["seed"] for record in pair] == [0, 1]  # threads differ, and don't matter


@pytest.mark.parametrize("setting", [{"shots": 4}, {"prompt_set": 1}, {"top_p": 0.9}, {"examples": 8}])
def test_prompts_and_decoding_are_settings_of_a_configuration(setting: dict[str, Any], tmp_path: Path):
    other = summary(task="samsum")
    other["details"]["config"]["task"]["generation"] = setting
    write(tmp_path, summary(task="samsum"), other)
    assert len(records.by_configuration(records.load(tmp_path))) == 2


def test_a_seed_that_was_run_twice_is_refused_since_a_reader_could_choose(tmp_path: Path):
    write(tmp_path, summary(accuracy=0.9), summary(accuracy=0.8))
    with pytest.raises(UserError, match=r"one run with one seed: keep the one of the later commit"):
        records.by_configuration(records.load(tmp_path))


def test_other_data_is_another_configuration(tmp_path: Path):
    other = summary(seed=1)
    other["data"]["sha256"] = {"train": "1" * 64}
    write(tmp_path, summary(seed=0), other)
    assert len(records.by_configuration(records.load(tmp_path))) == 2


@pytest.mark.parametrize(
    ("where", "found"),
    [
        ({"clip": "flat", "privacy.epsilon": "8"}, True), ({"privacy.epsilon": 3}, False), ({"optim.lr": "0.001"}, True),
        ({"clip": ["perlayer", "flat"]}, True), ({"privacy.epsilon": None}, False), ({"model.trainable": "all"}, True),
    ],
)  # fmt: skip
def test_a_record_is_found_by_its_settings(where: dict[str, Any], found: bool, tmp_path: Path):
    (record,) = records.load(write(tmp_path, summary()))
    assert record.matches(where) is found


def _audit(clip: str, seed: int, bits: float, count: int, **settings: object) -> dict:
    one = summary(clip, seed, task="e2e", model="smollm2", delta="half_over_n", **settings)
    one["details"]["config"] |= {"method": "exposure", "repetitions": [count], "secrets": 3}
    return one | {"metrics": {f"exposure_{count}": bits + seed / 10}, "audit": {"method": "exposure"}}


def test_exposures_come_from_audits_and_audits_fill_nothing_else(tmp_path: Path):
    audits = [_audit("flat", seed, 1.2, 10, epsilon=3.0) for seed in range(3)]
    audits += [_audit("nonprivate", seed, 15.0, 10, epsilon=None, spent=None) for seed in range(3)]
    write(tmp_path / "audits", *audits)
    write(tmp_path / "runs", summary())
    context = Context(tmp_path)
    document = context.document("table-li-9")
    assert document.status == "small 2/6"
    assert document.paragraphs[1].startswith(
        "**Our runs.** scale=small: supports for a part of the claim, 1 of 3"
    )
    shown = {(row["row"], row["column"]): row for row in document.rows if row.get("n")}
    assert set(shown) == {("ε = 3", "r = 10"), ("non-private", "r = 10")}
    row = shown["ε = 3", "r = 10"]
    assert (row["ours"], row["n"], row["difference"]) == ("1.30 ± 0.10", "3", "-0.02")
    assert row["record"].startswith("results/audits/record0.json")
    assert "3 canaries of each r = 10 in one training set" in row["configuration"]
    for name in ("table-li-7", "figure-he-7", "runs"):
        assert "audits/" not in context.document(name).as_markdown()


def test_an_audit_among_the_runs_and_a_run_among_the_audits_are_refused(tmp_path: Path):
    write(tmp_path / "runs", _audit("flat", 0, 1.0, 1))
    with pytest.raises(UserError, match="it is an audit"):
        load(tmp_path / "runs")
    write(tmp_path / "audits", summary())
    with pytest.raises(UserError, match="it is no audit"):
        load(tmp_path / "audits", audits=True)


# Of branches that were written anew before they were merged; results/README.md says how many records name them
LOST = {"0c54a201", "a2f7b80a", "d7613115", "fd919ec2", "bb1e5781", "a801eb20", "81902ff2"}


def test_commits_of_records_are_in_the_history():
    def git(*words: str, said: str = "") -> str:
        done = subprocess.run(["git", *words], cwd=RESULTS, input=said, capture_output=True, text=True)
        return done.stdout if done.returncode == 0 else ""

    if git("rev-parse", "--is-shallow-repository").strip() != "false":
        pytest.skip("the history is not here")
    kept = (json.loads(path.read_text(encoding="utf-8")) for path in RESULTS.glob("*/*.json"))
    commits = {record["git"]["commit"] for record in kept if isinstance(record, dict) and record.get("git")}
    found = git("cat-file", "--batch-check", said="\n".join(sorted(commits))).splitlines()
    assert len(found) == len(commits) > 50
    missing = {line[:8] for line in found if line.split()[1] != "commit"}
    assert missing <= LOST
